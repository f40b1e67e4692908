"""Input and output of an LLM step, as chat messages in OpenAI's form. Pure.

Reads what frameworks put into `data` and `metadata` of NAT's steps: OpenAI's own shapes, LangChain's serialised
messages and generations, LlamaIndex's texts and chat responses. Content lists stay lists: nothing is left out.
"""

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from rollstream.schemas.events.intermediate_steps import IntermediateStepPayload

Message = dict[str, Any]
ROLES = {
    "human": "user",
    "ai": "assistant",
    "AIMessageChunk": "assistant",
    "HumanMessageChunk": "user",
    "SystemMessageChunk": "system",
    "ToolMessageChunk": "tool",
    "chatbot": "assistant",
    "model": "assistant",
}
"""Roles and types of frameworks, by OpenAI's names; what is not here is called alike."""
_ROLE_AND_TEXT = re.compile(r"(system|developer|user|assistant|tool|function|chatbot|model): (.*)", re.DOTALL)
"""LlamaIndex's notation of a message as text."""
_TOOL_CALLS = "\n\nTool calls: "
"""Text by which NAT's LangChain handler appends tool calls to an answer."""


def prompt_of(start: IntermediateStepPayload | None, end: IntermediateStepPayload) -> tuple[Message, ...] | None:
    """The messages as sent; None if the steps do not tell them.

    An end alone has them only as messages; its text is that of the last one.
    """
    if start is not None:
        found = _messages(_data(start, "input")) or _messages(_chat_inputs(start))
        if found:
            return found
        text = _data(start, "input")
        return ({"role": "user", "content": text},) if isinstance(text, str) and text else None
    return _messages(_data(end, "input")) or _messages(_chat_inputs(end))


def answer_of(end: IntermediateStepPayload) -> Message:
    """The assistant's message."""
    payload, text = _data(end, "payload"), _data(end, "output")
    message = _answer_in(payload) or _answer_in(text)
    if message is None:
        content, calls = _without_appended_calls(text if isinstance(text, str) else "")
        return {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})
    if "tool_calls" not in message and isinstance(text, str):
        calls = _without_appended_calls(text)[1]
        message |= {"tool_calls": calls} if calls else {}
    return message | {"role": "assistant"}


def finish_reason(end: IntermediateStepPayload) -> str:
    """`stop`, `length`, ... as the framework says; `stop` if it does not."""
    payload = _data(end, "payload")
    for source in (
        at(payload, "message", "response_metadata"),
        at(payload, "generation_info"),
        first(at(payload, "choices")),
        first(at(payload, "raw", "choices")),
    ):
        reason = at(source, "finish_reason")
        if isinstance(reason, str):
            return reason
    return "stop"


def _messages(raw: Any) -> tuple[Message, ...] | None:
    if isinstance(raw, Mapping):
        raw = raw.get("messages", [raw])
    if not isinstance(raw, list) or not raw:
        return None
    if len(raw) == 1 and isinstance(raw[0], list):
        raw = raw[0]
    found = [_parsed_message(entry) if isinstance(entry, str) else _message(entry) for entry in raw]
    messages = tuple(message for message in found if message is not None)
    return messages if len(messages) == len(found) else None


def _parsed_message(text: str) -> Message:
    match = _ROLE_AND_TEXT.fullmatch(text)
    if match is None:
        return {"role": "user", "content": text}
    return {"role": ROLES.get(match.group(1), match.group(1)), "content": match.group(2)}


def _message(raw: Any) -> Message | None:
    """One message of any framework; None if it is not a message."""
    if not isinstance(raw, Mapping):
        return None
    role = raw.get("role") or raw.get("type")
    if not isinstance(role, str) or not ("content" in raw or "blocks" in raw or raw.get("tool_calls")):
        return None
    message: Message = {"role": ROLES.get(role, role), "content": _content(raw)}
    calls = raw.get("tool_calls") or at(raw, "additional_kwargs", "tool_calls")
    if isinstance(calls, list) and calls:
        message["tool_calls"] = [_tool_call(call) for call in calls]
    for key in ("tool_call_id", "name", "reasoning_content"):
        value = raw.get(key) or at(raw, "additional_kwargs", key)
        if isinstance(value, str):
            message[key] = value
    return message


def _content(raw: Mapping[str, Any]) -> Any:
    blocks = raw.get("blocks")
    if not isinstance(blocks, list):
        return raw.get("content")
    parts = [_part(block) for block in blocks]
    if all(part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(block: Any) -> Message:
    """A block of LlamaIndex as a part of OpenAI's."""
    if not isinstance(block, Mapping):
        return {"type": "other", "value": block}
    return {"type": block.get("block_type", "other")} | {k: v for k, v in block.items() if k != "block_type"}


def _tool_call(raw: Any) -> Any:
    """LangChain's name, args and id as OpenAI's function call, whose arguments are a JSON text."""
    if not isinstance(raw, Mapping) or "function" in raw or "name" not in raw:
        return raw
    arguments = raw.get("args", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": raw.get("id"), "type": "function", "function": {"name": raw["name"], "arguments": text}}


def _answer_in(raw: Any) -> Message | None:
    """The message of a LangChain generation, an OpenAI or LlamaIndex response, or a message as it is."""
    for source in (at(first(at(raw, "choices")), "message"), at(raw, "message"), raw):
        if isinstance(source, Mapping):
            typed = {"type": "ai", **source} if "role" not in source else source
            message = _message(typed)
            if message is not None:
                return message
    return None


def _without_appended_calls(text: str) -> tuple[str, list[Any]]:
    """Text and tool calls of an answer to which NAT's LangChain handler has appended them as Python; the whole text if
    what follows its mark is none.
    """
    content, _, calls_text = text.rpartition(_TOOL_CALLS)
    try:
        calls = ast.literal_eval(calls_text) if _TOOL_CALLS in text else None
        if not isinstance(calls, list) or not calls or not all(map(_is_call, calls)):
            return text, []
        return content, [_tool_call(call) for call in calls]
    except (TypeError, ValueError, SyntaxError, MemoryError, RecursionError):  # TypeError: a dict as key, a set
        return text, []


def _is_call(raw: Any) -> bool:
    """Whether it has the form of a tool call of LangChain or OpenAI."""
    return isinstance(raw, Mapping) and ("name" in raw or "function" in raw)


def _chat_inputs(payload: IntermediateStepPayload) -> Any:
    return (payload.metadata or {}).get("chat_inputs")


def _data(payload: IntermediateStepPayload, name: str) -> Any:
    return getattr(payload.data, name) if payload.data is not None else None


def at(raw: Any, *keys: str) -> Any:
    """The value under nested keys; None where one is missing."""
    for key in keys:
        raw = raw.get(key) if isinstance(raw, Mapping) else None
    return raw


def first(raw: Any) -> Any:
    """The first of a list; None if it is empty or not a list."""
    return raw[0] if isinstance(raw, list) and raw else None
