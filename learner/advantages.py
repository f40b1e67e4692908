"""Advantages of the members of one group from their rewards, one a member or one a step. Plain numbers; no tensors."""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rollstream.schemas.events import TrajectoryAssembled

Estimator = Literal["group_std", "group_mean", "leave_one_out", "batch_std", "batch_mean"]
EPSILON = 1e-6


def group_std(rewards_G: Sequence[float]) -> list[float]:
    """(r - mean) / (std + 1e-6), of the sample (GRPO, arXiv 2402.03300, section 4.1.2); 0 for one member."""
    centred_G = group_mean(rewards_G)
    if len(rewards_G) < 2:
        return centred_G
    std = math.sqrt(math.fsum(value * value for value in centred_G) / (len(rewards_G) - 1))
    return [value / (std + EPSILON) for value in centred_G]


def group_mean(rewards_G: Sequence[float]) -> list[float]:
    """r - mean (Dr. GRPO, arXiv 2503.20783, section 3.2)."""
    if min(rewards_G) == max(rewards_G):
        return [0.0] * len(rewards_G)
    mean = math.fsum(rewards_G) / len(rewards_G)
    return [reward - mean for reward in rewards_G]


def leave_one_out(rewards_G: Sequence[float]) -> list[float]:
    """r - mean of the others (RLOO, arXiv 2402.14740, section 2.2); 0 for one member."""
    others = len(rewards_G) - 1
    if others == 0:
        return [0.0]
    return [value * len(rewards_G) / others for value in group_mean(rewards_G)]


ESTIMATORS: dict[Estimator, Callable[[Sequence[float]], list[float]]] = {
    "group_std": group_std,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "batch_std": group_std,
    "batch_mean": group_mean,
}
BATCH_WIDE = frozenset({"batch_std", "batch_mean"})
"""Estimators for which a whole batch is one group (a global baseline, as in REINFORCE++, arXiv 2501.03262)."""


def by_group(rewards: Sequence[float], groups: Iterable[Hashable], estimator: Estimator) -> list[float]:
    """One advantage a member, in the order given, each compared with the members of its own group."""
    places: dict[Hashable, list[int]] = {}
    for place, group in enumerate(groups):
        places.setdefault(group, []).append(place)
    advantages = [0.0] * len(rewards)
    for members in places.values():
        values = ESTIMATORS[estimator]([rewards[place] for place in members])
        for place, value in zip(members, values, strict=True):
            advantages[place] = value
    return advantages


@dataclass(frozen=True, slots=True)
class SteppedMember:
    """One member's rewards step by step."""

    steps: frozenset[int]
    """Steps that have tokens to train on."""
    step_rewards: Mapping[int, float]
    """Recorded for a step (weighted); it may be one without tokens, as a tool's."""
    total: float
    """All of the member's reward. What no step has is the final reward."""

    def rewards(self) -> dict[int, float]:
        """Reward by step: the recorded ones, and the final reward on top of the last step's (0 if it has no step)."""
        last = max(self.steps | self.step_rewards.keys(), default=0)
        final = self.total - math.fsum(self.step_rewards.values())
        return {**self.step_rewards, last: self.step_rewards.get(last, 0.0) + final}


def stepped(trajectory: TrajectoryAssembled, total: float) -> SteppedMember:
    """A trajectory with its recorded step rewards; `total` is what its manifest says of it."""
    completions = (part for sequence in trajectory.sequences for part in sequence.completions)
    recorded = {int(step): value for step, value in trajectory.step_rewards.items()}
    return SteppedMember(frozenset(part.step_index for part in completions), recorded, total)


def by_step(
    members: Sequence[SteppedMember], groups: Iterable[Hashable], estimator: Estimator
) -> list[dict[int, float]]:
    """Advantage by step with tokens, one mapping a member: process supervision (arXiv 2402.03300, section 4.1.3).

    1. The final reward of a member counts as a reward of its last step. 2. All rewards of all steps of a group are
    normalised together by the estimator; a step that got none has none to normalise. 3. A step's advantage is the sum
    of the normalised rewards of itself and the steps after it. Without step rewards all of a member's steps have the
    advantage that `by_group` gives the member.
    """
    rewards = [sorted(member.rewards().items()) for member in members]
    owners = [(place, step) for place, found in enumerate(rewards) for step, _ in found]
    group_of = list(groups)
    flat = by_group([value for found in rewards for _, value in found], [group_of[p] for p, _ in owners], estimator)
    normalised: list[dict[int, float]] = [{} for _ in members]
    for (place, step), value in zip(owners, flat, strict=True):
        normalised[place][step] = value
    return [
        {step: math.fsum(value for later, value in found.items() if later >= step) for step in member.steps}
        for member, found in zip(members, normalised, strict=True)
    ]
