"""KTO: desirable rollouts become likelier than under the reference, undesirable ones less likely; no pairs."""

from collections.abc import Mapping

import numpy as np
import torch

from rollstream.learner.algorithms.base import Algorithm, BatchView, Counts, Normaliser, Prepared
from rollstream.learner.algorithms.tokens import Losses, TokenBatch
from rollstream.schemas.algorithms import KtoSettings


class Kto(Algorithm):
    """See `loss`."""

    Settings = KtoSettings

    def prepare(self, batch: BatchView, settings: KtoSettings) -> Prepared:
        """The sign of a row's advantages says whether its rollout is desirable, their size is its weight."""
        is_desirable = np.array([member.reward >= settings.reward_threshold for member in batch.members])
        weights = np.where(is_desirable, settings.desirable_weight, -settings.undesirable_weight)
        share = float(is_desirable.mean()) if len(is_desirable) else 0.0
        return Prepared(
            advantages=[float(weights[row.member]) for row in batch.rows],
            normaliser=Normaliser("sequences"),
            metrics={"kto/desirable": share},
        )

    def loss(self, tokens: TokenBatch, settings: KtoSettings) -> Losses:
        """w (1 - sigmoid(s beta (log p - log p of the reference))) by sequence, s 1 if it is desirable, else -1.

        arXiv 2402.01306, equation 8, with the reference point 0 in place of an estimate of the KL divergence, which
        would take a forward of mismatched answers (TRL's `apo_zero_unpaired`).
        """
        assert tokens.reference_N is not None
        log_ratio_B = tokens.by_row(tokens.logprobs_N - tokens.reference_N)
        weights_B = tokens.mean_by_row(tokens.advantages_N)
        losses_B = weights_B.abs() * torch.sigmoid(-weights_B.sign() * settings.beta * log_ratio_B)
        with torch.no_grad():
            sums = {
                "loss": losses_B.sum(),
                "entropy": tokens.entropies_N.sum(),
                "reward": (settings.beta * log_ratio_B).sum(),
                "margin": (weights_B.sign() * settings.beta * log_ratio_B).sum(),
            }
        return Losses(losses_B, sums, per="row")

    def metrics(self, sums: Mapping[str, float], counts: Counts) -> dict[str, float]:
        """Means over sequences: kto/reward is the implicit reward, kto/margin the same with the sign of the rollout."""
        names = {"loss": "loss/total", "reward": "kto/reward", "margin": "kto/margin"}
        found = {name: sums[key] / counts.sequences for key, name in names.items()}
        return {**found, "policy/entropy": sums["entropy"] / counts.tokens}
