"""The prefix tree of a micro-batch: rows that begin alike share the tokens of their beginning. Knows no model.

Rows in lexicographic order: what a row has in common with any row before it, it has in common with its neighbour. So
each row adds one segment, from there to its last input, and the tree of a batch is one row of segments without padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MAX_PADDING = 0.25
"""Share of an attention block's queries x keys that may be padding."""
Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Segments whose attention is computed together: S segments of up to Q tokens on paths of up to K tokens."""

    queries_S_Q: Tensor
    """int64, token of the tree; 0 where there is none."""
    keys_S_K: Tensor
    """int64, of the path from the row's first token; 0 where there is none."""
    starts_S: Tensor | None
    """int64, tokens of its path before each segment; None where all begin at the first token: causal attention then
    needs no mask.
    """


@dataclass(frozen=True, slots=True)
class Segments:
    """The tree's tokens, which are one segment after another, and the path of each: attention without padding."""

    keys_P: Tensor
    """int64, the tokens of all paths, one path after another."""
    query_bounds_S1: Tensor
    """int32, where each segment's tokens begin, and the end of the last one."""
    key_bounds_S1: Tensor
    """int32, the same of its path in `keys_P`. A path ends with its segment."""
    longest_segment: int
    longest_path: int


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """N tokens that stand for all rows."""

    token_ids_N: Tensor
    positions_N: Tensor
    """Position of each token in its rows."""
    sources_M: Tensor
    """The token that predicts each of the M tokens on the mask, row by row."""
    blocks: tuple[AttentionBlock, ...]
    slots_N: Tensor
    """Slot of each token in the queries of all blocks, flattened one after another."""
    segments: Segments


def inputs_of(token_ids: Ids, mask: NDArray[np.bool_]) -> Ids:
    """A row's tokens up to the one that predicts its last token on the mask: what comes after them changes nothing."""
    targets = np.flatnonzero(mask)
    return token_ids[: targets[-1] if len(targets) else 1]


class Order:
    """Rows in lexicographic order, and the lengths of prefixes that neighbours share."""

    def __init__(self, rows: Sequence[Ids]) -> None:
        """`rows`: the inputs of each."""
        keys = [row.astype(">u4").tobytes() for row in rows]
        self._sorted = sorted(range(len(rows)), key=lambda index: (keys[index], index))
        self.ranks = [0] * len(rows)
        for rank, index in enumerate(self._sorted):
            self.ranks[index] = rank
        self._lengths = [len(rows[index]) for index in self._sorted]
        pairs = zip(self._sorted, self._sorted[1:], strict=False)
        self._common = np.asarray([0, *(_common(rows[one], rows[other]) for one, other in pairs)])

    def added(self, before: int | None, rank: int, after: int | None) -> int:
        """Tokens that a row adds to a tree between its neighbours there; all three by rank."""
        one = 0 if before is None else int(self._common[before + 1 : rank + 1].min())
        other = 0 if after is None else int(self._common[rank + 1 : after + 1].min())
        return self._lengths[rank] - max(one, other)


def _common(one: Ids, other: Ids) -> int:
    """Length of the longest common prefix."""
    size = min(len(one), len(other))
    differs = one[:size] != other[:size]
    return int(differs.argmax()) if differs.any() else size


@dataclass(frozen=True, slots=True)
class _Segment:
    start: int
    """Tokens of the row that the tree has already."""
    path: NDArray[np.int64]
    """Tokens of the tree, from the row's first to its last input."""

    @property
    def size(self) -> int:
        return len(self.path) - self.start


def tree_of(rows: Sequence[Ids], masks: Sequence[NDArray[np.bool_]]) -> PrefixTree:
    """The tree of rows (whole) and their masks, none of them empty."""
    inputs = [inputs_of(row, mask) for row, mask in zip(rows, masks, strict=True)]
    keys = [row.astype(">u4").tobytes() for row in inputs]
    paths: list[NDArray[np.int64]] = [np.empty(0, np.int64)] * len(rows)
    segments: list[_Segment] = []
    last_ids, last_path, size = np.empty(0, np.int32), np.empty(0, np.int64), 0
    for index in sorted(range(len(rows)), key=lambda index: (keys[index], index)):
        start = _common(last_ids, inputs[index])
        length = len(inputs[index]) - start
        last_ids, last_path = inputs[index], np.concatenate([last_path[:start], np.arange(size, size + length)])
        paths[index] = last_path
        size += length
        if length:
            segments.append(_Segment(start, last_path))
    token_ids, positions = np.zeros(size, np.int64), np.zeros(size, np.int64)
    for path, row in zip(paths, inputs, strict=True):
        token_ids[path], positions[path] = row, np.arange(len(row))
    sources = [path[np.flatnonzero(mask) - 1] for path, mask in zip(paths, masks, strict=True)]
    blocks, slots = _blocks(segments, size)
    return PrefixTree(
        torch.from_numpy(token_ids),
        torch.from_numpy(positions),
        torch.from_numpy(np.concatenate(sources)),
        blocks,
        torch.from_numpy(slots),
        _segments(segments),
    )


def _segments(segments: Sequence[_Segment]) -> Segments:
    """Segments of a tree in the order in which it has their tokens."""
    sizes, lengths = [one.size for one in segments], [len(one.path) for one in segments]
    return Segments(
        torch.from_numpy(np.concatenate([one.path for one in segments])),
        torch.from_numpy(np.cumsum([0, *sizes], dtype=np.int32)),
        torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)),
        max(sizes),
        max(lengths),
    )


def _blocks(segments: Sequence[_Segment], size: int) -> tuple[tuple[AttentionBlock, ...], NDArray[np.int64]]:
    """Segments of like sizes together, and the index of each of `size` tokens among their queries."""
    order = sorted(segments, key=lambda one: (one.start > 0, -len(one.path), -one.size))
    blocks: list[AttentionBlock] = []
    slots = np.zeros(size, np.int64)
    first = num_queries = 0
    while first < len(order):
        end = _end_of_block(order, first)
        found = order[first:end]
        blocks.append(_block(found))
        width = blocks[-1].queries_S_Q.shape[1]
        for index, one in enumerate(found):
            at = num_queries + index * width
            slots[one.path[one.start :]] = np.arange(at, at + one.size)
        num_queries += len(found) * width
        first = end
    return tuple(blocks), slots


def _end_of_block(order: Sequence[_Segment], first: int) -> int:
    """The first segment after `first` that would fill the block with padding, or is of the other kind."""
    keys, queries = len(order[first].path), order[first].size
    used = 0
    for end in range(first, len(order)):
        one = order[end]
        queries = max(queries, one.size)
        used += one.size * len(one.path)
        is_other = (one.start > 0) != (order[first].start > 0)
        if is_other or used < (1 - MAX_PADDING) * (end - first + 1) * queries * keys:
            return max(end, first + 1)
    return len(order)


def _block(segments: Sequence[_Segment]) -> AttentionBlock:
    shape = len(segments), max(one.size for one in segments), max(len(one.path) for one in segments)
    queries_S_Q, keys_S_K = np.zeros(shape[:2], np.int64), np.zeros((shape[0], shape[2]), np.int64)
    starts_S = np.asarray([one.start for one in segments])
    for index, one in enumerate(segments):
        queries_S_Q[index, : one.size] = one.path[one.start :]
        keys_S_K[index, : len(one.path)] = one.path
    starts = torch.from_numpy(starts_S) if starts_S.any() else None
    return AttentionBlock(torch.from_numpy(queries_S_Q), torch.from_numpy(keys_S_K), starts)
