"""Token-exact prompts: what one agent's model saw and said so far stays as it was, and only what is new is tokenised.

Pure; knows text and ids, no messages.
"""

import hashlib
import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

from rollstream.producers.engines.base import Generation, Tokenizer, ids_after, plain_ids, space_before
from rollstream.schemas import tokens
from rollstream.schemas.base import maker_of, validator_of
from rollstream.schemas.events.rollouts import LLMCall, Prefix

_REWRITTEN = re.compile(r"\\[nrt\"]|[\W_]+")
"""Characters that may differ when a text is rendered again: spaces, punctuation, the escapes of JSON."""
REASONED = "</think>"
"""Ends what chat templates leave out of an answer when they render it back."""
Bridge = Callable[[list[int], list[int]], list[int] | None]
_llm_call, _prefix = validator_of(LLMCall), maker_of(Prefix)
MIN_SHARED = 32
"""Ids that a prompt must share with a part of an earlier call, to be written as its prefix."""


class Prompt(NamedTuple):
    """Ids to go on from: (P,) = the prefix's ids and the new ones."""

    text: str
    token_ids: "array[int]"
    prefix: Prefix | None
    uses: tuple[int, ...] = ()
    """Steps of earlier calls whose answers the new part of the text holds."""
    history: str = ""
    """Digest of the messages and tools that it is made of, for a renderer to go on from; empty: none does."""
    request: int | None = None
    """`LLMCall.request` of its answers."""

    @property
    def new_ids(self) -> "array[int]":
        """Ids after the prefix."""
        return self.token_ids[self.prefix.length :] if self.prefix else self.token_ids


@dataclass(slots=True)
class _Node:
    """A node of a radix tree: what it adds to the text of the node above it."""

    text: str
    children: "dict[str, _Node]"
    """Nodes below, by the first character of their text."""
    stem: tuple[int, int] | None = None
    """Number of ids of the whole text up to here, and the step of the call that has it."""


_Best = tuple[int, int, int] | None
"""The text with most ids on the way to a node: its characters, its ids and its step."""
_Position = tuple[_Node, int, _Best]
"""The node whose text ends with so many characters of a text."""


class Stems:
    """Texts that a later prompt may begin with, in a radix tree: what several of them have in common is kept once."""

    def __init__(self) -> None:
        self._root: _Position = _Node("", {}), 0, None
        self._text, self._position = "", self._root
        """The last text and its position. A conversation goes on from there, so its next text is not looked up from the
        root, node by node: a call costs the same after many others.
        """

    def add(self, text: str, length: int, step_index: int) -> None:
        """A text, which is the first `length` ids of the call at a step. Of equal texts, the longest in ids counts,
        then the newest.
        """
        node, at, best = self._found(text)
        if at < len(text):
            below = node.children.get(text[at])
            if below is not None:  # another text, from some character on
                shared = _num_shared(below.text, text[at:])
                upper = node.children[text[at]] = _Node(below.text[:shared], {below.text[shared]: below})
                below.text = below.text[shared:]
                node, at = upper, at + shared
            if at < len(text):
                node.children[text[at]] = node = _Node(text[at:], {})
        if node.stem is None or length >= node.stem[0]:
            node.stem = length, step_index
            if best is None or length >= best[1]:
                best = len(text), length, step_index
        self._text, self._position = text, (node, len(text), best)
        if not text:
            self._root = self._position

    def longest(self, text: str) -> _Best:
        """The text with most ids that `text` begins with: its characters, its ids and its step."""
        return self._found(text)[2]

    def _found(self, text: str) -> _Position:
        """The position of the longest text of a node that `text` begins with."""
        node, at, best = self._position if text.startswith(self._text) else self._root
        while (below := node.children.get(text[at : at + 1])) is not None and text.startswith(below.text, at):
            node, at = below, at + len(below.text)
            if node.stem is not None and (best is None or node.stem[0] >= best[1]):
                best = at, *node.stem
        return node, at, best


class Conversation:
    """The calls of one agent in one rollout. A prompt may go on from any of them, so branches stay exact too."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._calls: dict[int, tuple[array[int], array[int]]] = {}
        """Ids of prompt and completion, by step."""
        self._stems = Stems()
        self._unused: dict[int, str] = {}
        """Letters of the answer at a step that no later prompt has taken up so far, by step; at most one entry a call.
        """
        self._by_history: dict[str, int] = {}
        """Steps by the digest of their messages with the answer, at most one a call."""

    def prompt(self, text: str, token_ids: "array[int] | None" = None, *, is_plain: bool = False) -> Prompt:
        """Ids of a rendered chat: the longest stretch that an earlier call had word for word, then new ids.

        `token_ids`: of the text, to be taken as they are. `is_plain`: no chat template wrote the text.
        """
        if token_ids is not None:
            exact = self.continue_from_ids(token_ids)
            return exact._replace(text=text, uses=self._used_in(text, exact.prefix))
        best = self._stems.longest(text)
        if best is None:
            first = plain_ids(self._tokenizer, text) if is_plain else None
            token_ids = array("i", first or self._tokenizer.encode(text, add_special_tokens=False))
            return Prompt(text, token_ids, None, self._used_in(text, None))
        num_characters, length, step_index = best
        prompt_ids, completion_ids = self._calls[step_index]
        kept = prompt_ids[:length] + completion_ids[: max(0, length - len(prompt_ids))]
        rest = text[num_characters:]
        new_ids = array("i", ids_after(self._tokenizer, rest, kept[-1]) if rest else ())
        prefix = _prefix({"step_index": step_index, "length": length, "sha256": ids_sha256(kept)})
        return Prompt(text, kept + new_ids, prefix, self._used_in(rest, prefix))

    def bridged(self, text: str, before: str, bridge: Bridge) -> Prompt | None:
        """The prompt that goes on from all ids of an earlier call; None: there is none, or nothing proves it.

        `before`: `history_with` of the messages up to the answer. `bridge`: (prompt ids, completion ids) -> all ids.
        """
        step_index = self._by_history.get(before)
        if step_index is None:
            return None
        prompt_ids, completion_ids = self._calls[step_index]
        found = bridge(prompt_ids.tolist(), completion_ids.tolist())
        if found is None:
            return None
        length = len(prompt_ids) + len(completion_ids)
        prefix = Prefix(step_index=step_index, length=length, sha256=ids_sha256(prompt_ids + completion_ids))
        token_ids = array("i", found)
        return Prompt(text, token_ids, prefix, self._used_in(self._text(token_ids[length:]), prefix))

    def continue_from_ids(self, token_ids: "array[int]") -> Prompt:
        """A prompt that is known by its ids, which all stay; the prefix is the longest stretch that it shares."""
        best: tuple[int, int] | None = None
        for step_index, (prompt_ids, completion_ids) in reversed(self._calls.items()):
            if best is not None and len(prompt_ids) + len(completion_ids) <= best[0]:
                continue  # no longer than what is shared already: in a long conversation, all calls but the last
            known = prompt_ids + completion_ids
            shared = _num_shared(token_ids, known)
            is_worth_it = shared == len(known) or shared >= MIN_SHARED
            if is_worth_it and (best is None or shared > best[0]):
                best = (shared, step_index)
        if best is None:
            return Prompt("", token_ids, None)
        length, step_index = best
        sha256 = ids_sha256(token_ids[:length])
        return Prompt("", token_ids, Prefix(step_index=step_index, length=length, sha256=sha256))

    def append_recorded(self, step_index: int, prompt: Prompt, completion: "array[int]") -> None:
        """Append what was answered at a step to a prompt that is known by its ids."""
        self._calls[step_index] = prompt.token_ids, completion

    def append_sampled(
        self, step_index: int, prompt: Prompt, completion_ids: Sequence[int], stop: Sequence[str] = ()
    ) -> str:
        """Append what the model answered at a step; returns its text without the end token.

        `stop`: texts before which the answer ends for the client, who gives it back so. Some models end an answer with
        the token that opens the next turn (GLM: `<|observation|>`), which the chat template writes again.
        """
        completion = array("i", completion_ids)
        has_end = bool(completion) and is_end(self._tokenizer, completion[-1])
        text_ids = completion[:-1] if has_end else completion
        answer = self._text(text_ids)
        num_prompt = len(prompt.token_ids)
        self._calls[step_index] = prompt.token_ids, completion
        self._stems.add(prompt.text, num_prompt, step_index)
        texts = [(answer, len(text_ids)), *([(self._text(completion), len(completion))] if has_end else [])]
        for before in dict.fromkeys(("", self._space_before(completion, prompt.token_ids))):
            for text, length in texts:
                self._stems.add(prompt.text + before + text, num_prompt + length, step_index)
        if prompt.history:
            self._by_history[history_with(prompt.history, answer)] = step_index
        for used in prompt.uses:
            self._unused.pop(used, None)
        if self._holds_answer(prompt.prefix):
            self._unused.pop(prompt.prefix.step_index, None)
        if letters := _letters(answer[: first_stop(answer, stop)].rpartition(REASONED)[2]):
            self._unused[step_index] = letters
        return answer

    def _holds_answer(self, prefix: Prefix | None) -> "TypeGuard[Prefix]":
        """Whether a prefix has ids of the answer that it names; else only those of its prompt, or of a part of it."""
        return prefix is not None and prefix.length > len(self._calls[prefix.step_index][0])

    def _used_in(self, text: str, prefix: Prefix | None) -> tuple[int, ...]:
        """Steps whose answers a text holds, by their letters and digits; not the one whose ids it goes on from.

        That one counts, too, if the text comes after its prompt: an answer that is rendered otherwise than it was
        sampled (without its reasoning, or its outer spaces) is given back all the same.
        """
        own = prefix.step_index if self._holds_answer(prefix) else None
        known = {step: answer for step, answer in self._unused.items() if step != own}
        letters = _letters(text) if known else ""
        return tuple(step for step, answer in known.items() if answer in letters)

    def _space_before(self, completion: "array[int]", prompt_ids: "array[int]") -> str:
        """The space with which a chat template begins an answer, and the answer's text does not."""
        return space_before(self._tokenizer, completion[0], prompt_ids[-1]) if completion and prompt_ids else ""

    def _text(self, ids: "array[int]") -> str:
        # Special tokens stay in the text: an answer that holds one is rendered back word for word.
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False) if ids else ""


def is_end(tokenizer: Tokenizer, token_id: int) -> bool:
    """Whether a token that is the last of an answer is not part of its text: the end token, or a special one."""
    return token_id == tokenizer.eos_token_id or not tokenizer.decode([token_id], skip_special_tokens=True)


def first_stop(text: str, stop: Sequence[str]) -> int | None:
    """Index at which the first of the stop texts begins in a text; None if it holds none."""
    return min((at for at in map(text.find, stop) if at >= 0), default=None)


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
    return text if text.isalnum() else _REWRITTEN.sub("", text)


def _num_shared(one: Any, other: Any) -> int:
    """Number of ids, or of characters, that both begin with, found by bisection."""
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
    fields: dict[str, Any] = {
        "prefix": prompt.prefix,
        "prompt_ids": tokens.encode_ids(prompt.new_ids),
        "completion_ids": tokens.encode_ids(generation.token_ids),
        "logprobs": tokens.encode_floats(generation.logprobs) if generation.spans else None,
        "spans": generation.spans,
        "finish_reason": generation.finish_reason,
    }
    if generation.kept is not None:
        fields["kept_ids"] = tokens.encode_kept(generation.kept)
    if prompt.uses:
        fields["uses"] = prompt.uses
    if prompt.request is not None:
        fields["request"] = prompt.request
    return _llm_call(fields)
