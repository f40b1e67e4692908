"""REINFORCE++: rewards less a KL penalty by token, normalised over all tokens of the batch."""

import math
from collections import defaultdict
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rollstream.learner.algorithms.advantages import EPSILON
from rollstream.learner.algorithms.base import BatchView, Prepared, Row
from rollstream.learner.algorithms.builtin.grpo import Clipped
from rollstream.learner.algorithms.tokens import Losses, TokenBatch, recorded_log_ratio
from rollstream.schemas.errors import RunFailedError
from rollstream.schemas.policy_gradient import ClippedSettings, ReinforcePpSettings
from rollstream.schemas.revisions import NORMALISES_TRAINED_SINCE, SCORES_SINCE, SUMS_ROLLOUTS_SINCE


class ReinforcePp(Clipped):
    """See `prepare`; the loss is the clipped objective (arXiv 2501.03262, section 3)."""

    Settings = ReinforcePpSettings

    def prepare(self, batch: BatchView, settings: ReinforcePpSettings) -> Prepared:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A_t = r - b sum over i >= t in the rollout of (log q_i - log p_ref,i), less the mean and divided by the
        deviation of all such values of the agent's trained tokens in the batch; q the policy that sampled, b
        `kl_coefficient`. If b is 0, by rollout, as `advantage` says.
        """
        if not settings.kl_coefficient:
            return super().prepare(batch, settings)
        own = "group_mean" if settings.advantage == "reinforce_pp_baseline" else "none"
        prepared = super().prepare(batch, settings.model_copy(update={"advantage": own}))
        values = [
            given - settings.kl_coefficient * ahead
            for given, ahead in zip(prepared.advantages, _kl_ahead(batch), strict=True)
        ]
        counted = [row.mask for row in batch.rows]
        if prepared.keep and batch.revision >= NORMALISES_TRAINED_SINCE:
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


def _kl_ahead(batch: BatchView) -> list[NDArray[np.float64]]:
    """(T,) a row: log q - log p of the reference, each bounded, summed over a token and those after it in its rollout:
    those after it in its row, and all of later steps in other rows.
    """
    ratios = [_log_ratio(row, batch.revision) for row in batch.rows]
    found = [np.cumsum(ratio[::-1])[::-1] for ratio in ratios]
    if batch.revision < SUMS_ROLLOUTS_SINCE:
        return found
    steps: dict[int, list[tuple[int, int, float]]] = defaultdict(list)
    for index, (row, ratio) in enumerate(zip(batch.rows, ratios, strict=True)):
        for part in row.completions:
            of_step = float(ratio[part.start : part.start + part.length].sum())
            steps[row.member].append((index, part.step_index, of_step))
    for index, row in enumerate(batch.rows):
        others = [(step, value) for other, step, value in steps[row.member] if other != index]
        for part in row.completions:
            later = math.fsum(value for step, value in others if step > part.step_index)
            found[index][part.start : part.start + part.length] += later
    return found


def _log_ratio(row: Row, revision: int) -> NDArray[np.float64]:
    """(T,): log q - log p of the reference, bounded; 0 where nothing was sampled."""
    if "reference" not in row.scores:
        raise RunFailedError(
            f"a KL penalty in the rewards needs recorded scores, which jobs have since revision {SCORES_SINCE}; "
            "submit a new job"
        )
    recorded = recorded_log_ratio(row.logprobs, row.scores["reference"], revision)
    return np.where(row.mask, recorded, 0.0).astype(np.float64)
