"""Reward functions: a finished rollout in, a number out. They run before the rollout ends: rewards are recorded."""

import asyncio
import functools
import inspect
import math
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from typing import Any, Protocol

from rollstream.eventlog.blocking_calls import start_thread
from rollstream.producers.rollout.reply import FinalError
from rollstream.schemas.errors import EnvironmentRunError, describe, is_of_users, message_of, raised_at
from rollstream.schemas.events import RewardRecorded, StepRecorded
from rollstream.schemas.settings import RolloutSettings

_abandoned: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()
"""Threads whose result nobody waits for any more."""


class RewardError(EnvironmentRunError):
    """A reward is not a finite number, belongs to nothing, or its function raised."""


class NoScoreError(RewardError):
    """There is no score: a reward function gave none, or whom it asked did not answer with one."""


class FinalNoScoreError(FinalError, NoScoreError):
    """A recorded rollout has no score, and a further attempt would play the same."""


@dataclass(frozen=True, slots=True)
class FinishedRollout:
    """Input of a reward function: all that happened, before the rollout's last event."""

    inputs: Mapping[str, Any]
    seed: int
    steps: tuple[StepRecorded, ...]
    """Steps by index; LLM and tool calls of all agents, without the calls to judges."""
    rewards: tuple[RewardRecorded, ...]
    """Those of the environment and of the reward functions before this one."""
    messages: Mapping[str, tuple[Mapping[str, Any], ...]]
    """Messages of each agent's last call by step index, and the answer without its stop text, by agent; a label
    (`session.relabel`) is not an answer.
    """
    stop_reason: str


Value = float | Mapping[str, float] | None
"""One number for all agents, or one by agent; none: there is no score."""
RewardFunction = Callable[[FinishedRollout], Value | Awaitable[Value]]

MAX_REWARD = 1e15
"""Largest absolute reward: sums and squares of so many as a group has are finite in float32, too."""
MAX_ABANDONED = 512
"""Maximum threads of functions that go on after their rollouts have timed out: each keeps its rollout in memory. Twice
the rollouts that a process has at a time by default, so that one outage of what rewards ask ends no process.
"""
JUDGE = "judge:"
"""Prefix of the names of agents that only judge; they have no model group and no trajectory."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Question to a judge and its answer, as recorded in the log (without secrets)."""

    judge: str
    """The evaluator's name."""
    model: str
    data: dict[str, Any]
    """`input` (messages) and `output` (text)."""
    metadata: dict[str, Any]
    usage: dict[str, Any] | None
    began_ms: int
    """Event time."""


class Recorder(Protocol):
    """Takes down what judges are asked, before what comes of it counts."""

    def clock(self) -> int:
        """Event time in ms."""
        ...

    async def record(self, asked: Asked) -> None:
        """Make a step of it."""
        ...


def played(steps: Iterable[StepRecorded]) -> tuple[StepRecorded, ...]:
    """Steps of a rollout without those of judges."""
    return tuple(step for step in steps if not step.agent.startswith(JUDGE))


def unscored(
    steps: Iterable[StepRecorded],
    rewards: Iterable[RewardRecorded],
    settings: RolloutSettings,
    opponents: Iterable[str],
) -> list[str]:
    """Agents that are trained on and have no reward of a weight other than 0, which would count as a reward of 0.

    They are those that spoke, or all of the task's if nobody did, without `opponents` and frozen agents.
    """
    spoke = {step.agent for step in steps if step.llm is not None} or set(settings.agents)
    weights = (settings.reward_weights, *settings.algorithm_weights)
    counted = {reward.agent for reward in rewards if any(map(reward.weight_in, weights))}
    return [] if None in counted else sorted(spoke.difference(opponents, settings.frozen_agents, counted))


async def evaluate(name: str, function: RewardFunction, rollout: FinishedRollout) -> dict[str | None, float]:
    """Reward by agent (None: all agents). A plain function has a thread of its own, so that it holds nobody up.

    Raises RewardError naming the function if it raised or returned what is not a finite number, NoScoreError if it has
    no score to give.
    """
    try:
        if inspect.iscoroutinefunction(function):
            value: Any = await function(rollout)
        else:
            value, error = await in_thread(functools.partial(function, rollout))
            if error is not None:
                raise error
            value = await value if inspect.isawaitable(value) else value
    except RewardError as error:
        if not is_of_users(error):
            raise
        kind = NoScoreError if isinstance(error, NoScoreError) else RewardError
        raise kind(f"reward {name} raised {type(error).__name__} ({raised_at(error)}): {message_of(error)}") from error
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        raise RewardError(f"reward {name} raised {describe(error)}") from error
    if isinstance(value, Mapping):
        return {agent: _score(name, number) for agent, number in value.items()}
    return {None: _score(name, value)}


def _score(name: str, value: Any) -> float:
    if value is None:
        raise NoScoreError(
            f"reward {name} gave no score (None); return a number, or leave such rollouts out "
            "(trajectory_builders.X.missing_score: reject)"
        )
    return finite(name, value)


def check_own(name: str, location: str, own: Iterable[RewardRecorded]) -> None:
    """Raises RewardError for a reward function that has the name of one of the environment's own rewards.

    Rewards of one name are added, so the function's value would not be the reward that its name chooses.
    """
    if any(reward.name == name and not reward.is_score for reward in own):
        kind, rest = ("evaluator", "") if location != name else ("reward function", ", or the environment's reward")
        raise RewardError(
            f"reward {location}: the environment has recorded a reward named {name!r} of its own, and rewards of one "
            f"name are added; rename the {kind}{rest}, in a new run"
        )


async def in_thread(function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Return the result of a plain function, or its exception."""
    thread, answer = start_thread(function, "reward")
    try:
        return await answer
    except asyncio.CancelledError:
        _abandoned.add(thread)
        raise


def check_threads() -> None:
    """Raises EnvironmentRunError if too many functions still run although nobody waits for them any more.

    No thread can be ended from outside; the process can.
    """
    running = [thread for thread in _abandoned if thread.is_alive()]
    if len(running) > MAX_ABANDONED:
        raise EnvironmentRunError(
            f"{len(running)} reward functions still run after their rollouts have timed out, so this process ends to "
            "be started again; give what they wait for a time-out shorter than rollout_timeout_s"
        )


def check_target(
    name: str, step_index: int | None, agent: str | None, agents: Sequence[str], *, is_score: bool, has_step: bool
) -> None:
    """Raises RewardError for a reward of a step or an agent that is not there, or a score without a step."""
    if not has_step:
        raise RewardError(f"reward {name} is for step {step_index}, which is not recorded; give another")
    if is_score and step_index is None:
        raise RewardError(f"score {name} has no step; give the step that it is for")
    if agent is not None and agent not in agents:
        raise RewardError(f"reward {name} is for unknown agent {agent!r}; known agents: {', '.join(agents)}")


def finite(name: str, value: Any) -> float:
    """`value` as a float. Raises RewardError for one that is not finite or too large, NoScoreError without a number."""
    if not isinstance(value, Real) and getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()  # numpy's bool, and arrays and tensors of no dimension
    if value is None:
        raise NoScoreError(f"reward {name} is None; expected a finite number")
    if not isinstance(value, Real | Decimal):
        raise RewardError(f"reward {name} is a {type(value).__name__}; expected a finite number")
    try:
        number = float(value)
    except OverflowError as error:
        raise RewardError(f"reward {name} is too large; return a finite number") from error
    except ValueError:  # a signaling NaN of Decimal
        number = math.nan
    if not math.isfinite(number):
        raise RewardError(f"reward {name} is {number}; expected a finite number")
    if abs(number) > MAX_REWARD:
        raise RewardError(f"reward {name} is {number:g}; return a number between -{MAX_REWARD:g} and {MAX_REWARD:g}")
    return number
