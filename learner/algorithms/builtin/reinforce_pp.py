"""REINFORCE++: rewards less a KL penalty by token, normalised over all tokens of the batch."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rollstream.learner.algorithms.advantages import EPSILON
from rollstream.learner.algorithms.base import BatchView, Prepared, Row
from rollstream.learner.algorithms.builtin.grpo import Clipped
from rollstream.learner.algorithms.tokens import Losses, TokenBatch, recorded_log_ratio
from rollstream.schemas.errors import RunFailedError
from rollstream.schemas.policy_gradient import ClippedSettings, ReinforcePpSettings
from rollstream.schemas.settings import CORRECTED_SINCE


class ReinforcePp(Clipped):
    """See `prepare`; the loss is the clipped objective (arXiv 2501.03262, section 3)."""

    Settings = ReinforcePpSettings

    def prepare(self, batch: BatchView, settings: ReinforcePpSettings) -> Prepared:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A_t = r - b sum over i >= t of (log q_i - log p_ref,i), less the mean and divided by the deviation of all
        such values of the agent's trained tokens in the batch; q the policy that sampled, b `kl_coefficient`. If b is
        0, by rollout, as `advantage` says.
        """
        if not settings.kl_coefficient:
            return super().prepare(batch, settings)
        own = "group_mean" if settings.advantage == "reinforce_pp_baseline" else "none"
        prepared = super().prepare(batch, settings.model_copy(update={"advantage": own}))
        values = [
            given - settings.kl_coefficient * _kl_ahead(row, batch.revision)
            for row, given in zip(batch.rows, prepared.advantages, strict=True)
        ]
        counted = [row.mask for row in batch.rows]
        if prepared.keep and batch.revision >= CORRECTED_SINCE:
            counted = [mask & keep for mask, keep in zip(counted, prepared.keep, strict=True)]
        agents = [batch.members[row.member].agent for row in batch.rows]
        for agent in set(agents):
            of_agent = [index for index, one in enumerate(agents) if one == agent]
            tokens = np.concatenate([values[index][counted[index]] for index in of_agent])
            mean, std = (float(tokens.mean()), float(tokens.std())) if len(tokens) else (0.0, 0.0)
            for index in of_agent:
                values[index] = (values[index] - mean) / (std + EPSILON)
        return replace(prepared, advantages=[value.astype(np.float32) for value in values])

    def loss(self, tokens: TokenBatch, settings: ClippedSettings) -> Losses:
        """Without a penalty of its own: the KL divergence is in the advantages."""
        return super().loss(tokens._replace(reference_N=None), settings)


def _kl_ahead(row: Row, revision: int) -> NDArray[np.float64]:
    """(T,): log q - log p of the reference, each bounded, summed over a token and those after it."""
    if "reference" not in row.scores:
        raise RunFailedError(
            "a KL penalty in the rewards needs recorded scores, which jobs have since revision 6; submit a new job"
        )
    recorded = recorded_log_ratio(row.logprobs, row.scores["reference"], revision)
    log_ratio = np.where(row.mask, recorded, 0.0).astype(np.float64)
    return np.cumsum(log_ratio[::-1])[::-1]
