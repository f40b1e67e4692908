"""Expert iteration: supervised fine-tuning on the rollouts of the policy itself that were good enough."""

import math
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from rollstream.learner.algorithms.base import BatchView, Prepared, Row
from rollstream.learner.algorithms.builtin.sft import Sft
from rollstream.schemas.algorithms import ExpertIterationSettings
from rollstream.schemas.revisions import COUNTS_WEIGHT_0_SINCE


class ExpertIteration(Sft):
    """Rollouts are selected by the reward of the agent that trains on them (STaR, arXiv 2203.14465)."""

    Settings = ExpertIterationSettings

    def prepare(self, batch: BatchView, settings: ExpertIterationSettings) -> Prepared:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Kept tokens and weights. A rollout with a relabelled answer is kept whatever its reward.

        A relabelled answer has no version, as the policy did not sample it; the answer in whose place it was recorded
        is left out. Weights of `weighted` have a mean of 1 over the rollouts of an agent, and a rollout of weight 0
        counts in it, as one of a small weight does.
        """
        relabelled = _relabelled(batch.rows)
        factors = _factors(batch, relabelled.keys(), settings)
        keeps_all = settings.selection == "weighted" and batch.revision >= COUNTS_WEIGHT_0_SINCE
        keep: list[NDArray[np.bool_]] = []
        for row in batch.rows:
            kept = np.full(len(row.token_ids), keeps_all or factors[row.member] > 0)
            if settings.mask_truncated:
                kept &= ~row.truncated
            for part in row.completions:
                if part.spans and row.token_ids[: part.start].tobytes() in relabelled.get(row.member, ()):
                    kept[part.start : part.start + part.length] = False
            keep.append(kept)
        trained = sum(1 for factor in factors if factor)
        metrics = {
            "expert_iteration/selected": (trained - len(relabelled)) / max(1, len(factors) - len(relabelled)),
            "expert_iteration/relabelled": len(relabelled) / max(1, len(factors)),
        }
        weights = [factors[row.member] for row in batch.rows] if settings.selection == "weighted" else ()
        return Prepared(keep=keep, weights=weights, metrics=metrics)


def weights_of(rewards: Sequence[float], settings: ExpertIterationSettings) -> list[float]:
    """One factor a rollout, with a mean of 1: (w + epsilon / n) n / (1 + epsilon), w its share of all reward above the
    minimum. Equal if there is none. It is the expected number of times that sampling by weight would take it.
    """
    low = min(rewards, default=0.0) if settings.weighting_minimum is None else settings.weighting_minimum
    above = [max(0.0, reward - low) for reward in rewards]
    total, num = math.fsum(above), len(rewards)
    if not total:
        return [1.0] * num
    epsilon = settings.weighting_epsilon
    return [(value / total * num + epsilon) / (1 + epsilon) for value in above]


def _factors(batch: BatchView, relabelled: Collection[int], settings: ExpertIterationSettings) -> list[float]:
    """Weights of the batch's members: 0 if a member is not trained on."""
    factors = [1.0] * len(batch.members)
    by_agent: dict[str, list[int]] = {}
    for index, member in enumerate(batch.members):
        if index not in relabelled:
            by_agent.setdefault(member.agent, []).append(index)
    for indices in by_agent.values():
        rewards = [batch.members[index].reward for index in indices]
        if settings.selection == "weighted":
            values = weights_of(rewards, settings)
        else:
            values = [1.0 if reward >= settings.reward_threshold else 0.0 for reward in rewards]
        for index, value in zip(indices, values, strict=True):
            factors[index] = value
    return factors


def _relabelled(rows: Sequence[Row]) -> dict[int, set[bytes]]:
    """Prompts of relabelled answers, by member that has one: others of its answers were sampled."""
    prompts: dict[int, set[bytes]] = {}
    sampled: set[int] = set()
    for row in rows:
        for part in row.completions:
            if part.spans:
                sampled.add(row.member)
            else:
                prompts.setdefault(row.member, set()).add(row.token_ids[: part.start].tobytes())
    return {member: found for member, found in prompts.items() if member in sampled}
