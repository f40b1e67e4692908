"""Advantages of the members of one group from their rewards, one a member or one a step. Plain numbers; no tensors."""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rollstream.learner.algorithms.base import Algorithm, BatchView, Member, PerToken, Prepared
from rollstream.schemas.algorithm_settings import BATCH_WIDE, Advantage, PolicyGradientSettings

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


ESTIMATORS: dict[Advantage, Callable[[Sequence[float]], list[float]]] = {
    "group_std": group_std,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "batch_std": group_std,
    "batch_mean": group_mean,
    "per_agent": group_std,
    "hierarchical": group_std,
}


def by_group(rewards: Sequence[float], groups: Iterable[Hashable], estimator: Advantage) -> list[float]:
    """One advantage a member, in the order given, each compared with the members of its own group."""
    indices_of: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        indices_of.setdefault(group, []).append(index)
    advantages = [0.0] * len(rewards)
    for members in indices_of.values():
        values = ESTIMATORS[estimator]([rewards[index] for index in members])
        for index, value in zip(members, values, strict=True):
            advantages[index] = value
    return advantages


def role_of(agent: str) -> str:
    """The role that an agent shares with others: its name without a number at its end (solver_2 is a solver)."""
    return agent.rstrip("0123456789").rstrip("_-") or agent


def hierarchical_groups(members: Sequence[Member]) -> list[Hashable]:
    """What each member is compared with: agents of its role in its own rollout, or its role in the group's rollouts.

    So answers to one proposed problem are compared with each other, and proposals with proposals.
    """
    keys = [(member.rollout_id, role_of(member.agent)) for member in members]
    num_of = Counter(keys)
    return [
        key if num_of[key] > 1 else (member.group_id, "", key[1]) for member, key in zip(members, keys, strict=True)
    ]


def role_conditioned(
    rewards: Sequence[float], agents: Sequence[str], baselines: Mapping[str, float], decay: float
) -> tuple[list[float], dict[str, float]]:
    """r - b, where b is the moving average of the agent's rewards, this one included; and the averages afterwards.

    SPIRAL's role-conditioned advantage estimation (arXiv 2506.24119, section 3.3); an average begins at 0.
    """
    known = dict(baselines)
    advantages: list[float] = []
    for reward, agent in zip(rewards, agents, strict=True):
        known[agent] = decay * known.get(agent, 0.0) + (1 - decay) * reward
        advantages.append(reward - known[agent])
    return advantages, known


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


def stepped(member: Member, total: float) -> SteppedMember:
    """A member with its recorded step rewards; `total`: all of its reward."""
    return SteppedMember(member.steps, member.step_rewards, total)


def by_step(
    members: Sequence[SteppedMember], groups: Iterable[Hashable], estimator: Advantage
) -> list[dict[int, float]]:
    """Advantage by step with tokens, one mapping a member: process supervision (arXiv 2402.03300, section 4.1.3).

    1. The final reward of a member counts as a reward of its last step. 2. All rewards of all steps of a group are
    normalised together by the estimator; a step that got none has none to normalise. 3. A step's advantage is the sum
    of the normalised rewards of itself and the steps after it. Without step rewards all of a member's steps have the
    advantage that `by_group` gives the member.
    """
    rewards = [sorted(member.rewards().items()) for member in members]
    owners = [(index, step) for index, found in enumerate(rewards) for step, _ in found]
    group_of = list(groups)
    flat = by_group([value for found in rewards for _, value in found], [group_of[p] for p, _ in owners], estimator)
    normalised: list[dict[int, float]] = [{} for _ in members]
    for (index, step), value in zip(owners, flat, strict=True):
        normalised[index][step] = value
    return [
        {step: math.fsum(value for later, value in found.items() if later >= step) for step in member.steps}
        for member, found in zip(members, normalised, strict=True)
    ]


def of_members(members: Sequence[Member], settings: PolicyGradientSettings) -> Sequence[float | Mapping[int, float]]:
    """One advantage a member, or one a step of it, from rewards less the penalty of truncated answers.

    Not for `rae`, which needs what it knows of earlier batches.
    """
    is_wide = settings.advantage in BATCH_WIDE
    groups: list[Hashable] = [("" if is_wide else member.group_id, member.agent) for member in members]
    if settings.advantage == "hierarchical":
        groups = hierarchical_groups(members)
    rewards = _rewards(members, settings)
    if settings.step_rewards == "total":
        return by_group(rewards, groups, settings.advantage)
    by_member = [stepped(member, reward) for member, reward in zip(members, rewards, strict=True)]
    return by_step(by_member, groups, settings.advantage)


def _rewards(members: Sequence[Member], settings: PolicyGradientSettings) -> list[float]:
    return [m.reward - settings.truncation_penalty if m.is_truncated else m.reward for m in members]


class PolicyGradient(Algorithm):
    """Base of algorithms that weigh tokens by the advantages of their rollouts."""

    def prepare(self, batch: BatchView, settings: PolicyGradientSettings) -> Prepared:
        """Advantages by row, or by token with step rewards; truncated completions are left out if settings say so."""
        statistics: Mapping[str, float] = {}
        if settings.advantage == "rae":
            agents = [member.agent for member in batch.members]
            rewards = _rewards(batch.members, settings)
            found, statistics = role_conditioned(rewards, agents, batch.statistics, settings.rae_decay)
        else:
            found = of_members(batch.members, settings)
        advantages: list[PerToken] = []
        for row in batch.rows:
            value = found[row.member]
            advantages.append(value if isinstance(value, (int, float)) else row.by_step(value))
        keep = [~row.truncated for row in batch.rows] if settings.mask_truncated else ()
        metrics = {f"baseline/{agent}": value for agent, value in sorted(statistics.items())}
        return Prepared(advantages=advantages, keep=keep, metrics=metrics, statistics=statistics)
