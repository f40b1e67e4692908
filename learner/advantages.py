"""Advantages of the members of one group from their rewards. Plain numbers; no tensors."""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Literal

Estimator = Literal["group_std", "group_mean", "leave_one_out"]
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
}


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
