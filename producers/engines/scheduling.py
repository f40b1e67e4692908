"""Selection of the waiting requests that join the next forward, and of the keys and values that are kept. Knows neither
model nor torch.

Kept sequences are found by the hashes of their leading blocks of tokens, as in vLLM's prefix cache (Kwon et al. 2023,
PagedAttention, section 4.3); a hit is compared token by token, so equal hashes of unequal tokens do no harm.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

Ids = np.ndarray[tuple[int, ...], np.dtype[np.int32]]

MAX_PADDED_TOKENS = 131_072
COLUMN_STEP = 64
BLOCK = 4
"""Tokens of a block: what two sequences have in common below it is not looked for. Few, so that conversations of one
or two words a turn are continued, too.
"""


class WaitingPrompt(NamedTuple):
    """A waiting request."""

    model_group: str
    num_tokens: int
    """Number of tokens of its prompt."""
    waited: int
    """Forwards that went by since it could have joined."""
    max_length: int = 0
    """Tokens of its prompt and of the longest answer."""


class PoolCapacity(NamedTuple):
    """Room for keys and values of a model group's rows: each row takes as much as the longest one may become."""

    num_rows: int = 0
    max_length: int = 0
    """Tokens of the longest live row at its end."""
    max_tokens: float = math.inf
    """Tokens, over all rows, for which there is memory."""

    def holds(self, num_joining: int, max_length: int) -> bool:
        """Whether further rows of at most so many tokens fit beside the live ones."""
        return (self.num_rows + num_joining) * padded_length(max(self.max_length, max_length)) <= self.max_tokens


def padded_length(length: int) -> int:
    """Columns of a pool for rows of this length."""
    return -(-length // COLUMN_STEP) * COLUMN_STEP


@dataclass(frozen=True, slots=True)
class JoinLimits:
    """Bounds of a forward, and how long to wait for company: few rows are prefilled at about the cost of many."""

    max_rows: int
    max_padded_tokens: int = MAX_PADDED_TOKENS
    """Prompt tokens of one prefill, padding included: bounds its memory."""
    share: float = 0.125
    """Join at once if they are this share of the live rows."""
    max_wait: int = 4
    """Forwards after which a request joins without company."""


def joining(
    waiting: Sequence[WaitingPrompt],
    *,
    num_live: int,
    limits: JoinLimits,
    held: Collection[str] = (),
    capacity_of: Callable[[str], PoolCapacity] = lambda _: PoolCapacity(),
) -> list[int]:
    """Indices into `waiting` (in order of arrival) of those that join now: all of one model group.

    The group is that of the longest-waiting request whose group is not in `held`; nobody overtakes within a group.
    `capacity_of`: room for a model group. One for which there is never room joins once nothing else is live.
    """
    first = next((index for index, one in enumerate(waiting) if one.model_group not in held), None)
    seats = limits.max_rows - num_live
    if first is None or seats <= 0:
        return []
    group = [index for index, one in enumerate(waiting) if one.model_group == waiting[first].model_group]
    company = min(seats, math.ceil(limits.share * num_live))
    if len(group) < company and waiting[first].waited < limits.max_wait:
        return []
    taken: list[int] = []
    width = longest = 0
    capacity = capacity_of(waiting[first].model_group)
    for index in group[:seats]:
        width = max(width, waiting[index].num_tokens)
        longest = max(longest, waiting[index].max_length)
        if taken and width * (len(taken) + 1) > limits.max_padded_tokens:
            break
        if (taken or num_live) and not capacity.holds(len(taken) + 1, longest):
            break
        taken.append(index)
    return taken


def holes_filled(is_live: Sequence[bool]) -> list[tuple[int, int]]:
    """Moves (from, to) after which the live rows are the first ones: as few as possible."""
    num_live = sum(is_live)
    holes = [index for index in range(num_live) if not is_live[index]]
    movers = [index for index in range(num_live, len(is_live)) if is_live[index]]
    return list(zip(movers, holes, strict=True))


@dataclass(eq=False, slots=True)
class Block:
    """Memory that entries share; it is free once none of them is kept."""

    data: Any
    size_bytes: int
    num_entries: int = 0


@dataclass(eq=False, slots=True)
class KeptSequence:
    """A sequence whose keys and values can be taken over."""

    ids: Ids
    """(T,) tokens whose keys and values there are."""
    where: Any
    """A row that is live, or an index into `block`."""
    block: Block | None = None
    """Block of its keys and values; None: it is live, and takes no memory of its own."""
    prompt_length: int = 0
    after_prompt: Any = None
    """The model's output after the first `prompt_length` tokens; None: not known."""
    keys: list[int] = field(default_factory=list)


class PrefixMatch(NamedTuple):
    """The common beginning of a kept sequence and a prompt."""

    kept: KeptSequence
    length: int
    """Number of tokens whose keys and values can be taken over."""
    is_whole: bool
    """Whether the whole prompt is known, with the model's output after it."""

    @property
    def is_continued(self) -> bool:
        """Whether the prompt goes on from the end of the kept sequence, and not only begins as it does."""
        return not self.is_whole and self.length == len(self.kept.ids)


class PrefixCache:
    """Kept sequences of one weight version; those used longest ago go first once they take more than `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.size_bytes = 0
        self._kept: OrderedDict[int, KeptSequence] = OrderedDict()
        """Kept sequences by `id`, the most recently used last."""
        self._by_key: dict[int, KeptSequence] = {}
        """The most recently added sequence by the hash of its leading blocks."""
        self._by_prompt: dict[int, KeptSequence] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, ids: Ids) -> PrefixMatch | None:
        """The longest known beginning of a prompt (at least one block, less than all of it), or all of it."""
        whole = self._by_prompt.get(_whole(ids))
        if whole is not None and whole.prompt_length == len(ids) and np.array_equal(whole.ids[: len(ids)], ids):
            self._touch(whole)
            return PrefixMatch(whole, len(ids), True)
        for key in reversed(list(_block_keys(ids))):
            kept = self._by_key.get(key)
            length = 0 if kept is None else min(_common(kept.ids, ids), len(ids) - 1)
            if kept is not None and length >= BLOCK:
                self._touch(kept)
                return PrefixMatch(kept, length, False)
        return None

    def add(self, kept: KeptSequence) -> None:
        """Keep a sequence; others may have to go for it, and itself if it takes too much."""
        kept.keys = list(_block_keys(kept.ids))
        self._kept[id(kept)] = kept
        for key in kept.keys:
            self._by_key[key] = kept
        if kept.after_prompt is not None:
            self._by_prompt[_whole(kept.ids[: kept.prompt_length])] = kept
        if kept.block is not None:
            kept.block.num_entries += 1
            self.size_bytes += kept.block.size_bytes if kept.block.num_entries == 1 else 0
        self._shrink()

    def remove(self, kept: KeptSequence) -> None:
        """Forget a sequence, if it is kept."""
        if self._kept.pop(id(kept), None) is None:
            return
        for key in kept.keys:
            if self._by_key.get(key) is kept:
                del self._by_key[key]
        if kept.after_prompt is not None:
            whole = _whole(kept.ids[: kept.prompt_length])
            if self._by_prompt.get(whole) is kept:
                del self._by_prompt[whole]
        if kept.block is not None:
            kept.block.num_entries -= 1
            self.size_bytes -= kept.block.size_bytes if not kept.block.num_entries else 0

    def clear(self) -> None:
        """Forget all."""
        for kept in list(self._kept.values()):
            self.remove(kept)

    def _touch(self, kept: KeptSequence) -> None:
        self._kept.move_to_end(id(kept))

    def _shrink(self) -> None:
        while self.size_bytes > self.max_bytes:
            self.remove(next(kept for kept in self._kept.values() if kept.block is not None))


def _block_keys(ids: Ids) -> Iterator[int]:
    key = 0
    whole = ids[: len(ids) // BLOCK * BLOCK].tobytes()
    step = BLOCK * ids.itemsize
    for begin in range(0, len(whole), step):
        key = hash((key, whole[begin : begin + step]))
        yield key


def _whole(ids: Ids) -> int:
    return hash(ids.tobytes())


def _common(one: Ids, other: Ids) -> int:
    """Leading tokens that are equal."""
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length
