"""The completion tokens of a micro-batch, flat: what a loss is given and gives back."""

from typing import NamedTuple

from torch import Tensor


class TokenBatch(NamedTuple):
    """N completion tokens."""

    logprobs_N: Tensor
    """Under the current policy; carries the gradient."""
    entropies_N: Tensor
    """Of the current policy where each token was sampled; carries a gradient if it is part of the loss."""
    behaviour_N: Tensor
    """Log-probabilities under the policy that sampled."""
    advantages_N: Tensor
    reference_N: Tensor | None = None
    """Log-probabilities under the job's base version, where the loss compares with it."""


class TokenLosses(NamedTuple):
    """What a loss makes of a TokenBatch."""

    losses_N: Tensor
    sums: dict[str, Tensor]
    """Detached sums over the tokens, added up over micro-batches."""
