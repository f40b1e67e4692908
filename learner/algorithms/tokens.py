"""The tokens of a micro-batch that are trained on, flat: what a loss is given and gives back."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollstream.schemas.policy_gradient import KlPenaltySettings
from rollstream.schemas.revisions import (
    BOUNDS_KL_RATIOS_SINCE,
    BOUNDS_RECORDED_SINCE,
    BOUNDS_TARGETS_SINCE,
    NEWEST_REVISION,
)

MAX_LOG_RATIO = 20.0
"""A log-ratio counts for no more: some engines write -9999 for a token that they held for hardly possible, and the
exponential of such a ratio is not finite.
"""
MAX_KL_RATIO = 20.0
"""Bound of the ratio that weighs an estimate of KL, as `ratio_max` of dppo and opd is by default."""
KL_REFERENCE = "kl_reference"
"""Name of the sum of a batch's KL penalties."""


class Layout(NamedTuple):
    """The rows and pairs that a micro-batch's tokens form: indices (int64) on its device.

    They are made in main memory before a GPU has the micro-batch, because computing them there would make the host wait
    for the GPU.
    """

    rows_N: Tensor
    """Row of each token, 0 to B - 1."""
    lengths_B: Tensor
    """Tokens of each row."""
    chosen_K: Tensor
    """Row of each pair's better answer."""
    rejected_K: Tensor
    counted: Mapping[str, Tensor] = {}
    """(K,) by component: the tokens on which it counts."""


def layout_of(
    lengths: Sequence[int],
    chosen: Sequence[int] = (),
    rejected: Sequence[int] = (),
    counted: Mapping[str, Tensor] = {},
) -> Layout:
    """Make a layout in main memory."""
    rows = [row for row, length in enumerate(lengths) for _ in range(length)]
    rows_N, lengths_B, chosen_K, rejected_K = (
        torch.from_numpy(np.asarray(one, np.int64))  # pyright: ignore[reportUnknownMemberType]
        for one in (rows, lengths, chosen, rejected)
    )
    return Layout(rows_N, lengths_B, chosen_K, rejected_K, counted)


class TokenBatch(NamedTuple):
    """N tokens of B rows, row by row. A column that the settings do not need is None."""

    logprobs_N: Tensor
    """Under the current policy; carries the gradient."""
    entropies_N: Tensor
    """Entropy of the current policy at each token; carries a gradient if the settings need it."""
    behaviour_N: Tensor
    """Log-probabilities under the policy that sampled."""
    advantages_N: Tensor
    """0 where `prepare` gave none."""
    reference_N: Tensor | None = None
    """Log-probabilities under the job's base version."""
    proximal_N: Tensor | None = None
    """Log-probabilities under the policy before the batch's first optimizer step."""
    teacher_N: Tensor | None = None
    """Log-probabilities under the teacher."""
    weights_N: Tensor | None = None
    """Factors of token losses, which are applied when losses are summed up."""
    versions_N: Tensor | None = None
    """Weight version that sampled each token; -1 where none is known, -2 where it is one of another model group."""
    rows_N: Tensor | None = None
    """Row of each token, 0 to B - 1."""
    lengths_B: tuple[int, ...] = ()
    """Tokens of each row, at least 1."""
    groups_B: tuple[int, ...] = ()
    """Rows of one task have the same number."""
    chosen_K: tuple[int, ...] = ()
    """Row of each pair's better answer."""
    rejected_K: tuple[int, ...] = ()
    components: Mapping[str, Tensor] = {}
    """(N,) by component: what `Prepared.components` says of each token."""
    revision: int = NEWEST_REVISION
    """Revision of the job, see `JobSettings.revision`."""
    layout: Layout | None = None
    """The same rows, pairs and components as indices; see `located`."""

    def located(self) -> Layout:
        """Rows, pairs and components as indices on the tokens' device, which is not waited for if `layout` is given."""
        if self.layout is not None:
            return self.layout
        counted = {name: weights_N.nonzero().flatten() for name, weights_N in self.components.items()}
        made, device = layout_of(self.lengths_B, self.chosen_K, self.rejected_K), self.logprobs_N.device
        rows_N, lengths_B, chosen_K, rejected_K = (one.to(device) for one in made[:4])
        return Layout(rows_N, lengths_B, chosen_K, rejected_K, counted)

    def sizes(self, like: Tensor) -> Tensor:
        """Tokens of each row (B,), in the type of `like`."""
        return self.located().lengths_B.to(like.dtype)

    def by_row(self, values_N: Tensor) -> Tensor:
        """Sums (B,) of the rows' values."""
        return torch.stack([part.sum() for part in torch.split(values_N, list(self.lengths_B))])

    def mean_by_row(self, values_N: Tensor) -> Tensor:
        """Means (B,) over the rows' tokens."""
        sums_B = self.by_row(values_N)
        return sums_B / self.sizes(sums_B)

    def to_tokens(self, values_B: Tensor) -> Tensor:
        """(N,): every token gets the value of its row."""
        return values_B[self.rows_N]

    def log_ratio_to(self, target_N: Tensor) -> Tensor:
        """log q - log p (N,) without a gradient, q the target and p the current policy, at most MAX_LOG_RATIO and at
        least -MAX_LOG_RATIO; jobs before BOUNDS_TARGETS_SINCE have no lower bound.
        """
        found_N = log_ratio(target_N, self.logprobs_N.detach())
        return found_N if self.revision < BOUNDS_TARGETS_SINCE else found_N.clamp(min=-MAX_LOG_RATIO)


class Losses(NamedTuple):
    """The result of a loss for a TokenBatch."""

    values: Tensor
    """(N,), (B,) or (K,), as `per` says."""
    sums: dict[str, Tensor]
    """Detached sums, added up over micro-batches."""
    per: Literal["token", "row", "pair"] = "token"
    parts: Mapping[str, Tensor] = {}
    """(N,) by component, if there are several: losses of tokens before `components` weigh them. They are trained in
    place of `values`.
    """


def log_ratio(logprobs_N: Tensor, others_N: Tensor) -> Tensor:
    """logprobs - others, but at most MAX_LOG_RATIO; no gradient above that."""
    return (logprobs_N - others_N).clamp(max=MAX_LOG_RATIO)


def recorded_log_ratio(
    logprobs_T: NDArray[np.float32], others_T: NDArray[np.float32], revision: int
) -> NDArray[np.float32]:
    """logprobs - others of recorded values, at most MAX_LOG_RATIO and at least -MAX_LOG_RATIO; without bounds in jobs
    before BOUNDS_RECORDED_SINCE.
    """
    found_T = logprobs_T - others_T
    return found_T if revision < BOUNDS_RECORDED_SINCE else found_T.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def dual_clipped(objective: Tensor, advantages: Tensor, bound: float | None) -> Tensor:
    """The objective of tokens or rows, but at least bound * A where A < 0 (dual-clip PPO, arXiv 1912.09729, equation
    5); as it is without a bound.
    """
    if bound is None:
        return objective
    return torch.where(advantages < 0, torch.maximum(objective, bound * advantages), objective)


def regularised(
    losses: Tensor,
    ratio: Tensor,
    tokens: TokenBatch,
    settings: KlPenaltySettings,
    *,
    kl_ratio_N: Tensor | None = None,
    by_row: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """losses - c H + b KL(current || base version) with `entropy_coefficient` c and `kl_coefficient` b, and the sums of
    these, of H, of `ratio` and of KL, if that counts: (N,), or `by_row` (B,) with the means over the rows' tokens.

    `kl_ratio_N`: the ratio that weighs the estimate of KL with `unbiased_kl`; computed here if it is not given.
    """
    entropies = tokens.mean_by_row(tokens.entropies_N) if by_row else tokens.entropies_N
    losses = with_entropy_bonus(losses, entropies, settings.entropy_coefficient)
    sums = dict[str, Tensor]()
    if settings.kl_coefficient and tokens.reference_N is not None:
        found_N = _kl(tokens, tokens.reference_N, settings, kl_ratio_N)
        found = tokens.mean_by_row(found_N) if by_row else found_N
        losses = losses + settings.kl_coefficient * found
        sums[KL_REFERENCE] = found.detach().sum()
    summed = {"loss": losses, "entropy": entropies, "ratio": ratio}
    return losses, sums | {name: values.detach().sum() for name, values in summed.items()}


def means(sums: Mapping[str, float], count: int, names: Mapping[str, str]) -> dict[str, float]:
    """Metrics of a loss that `regularised` completes: means of its sums, and of those in `names`, which gives them the
    names of metrics; without the sums that the loss does not have.
    """
    common = {"loss": "loss/total", "entropy": "policy/entropy", "ratio": "policy/ratio"}
    every = {**common, **names, KL_REFERENCE: "policy/kl_reference"}
    return {name: sums[key] / count for key, name in every.items() if key in sums}


def _kl(tokens: TokenBatch, reference_N: Tensor, settings: KlPenaltySettings, ratio_N: Tensor | None) -> Tensor:
    """The estimate (N,) of KL(current || base version): k3 = r - 1 - log r with the ratio of the base version's
    probability to the policy's (Schulman, "Approximating KL Divergence"; DeepSeekMath, arXiv 2402.03300, equation 4).

    With `unbiased_kl` it is weighted by `ratio_N`, that of the policy to the one that sampled: estimate and gradient
    are then unbiased although that one sampled the tokens (DeepSeek-V3.2, arXiv 2512.02556, section 3.1). The ratio
    counts as MAX_KL_RATIO at most, and has no gradient above that: a token that was recorded as impossible would else
    outweigh a batch. Jobs before BOUNDS_KL_RATIOS_SINCE have no such bound.
    """
    log_odds_N = log_ratio(reference_N, tokens.logprobs_N)
    found_N = log_odds_N.exp() - 1 - log_odds_N
    if not settings.unbiased_kl:
        return found_N
    if ratio_N is None:
        ratio_N = log_ratio(tokens.logprobs_N, tokens.behaviour_N).exp()
    if tokens.revision >= BOUNDS_KL_RATIOS_SINCE:
        ratio_N = ratio_N.clamp(max=MAX_KL_RATIO)
    return ratio_N * found_N


def with_entropy_bonus(losses: Tensor, entropies: Tensor, coefficient: float) -> Tensor:
    """losses - coefficient * entropies, both (N,) or (B,); the losses themselves if the coefficient is 0."""
    return losses - coefficient * entropies if coefficient else losses
