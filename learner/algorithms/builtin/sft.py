"""Supervised fine-tuning: the negative log-likelihood of completion tokens. Rewards play no part."""

from collections.abc import Mapping

from rollstream.learner.algorithms.base import Algorithm, BatchView, Counts, Prepared
from rollstream.learner.algorithms.tokens import Losses, TokenBatch
from rollstream.schemas.algorithms import SftSettings


class Sft(Algorithm):
    """See `loss`."""

    Settings = SftSettings

    def prepare(self, batch: BatchView, settings: SftSettings) -> Prepared:
        """Completions that ended at the token limit are left out if the settings say so."""
        return Prepared(keep=[~row.truncated for row in batch.rows] if settings.mask_truncated else ())

    def loss(self, tokens: TokenBatch, settings: SftSettings) -> Losses:
        """-log p by token."""
        losses_N = -tokens.logprobs_N
        return Losses(losses_N, {"loss": losses_N.detach().sum(), "entropy": tokens.entropies_N.detach().sum()})

    def metrics(self, sums: Mapping[str, float], counts: Counts) -> dict[str, float]:
        """Means over all completion tokens."""
        return {"loss/total": sums["loss"] / counts.tokens, "policy/entropy": sums["entropy"] / counts.tokens}
