"""The tokens of a micro-batch that are trained on, flat: what a loss is given and gives back."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""A log-ratio counts for no more: some engines write -9999 for a token that they held for hardly possible, and the
exponential of such a ratio is not finite.
"""


class TokenBatch(NamedTuple):
    """N tokens of B rows, row by row. A column that the settings do not need is None."""

    logprobs_N: Tensor
    """Under the current policy; carries the gradient."""
    entropies_N: Tensor
    """Of the current policy where each token was sampled; carries a gradient if the settings need it."""
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
    """Weight version that sampled each token, -1 where none is known."""
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

    def by_row(self, values_N: Tensor) -> Tensor:
        """Sums (B,) of the rows' values."""
        return torch.stack([part.sum() for part in torch.split(values_N, list(self.lengths_B))])

    def mean_by_row(self, values_N: Tensor) -> Tensor:
        """Means (B,) over the rows' tokens."""
        sums_B = self.by_row(values_N)
        return sums_B / torch.tensor(self.lengths_B, dtype=sums_B.dtype, device=sums_B.device)

    def to_tokens(self, values_B: Tensor) -> Tensor:
        """(N,): every token gets the value of its row."""
        return values_B[self.rows_N]


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


def with_entropy_bonus(losses: Tensor, entropies: Tensor, coefficient: float) -> Tensor:
    """losses - coefficient * entropies, both (N,) or (B,); the losses themselves if the coefficient is 0."""
    return losses - coefficient * entropies if coefficient else losses
