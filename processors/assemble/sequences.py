"""Joins LLM calls of one agent to training sequences by their verified prefixes. No rewards, no I/O."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple

import pybase64

from rollstream.processors.assemble.state import Call
from rollstream.schemas import tokens
from rollstream.schemas.base import validator_of
from rollstream.schemas.errors import DecodeError
from rollstream.schemas.events.rollouts import LLMCall, StepRecorded, TokenSequence
from rollstream.schemas.revisions import ANSWERS_SINCE, NEWEST_GROUP_REVISION

TOKEN_BYTES = 4
_unpack = pybase64.b64decode
"""Little-endian values of a base64 text; the bytes are not converted, so the machine's byte order does not matter."""
_token_sequence = validator_of(TokenSequence)


# Called for every sequence: `list[bytes]()` takes five times as long.
def _no_parts() -> list[bytes]:
    return []


def _no_completions() -> list[dict[str, object]]:
    return []


@dataclass(slots=True)
class _Growing:
    """A sequence that later calls may extend; `length` counts its tokens."""

    parts: list[bytes] = field(default_factory=_no_parts)
    length: int = 0
    hasher: "hashlib._Hash | None" = None  # pyright: ignore[reportPrivateUsage]
    num_hashed: int = 0
    """Parts that the hasher has seen: nobody asks for the hash of a sequence that no call extends."""
    logprobs: list[bytes] = field(default_factory=_no_parts)
    has_logprobs: bool = True
    completions: list[dict[str, object]] = field(default_factory=_no_completions)
    """Fields of Completion, validated with the sequence."""

    def sha256(self) -> str:
        """Sha256 of all tokens so far."""
        unseen = b"".join(self.parts[self.num_hashed :])
        self.num_hashed = len(self.parts)
        if self.hasher is None:
            self.hasher = hashlib.sha256(unseen)
        else:
            self.hasher.update(unseen)
        return self.hasher.hexdigest()


def dead_branches(steps: Sequence[StepRecorded | Call], revision: int = NEWEST_GROUP_REVISION) -> frozenset[int]:
    """Step indices of the calls that were discarded, given one agent's LLM steps in ascending step index.

    Calls whose prompts begin with each other's are one conversation. Of each, the last call is alive, and so is a call
    whose completion the prefix of a living call holds or whose answer a living call uses as text. What is left led to
    nothing: an attempt at a summary that was rejected, an answer that was asked for again. The calls have passed
    `join_calls`.

    `revision`: of the group. Since ANSWERS_SINCE, several last answers to one request (`n`) are all alive, unless a
    later call goes on from one of them or uses it; first answers are not conversations of their own then.
    """
    calls = {step.step_index: step.llm for step in steps if step.llm is not None}
    parents: dict[int, _Parent | None] = {}
    roots: dict[int, int] = {}
    held: dict[int, int | None] = {}
    """The last call whose completion the prefix of a call holds, by call."""
    for index in calls:
        parent = parents[index] = _parent(calls, index, parents)
        roots[index] = index if parent is None else roots[parent.step_index]
        held[index] = None
        if parent is not None:
            held[index] = parent.step_index if parent.has_completion else held[parent.step_index]
    alive = set({root: index for index, root in roots.items()}.values())
    if revision >= ANSWERS_SINCE:
        alive = _with_answers(alive, calls, parents.values())
    for index in reversed(calls):
        if index in alive:
            before = held[index]
            alive.update(calls[index].uses, () if before is None else (before,))
    return frozenset(calls) - alive


def _with_answers(
    last: AbstractSet[int], calls: Mapping[int, LLMCall], parents: Iterable["_Parent | None"]
) -> set[int]:
    """The `last` calls with the other answers to their requests, unless a later call follows one of these: then those
    that a later call uses.
    """
    used = {index for call in calls.values() for index in call.uses}
    followed = used | {parent.step_index for parent in parents if parent is not None}
    answers: dict[int, set[int]] = {}
    for index, call in calls.items():
        answers.setdefault(index if call.request is None else call.request, set()).add(index)
    found: set[int] = set()
    for request in answers.values():
        if request & last:
            found |= request & used if request & followed else request
    return found


class _Parent(NamedTuple):
    """The call whose whole prompt is in the prefix of another."""

    step_index: int
    has_completion: bool
    """Whether some of its completion is, too."""


def _parent(calls: Mapping[int, LLMCall], index: int, parents: Mapping[int, _Parent | None]) -> _Parent | None:
    """The parent of a call. `parents`: of the calls before it, so that prompts with a common beginning, each of which
    names the one before, are not followed to the first.
    """
    prefix = calls[index].prefix
    length = prefix.length if prefix else 0
    while prefix is not None and prefix.step_index in calls:
        own = calls[prefix.step_index]
        own_length = own.prefix.length if own.prefix else 0
        start = tokens.count(own.prompt_ids) + own_length
        if length >= start:
            return _Parent(prefix.step_index, length > start)
        if length >= own_length:
            return parents[prefix.step_index]
        prefix = own.prefix
    return None


def join_calls(
    steps: Sequence[StepRecorded | Call],
    *,
    keep_finish_reasons: bool = False,
    without: AbstractSet[int] = frozenset(),
) -> tuple[TokenSequence, ...]:
    """Training sequences of one agent's LLM steps, given in ascending step index.

    A call whose prefix is the complete prompt and completion of an earlier call extends that call's sequence, if no
    other call has yet and both or neither have log-probabilities. A shorter prefix or a second branch starts a new
    sequence in which the prefix is prompt. So every completion token is in exactly one `completions` entry, and a
    sequence has log-probabilities for all or none of its completion tokens. `without`: the steps of `dead_branches`,
    which are left out. Raises DecodeError naming the step if a
    prefix does not refer to an earlier call, is longer than it or has another hash, or if token arrays are
    inconsistent.
    """
    sequences: list[_Growing] = []
    ends: dict[int, tuple[_Growing, int]] = {}
    for step in steps:
        call = step.llm
        if call is None:
            continue
        index = step.step_index
        try:
            sequence = _sequence_for(call, ends, sequences)
            _extend(sequence, call, index)
            if keep_finish_reasons and call.finish_reason != "stop":
                sequence.completions[-1]["finish_reason"] = call.finish_reason
        except ValueError as error:
            raise DecodeError(f"step {index} of agent {step.agent}: {error}") from error
        ends[index] = (sequence, sequence.length)
    for sequence in sequences if without else ():
        _prune(sequence, without)
    return tuple([_sealed(sequence) for sequence in sequences if sequence.completions])


def _prune(sequence: _Growing, without: AbstractSet[int]) -> None:
    """Remove the calls at the end of a sequence that are left out; a living one has living ones before it."""
    while sequence.completions and sequence.completions[-1]["step_index"] in without:
        sequence.completions.pop()
        sequence.parts.pop()
        if sequence.logprobs:
            sequence.logprobs.pop()


def _sequence_for(call: LLMCall, ends: dict[int, tuple[_Growing, int]], sequences: list[_Growing]) -> _Growing:
    prefix = call.prefix
    if prefix is not None:
        named = ends.get(prefix.step_index)
        if named is None:
            raise DecodeError(
                f"its prefix refers to step {prefix.step_index}, which is not an earlier LLM call of this agent"
            )
        sequence, end = named
        length = prefix.length
        if length > end:
            raise DecodeError(f"its prefix has {length} tokens, but step {prefix.step_index} has only {end}")
        if length == sequence.length and sequence.has_logprobs == (call.logprobs is not None):
            if sequence.sha256() != prefix.sha256:
                raise DecodeError("the sha256 of its prefix differs")
            return sequence
    begun = _Growing()
    if prefix is not None:
        packed = b"".join(ends[prefix.step_index][0].parts)[: prefix.length * TOKEN_BYTES]
        begun.parts.append(packed)
        begun.length = len(packed) // TOKEN_BYTES
        if begun.sha256() != prefix.sha256:
            raise DecodeError("the sha256 of its prefix differs")
    sequences.append(begun)
    return begun


def _extend(sequence: _Growing, call: LLMCall, step_index: int) -> None:
    prompt, completion = _unpack(call.prompt_ids, None, True), _unpack(call.completion_ids, None, True)
    logprobs = None if call.logprobs is None else _unpack(call.logprobs, None, True)
    if len(prompt) % TOKEN_BYTES or len(completion) % TOKEN_BYTES or len(logprobs or b"") % TOKEN_BYTES:
        raise DecodeError("the size of a token array is not a multiple of four bytes")
    length = len(completion) // TOKEN_BYTES
    spans = call.spans
    if spans and (spans[0].length if len(spans) == 1 else sum(span.length for span in spans)) != length:
        raise DecodeError(f"its version spans do not cover the {length} completion tokens")
    if logprobs is None:
        sequence.has_logprobs = False
    elif len(logprobs) != len(completion):
        raise DecodeError(f"{len(logprobs) // TOKEN_BYTES} log-probabilities for {length} completion tokens")
    else:
        sequence.logprobs.append(logprobs)
    start = sequence.length + len(prompt) // TOKEN_BYTES
    sequence.completions.append({"start": start, "length": length, "step_index": step_index, "spans": spans})
    if call.kept_ids is not None:
        sampled = tokens.decode_ids(call.completion_ids)
        tokens.check_kept(sampled, tokens.decode_kept(call.kept_ids, len(sampled)))
        sequence.completions[-1]["kept_ids"] = call.kept_ids
    sequence.parts.append(prompt + completion)
    sequence.length = start + length


def _sealed(sequence: _Growing) -> TokenSequence:
    return _token_sequence(
        {
            "token_ids": _pack(sequence.parts),
            "logprobs": _pack(sequence.logprobs) if sequence.has_logprobs else None,
            "completions": tuple(sequence.completions),
        }
    )


def _pack(parts: list[bytes]) -> str:
    return pybase64.b64encode_as_string(b"".join(parts))
