"""Recomputes rewards of recorded rollouts with other reward functions or weights. Calls no model and no tool."""

import copy
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollstream.eventlog import codec
from rollstream.eventlog.attempts import Recorded, attempt_in
from rollstream.eventlog.log import ReadableLog, Record
from rollstream.eventlog.reading import read_to_end
from rollstream.processors.assemble.trajectories import sum_rewards
from rollstream.producers.evaluators.table import read, reward_of
from rollstream.producers.league.draw import is_opponents
from rollstream.producers.rollout.reply import MAX_TURNS
from rollstream.producers.rollout.rewards import FinishedRollout, NoScoreError, check_own, evaluate, played, unscored
from rollstream.producers.rollout.scored_answers import LastAnswers
from rollstream.replay.assembly import Range
from rollstream.replay.what_if.plan import OF_REWARDS
from rollstream.schemas import ids
from rollstream.schemas.errors import ConfigError, DecodeError
from rollstream.schemas.evaluators import SECTION, is_pure
from rollstream.schemas.events import GroupStarted, RewardRecorded, RolloutEnded, RolloutFailed, StepRecorded
from rollstream.schemas.events.recorded import INPUT, RECORDED
from rollstream.schemas.events.rollouts import GroupEvent, RolloutEvent
from rollstream.schemas.permissions import NOTHING, Permissions
from rollstream.schemas.settings import RolloutSettings

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Attempt(Recorded):
    """An attempt that is not decided, with the records that count."""

    first_steps: dict[int, StepRecorded] = field(default_factory=dict[int, StepRecorded])
    first_rewards: dict[int, RewardRecorded] = field(default_factory=dict[int, RewardRecorded])


@dataclass(slots=True)
class _Group:
    """A group that has started, and its attempts by rollout id; None of those that are decided or of no member."""

    started: GroupStarted
    attempts: dict[str, _Attempt | None] = field(default_factory=dict[str, _Attempt | None])

    def attempt(self, rollout_id: str) -> _Attempt | None:
        """The attempt, which starts at its first record, while it is not decided."""
        if rollout_id not in self.attempts:
            named = attempt_in(self.started.group_id, self.started.size, rollout_id)
            self.attempts[rollout_id] = None if named is None else _Attempt(rollout_id, *named)
        return self.attempts[rollout_id]


@dataclass(frozen=True, slots=True)
class Grading:
    """Rewards at the time of recording, and those to be computed now."""

    before: RolloutSettings
    now: RolloutSettings
    inputs: Mapping[str, Mapping[str, Any]]
    """Inputs by group id, for all groups that are scored again."""
    permissions: Permissions = NOTHING
    """Permissions for the names in `now`."""

    @property
    def changes_something(self) -> bool:
        """Whether any reward may come out differently, or a rollout without a score be rejected or used."""
        names = (*OF_REWARDS, "missing_score")
        return any(getattr(self.before, name) != getattr(self.now, name) for name in names)

    @property
    def kept(self) -> frozenset[str]:
        """Names of those rewards that cannot be worked out again, and stay as they were recorded."""
        return frozenset(name for name in self.now.rewards if not self._is_pure(name))

    def _is_pure(self, name: str) -> bool:
        """Whether a reward depends on the recorded rollout alone. Registered functions are held to do so."""
        block = self.now.evaluators.get(name)
        return block is None or is_pure(read(name, block, self.permissions))

    def is_unchanged(self, name: str) -> bool:
        """Whether the recorded run had a reward of this name by the same function."""
        return name in self.before.rewards and self.before.evaluators.get(name) == self.now.evaluators.get(name)

    def check(self) -> None:
        """Raises ConfigError naming the path of an evaluator that would have to be asked."""
        for name in sorted(self.kept):
            if not self.is_unchanged(name):
                raise ConfigError(
                    f"{SECTION}.{name} is not pure and its scores are not recorded; a what-if calls neither judges nor "
                    f"functions without pure: true; use `finetune --fork` to make new rollouts"
                )


async def grade(log: ReadableLog, parts: Iterable[Range], grading: Grading) -> dict[str, float | None]:
    """Reward by trajectory id of every attempt of the grading's groups in the ranges that came to its end; None for one
    that is rejected because a score is missing (`missing_score: reject`).

    The environment's own rewards stay as recorded; those of the recorded reward functions give way to the new ones',
    which must be pure; those of judges stay too, and so do a recorded rollout's by functions that are unchanged: it may
    have brought them. Raises EnvironmentRunError naming a reward function that fails or that, where the settings demand
    a score, has none to give, TruncatedError.
    """
    found: dict[str, float | None] = {}
    for part in parts:
        groups: dict[str, _Group] = {}
        async for record in read_to_end(log, "steps", {part.partition: part.first}, {part.partition: part.end}):
            event, digest = _event_of(record, part)
            if event is None or event.group_id not in grading.inputs:
                continue
            if isinstance(event, GroupStarted):
                groups.setdefault(event.group_id, _Group(event))
            group = groups.get(event.group_id)  # records of groups that were not seen to start belong to closed ones
            attempt = group.attempt(event.rollout_id) if group and isinstance(event, RolloutEvent) else None
            if group is None or attempt is None:
                continue
            _take(attempt, event, digest)
            if isinstance(event, RolloutEnded | RolloutFailed):
                group.attempts[event.rollout_id] = None
            if isinstance(event, RolloutEnded) and attempt.incompleteness(event) in ("", "no_score"):
                found |= await _grade(event, attempt, ids.member_seed(group.started.seed, attempt.member), grading)
    return found


def _take(attempt: _Attempt, event: GroupEvent, digest: str) -> None:
    if isinstance(event, StepRecorded):
        if attempt.take_step(event.step_index, digest):
            attempt.first_steps[event.step_index] = event
    elif isinstance(event, RewardRecorded) and attempt.take_reward(event.reward_index, digest):
        attempt.first_rewards[event.reward_index] = event


def _event_of(record: Record, part: Range) -> tuple[GroupEvent | None, str]:
    """A record's event of a group of the run, or None, and its digest."""
    if record.offset in part.dead:
        return None, ""
    try:
        received = codec.decode(record)
    except DecodeError:
        return None, ""
    event = received.event
    return (event if isinstance(event, GroupEvent) and event.run_id == part.run_id else None), received.digest


async def _grade(ended: RolloutEnded, attempt: _Attempt, seed: int, grading: Grading) -> dict[str, float | None]:
    """`seed`: of its member, by the group's record, because the attempt's RolloutStarted may be undecodable."""
    steps = played(step for _, step in sorted(attempt.first_steps.items()))
    agents = sorted({step.agent for step in steps if not is_opponents(step)}) or sorted(grading.now.agents)
    try:
        rewards = await _rewards(ended, attempt, steps, seed, grading)
        if grading.now.missing_score != "unneeded":
            _check_scored(ended, steps, rewards, grading.now)
    except NoScoreError as error:
        if grading.now.missing_score == "error" and not ended.missing_scores:
            raise
        logger.info("rollout %s is left out as no_score: %s", ended.rollout_id, error)
        return {ids.trajectory_id(ended.rollout_id, agent): None for agent in agents}
    weights = grading.now.reward_weights
    return {ids.trajectory_id(ended.rollout_id, agent): sum_rewards(rewards, agent, weights).total for agent in agents}


async def _rewards(
    ended: RolloutEnded, attempt: _Attempt, steps: tuple[StepRecorded, ...], seed: int, grading: Grading
) -> list[RewardRecorded]:
    """All rewards of an attempt, recorded and new ones. Raises NoScoreError unless scores are unneeded, RewardError."""
    kept = grading.kept
    if grading.now.environment == RECORDED:
        names = {reward.name for reward in attempt.first_rewards.values()}
        brought = {name for name in names if name not in grading.before.rewards or grading.is_unchanged(name)}
        kept |= brought.intersection(grading.now.rewards)
    replaced = set(grading.before.rewards) - kept
    rewards = [reward for _, reward in sorted(attempt.first_rewards.items()) if reward.name not in replaced]
    own = tuple(rewards)
    inputs, messages = _inputs(grading, ended.group_id), LastAnswers(_copied(steps)).messages
    for name in (name for name in grading.now.rewards if name not in kept):
        rollout = FinishedRollout(
            inputs=inputs,
            seed=seed,
            steps=_copied(steps),
            rewards=tuple(rewards),
            messages=dict(messages),
            stop_reason=ended.stop_reason,
        )
        chosen = reward_of(name, grading.now, grading.permissions, None)
        check_own(name, chosen.location, own)
        try:
            values = await evaluate(chosen.location, chosen.function, rollout)
        except NoScoreError:
            if grading.now.missing_score != "unneeded":
                raise
            continue
        rewards += [_reward(ended, len(rewards) + n, name, *one) for n, one in enumerate(values.items())]
    return rewards


def _inputs(grading: Grading, group_id: str) -> dict[str, Any]:
    """A copy of a task's inputs, without the recorded rollouts, which the environment `recorded` takes out too."""
    inputs = grading.inputs[group_id]
    is_recorded = grading.now.environment == RECORDED
    return copy.deepcopy({name: value for name, value in inputs.items() if name != INPUT or not is_recorded})


def _copied(steps: Iterable[StepRecorded]) -> tuple[StepRecorded, ...]:
    """A reward function may change what it is given: as in `producers.rollout`, the next one gets it unchanged."""
    return tuple(step.model_copy(deep=True) for step in steps)


def _check_scored(
    ended: RolloutEnded, steps: Iterable[StepRecorded], rewards: list[RewardRecorded], now: RolloutSettings
) -> None:
    """Raises NoScoreError if an agent that is trained on has no reward that counts; as in `producers.attempt`."""
    if now.policy == "demonstration" or ended.stop_reason == MAX_TURNS:
        return
    steps = tuple(steps)
    if without := unscored(steps, rewards, now, {step.agent for step in steps if is_opponents(step)}):
        raise NoScoreError(
            f"rollout {ended.rollout_id}: the what-if gives no reward to {', '.join(without)} (one of weight 0 "
            "does not count); name a reward function or evaluator that scores them (finetuning.reward_function.name)"
        )


def _reward(ended: RolloutEnded, index: int, name: str, agent: str | None, value: float) -> RewardRecorded:
    return RewardRecorded(
        run_id=ended.run_id,
        time_ms=ended.time_ms,
        group_id=ended.group_id,
        rollout_id=ended.rollout_id,
        reward_index=index,
        name=name,
        value=value,
        agent=agent,
    )
