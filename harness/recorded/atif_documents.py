"""Documents of the Agent Trajectory Interchange Format (ATIF 1.0 to 1.7) as lines of recorded rollouts. Pure.

Every answer that an agent sampled becomes an LLM call whose prompt is the conversation before it, every result of a
tool a tool's end. Embedded trajectories of sub-agents are not read.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import orjson
from pydantic import BaseModel, FiniteFloat, JsonValue

VERSION_KEY = "schema_version"
WORKFLOW = {"function_id": "workflow", "function_name": "<workflow>"}
_ROLES = {"system": "system", "user": "user", "agent": "assistant"}


class _ToolCall(BaseModel):
    tool_call_id: str
    function_name: str
    arguments: dict[str, Any] = {}


class _Part(BaseModel):
    type: Literal["text", "image"]
    text: str | None = None
    source: dict[str, Any] | None = None


_Content = str | list[_Part] | None


class _Result(BaseModel):
    source_call_id: str | None = None
    content: _Content = None


class _Observation(BaseModel):
    results: list[_Result] = []


class _Metrics(BaseModel):
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[FiniteFloat] | None = None


class _Step(BaseModel):
    source: Literal["system", "user", "agent"]
    model_name: str | None = None
    message: _Content = ""
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None
    observation: _Observation | None = None
    metrics: _Metrics | None = None
    is_copied_context: bool | None = None
    llm_call_count: int | None = None
    extra: dict[str, Any] | None = None


class _Agent(BaseModel):
    model_name: str | None = None
    tool_definitions: list[dict[str, Any]] | None = None


class _Document(BaseModel):
    session_id: str | None = None
    trajectory_id: str | None = None
    agent: _Agent
    steps: list[_Step]
    extra: dict[str, Any] | None = None


def is_document(found: Mapping[str, Any]) -> bool:
    """Whether a line's object is an ATIF document."""
    version = found.get(VERSION_KEY)
    return isinstance(version, str) and version.startswith("ATIF-")


def rollout_line(found: Mapping[str, Any]) -> dict[str, JsonValue]:
    """A line of a recorded rollout with the document's steps; its reward is `extra.rewards` by name, or `extra.reward`.

    Documents of one session are one rollout, or one for each `extra.agent`. Examples are told apart by
    `extra.example_id`, or else by the first message of a user.

    Raises pydantic.ValidationError for a document that is not ATIF.
    """
    document = _Document.model_validate(found)
    extra = document.extra or {}
    digest = hashlib.sha256(orjson.dumps(dict(found))).hexdigest()[:16]
    line: dict[str, Any] = {"steps": list(_steps(document, document.trajectory_id or digest))}
    if name := document.session_id or document.trajectory_id:
        agent = extra.get("agent")
        line["rollout_id"] = f"{name}/{agent}" if isinstance(agent, str) else name
    asked = next((step.message for step in document.steps if step.source == "user"), None)
    if "example_id" in extra:
        line["example_id"] = extra["example_id"]
    elif asked:
        line["inputs"] = {"question": _content(asked)}
    if isinstance(extra.get("rewards"), dict) and extra["rewards"]:
        line["rewards"] = extra["rewards"]
    elif "reward" in extra:
        line["reward"] = extra["reward"]
    return line


def _steps(document: _Document, name: str) -> Iterator[dict[str, Any]]:
    """Intermediate steps as NAT writes them. `name`: of the document, for their ids."""
    tools = {"metadata": {"tools_schema": found}} if (found := document.agent.tool_definitions) else {}
    conversation: list[dict[str, Any]] = []
    for number, step in enumerate(document.steps, 1):
        uuid = f"{name}-{number}"
        message = _message(step)
        if step.source == "agent" and not step.is_copied_context and step.llm_call_count != 0:
            model = step.model_name or document.agent.model_name
            start = {"event_type": "LLM_START", "data": {"input": {"messages": [*conversation]}}, **tools}
            end = {"event_type": "LLM_END", "data": {"output": message["content"], "payload": _response(step, message)}}
            yield from (_step(uuid, name=model, **payload) for payload in (start, end))
        conversation.append(message)
        calls = {call.tool_call_id: call for call in step.tool_calls or ()}
        for index, result in enumerate(step.observation.results if step.observation else ()):
            content, call = _content(result.content), calls.get(result.source_call_id or "")
            data = {"input": {} if call is None else call.arguments, "output": content}
            name = "tool" if call is None else call.function_name
            yield _step(f"{uuid}-{index}", event_type="TOOL_END", name=name, data=data)
            by = {} if result.source_call_id is None else {"tool_call_id": result.source_call_id}
            conversation.append({"role": "tool", "content": content, **by})


def _step(uuid: str, **payload: Any) -> dict[str, Any]:
    return {"parent_id": "root", "function_ancestry": WORKFLOW, "payload": {"UUID": uuid, **payload}}


def _message(step: _Step) -> dict[str, Any]:
    message = {"role": _ROLES[step.source], "content": _content(step.message)}
    if step.reasoning_content:
        message["reasoning_content"] = step.reasoning_content
    return message | ({"tool_calls": [*map(_tool_call, step.tool_calls)]} if step.tool_calls else {})


def _response(step: _Step, message: dict[str, Any]) -> dict[str, Any]:
    """The answer in the form of OpenAI's client, with its tokens."""
    metrics = step.metrics or _Metrics()
    tokens = {
        "prompt_token_ids": metrics.prompt_token_ids,
        "token_ids": metrics.completion_token_ids,
        "logprobs": metrics.logprobs,
        "kept_ids": (step.extra or {}).get("kept_ids"),
    }
    reason = (step.extra or {}).get("finish_reason")
    choice = {"index": 0, "message": message, "finish_reason": reason if isinstance(reason, str) else "stop"}
    return {"choices": [choice | {"logprobs": {name: value for name, value in tokens.items() if value is not None}}]}


def _tool_call(call: _ToolCall) -> dict[str, Any]:
    arguments = orjson.dumps(call.arguments).decode()
    return {
        "id": call.tool_call_id,
        "type": "function",
        "function": {"name": call.function_name, "arguments": arguments},
    }


def _content(content: _Content) -> Any:
    """OpenAI's content of a message."""
    if not isinstance(content, list):
        return content or ""
    return [
        {"type": "text", "text": part.text or ""}
        if part.type == "text"
        else {"type": "image_url", "image_url": {"url": str((part.source or {}).get("path", ""))}}
        for part in content
    ]
