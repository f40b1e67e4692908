"""Advantages of the members of one group from their rewards, one a member or one a step. Plain numbers; no tensors."""

import bisect
import math
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rollstream.learner.algorithms.base import (
    Algorithm,
    BatchView,
    Member,
    Normaliser,
    PerToken,
    Prepared,
)
from rollstream.schemas.errors import RunFailedError
from rollstream.schemas.policy_gradient import BATCH_WIDE, Advantage, OverlongSettings, PolicyGradientSettings
from rollstream.schemas.revisions import (
    CHECKS_NEGATIVE_SINCE,
    CONSTANT_BY_MINI_BATCH_SINCE,
    NEWEST_REVISION,
    OWN_STEPS_SINCE,
)
from rollstream.schemas.settings import OTHERS

EPSILON = 1e-6


def group_std(rewards_G: Sequence[float]) -> list[float]:
    """(r - mean) / (std + 1e-6), of the sample (GRPO, arXiv 2402.03300, section 4.1.2); 0 for one member.

    Not a number if the deviation is infinite: a division by it would give 0.
    """
    centred_G = group_mean(rewards_G)
    if len(rewards_G) < 2:
        return centred_G
    std = math.sqrt(math.fsum(value * value for value in centred_G) / (len(rewards_G) - 1))
    if math.isinf(std):
        return [math.nan] * len(centred_G)
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


def max_rl(rewards_G: Sequence[float]) -> list[float]:
    """(r - mean) / mean (Tajwar et al., "Maximum Likelihood Reinforcement Learning", arXiv 2602.02710, equation 10);
    0 if no reward was won (algorithm 1). Rewards are not negative, see `check_rewards`.
    """
    mean = math.fsum(rewards_G) / len(rewards_G)
    return [value / mean if mean > 0 else 0.0 for value in group_mean(rewards_G)]


ESTIMATORS: dict[Advantage, Callable[[Sequence[float]], list[float]]] = {
    "none": list,
    "group_std": group_std,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "max_rl": max_rl,
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


def decoupled(members: Sequence[Member], weights: Mapping[str, float]) -> list[float]:
    """GDPO (arXiv 2601.05242, equations 4, 6 and 7): the weighted sum of each reward's `group_std`, normalised by mean
    and deviation of all such sums of the agent in the batch. A reward that a member did not get counts as 0.
    """
    groups = [(member.group_id, member.agent) for member in members]
    sums, others = [0.0] * len(members), weights.get(OTHERS, 1.0)
    for name in sorted({name for member in members for name in member.rewards}):
        found = by_group([member.rewards.get(name, 0.0) for member in members], groups, "group_std")
        sums = [total + weights.get(name, others) * value for total, value in zip(sums, found, strict=True)]
    return by_group(sums, [member.agent for member in members], "group_std")


def against_group_by_batch(rewards: Sequence[float], members: Sequence[Member]) -> list[float]:
    """(r - mean of the group), divided by the root mean square of all such differences of the agent in the batch:
    REINFORCE++-baseline (arXiv 2501.03262).
    """
    return _by_scale(rewards, members, lambda _, centred: math.sqrt(math.fsum(v**2 for v in centred) / len(centred)))


def against_group_by_rewards(rewards: Sequence[float], members: Sequence[Member]) -> list[float]:
    """(r - mean of the group), divided by the sample deviation of all rewards of the agent in the batch (arXiv
    2508.08221; `scale_rewards="batch"` in TRL).
    """
    return _by_scale(rewards, members, lambda own, _: statistics.stdev(own) if len(own) > 1 else 1.0)


def _by_scale(
    rewards: Sequence[float], members: Sequence[Member], scale_of: Callable[[list[float], list[float]], float]
) -> list[float]:
    """Rewards less the means of their groups, by a scale of the agent's `(rewards, differences)` in the batch."""
    centred = by_group(rewards, [(member.group_id, member.agent) for member in members], "group_mean")
    own: dict[str, tuple[list[float], list[float]]] = {}
    for reward, value, member in zip(rewards, centred, members, strict=True):
        found = own.setdefault(member.agent, ([], []))
        found[0].append(reward)
        found[1].append(value)
    scale = {agent: scale_of(*found) + EPSILON for agent, found in own.items()}
    return [value / scale[member.agent] for value, member in zip(centred, members, strict=True)]


def overlong_penalty(length: int, settings: OverlongSettings) -> float:
    """DAPO's soft overlong punishment, 0 to 1 (arXiv 2503.14476, equation 13, with its sign turned)."""
    return min(1.0, max(0.0, (length - settings.max_length + settings.buffer) / settings.buffer))


def role_of(agent: str) -> str:
    """The role that an agent shares with others: its name without a number at its end (solver_2 is a solver)."""
    return agent.rstrip("0123456789").rstrip("_-") or agent


def hierarchical_groups(members: Sequence[Member]) -> list[Hashable]:
    """Comparison group of each member: agents of its role in its own rollout, or its role in the group's rollouts.

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
    members: Sequence[SteppedMember],
    groups: Iterable[Hashable],
    estimator: Advantage,
    discount: float = 1.0,
    revision: int = NEWEST_REVISION,
) -> list[dict[int, float]]:
    """Advantage by step with tokens, one mapping a member: process supervision (arXiv 2402.03300, section 4.1.3).

    1. The final reward of a member counts as a reward of its last step. 2. All rewards of all steps of a group are
    normalised together by the estimator; a step that got none has none to normalise. 3. A step's advantage is its
    return of the normalised rewards, see `returns`. Without step rewards and with discount 1 all of a member's steps
    have the advantage that `by_group` gives the member.
    """
    rewards = [sorted(member.rewards().items()) for member in members]
    owners = [(index, step) for index, found in enumerate(rewards) for step, _ in found]
    group_of = list(groups)
    flat = by_group([value for found in rewards for _, value in found], [group_of[p] for p, _ in owners], estimator)
    normalised: list[dict[int, float]] = [{} for _ in members]
    for (index, step), value in zip(owners, flat, strict=True):
        normalised[index][step] = value
    return [returns(member.steps, found, discount, revision) for member, found in zip(members, normalised, strict=True)]


def returns(
    steps: frozenset[int], rewards: Mapping[int, float], discount: float, revision: int = NEWEST_REVISION
) -> dict[int, float]:
    """Return of each of a member's own `steps`: the sum of the rewards of itself and of the steps after it, each times
    `discount` for every own step that it is later (GAE without a critic, arXiv 1506.02438, equation 16).

    Time counts the member's own actions. A step that is not its own (a tool's, another agent's, a call that was lost or
    refused) takes no time, so that a reward recorded for one is as late as the own step before it, whose outcome it is.
    Before OWN_STEPS_SINCE, every step that the rollout recorded took time.
    """
    own = sorted(steps)
    found = rewards.keys() | steps
    time_of = {step: bisect.bisect(own, step) if revision >= OWN_STEPS_SINCE else step for step in found}
    return {
        step: math.fsum(
            value * discount ** (time_of[later] - time_of[step]) for later, value in rewards.items() if later >= step
        )
        for step in steps
    }


def of_members(
    members: Sequence[Member],
    settings: PolicyGradientSettings,
    rewards: Sequence[float] | None = None,
    revision: int = NEWEST_REVISION,
) -> Sequence[float | Mapping[int, float]]:
    """One advantage a member, or one a step of it. `rewards`: one a member, less penalties; None: as they are.
    `revision`: of the job.

    Not for `rae`, which needs what it knows of earlier batches. `gdpo` knows the members' rewards by name alone.
    """
    rewards = [member.reward for member in members] if rewards is None else rewards
    if settings.advantage == "gdpo":
        return decoupled(members, settings.reward_weights)
    if settings.advantage == "reinforce_pp_baseline":
        return against_group_by_batch(rewards, members)
    if settings.advantage == "group_mean_batch_std":
        return against_group_by_rewards(rewards, members)
    is_wide = settings.advantage in BATCH_WIDE
    groups: list[Hashable] = [("" if is_wide else member.group_id, member.agent) for member in members]
    if settings.advantage == "hierarchical":
        groups = hierarchical_groups(members)
    if settings.step_rewards == "total":
        return by_group(rewards, groups, settings.advantage)
    by_member = [stepped(member, reward) for member, reward in zip(members, rewards, strict=True)]
    return by_step(by_member, groups, settings.advantage, settings.step_discount, revision)


def penalised(batch: BatchView, settings: PolicyGradientSettings) -> list[float]:
    """Rewards of the members, less what truncated and overlong answers cost."""
    rewards = [one.reward - settings.truncation_penalty if one.is_truncated else one.reward for one in batch.members]
    if settings.overlong is None:
        return rewards
    lengths = Counter[int]()
    for row in batch.rows:
        lengths[row.member] += row.num_completion_tokens
    return [reward - overlong_penalty(lengths[index], settings.overlong) for index, reward in enumerate(rewards)]


class PolicyGradient(Algorithm):
    """Base of algorithms that weigh tokens by the advantages of their rollouts."""

    def prepare(self, batch: BatchView, settings: PolicyGradientSettings) -> Prepared:
        """Advantages by row, or by token with step rewards; truncated completions are left out if settings say so."""
        statistics: Mapping[str, float] = {}
        rewards = penalised(batch, settings)
        if batch.revision >= CHECKS_NEGATIVE_SINCE:
            check_rewards(batch, rewards, settings)
        if settings.advantage == "rae":
            agents = [member.agent for member in batch.members]
            found, statistics = role_conditioned(rewards, agents, batch.statistics, settings.rae_decay)
        else:
            found = of_members(batch.members, settings, rewards, batch.revision)
        advantages: list[PerToken] = []
        for row in batch.rows:
            value = found[row.member]
            advantages.append(value if isinstance(value, (int, float)) else row.by_step(value))
        keep = [~row.truncated for row in batch.rows] if settings.mask_truncated else ()
        metrics = {f"baseline/{agent}": value for agent, value in sorted(statistics.items())}
        return Prepared(
            advantages, keep, normaliser=normaliser_of(settings, batch), metrics=metrics, statistics=statistics
        )


def check_rewards(batch: BatchView, rewards: Sequence[float], settings: PolicyGradientSettings) -> None:
    """Raises RunFailedError naming the first rollout whose reward is negative where the estimator divides by a mean."""
    if not settings.needs.nonnegative_rewards:
        return
    for member, reward in zip(batch.members, rewards, strict=True):
        if reward < 0:
            raise RunFailedError(
                f"rollout {member.rollout_id}, agent {member.agent}: reward {reward:g} is negative, and "
                f"{settings.name} with advantage {settings.advantage} divides by the mean reward; use rewards of 0 or "
                "more, or another advantage"
            )


def normaliser_of(settings: PolicyGradientSettings, batch: BatchView) -> Normaliser:
    """Normaliser for the setting `aggregation`. Jobs before CONSTANT_BY_MINI_BATCH_SINCE divide the rows of a batch by
    the number of mini-batches.
    """
    if settings.aggregation != "constant":
        return Normaliser(settings.aggregation)
    assert settings.aggregation_length is not None
    if batch.revision >= CONSTANT_BY_MINI_BATCH_SINCE:
        return Normaliser("row_length", settings.aggregation_length)
    num_rows = max(1, len(batch.rows))
    return Normaliser("constant", num_rows * settings.aggregation_length / settings.mini_batches)
