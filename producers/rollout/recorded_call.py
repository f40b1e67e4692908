"""A recorded step as an LLM call of the log: its exact tokens, or tokens made from its text, and flags that say which.

Pure but for the tokenizer. Decides nothing about rewards or order.
"""

import json
import math
from array import array
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Any

from rollstream.producers.engines.base import Tokenizer
from rollstream.producers.rollout.conversation import Conversation, Prompt
from rollstream.producers.rollout.reply import content_text
from rollstream.schemas import tokens
from rollstream.schemas.errors import EnvironmentRunError
from rollstream.schemas.events.recorded import RecordedChat, RecordedStep
from rollstream.schemas.events.rollouts import LLMCall, Policy, VersionSpan

NO_TOKEN_IDS = "no_token_ids"
NO_LOGPROBS = "no_logprobs"
NOT_TEXT = "not_text"
FLAGS = "rollstream"
"""Key in a step's metadata for assumptions about it, and the reason why it is not trained on."""


@dataclass(frozen=True, slots=True)
class ImportContext:
    """Settings for the import of recorded steps into a run."""

    model_group: str
    policy: Policy = "model"
    assumed_version: int = 0
    """Weight version of tokens that were recorded without one."""
    retokenise: bool = False
    """Make tokens from text where there are none."""


@dataclass(frozen=True, slots=True)
class ImportedCall:
    """Result of importing a step: its call, and the flags of its metadata."""

    call: LLMCall | None
    flags: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _CallTokens:
    """Ids (C,) of a completion, log-probabilities (C,) if there are any, and where they come from."""

    prompt: Prompt
    completion: "array[int]"
    logprobs: "array[float] | None"
    spans: tuple[VersionSpan, ...]
    finish_reason: str
    is_retokenised: bool
    kept_ids: str | None = None


def read_step(
    step: RecordedStep, step_index: int, playing: ImportContext, conversation: Conversation, tokenizer: Tokenizer
) -> ImportedCall:
    """The call of a step, which `conversation` then knows; none if it is not trained on, with the reason as a flag.

    Raises EnvironmentRunError for ids that the tokenizer does not have and log-probabilities that are not numbers.
    """
    if step.untrained is not None:
        return ImportedCall(None, {"untrained": step.untrained})
    if step.tokens is None and step.chat is None:
        is_call = step.event_type == "LLM_END"
        return ImportedCall(None, {"untrained": NO_TOKEN_IDS} if is_call else {})
    if step.tokens is None and not playing.retokenise:
        return ImportedCall(None, {"untrained": NO_TOKEN_IDS})
    call_tokens = _exact(step, conversation, tokenizer) if step.tokens else None
    if call_tokens is None:
        assert step.chat is not None
        call_tokens = _retokenised(step.chat, conversation, tokenizer)
    if call_tokens is None:
        return ImportedCall(None, {"untrained": NOT_TEXT})
    if call_tokens.is_retokenised and call_tokens.prompt.text:
        conversation.append_sampled(step_index, call_tokens.prompt, call_tokens.completion)
    else:
        conversation.append_recorded(step_index, call_tokens.prompt, call_tokens.completion)
    return _imported(call_tokens, playing)


def fields_of(step: RecordedStep, imported: ImportedCall) -> dict[str, Any]:
    """Fields of StepRecorded beside ids and agent; a uuid or time of the end that was not recorded is left out."""
    metadata = (step.metadata or {}) | ({FLAGS: imported.flags} if imported.flags else {})
    fields: dict[str, Any] = {
        "event_type": step.event_type,
        "parent_id": step.parent_id,
        "framework": step.framework,
        "name": step.name,
        "tags": step.tags,
        "metadata": metadata or None,
        "data": step.data,
        "usage_info": step.usage_info,
        "llm": imported.call,
    }
    for name in ("uuid", "function_ancestry"):
        if getattr(step, name) is not None:
            fields[name] = getattr(step, name)
    fields["span_event_timestamp"] = step.span_event_timestamp
    has_times = step.event_timestamp is not None or step.span_event_timestamp is not None
    return fields | ({"event_timestamp": step.event_timestamp} if has_times else {})


def _imported(call_tokens: _CallTokens, playing: ImportContext) -> ImportedCall:
    flags: dict[str, Any] = {"is_retokenised": True} if call_tokens.is_retokenised else {}
    if call_tokens.logprobs is None and playing.policy == "model":
        flags["has_logprobs"] = False
    spans = call_tokens.spans
    if not spans or any(span.model_group != playing.model_group for span in spans):
        spans = ()
        if playing.policy == "model":
            flags["is_version_assumed"] = True
            length = len(call_tokens.completion)
            spans = (VersionSpan(model_group=playing.model_group, version=playing.assumed_version, length=length),)
    call = LLMCall(
        prefix=call_tokens.prompt.prefix,
        prompt_ids=tokens.encode_ids(call_tokens.prompt.new_ids),
        completion_ids=tokens.encode_ids(call_tokens.completion),
        logprobs=None if call_tokens.logprobs is None else tokens.encode_floats(call_tokens.logprobs),
        spans=spans,
        finish_reason=call_tokens.finish_reason,
        kept_ids=call_tokens.kept_ids,
    )
    return ImportedCall(call, flags)


def _exact(step: RecordedStep, conversation: Conversation, tokenizer: Tokenizer) -> _CallTokens:
    recorded = step.tokens
    assert recorded is not None
    prompt_ids, completion = tokens.decode_ids(recorded.prompt_ids), tokens.decode_ids(recorded.completion_ids)
    _check_ids(prompt_ids, tokenizer)
    _check_ids(completion, tokenizer)
    logprobs = None if recorded.logprobs is None else tokens.decode_floats(recorded.logprobs)
    if logprobs is not None and not all(map(math.isfinite, logprobs)):
        raise EnvironmentRunError("a recorded log-probability is not a finite number; record finite ones")
    return _CallTokens(
        conversation.continue_from_ids(prompt_ids),
        completion,
        logprobs,
        recorded.spans,
        recorded.finish_reason,
        recorded.is_retokenised,
        recorded.kept_ids,
    )


def _check_ids(token_ids: "array[int]", tokenizer: Tokenizer) -> None:
    size = len(tokenizer) if isinstance(tokenizer, Sized) else None
    if min(token_ids) < 0 or (size is not None and max(token_ids) >= size):
        wrong = min(token_ids) if min(token_ids) < 0 else max(token_ids)
        raise EnvironmentRunError(
            f"recorded token id {wrong} is outside the model's vocabulary of {size}; check that it was recorded with "
            f"the same tokenizer"
        )


def _retokenised(chat: RecordedChat, conversation: Conversation, tokenizer: Tokenizer) -> _CallTokens | None:
    """Tokenise text with the model's chat template; None if it is not all text."""
    messages = [_plain_text(message) for message in chat.messages]
    answer = _plain_text(chat.answer)
    if answer is None or not messages or not all(messages):
        return None
    known: list[dict[str, Any]] = [_for_template(message) for message in messages if message is not None]
    texts = _rendered(known, _for_template(answer), chat.tools, tokenizer)
    if texts is None:
        return None
    prompt = conversation.prompt(texts[0])
    answer_ids = tokenizer.encode(texts[1], add_special_tokens=False) if texts[1] else []
    logprobs = array("f", chat.logprobs) if chat.logprobs is not None else None
    has_end = logprobs is None or len(logprobs) != len(answer_ids) or not answer_ids
    completion = array("i", [*answer_ids, tokenizer.eos_token_id] if has_end else answer_ids)
    if logprobs is not None and len(logprobs) != len(completion):
        logprobs = None
    if not prompt.token_ids:
        return None
    return _CallTokens(prompt, completion, logprobs, (), "stop" if has_end else "length", True)


def _rendered(
    messages: list[dict[str, Any]], answer: dict[str, Any], tools: Sequence[Any], tokenizer: Tokenizer
) -> tuple[str, str] | None:
    """Text of the prompt and of the answer without its end token; None if the template does not join the two.

    For an answer with tool calls, the template's text is used.
    """
    options: dict[str, Any] = {"tokenize": False} | ({"tools": list(tools)} if tools else {})
    prompt: str = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)
    if not answer.get("tool_calls"):
        return prompt, answer["content"]
    whole: str = tokenizer.apply_chat_template([*messages, answer], add_generation_prompt=False, **options)
    end = tokenizer.decode([tokenizer.eos_token_id])
    completion = whole.removeprefix(prompt).rstrip()
    return (prompt, completion.removesuffix(end)) if whole.startswith(prompt) else None


def _plain_text(message: dict[str, Any]) -> dict[str, Any] | None:
    """A message whose content is one text; None if a part of it is not text."""
    content = message.get("content")
    text = "" if content is None else content_text(content)
    return None if text is None else message | {"content": text}


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose tool calls have their arguments as objects, which chat templates write as JSON."""
    calls = message.get("tool_calls")
    return message | {"tool_calls": [_with_object(call) for call in calls]} if isinstance(calls, list) else message


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments := function.get("arguments"), str):
        return call
    try:
        found = json.loads(arguments)
    except ValueError:
        return call
    return call | {"function": function | {"arguments": found}} if isinstance(found, dict) else call
