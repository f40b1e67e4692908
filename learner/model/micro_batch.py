"""Rows of one forward as tensors, made in main memory and moved to a device. Knows no model and no loss.

Indices that a computation on a GPU needs are made here too: there, their number would have to be waited for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollstream.learner.algorithms.base import PerToken, Row
from rollstream.learner.algorithms.tokens import Layout, TokenBatch, layout_of
from rollstream.learner.model.logprobs import KeptSets, kept_sets
from rollstream.learner.model.prefixes import PrefixTree, tree_of

T = TypeVar("T")
Unit = tuple[int, ...]
"""Rows that are trained together, so in one micro-batch: one, or the better and the worse answer of a pair."""
Units = Sequence[Unit]


@dataclass(frozen=True, slots=True)
class TrainRow:
    """A row as an algorithm has prepared it."""

    row: Row
    mask: NDArray[np.bool_]  # (T,), tokens that are trained
    advantage: PerToken = 0.0
    weight: PerToken | None = None
    group: int = 0
    """Rows of one task have the same number."""
    components: Mapping[str, PerToken] = field(default_factory=dict[str, PerToken])

    @property
    def num_tokens(self) -> int:
        """Tokens that are trained."""
        return int(self.mask.sum())


class Targets(NamedTuple):
    """The columns of padded rows that logits are made of, and where the tokens on the mask are predicted there."""

    columns_K: Tensor
    """int64: each predicts a token of the mask in some row."""
    at_N: Tensor
    """int64, in (B * K)."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one forward, padded on the right. A column that is not needed is None."""

    token_ids: Tensor  # (B, T) int64
    mask: Tensor  # (B, T) bool
    logprobs: Tensor  # (B, T) float32
    advantages: Tensor  # (B, T) float32
    weights: Tensor | None = None  # (B, T) float32
    versions: Tensor | None = None  # (B, T) int64
    lengths: tuple[int, ...] = ()
    """Tokens of each row that are trained."""
    groups: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    """Index of each row in the batch."""
    chosen: tuple[int, ...] = ()
    """Row of each pair's better answer."""
    rejected: tuple[int, ...] = ()
    num_tokens: int = 0
    """Unpadded, prompts included."""
    kept: KeptSets | None = None
    """Kept ids of the tokens on the mask, row by row, if the sampling of some was truncated."""
    tree: PrefixTree | None = None
    """Computed in place of `token_ids`: what rows have in common at their beginning is there once."""
    scores: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])  # (B, T) float32
    """Recorded log-probabilities by role, see `Row.scores`."""
    components: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])  # (B, T) float32
    """Weights by component of the loss."""
    is_filler: bool = False
    """Computed for other processes' sake, and of no weight: see `Ranks.divide`."""
    at_N: Tensor | None = None
    """int64, the tokens on the mask by their position in (B * T): known before the mask is on a GPU, which would have
    to be waited for.
    """
    layout: Layout = field(default_factory=lambda: layout_of(()))
    """Layout of the tokens on the mask."""
    columns: Targets | None = None
    """Target columns of rows that are not in a tree, see `targets`."""

    def on_mask(self, values_B_T: Tensor) -> Tensor:
        """Values (N,) of the tokens on the mask, row by row."""
        return values_B_T[self.mask] if self.at_N is None else values_B_T.flatten()[self.at_N]

    @property
    def targets(self) -> Targets:
        """Positions of the targets, if logits are computed for all tokens."""
        return targets_of(self.mask.numpy(force=True)) if self.columns is None else self.columns

    @property
    def num_computed(self) -> int:
        """Tokens that the model computes, padding included."""
        return self.token_ids.numel() if self.tree is None else len(self.tree.token_ids_N)

    def as_tokens(self, logprobs_N: Tensor, entropies_N: Tensor, scores: Mapping[str, Tensor]) -> TokenBatch:
        """Input of a loss; `scores` (N,) by role."""
        return TokenBatch(
            logprobs_N,
            entropies_N,
            self.on_mask(self.logprobs),
            self.on_mask(self.advantages),
            scores.get("reference"),
            teacher_N=scores.get("teacher"),
            components={name: self.on_mask(weights) for name, weights in self.components.items()},
            weights_N=None if self.weights is None else self.on_mask(self.weights),
            versions_N=None if self.versions is None else self.on_mask(self.versions),
            rows_N=self.layout.rows_N,
            lengths_B=self.lengths,
            groups_B=self.groups,
            chosen_K=self.chosen,
            rejected_K=self.rejected,
            layout=self.layout,
        )

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on a device."""
        return moved(self, device)


def moved(value: T, device: torch.device) -> T:
    """The same with all its tensors on a device. A copy to a GPU is from pinned memory, and is not waited for."""
    found: Any = value
    if isinstance(found, Tensor):
        if device.type == "cuda" and found.device.type == "cpu":
            return found.pin_memory().to(device, non_blocking=True)  # pyright: ignore[reportReturnType]
        return found.to(device)  # pyright: ignore[reportReturnType]
    if is_dataclass(found):
        return replace(found, **{one.name: moved(getattr(found, one.name), device) for one in fields(found)})  # pyright: ignore[reportArgumentType, reportReturnType]
    if isinstance(found, Mapping):
        return {name: moved(one, device) for name, one in found.items()}  # pyright: ignore
    if isinstance(found, tuple) and not all(isinstance(one, int) for one in found):
        parts = [moved(one, device) for one in found]
        return type(found)(*parts) if hasattr(found, "_fields") else tuple(parts)  # pyright: ignore
    return value


def pad(rows: Sequence[TrainRow], units: Units, *, versions: bool = False, shares: bool = False) -> MicroBatch:
    """The rows of units as tensors (B, T), T the longest; padded with token 0, which no mask holds.

    `shares`: with their prefix tree.
    """
    index_of: dict[int, int] = {}
    columns = [tuple(index_of.setdefault(unit[side], len(index_of)) for unit in units) for side in range(len(units[0]))]
    found = [rows[index] for index in index_of]
    shape = len(found), max(len(one.row.token_ids) for one in found)
    token_ids_B_T, mask_B_T = np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
    logprobs_B_T, advantages_B_T = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    weights_B_T = np.zeros(shape, np.float32) if any(one.weight is not None for one in found) else None
    versions_B_T = np.full(shape, -1, np.int64) if versions else None
    for position, one in enumerate(found):
        length = len(one.row.token_ids)
        token_ids_B_T[position, :length] = one.row.token_ids
        mask_B_T[position, :length] = one.mask
        logprobs_B_T[position, :length] = one.row.logprobs
        advantages_B_T[position, :length] = one.advantage
        if weights_B_T is not None:
            weights_B_T[position, :length] = 1.0 if one.weight is None else one.weight
        if versions_B_T is not None:
            versions_B_T[position, :length] = one.row.versions
    lengths = tuple(one.num_tokens for one in found)
    chosen, rejected = columns if len(columns) == 2 else ((), ())
    components = _columns([one.components for one in found], [len(one.row.token_ids) for one in found])
    arrays = (token_ids_B_T, mask_B_T, logprobs_B_T, advantages_B_T, weights_B_T, versions_B_T)
    return MicroBatch(
        *(None if array is None else torch.from_numpy(array) for array in arrays),  # pyright: ignore[reportArgumentType]
        lengths=lengths,
        groups=tuple(one.group for one in found),
        rows=tuple(index_of),
        chosen=chosen,
        rejected=rejected,
        num_tokens=sum(len(one.row.token_ids) for one in found),
        kept=_kept_of(found, token_ids_B_T[mask_B_T]),
        tree=tree_of([one.row.token_ids for one in found], [one.mask for one in found]) if shares else None,
        at_N=torch.from_numpy(np.flatnonzero(mask_B_T)),
        scores=_tensors(_columns([one.row.scores for one in found], [len(one.row.token_ids) for one in found])),
        components=_tensors(components),
        layout=layout_of(lengths, chosen, rejected, _counted(components, mask_B_T)),
        columns=None if shares else targets_of(mask_B_T),
    )


def _columns(rows: Sequence[Mapping[str, PerToken]], lengths: Sequence[int]) -> dict[str, NDArray[np.float32]]:
    """(B, T) by name from values of the rows, which have the same names."""
    columns = {name: np.zeros((len(rows), max(lengths)), np.float32) for name in rows[0]}
    for name, values_B_T in columns.items():
        for position, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            values_B_T[position, :length] = row[name]
    return columns


def _tensors(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(values) for name, values in arrays.items()}


def _counted(components: Mapping[str, NDArray[np.float32]], mask_B_T: NDArray[np.bool_]) -> dict[str, Tensor]:
    """`Layout.counted`."""
    return _tensors({name: np.flatnonzero(weights_B_T[mask_B_T]) for name, weights_B_T in components.items()})


def targets_of(mask_B_T: NDArray[np.bool_]) -> Targets:
    """Targets of a mask, in main memory."""
    is_target_B_T = mask_B_T[:, 1:]
    columns_K = np.flatnonzero(is_target_B_T.any(axis=0))
    return Targets(torch.from_numpy(columns_K), torch.from_numpy(np.flatnonzero(is_target_B_T[:, columns_K])))


def _kept_of(rows: Sequence[TrainRow], targets_N: NDArray[np.int64]) -> KeptSets | None:
    if all(one.row.kept is None for one in rows):
        return None
    lengths = [
        np.zeros(one.num_tokens, np.int64) if one.row.kept is None else one.row.kept.lengths[one.mask] for one in rows
    ]
    ids = [kept.ids[np.repeat(one.mask, kept.lengths)] for one in rows if (kept := one.row.kept) is not None]
    return kept_sets(np.concatenate(ids).astype(np.int64), np.concatenate(lengths), targets_N)
