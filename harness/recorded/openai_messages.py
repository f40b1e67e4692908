"""`parse_to_openai_messages`: converts NAT's steps of one episode to a list of chat messages, like NAT's function.

For builders written for NAT. Our own builders do not use it: prompts merged by their text differ from the model's input
if a text is repeated or the history is edited.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from rollstream.producers.traces.messages import answer_of, at, first, prompt_of
from rollstream.schemas.events.intermediate_steps import IntermediateStep, IntermediateStepPayload

Message = dict[str, Any]


def parse_to_openai_messages(steps: Sequence[Any]) -> list[Message]:
    """Messages of LLM starts (each text once), LLM ends (with `logprobs`, {} if there are none) and tool ends in order.

    `steps`: NAT's IntermediateStep or ours, or their JSON. A prompt right after a tool's end is skipped, because its
    messages are already included. Raises ValueError for an invalid order: two consecutive user or assistant messages,
    or a system message after others.
    """
    messages: list[Message] = []
    seen: set[str] = set()
    last = ""
    for step in map(_step, steps):
        payload, kind = step.payload, step.payload.event_type
        if kind not in ("LLM_START", "LLM_END", "TOOL_END") or (kind == "LLM_START" and last == "TOOL_END"):
            continue
        if payload.framework is None:
            continue  # NAT's function ignores such steps too
        for message in _messages_of(payload):
            text = f"{message['role']}: {message['content']}"
            if kind != "LLM_START" or text not in seen:
                messages.append(message)
            seen.add(text)
        last = kind
    return _in_order(_begun_by_user(messages))


def _step(step: Any) -> IntermediateStep:
    if isinstance(step, IntermediateStep):
        return step
    return IntermediateStep.model_validate(step if isinstance(step, Mapping) else step.model_dump(mode="json"))


def _messages_of(payload: IntermediateStepPayload) -> list[Message]:
    if payload.event_type == "LLM_START":
        return list(prompt_of(payload, payload) or ({"role": "user", "content": ""},))
    if payload.event_type == "LLM_END":
        return [{**answer_of(payload), "logprobs": _logprobs(payload)}]
    output = getattr(payload.data, "output", None)
    role = "tool" if payload.framework == "langchain" else "function"
    text = output if isinstance(output, str) else "" if output is None else str(output)
    return [{"role": role, "content": text, "tool_call_id": at(payload.metadata, "tool_call_id") or 0}]


def _logprobs(end: IntermediateStepPayload) -> Any:
    data = {} if end.data is None else end.data.model_dump()
    generation = data.get("payload")
    sources = (
        at(generation, "message", "response_metadata"),
        at(generation, "generation_info"),
        first(at(generation, "choices")),
        first(at(generation, "raw", "choices")),
        data,
    )
    return next((found for source in sources if (found := at(source, "logprobs"))), {})


def _begun_by_user(messages: list[Message]) -> list[Message]:
    """Merges all messages before the first answer into one user message if they are not all from the user."""
    begin = next((index for index, one in enumerate(messages) if one["role"] != "system"), len(messages))
    answer = next((n for n, one in enumerate(messages) if n >= begin and one["role"] == "assistant"), begin)
    before = messages[begin:answer]
    if all(one["role"] == "user" for one in before):
        return messages
    texts = [
        one["content"] if one["role"] == "user" else f"[{one['role'].upper()}]: {one['content']}" for one in before
    ]
    return [*messages[:begin], {"role": "user", "content": "\n\n".join(filter(None, texts))}, *messages[answer:]]


def _in_order(messages: list[Message]) -> list[Message]:
    roles = [one["role"] for one in messages]
    for index, (role, later) in enumerate(itertools.pairwise(roles)):
        if later == "system" and role != "system":
            raise ValueError(f"message {index + 1} is a system message after others; system messages must come first")
        if role == later and role in ("user", "assistant"):
            raise ValueError(
                f"messages {index} and {index + 1} both have role {role}; the steps must form one conversation"
            )
    return messages
