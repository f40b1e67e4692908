"""Token-exact prompts: what one agent's model saw and said so far stays as it was, and only what is new is tokenised.

Pure; knows text and ids, no messages.
"""

import hashlib
import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollstream.producers.engines.base import Generation, Tokenizer
from rollstream.schemas import tokens
from rollstream.schemas.events.rollouts import LLMCall, Prefix

_REWRITTEN = re.compile(r"\\[nrt\"]|[\W_]+")
"""Characters that may differ when a text is rendered again: spaces, punctuation, the escapes of JSON."""
REASONED = "</think>"
"""Ends what chat templates leave out of an answer when they render it back."""
Bridge = Callable[[list[int], list[int]], list[int] | None]
MIN_SHARED = 32
"""Ids that a prompt must share with a part of an earlier call, to be written as its prefix."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Ids to go on from: (P,) = the prefix's ids and the new ones."""

    text: str
    token_ids: "array[int]"
    prefix: Prefix | None
    uses: tuple[int, ...] = ()
    """Steps of earlier calls whose answers the new part of the text holds."""
    history: str = ""
    """Digest of the messages and tools that it is made of, for a renderer to go on from; empty: none does."""

    @property
    def new_ids(self) -> "array[int]":
        """Ids after the prefix."""
        return self.token_ids[self.prefix.length :] if self.prefix else self.token_ids


@dataclass(frozen=True, slots=True)
class _Call:
    step_index: int
    token_ids: "array[int]"
    """Prompt and completion."""
    stems: tuple[tuple[str, int], ...]
    """Texts that a later prompt may begin with, and how many ids they are; longest first."""


class Conversation:
    """The calls of one agent in one rollout. A prompt may go on from any of them, so branches stay exact too."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._calls: list[_Call] = []
        self._unused: dict[int, str] = {}
        """Letters of the answer at a step that no later prompt has taken up so far, by step; at most one entry a call.
        """
        self._num_prompt: dict[int, int] = {}
        """Number of ids of the prompt, by step."""
        self._by_history: dict[str, _Call] = {}
        """Calls by the digest of their messages with the answer, at most one a call."""

    def prompt(self, text: str, token_ids: "array[int] | None" = None) -> Prompt:
        """Ids of a rendered chat: the longest stretch that an earlier call had word for word, then new ids.

        `token_ids`: of the text, to be taken as they are.
        """
        if token_ids is not None:
            exact = self.continue_from_ids(token_ids)
            return replace(exact, text=text, uses=self._used_in(text, exact.prefix))
        best: tuple[int, str, _Call] | None = None
        for call in reversed(self._calls):
            for stem, length in call.stems:
                if text.startswith(stem):
                    if best is None or length > best[0]:
                        best = (length, stem, call)
                    break
        if best is None:
            token_ids = array("i", self._tokenizer.encode(text, add_special_tokens=False))
            return Prompt(text, token_ids, None, self._used_in(text, None))
        length, stem, call = best
        kept = call.token_ids[:length]
        rest = text[len(stem) :]
        new_ids = array("i", self._tokenizer.encode(rest, add_special_tokens=False) if rest else ())
        prefix = Prefix(step_index=call.step_index, length=length, sha256=ids_sha256(kept))
        return Prompt(text, kept + new_ids, prefix, self._used_in(rest, prefix))

    def bridged(self, text: str, before: str, bridge: Bridge) -> Prompt | None:
        """The prompt that goes on from all ids of an earlier call; None: there is none, or nothing proves it.

        `before`: `history_with` of the messages up to the answer. `bridge`: (prompt ids, completion ids) -> all ids.
        """
        call = self._by_history.get(before)
        if call is None:
            return None
        num_prompt, length = self._num_prompt[call.step_index], len(call.token_ids)
        found = bridge(call.token_ids[:num_prompt].tolist(), call.token_ids[num_prompt:].tolist())
        if found is None:
            return None
        prefix = Prefix(step_index=call.step_index, length=length, sha256=ids_sha256(call.token_ids))
        token_ids = array("i", found)
        return Prompt(text, token_ids, prefix, self._used_in(self._text(token_ids[length:]), prefix))

    def continue_from_ids(self, token_ids: "array[int]") -> Prompt:
        """A prompt that is known by its ids, which all stay; the prefix is the longest stretch that it shares."""
        best: tuple[int, _Call] | None = None
        for call in reversed(self._calls):
            shared = _num_shared(token_ids, call.token_ids)
            is_worth_it = shared == len(call.token_ids) or shared >= MIN_SHARED
            if is_worth_it and (best is None or shared > best[0]):
                best = (shared, call)
        if best is None:
            return Prompt("", token_ids, None)
        length, call = best
        sha256 = ids_sha256(token_ids[:length])
        return Prompt("", token_ids, Prefix(step_index=call.step_index, length=length, sha256=sha256))

    def append_recorded(self, step_index: int, prompt: Prompt, completion: "array[int]") -> None:
        """Append what was answered at a step to a prompt that is known by its ids."""
        self._calls.append(_Call(step_index, prompt.token_ids + completion, ()))

    def append_sampled(self, step_index: int, prompt: Prompt, completion_ids: Sequence[int]) -> str:
        """Append what the model answered at a step; returns its text without the end token.

        Some models end an answer with the token that opens the next turn (GLM: `<|observation|>`), which the chat
        template writes again.
        """
        completion = array("i", completion_ids)
        has_end = bool(completion) and self._is_end(completion[-1])
        text_ids = completion[:-1] if has_end else completion
        answer = self._text(text_ids)
        num_prompt = len(prompt.token_ids)
        stems = [(prompt.text + answer, num_prompt + len(text_ids)), (prompt.text, num_prompt)]
        if has_end:
            stems.insert(0, (prompt.text + self._text(completion), num_prompt + len(completion)))
        self._calls.append(_Call(step_index, prompt.token_ids + completion, tuple(stems)))
        if prompt.history:
            self._by_history[history_with(prompt.history, answer)] = self._calls[-1]
        for used in prompt.uses:
            self._unused.pop(used, None)
        if prompt.prefix is not None and prompt.prefix.length > self._num_prompt.get(prompt.prefix.step_index, 0):
            self._unused.pop(prompt.prefix.step_index, None)
        self._num_prompt[step_index] = num_prompt
        if letters := _letters(answer.rpartition(REASONED)[2]):
            self._unused[step_index] = letters
        return answer

    def _used_in(self, text: str, prefix: Prefix | None) -> tuple[int, ...]:
        """Steps whose answers a text holds, by their letters and digits; not the one whose ids it goes on from."""
        known = {step: answer for step, answer in self._unused.items() if prefix is None or prefix.step_index != step}
        letters = _letters(text) if known else ""
        return tuple(step for step, answer in known.items() if answer in letters)

    def _is_end(self, token_id: int) -> bool:
        """Whether a token that is the last of an answer is not part of its text: the end token, or a special one."""
        is_eos = token_id == self._tokenizer.eos_token_id
        return is_eos or not self._tokenizer.decode([token_id], skip_special_tokens=True)

    def _text(self, ids: "array[int]") -> str:
        # Special tokens stay in the text: an answer that holds one is rendered back word for word.
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False) if ids else ""


def history_with(history: str, answer: str) -> str:
    """Digest of messages and the text of their answer."""
    return hashlib.sha256(f"{history}\x1f{answer}".encode(errors="surrogatepass")).hexdigest()


def usage_of(prompt: Prompt, generation: Generation) -> dict[str, Any]:
    """NAT's `usage_info` of a call."""
    num_prompt, num_completion = len(prompt.token_ids), len(generation.token_ids)
    usage = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "cached_tokens": 0,
        "reasoning_tokens": 0,
        "total_tokens": num_prompt + num_completion,
    }
    return {"token_usage": usage, "num_llm_calls": 1, "seconds_between_calls": 0}


def _letters(text: str) -> str:
    return _REWRITTEN.sub("", text)


def _num_shared(one: "array[int]", other: "array[int]") -> int:
    """Number of ids that both begin with, found by bisection."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while low < high - 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def ids_sha256(token_ids: "array[int]") -> str:
    """sha256 (hex) of ids as little-endian int32."""
    return hashlib.sha256(tokens.packed(token_ids)).hexdigest()


def recorded_call(prompt: Prompt, generation: Generation) -> LLMCall:
    """An answer to a prompt as its step records it."""
    return LLMCall(
        prefix=prompt.prefix,
        prompt_ids=tokens.encode_ids(prompt.new_ids),
        completion_ids=tokens.encode_ids(generation.token_ids),
        logprobs=tokens.encode_floats(generation.logprobs) if generation.spans else None,
        spans=generation.spans,
        finish_reason=generation.finish_reason,
        kept_ids=None if generation.kept is None else tokens.encode_kept(generation.kept),
        uses=prompt.uses,
    )
