"""Intermediate steps as NAT writes them, in the shapes of three frameworks, with the scripted tokenizer's tokens."""

import itertools
import json

from rollstream.producers.engines.scripted import ScriptedTokenizer
from rollstream.schemas.events.intermediate_steps import IntermediateStep

TOKENIZER = ScriptedTokenizer()
MODEL = "my-model"
_TYPES = {"user": "human", "assistant": "ai"}
WORKFLOW = "<workflow>"
Names = str | tuple[str, ...]
"""Names of a function, or of it, its caller, ... outwards; ids are `f-NAME`."""


def step(event_type, uuid, *, name=None, parent="w", function: Names = WORKFLOW, data=None, metadata=None, **payload):
    """One step."""
    names = (function,) if isinstance(function, str) else function
    node = {"function_id": f"f-{names[0]}", "function_name": names[0], "parent_id": None, "parent_name": None}
    if len(names) > 1:
        node |= {"parent_id": f"f-{names[1]}", "parent_name": names[1]}
    full = {"input": None, "output": None, "chunk": None, "payload": None} | data if data is not None else None
    return {
        "parent_id": parent,
        "function_ancestry": node,
        "payload": {
            "event_type": event_type,
            "event_timestamp": 1.5,
            "span_event_timestamp": None,
            "framework": None,
            "name": name,
            "tags": None,
            "metadata": metadata,
            "data": full,
            "usage_info": None,
            "UUID": uuid,
        }
        | payload,
    }


def messages(*texts):
    """User and assistant in turn."""
    return [{"role": role, "content": text} for role, text in zip(itertools.cycle(["user", "assistant"]), texts)]


def logprobs(prompt, answer, *, ids=True):
    """OpenAI's log-probabilities of an answer, with ids beside them."""
    prompt_ids = TOKENIZER.encode(TOKENIZER.apply_chat_template(prompt, add_generation_prompt=True))
    completion = [*TOKENIZER.encode(answer), TOKENIZER.eos_token_id]
    found = {"content": [{"token": str(n), "bytes": None, "logprob": -0.5, "top_logprobs": []} for n in completion]}
    reported = {"prompt_token_ids": prompt_ids, "token_ids": completion, "model_group": "run-1/policy", "version": 0}
    return found | {"refusal": None} | (reported if ids else {})


def langchain(uuid, prompt, answer, *, ids=True, model=MODEL, reported=None, **given):
    """Start and end of a call through NAT's LangChain handler."""
    sent = [{"content": m["content"], "type": _TYPES.get(m["role"], m["role"]), "id": None} for m in prompt]
    reported = logprobs(prompt, answer, ids=ids) if reported is None else reported
    metadata = {"model_name": model} | ({"logprobs": reported} if reported else {})
    message = {"content": answer, "additional_kwargs": {}, "response_metadata": metadata, "type": "ai", "id": uuid}
    generation = {"text": answer, "generation_info": None, "type": "ChatGeneration", "message": message}
    fields = {"framework": "langchain", "name": model, **given}
    return [
        step("LLM_START", uuid, data={"input": sent}, metadata={"chat_inputs": sent, "tools_schema": []}, **fields),
        step("LLM_END", uuid, data={"input": "", "output": answer, "payload": generation}, **fields),
    ]


def openai(uuid, prompt, answer, *, ids=True, model=MODEL, **given):
    """Start and end of a call of OpenAI's client: the request's messages, the response."""
    choice = {"index": 0, "message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}
    choice["logprobs"] = logprobs(prompt, answer, ids=ids)
    response = {"id": "c", "model": model, "choices": [choice]}
    return [
        step("LLM_START", uuid, name=model, data={"input": {"model": model, "messages": prompt}}, **given),
        step("LLM_END", uuid, name=model, data={"output": answer, "payload": response}, **given),
    ]


def llama_index(uuid, prompt, answer, *, ids=True, model=MODEL, **given):
    """Start and end of a call through NAT's LlamaIndex handler: texts in, a chat response with blocks out."""
    texts = [f"{m['role']}: {m['content']}" for m in prompt]
    blocks = [{"block_type": "text", "text": answer}]
    raw = {"model": model, "choices": [{"logprobs": logprobs(prompt, answer, ids=ids), "finish_reason": "stop"}]}
    response = {"message": {"role": "assistant", "additional_kwargs": {}, "blocks": blocks}, "raw": raw, "delta": None}
    response |= {"logprobs": None, "additional_kwargs": {}}
    fields = {"framework": "llama_index", "name": model, **given}
    return [
        step("LLM_START", uuid, data={"input": " ".join(texts)}, metadata={"chat_inputs": texts}, **fields),
        step("LLM_END", uuid, data={"output": answer, "payload": response}, **fields),
    ]


def tool(uuid, output, **given):
    """Start and end of a tool call."""
    return [
        step("TOOL_START", uuid, name="add", data={"input": "{'a': 1}"}, **given),
        step("TOOL_END", uuid, name="add", data={"input": "{'a': 1}", "output": output}, **given),
    ]


def workflow(*calls, question="1+1", answer="2", uuid="w", run_id="r1"):
    """A whole workflow around the steps of its calls."""
    reported = {"provided_metadata": {"workflow_run_id": run_id, "conversation_id": None}}
    root = {"parent": "root", "function": "root", "name": "my_agent"}
    inner = {"parent": uuid, "name": WORKFLOW, "function": (WORKFLOW, "root")}
    return [
        step("WORKFLOW_START", uuid, data={"input": question}, metadata=reported, **root),
        step("FUNCTION_START", f"{uuid}-f", data={"input": question}, **inner),
        *itertools.chain.from_iterable(calls),
        step("FUNCTION_END", f"{uuid}-f", data={"input": question, "output": answer}, **inner),
        step("WORKFLOW_END", uuid, data={"output": answer}, **root),
    ]


def read(steps):
    """The models of steps, as if from a file."""
    return [IntermediateStep.model_validate_json(json.dumps(one)) for one in steps]
