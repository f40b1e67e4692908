"""From a generation to one answer: stop texts, the text without its end token, the model's tool calls. Pure."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from rollstream.producers.engine import Generation, Tokenizer

TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
"""How models of the Qwen and Hermes families write a call: a JSON object with `name` and `arguments`."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice. `token_ids`, `token_texts` and `logprobs` have equal length (T,)."""

    text: str
    """Without the end token, the stop text and what follows it, and the tool calls."""
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """As sampled, up to the end token or the token that completes a stop text."""
    token_texts: tuple[str, ...]
    logprobs: tuple[float, ...]
    """Under the distribution that the tokens were sampled from."""
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    tool_calls: tuple[dict[str, Any], ...]
    model_group: str
    version: int
    """Of the weights; the oldest, if there were several."""


def answer_of(
    generation: Generation,
    tokenizer: Tokenizer,
    *,
    prompt_ids: Sequence[int],
    stop: Sequence[str] = (),
    has_tools: bool = False,
) -> Answer:
    """The answer in what was sampled. Tool calls are looked for only if the model was told of tools."""
    ids, reason = generation.token_ids, generation.finish_reason
    spoken = ids[:-1] if reason == "stop" else ids
    text = _text(tokenizer, spoken)
    at = _first_stop(text, stop)
    if at is not None:
        ids = ids[: _tokens_until_stop(tokenizer, spoken, stop)]
        text, reason = text[:at], "stop"
    calls = tool_calls_in(text, len(prompt_ids)) if has_tools else ()
    if calls:
        text, reason = TOOL_CALL.sub("", text).strip(), "tool_calls" if reason == "stop" else reason
    return Answer(
        text=text,
        prompt_ids=tuple(prompt_ids),
        token_ids=ids,
        token_texts=tuple(_text(tokenizer, (number,)) for number in ids),
        logprobs=generation.logprobs[: len(ids)],
        finish_reason=reason,
        tool_calls=calls,
        model_group=generation.spans[0].model_group,
        version=min(span.version for span in generation.spans),
    )


def tool_calls_in(text: str, salt: int = 0) -> tuple[dict[str, Any], ...]:
    """Calls in OpenAI's shape; none if one of them cannot be read. `salt` keeps ids of equal calls apart."""
    calls: list[dict[str, Any]] = []
    for number, found in enumerate(TOOL_CALL.finditer(text)):
        try:
            call = orjson.loads(found.group(1))
        except orjson.JSONDecodeError:
            return ()
        if not isinstance(call.get("name"), str) or not isinstance(call.get("arguments", {}), dict):
            return ()
        arguments = orjson.dumps(call.get("arguments", {})).decode()
        digest = hashlib.sha256(f"{salt}\x1f{number}\x1f{found.group(1)}".encode()).hexdigest()
        function = {"name": call["name"], "arguments": arguments}
        calls.append({"id": f"call_{digest[:24]}", "type": "function", "function": function})
    return tuple(calls)


def _first_stop(text: str, stop: Sequence[str]) -> int | None:
    found = [at for at in (text.find(word) for word in stop) if at >= 0]
    return min(found, default=None)


def _tokens_until_stop(tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str]) -> int:
    """How many of the ids, at least, say one of the stop texts."""
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        has_stop = _first_stop(_text(tokenizer, ids[:middle]), stop) is not None
        low, high = (low, middle) if has_stop else (middle + 1, high)
    return low


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    # Special tokens stay in the text: an answer that holds one is rendered back word for word.
    return tokenizer.decode(list(ids), skip_special_tokens=False) if ids else ""
