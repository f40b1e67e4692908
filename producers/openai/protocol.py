"""OpenAI's chat completions as values: what answers and streams look like (requests: `requests`). Pure.

Beside OpenAI's keys `choices[i].logprobs` holds `prompt_token_ids`, `token_ids`, `model_group` and `version`, so that
whoever keeps the answer keeps what a learner needs. `logprobs.content` has one entry for each of `token_ids`.

From a generation to one answer: stop texts, the text without its end token, the model's tool calls. Pure.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from rollstream.producers.engines.base import Generation, Tokenizer
from rollstream.producers.rollout.rendering import ParsedAnswer

CALL_BEGINS, CALL_ENDS = "<tool_call>", "</tool_call>"
"""How models of the Qwen and Hermes families write a call: between them a JSON object with `name` and `arguments`."""
REASONING = "reasoning_content"
"""Key of a message; not OpenAI's, but what servers of open models call it."""
Parse = Callable[[Sequence[int]], ParsedAnswer]
_MARKER = re.compile(r"</?tool_call>")
_BRACE = re.compile(r"\s*+\{")


NOTHING_SENT: Mapping[int, int] = {}


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
    stop_text: str | None = None
    """The stop text of the request that ended it."""
    reasoning: str | None = None
    """What a renderer told apart from the text."""


def answer_of(
    generation: Generation,
    tokenizer: Tokenizer,
    *,
    prompt_ids: Sequence[int],
    stop: Sequence[str] = (),
    has_tools: bool = False,
    is_cut: bool = False,
    parse: Parse | None = None,
) -> Answer:
    """The answer in what was sampled. Tool calls are parsed only if the request has tools. `is_cut`: the generation
    ends with a stop text already, in place of an end token. `parse`: a renderer's, in place of <tool_call> alone.
    """
    ids, reason = generation.token_ids, generation.finish_reason
    text_ids = ids[:-1] if reason == "stop" and not is_cut else ids
    text = _text(tokenizer, text_ids)
    at, stop_text = _first_stop(text, stop), None
    if at is not None:
        stop_text = next(word for word in stop if text.startswith(word, at))
        ids = ids[: _tokens_until_stop(tokenizer, text_ids, stop)]
        text, reason = text[:at], "stop"
    reasoning = None
    if has_tools and parse is not None:
        parsed = parse(ids)
        end = _first_stop(parsed.content, stop)
        text, reasoning, calls = parsed.content[:end], parsed.reasoning, _calls_of(parsed, len(prompt_ids))
    else:
        calls = tool_calls_in(text, len(prompt_ids)) if has_tools else ()
        text = _without_calls(text) if calls else text
    reason = "tool_calls" if calls and reason == "stop" else reason
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
        stop_text=stop_text,
        reasoning=reasoning,
    )


def stop_length(generation: Generation, tokenizer: Tokenizer, stop: Sequence[str]) -> int | None:
    """How many tokens, at least, say one of the stop texts; None if all of them do not."""
    ids = generation.token_ids
    if not stop or _first_stop(_text(tokenizer, ids), stop) is None:
        return None
    return _tokens_until_stop(tokenizer, ids, stop)


def tool_calls_in(text: str, salt: int = 0) -> tuple[dict[str, Any], ...]:
    """Calls in OpenAI's shape; none if one of them cannot be read. `salt` keeps ids of equal calls apart."""
    calls: list[dict[str, Any]] = []
    for number, (begin, end) in enumerate(call_spans(text)):
        body = text[begin + len(CALL_BEGINS) : end - len(CALL_ENDS)].strip()
        try:
            call = orjson.loads(body)
        except orjson.JSONDecodeError:
            return ()
        if not isinstance(call.get("name"), str) or not isinstance(call.get("arguments", {}), dict):
            return ()
        arguments = orjson.dumps(call.get("arguments", {})).decode()
        calls.append(_call(_call_id(salt, number, body), call["name"], arguments))
    return tuple(calls)


def _calls_of(parsed: ParsedAnswer, salt: int) -> tuple[dict[str, Any], ...]:
    return tuple(
        _call(own_id or _call_id(salt, number, f"{name}\x1f{arguments}"), name, arguments)
        for number, (name, arguments, own_id) in enumerate(parsed.calls)
    )


def _call_id(salt: int, number: int, body: str) -> str:
    digest = hashlib.sha256(f"{salt}\x1f{number}\x1f{body}".encode()).hexdigest()
    return f"call_{digest[:24]}"


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _without_calls(text: str) -> str:
    parts: list[str] = []
    at = 0
    for begin, end in call_spans(text):
        parts.append(text[at:begin])
        at = end
    return "".join([*parts, text[at:]]).strip()


def call_spans(text: str) -> list[tuple[int, int]]:
    """Where calls begin and end, markers included, in one pass over the text.

    A call begins at a marker before a brace and ends at the first end marker behind one, for a text within the JSON may
    hold a marker too. Each run of white space is passed once forwards and once backwards.
    """
    found: list[tuple[int, int]] = []
    begin: int | None = None
    for marker in _MARKER.finditer(text):
        if marker[0] == CALL_BEGINS:
            if begin is None and _BRACE.match(text, marker.end()):
                begin = marker.start()
        elif begin is not None and _is_behind_brace(text, marker.start()):
            found.append((begin, marker.end()))
            begin = None
    return found


def _is_behind_brace(text: str, at: int) -> bool:
    while at > 0 and text[at - 1].isspace():
        at -= 1
    return text[at - 1 : at] == "}"


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


def completion(head: Mapping[str, Any], answers: list[Answer]) -> dict[str, Any]:
    """The whole answer; `head` has `id`, `created`, `model` and `system_fingerprint`."""
    return {
        **head,
        "object": "chat.completion",
        "choices": [
            {
                "index": index,
                "message": _message(answer),
                "finish_reason": answer.finish_reason,
                "logprobs": logprobs_of(answer),
            }
            for index, answer in enumerate(answers)
        ],
        "usage": usage_of(answers),
    }


def chunk(head: Mapping[str, Any], index: int, text: str, *, is_first: bool) -> dict[str, Any]:
    """A piece of a choice's text in a stream."""
    delta = {"role": "assistant", "content": text} if is_first else {"content": text}
    choice = {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}
    return {**head, "object": "chat.completion.chunk", "choices": [choice]}


def chunks(
    head: Mapping[str, Any], answers: list[Answer], *, include_usage: bool, sent: Mapping[int, int] = NOTHING_SENT
) -> list[dict[str, Any]]:
    """The same as a stream: what is left of each choice, with the log-probabilities of all of it, then its end.

    `sent`: characters of each choice's text that are sent.
    """
    found: list[dict[str, Any]] = []
    for index, answer in enumerate(answers):
        delta = _message(answer)
        if index in sent:
            delta = {key: delta[key] for key in delta if key == REASONING} | {"content": answer.text[sent[index] :]}
        if answer.tool_calls:
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(answer.tool_calls)]
        found.append({"index": index, "delta": delta, "finish_reason": None, "logprobs": logprobs_of(answer)})
        found.append({"index": index, "delta": {}, "finish_reason": answer.finish_reason, "logprobs": None})
    whole = {**head, "object": "chat.completion.chunk"}
    stream = [{**whole, "choices": [choice]} for choice in found]
    return [*stream, {**whole, "choices": [], "usage": usage_of(answers)}] if include_usage else stream


def logprobs_of(answer: Answer) -> dict[str, Any]:
    """OpenAI's entries, and the exact token ids beside them."""
    return {
        "content": [_token(text, logprob) for text, logprob in zip(answer.token_texts, answer.logprobs, strict=True)],
        "refusal": None,
        "prompt_token_ids": list(answer.prompt_ids),
        "token_ids": list(answer.token_ids),
        "model_group": answer.model_group,
        "version": answer.version,
    }


def exact_of(answer: Answer) -> dict[str, Any]:
    """What APIs without a place for it have under `rollstream`."""
    return {
        "prompt_token_ids": list(answer.prompt_ids),
        "token_ids": list(answer.token_ids),
        "logprobs": list(answer.logprobs),
        "model_group": answer.model_group,
        "version": answer.version,
    }


def usage_of(answers: list[Answer]) -> dict[str, int]:
    """Token counts; the prompt counts once."""
    num_prompt = len(answers[0].prompt_ids)
    num_completion = sum(len(answer.token_ids) for answer in answers)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
    }


def _message(answer: Answer) -> dict[str, Any]:
    reasoning = {} if answer.reasoning is None else {REASONING: answer.reasoning}
    if not answer.tool_calls:
        return {"role": "assistant", "content": answer.text} | reasoning
    return {"role": "assistant", "content": answer.text or None, "tool_calls": list(answer.tool_calls)} | reasoning


def _token(text: str, logprob: float) -> dict[str, Any]:
    # A token that ends within a character has no bytes that its text would tell.
    spelt = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": spelt, "top_logprobs": []}
