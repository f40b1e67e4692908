"""KTO: desirable rollouts become likelier than under the reference, undesirable ones less likely; no pairs."""

from collections.abc import Mapping

import numpy as np
import torch

from rollstream.learner.algorithms.base import Algorithm, BatchView, Counts, Normaliser, PerToken, Prepared
from rollstream.learner.algorithms.tokens import Losses, TokenBatch, recorded_log_ratio
from rollstream.schemas.algorithms import KtoSettings
from rollstream.schemas.errors import RunFailedError
from rollstream.schemas.revisions import SCORES_SINCE

POINT = "reference_point"


class Kto(Algorithm):
    """See `loss`."""

    Settings = KtoSettings

    def prepare(self, batch: BatchView, settings: KtoSettings) -> Prepared:
        """The sign of a row's advantages says whether its rollout is desirable, their size is its weight."""
        is_desirable = np.array([member.reward >= settings.reward_threshold for member in batch.members])
        weights = np.where(is_desirable, settings.desirable_weight, -settings.undesirable_weight)
        metrics = {"kto/desirable": float(is_desirable.mean()) if len(is_desirable) else 0.0}
        components: dict[str, list[PerToken]] = {}
        if settings.reference_point == "sampled":
            metrics["kto/reference_point"] = point = reference_point(batch)
            components[POINT] = [point for _ in batch.rows]
        return Prepared(
            advantages=[float(weights[row.member]) for row in batch.rows],
            components=components,
            normaliser=Normaliser("sequences"),
            metrics=metrics,
        )

    def loss(self, tokens: TokenBatch, settings: KtoSettings) -> Losses:
        """w (1 - sigmoid(s beta (log p - log p of the reference - z))) by sequence, s 1 if it is desirable, else -1.

        arXiv 2402.01306, equation 8. z is 0 (TRL's `apo_zero_unpaired`), or `reference_point`.
        """
        assert tokens.reference_N is not None
        log_ratio_B = tokens.by_row(tokens.logprobs_N - tokens.reference_N)
        if POINT in tokens.components:
            log_ratio_B = log_ratio_B - tokens.mean_by_row(tokens.components[POINT])
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
        """Means over sequences: kto/reward is the implicit reward above the reference point's, kto/margin the same with
        the sign of the rollout.
        """
        names = {"loss": "loss/total", "reward": "kto/reward", "margin": "kto/margin"}
        found = {name: sums[key] / counts.sequences for key, name in names.items()}
        return {**found, "policy/entropy": sums["entropy"] / counts.tokens}


def reference_point(batch: BatchView) -> float:
    """z: the mean over sequences of log q - log p of the reference, q the policy that sampled; 0 at least. The
    log-ratio of each token is bounded, see `recorded_log_ratio`.

    The samples are the policy's own, so it estimates KL(q || reference) without the mismatched answers that the paper
    has for the answers of others. Raises RunFailedError for a job whose reference is not recorded.
    """
    found: list[float] = []
    for row in batch.rows:
        if "reference" not in row.scores:
            raise RunFailedError(
                "kto with reference_point sampled needs recorded scores, which jobs have since revision "
                f"{SCORES_SINCE}; "
                "submit a new job"
            )
        log_ratio = recorded_log_ratio(row.logprobs, row.scores["reference"], batch.revision)
        found.append(float(log_ratio[row.mask].sum(dtype=np.float64)))
    return max(0.0, sum(found) / len(found)) if found else 0.0
