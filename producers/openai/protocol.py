"""OpenAI's chat completions as values: what answers and streams look like (requests: `requests`). Pure.

Beside OpenAI's keys `choices[i].logprobs` holds `prompt_token_ids`, `token_ids`, `model_group`, `version` and, of a
rollout's call, `step_index`, so that whoever keeps the answer keeps what a learner needs.
`logprobs.content` has one entry for each of `token_ids`, and is null for an engine without log-probabilities.

From a generation to one answer: stop texts, the text without its end token. Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollstream.producers.engines.base import Generation, Tokenizer
from rollstream.producers.rollout.conversation import first_stop, is_end
from rollstream.producers.rollout.reply import AnswerParts, Parse, parts_of

REASONING = "reasoning_content"
"""Key of a message; not OpenAI's, but what servers of open models call it."""


REPLACEMENT = "\ufffd"
"""Placeholder that a tokenizer writes for a character of which it does not have all bytes."""
WINDOW = 32
"""Ids that are decoded together where the text of an answer is looked through id by id."""
NOTHING_SENT: Mapping[int, int] = {}


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice. `token_ids`, `token_texts` and `logprobs` have equal length (T,), or there are no `logprobs`."""

    text: str
    """Text without the end token, the stop text and everything after it, and the tool calls."""
    prompt_ids: Sequence[int]
    token_ids: tuple[int, ...]
    """Ids as sampled, up to the end token or the token that completes a stop text."""
    token_texts: tuple[str, ...]
    logprobs: tuple[float, ...]
    """Under the distribution that the tokens were sampled from."""
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    tool_calls: tuple[dict[str, Any], ...]
    model_group: str
    version: int
    """Version of the weights; the oldest, if there were several. 0 for those of a frozen engine."""
    stop_text: str | None = None
    """The stop text of the request that ended it."""
    reasoning: str | None = None
    """Reasoning that a renderer separated from the text."""
    step_index: int | None = None
    """Index of the rollout's step that records it, for its rewards; None: nothing is recorded."""

    @property
    def has_logprobs(self) -> bool:
        """Whether the engine gave a log-probability with each token."""
        return len(self.logprobs) == len(self.token_ids)


def answer_of(
    generation: Generation,
    tokenizer: Tokenizer,
    *,
    model_group: str,
    prompt_ids: Sequence[int],
    salt: int | str,
    stop: Sequence[str] = (),
    has_tools: bool = False,
    is_cut: bool = False,
    parse: Parse | None = None,
) -> Answer:
    """The answer for a generation. Tool calls are parsed only if the request has tools; `salt` keeps their ids apart
    from those of other answers. `is_cut`: the generation ends with a stop text already, in place of an end token.
    `parse`: a renderer's, in place of <tool_call> alone.
    """
    ids, reason = generation.token_ids, generation.finish_reason
    text_ids = ids[:-1] if reason == "stop" and not is_cut else ids
    text = _text(tokenizer, text_ids)
    stop_text = None
    if (length := _tokens_until_stop(tokenizer, text_ids, stop)) is not None:
        ids = ids[:length]
        text = _text(tokenizer, ids)
        at = first_stop(text, stop)
        stop_text = next(word for word in stop if text.startswith(word, at))
        text, reason = text[:at], "stop"
    parts = parts_of(text, ids, salt, parse) if has_tools else AnswerParts(text)
    text, calls = parts.content, parts.tool_calls
    text = text[: first_stop(text, stop)] if has_tools and parse is not None else text
    reason = "tool_calls" if calls and reason == "stop" else reason
    return Answer(
        text=text,
        prompt_ids=prompt_ids,
        token_ids=ids,
        token_texts=tuple(_text(tokenizer, (number,)) for number in ids),
        logprobs=generation.logprobs[: len(ids)],
        finish_reason=reason,
        tool_calls=calls,
        model_group=generation.spans[0].model_group if generation.spans else model_group,
        version=min((span.version for span in generation.spans), default=0),
        stop_text=stop_text,
        reasoning=parts.reasoning,
    )


def stop_length(generation: Generation, tokenizer: Tokenizer, stop: Sequence[str]) -> int | None:
    """Minimum number of tokens that contain one of the stop texts; None if all of them do not.

    Of an end token only its whole text counts: an answer that <|im_end|> ends does not contain `>`.
    """
    ids = generation.token_ids
    if not stop or not ids:
        return None
    has_end = is_end(tokenizer, ids[-1])
    length = _tokens_until_stop(tokenizer, ids[:-1] if has_end else ids, stop)
    if length is None and has_end and _text(tokenizer, ids[-1:]) in stop:
        return len(ids)
    return length


def _tokens_until_stop(tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str]) -> int | None:
    """Minimum number of the ids that contain one of the stop texts; None if there is none."""
    text = _text(tokenizer, ids) if stop else ""
    if first_stop(text, stop) is None:
        return _first_with_stop(tokenizer, ids, stop) if REPLACEMENT in text else None
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        has_stop = first_stop(_text(tokenizer, ids[:middle]), stop) is not None
        low, high = (low, middle) if has_stop else (middle + 1, high)
    is_doubtful = REPLACEMENT in _text(tokenizer, ids[: low - 1])
    return _first_with_stop(tokenizer, ids[:low], stop) if is_doubtful else low


def _first_with_stop(tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str]) -> int | None:
    """The same, found in order, for texts that lose a stop text again while a character has only some of its bytes:
    tokenizers with byte fallback write a whole run of bytes as REPLACEMENT until all of it can be decoded.

    Ids before a window are decoded once, where they decode apart as they do together; if need be with the id before the
    window as its context, since tokenizers leave out the space at the beginning of a text.
    """
    before, begin, skipped, longest = "", 0, 0, max(map(len, stop))
    for end in range(1, len(ids) + 1):
        text = before + _text(tokenizer, ids[begin:end])[skipped:]
        if first_stop(text, stop) is not None:
            return end
        middle = end - WINDOW
        if middle < begin + WINDOW:
            continue
        left = before + _text(tokenizer, ids[begin:middle])[skipped:]
        context = _text(tokenizer, ids[middle - 1 : middle])
        if left + _text(tokenizer, ids[middle:end]) == text:
            before, begin, skipped = left[-longest:], middle, 0
        elif REPLACEMENT not in context and left + _text(tokenizer, ids[middle - 1 : end])[len(context) :] == text:
            before, begin, skipped = left[-longest:], middle - 1, len(context)
    return None


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


def begin_chunk(head: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The beginning of a choice in a stream, before its text."""
    return _chunk(head, index, {"role": "assistant", "content": ""})


def chunk(head: Mapping[str, Any], index: int, text: str) -> dict[str, Any]:
    """A piece of a choice's text in a stream."""
    return _chunk(head, index, {"content": text})


def _chunk(head: Mapping[str, Any], index: int, delta: dict[str, Any]) -> dict[str, Any]:
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
    entries = map(_token, answer.token_texts, answer.logprobs)
    return {
        "content": [*entries] if answer.has_logprobs else None,
        "refusal": None,
        "prompt_token_ids": list(answer.prompt_ids),
        "token_ids": list(answer.token_ids),
        **_source_of(answer),
    }


def exact_of(answer: Answer) -> dict[str, Any]:
    """Exact tokens of an answer, which APIs without a field for them carry under `rollstream`."""
    return {
        "prompt_token_ids": list(answer.prompt_ids),
        "token_ids": list(answer.token_ids),
        "logprobs": list(answer.logprobs),
        **_source_of(answer),
    }


def _source_of(answer: Answer) -> dict[str, Any]:
    step = {} if answer.step_index is None else {"step_index": answer.step_index}
    return {"model_group": answer.model_group, "version": answer.version, **step}


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
    spelt = None if REPLACEMENT in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": spelt, "top_logprobs": []}
