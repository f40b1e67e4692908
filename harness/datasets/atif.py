"""Trajectories in the Agent Trajectory Interchange Format (ATIF 1.7, harbor's RFC 0001), with exact tokens. Pure."""

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

from rollstream.harness.datasets.conversations import ChatConversation, Message, RecordedTrajectory
from rollstream.harness.datasets.training_rows import Group, Row, RowOptions, Tally, chosen_conversations, parsed

VERSION = "ATIF-v1.7"
_SOURCES = {"system": "system", "developer": "system", "assistant": "agent"}
"""ATIF's sources by role; messages of all others are the user's."""
Calls = Mapping[int, Mapping[str, Any]]
"""Tokens of LLM calls by step index."""
_IMAGES = {"image/jpeg", "image/png", "image/gif", "image/webp"}


def atif(group: Group, choice: RowOptions, tally: Tally) -> Iterator[Row]:
    """One document per training sequence; those of one rollout share a `session_id`."""
    count: dict[str, int] = {}
    calls: Calls = {}
    for one, conversation in chosen_conversations(group, choice, tally):
        number = count[one.member.trajectory_id] = count.get(one.member.trajectory_id, -1) + 1
        calls = calls if number else one.tokens()
        yield _document(one, conversation, calls, one.member.trajectory_id + (f"/{number}" if number else ""))


def _document(one: RecordedTrajectory, conversation: ChatConversation, calls: Calls, trajectory_id: str) -> Row:
    steps = _steps(conversation, calls)
    metrics: list[dict[str, Any]] = [step["metrics"] for step in steps if "metrics" in step]
    agent = {
        "name": one.member.agent,
        "version": metadata.version("rollstream"),
        "model_name": one.assembled.model_group,
    }
    return {
        "schema_version": VERSION,
        "session_id": one.member.rollout_id,
        "trajectory_id": trajectory_id,
        "agent": agent | ({"tool_definitions": [*conversation.tools]} if conversation.tools else {}),
        "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": sum(found["prompt_tokens"] for found in metrics),
            "total_completion_tokens": sum(found["completion_tokens"] for found in metrics),
            "total_steps": len(steps),
        },
        "extra": {"run_id": one.group.run_id, **one.facts, "rewards": dict(one.assembled.rewards)},
    }


def _steps(conversation: ChatConversation, calls: Calls) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    for index, message in enumerate(conversation.messages):
        if message["role"] in ("tool", "function") and steps and steps[-1]["source"] == "agent":
            _observe(steps[-1], message)
            continue
        step = {"step_id": len(steps) + 1, **_message_step(message)}
        if index in conversation.answers:
            step |= _sampled(conversation.answers[index], calls[conversation.answers[index]])
        elif step["source"] == "agent":
            step["is_copied_context"] = True
        steps.append(step)
    return steps


def _message_step(message: Message) -> dict[str, Any]:
    source = _SOURCES.get(message["role"], "user")
    step: dict[str, Any] = {"source": source, "message": _content(message.get("content"))}
    calls = message.get("tool_calls")
    if source == "agent" and isinstance(calls, list) and calls:
        step["tool_calls"] = [_tool_call(number, call) for number, call in enumerate(calls)]
    reasoning = message.get("reasoning_content")
    if source == "agent" and isinstance(reasoning, str):
        step["reasoning_content"] = reasoning
    return step


def _sampled(step_index: int, tokens: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "llm_call_count": 1,
        "metrics": {
            "prompt_tokens": len(tokens["prompt_token_ids"]),
            "completion_tokens": len(tokens["token_ids"]),
            "prompt_token_ids": tokens["prompt_token_ids"],
            "completion_token_ids": tokens["token_ids"],
        }
        | ({} if tokens["logprobs"] is None else {"logprobs": tokens["logprobs"]}),
        "extra": {"step_index": step_index}
        | {name: tokens[name] for name in ("finish_reason", "spans", "kept_ids") if name in tokens},
    }


def _observe(step: dict[str, Any], message: Message) -> None:
    """Add the result of a tool to the step that called it."""
    result: dict[str, Any] = {"content": _content(message.get("content"))}
    call_id = message.get("tool_call_id")
    if call_id in [call["tool_call_id"] for call in step.get("tool_calls", ())]:
        result["source_call_id"] = call_id
    step.setdefault("observation", {"results": []})["results"].append(result)


def _tool_call(number: int, call: Any) -> dict[str, Any]:
    function: Any = call.get("function", call) if isinstance(call, dict) else {}
    arguments = parsed(function.get("arguments", {})) if isinstance(function, dict) else {}
    return {
        "tool_call_id": str((call.get("id") if isinstance(call, dict) else None) or f"call_{number}"),
        "function_name": str(function.get("name", "")) if isinstance(function, dict) else "",
        "arguments": arguments if isinstance(arguments, dict) else {"arguments": arguments},
    }


def _content(content: Any) -> str | list[dict[str, Any]]:
    if content is None or isinstance(content, str):
        return content or ""
    parts: Sequence[Any] = content if isinstance(content, list) else [content]
    return [_part(part) for part in parts]


def _part(part: Any) -> dict[str, Any]:
    """A part as ATIF's text or image; any other part as its JSON."""
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    image = part.get("image_url") if isinstance(part, dict) else None
    url = image.get("url") if isinstance(image, dict) else image
    if isinstance(url, str):
        kind = url.removeprefix("data:").partition(";")[0]
        if kind in _IMAGES:
            return {"type": "image", "source": {"media_type": kind, "path": url}}
    return {"type": "text", "text": part if isinstance(part, str) else json.dumps(part, ensure_ascii=False)}
