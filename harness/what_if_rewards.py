"""Rewards of recorded rollouts given anew, by other reward functions or weights. Calls no model and no tool."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from rollstream.eventlog import codec
from rollstream.eventlog.log import EventLog, Record
from rollstream.eventlog.reading import read_to_end
from rollstream.harness.replay_assembly import Range
from rollstream.processors.trajectories import sum_rewards
from rollstream.producers import registry
from rollstream.producers.rewards import FinishedRollout, evaluate
from rollstream.schemas import ids
from rollstream.schemas.errors import DecodeError
from rollstream.schemas.events import RewardRecorded, RolloutEnded, RolloutFailed, RolloutStarted, StepRecorded
from rollstream.schemas.events_rollouts import RolloutEvent
from rollstream.schemas.settings import RolloutSettings


@dataclass(slots=True)
class _Attempt:
    """What is recorded of one attempt so far; the first record of an index counts."""

    seed: int = 0
    steps: dict[int, StepRecorded] = field(default_factory=dict[int, StepRecorded])
    rewards: dict[int, RewardRecorded] = field(default_factory=dict[int, RewardRecorded])


@dataclass(frozen=True, slots=True)
class Grading:
    """Which rewards were given when the run was recorded, and which are to be given now."""

    before: RolloutSettings
    now: RolloutSettings
    inputs: Mapping[str, Mapping[str, Any]]
    """By group id."""

    @property
    def changes_something(self) -> bool:
        """Whether any reward may come out differently."""
        return self.before.rewards != self.now.rewards or self.before.reward_weights != self.now.reward_weights


async def grade(log: EventLog, parts: Iterable[Range], grading: Grading) -> dict[str, float]:
    """Reward by trajectory id of every attempt in the ranges that came to its end.

    The environment's own rewards stay as recorded; those of the recorded reward functions give way to the new ones',
    which must be pure. Raises EnvironmentRunError naming a reward function that fails, TruncatedError.
    """
    found: dict[str, float] = {}
    for part in parts:
        attempts: dict[str, _Attempt] = {}
        decided: set[str] = set()
        async for record in read_to_end(log, "steps", {part.partition: part.first}, {part.partition: part.end}):
            event = _event_of(record, part)
            if event is None or event.rollout_id in decided:
                continue
            match event:
                case RolloutStarted():
                    attempts.setdefault(event.rollout_id, _Attempt()).seed = event.seed
                case StepRecorded():
                    attempts.setdefault(event.rollout_id, _Attempt()).steps.setdefault(event.step_index, event)
                case RewardRecorded():
                    attempts.setdefault(event.rollout_id, _Attempt()).rewards.setdefault(event.reward_index, event)
                case RolloutEnded() if event.rollout_id in attempts:
                    decided.add(event.rollout_id)
                    found |= await _grade(event, attempts.pop(event.rollout_id), grading)
                case RolloutFailed():
                    decided.add(event.rollout_id)
                case _:
                    pass
    return found


def _event_of(record: Record, part: Range) -> RolloutEvent | None:
    """What a record says of an attempt of the run, if anything."""
    if record.offset in part.dead:
        return None
    try:
        event = codec.decode(record).event
    except DecodeError:
        return None
    return event if isinstance(event, RolloutEvent) and event.run_id == part.run_id else None


async def _grade(ended: RolloutEnded, attempt: _Attempt, grading: Grading) -> dict[str, float]:
    steps = tuple(step for _, step in sorted(attempt.steps.items()))
    rewards = [
        reward for _, reward in sorted(attempt.rewards.items()) if reward.name not in set(grading.before.rewards)
    ]
    for name in grading.now.rewards:
        rollout = FinishedRollout(
            inputs=grading.inputs.get(ended.group_id, {}),
            seed=attempt.seed,
            steps=steps,
            rewards=tuple(rewards),
            messages=_messages(steps),
            stop_reason=ended.stop_reason,
        )
        for agent, value in (await evaluate(name, registry.reward(name), rollout)).items():
            rewards.append(_reward(ended, len(rewards), name, value, agent))
    agents = sorted({step.agent for step in steps}) or sorted(grading.now.agents)
    weights = grading.now.reward_weights
    return {ids.trajectory_id(ended.rollout_id, agent): sum_rewards(rewards, agent, weights).total for agent in agents}


def _messages(steps: Iterable[StepRecorded]) -> dict[str, tuple[Mapping[str, Any], ...]]:
    """By agent: the messages of its last call, and the answer."""
    found: dict[str, tuple[Mapping[str, Any], ...]] = {}
    for step in steps:
        if step.llm is not None and isinstance(step.data, dict):
            sent = cast(list[Mapping[str, Any]], step.data.get("input") or [])
            found[step.agent] = (*sent, {"role": "assistant", "content": step.data.get("output")})
    return found


def _reward(ended: RolloutEnded, index: int, name: str, value: float, agent: str | None) -> RewardRecorded:
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
