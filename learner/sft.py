"""Supervised fine-tuning: the negative log-likelihood of completion tokens. Rewards play no part."""

from collections.abc import Mapping

from rollstream.learner.token_batch import TokenBatch, TokenLosses
from rollstream.schemas.settings import AlgorithmSettings


def losses(batch: TokenBatch, settings: AlgorithmSettings) -> TokenLosses:
    """-log p by token."""
    losses_N = -batch.logprobs_N
    return TokenLosses(losses_N, {"loss": losses_N.detach().sum(), "entropy": batch.entropies_N.detach().sum()})


def metrics(sums: Mapping[str, float], num_tokens: int) -> dict[str, float]:
    """Means over all completion tokens."""
    return {"loss/total": sums["loss"] / num_tokens, "policy/entropy": sums["entropy"] / num_tokens}
