"""One attempt at one rollout, from RolloutStarted to its terminal event. What users' code raises ends here, as data."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterator

from pydantic import JsonValue

from rollstream.producers import evaluators, registry, rewards
from rollstream.producers.engine import Engine
from rollstream.producers.environment import Environment
from rollstream.producers.journal import Emit, Journal
from rollstream.producers.session import Session, TurnsExhausted, member_seed
from rollstream.schemas import ids
from rollstream.schemas.environment import conceal
from rollstream.schemas.errors import EnvironmentRunError, RollstreamError, told
from rollstream.schemas.events import TaskRequested
from rollstream.schemas.settings import RolloutSettings

log = logging.getLogger(__name__)

GRACE_S = 1.0
"""How long an environment may take to stop when it is cancelled, before it is left to itself."""
MAX_MESSAGE = 500
RECORDED = "recorded"
"""The environment whose rollouts may bring a reward under the name of a reward function, which is then not asked."""


async def run_rollout(
    task: TaskRequested, *, member: int, attempt: int, engine: Engine, emit: Emit, clock: Callable[[], int]
) -> None:
    """Play member `member` of a task and emit its events; RolloutEnded or RolloutFailed is the last.

    `clock()` gives event time in ms and never goes back. Environment, rewards and engine together have
    `rollout_timeout_s`. What `emit` raises flies through, and then there is no terminal event.

    1. RolloutStarted. 2. Each call and reward as it happens. 3. The environment stops, or is stopped; nothing more is
    recorded. 4. The terminal event.
    """
    settings = task.settings
    journal = Journal(task, ids.rollout_id(task.group_id, member, attempt), emit, clock)
    await journal.begin(member=member, attempt=attempt, seed=member_seed(task, member))
    stage = _Stage(task, member, engine, journal)
    play = asyncio.create_task(stage.play())
    try:
        await asyncio.wait({play}, timeout=settings.rollout_timeout_s)
        has_timed_out = not play.done()
    finally:
        journal.close()
        await _stop(play, journal.rollout_id)
    if journal.emit_error is not None:
        raise journal.emit_error
    failure = stage.timed_out() if has_timed_out else stage.failure(play)
    if failure is None:
        await journal.end(play.result(), stage.missing_scores)
        return
    cause, message = failure
    message = _one_line(without_secrets(message, settings))
    log.info("rollout failed rollout_id=%s cause=%s: %s", journal.rollout_id, cause, message)
    if cause == "reward_error":
        log.error("%s", message)  # without an id: who watches the run is told each thing once
    await journal.fail(cause, message, is_final=attempt + 1 >= settings.max_attempts)


class _Stage:
    """Where an environment and reward functions run, and where what they raise becomes a cause."""

    def __init__(self, task: TaskRequested, member: int, engine: Engine, journal: Journal) -> None:
        self._task = task
        self._settings: RolloutSettings = task.settings
        self._member = member
        self._engine = engine
        self._journal = journal
        self._session: Session | None = None
        self.missing_scores: dict[str, str] = {}
        """Why there is no score, by reward name, where that is a rejection."""
        self._doing = f"environment {self._settings.environment}"

    async def play(self) -> str:
        """Environment, then reward functions. Returns the stop reason."""
        try:
            environment = registry.build_environment(
                self._settings.environment, self._settings.environment_config, os.environ
            )
            self._session = session = Session(
                self._task,
                member=self._member,
                engine=self._engine,
                journal=self._journal,
                demonstrator=environment,
            )
            stop_reason = await self._run(environment, session)
            await self._reward(session, stop_reason)
        except SystemExit as error:
            raise EnvironmentRunError(f"called sys.exit({error.code!r})") from error
        return stop_reason

    def timed_out(self) -> tuple[str, str]:
        """Cause and message when the time is over."""
        return "timeout", f"{self._doing} was not done after {self._settings.rollout_timeout_s:g} s (rollout_timeout_s)"

    def failure(self, play: "asyncio.Task[str]") -> tuple[str, str] | None:
        """Cause and message of a play that is done; None if it went well."""
        if self._session is not None and self._session.fault is not None:
            return self._session.fault
        if play.cancelled():
            return "environment_error", f"{self._doing} cancelled itself"
        error = play.exception()
        if error is None:
            return self._left_open() if self._journal.num_open else None
        if isinstance(error, rewards.RewardError):
            return "reward_error", str(error)
        text = str(error) if isinstance(error, RollstreamError) else told(error)
        return "environment_error", f"{self._doing}: {text}"

    def _left_open(self) -> tuple[str, str]:
        """Cause and message of an environment that went on after a call was not done or could not be recorded."""
        if self._journal.refusal is not None:
            return "environment_error", f"{self._doing}: {self._journal.refusal}"
        return "environment_error", f"{self._doing} ended with {self._journal.num_open} calls not done"

    async def _run(self, environment: Environment, session: Session) -> str:
        try:
            await environment.run(session)
        except TurnsExhausted:
            return "max_turns"
        except ExceptionGroup as group:
            if group.split(TurnsExhausted)[1] is not None:
                raise
            return "max_turns"
        return "done"

    async def _reward(self, session: Session, stop_reason: str) -> None:
        steps = rewards.played(self._journal.steps)
        came_with_it = {reward.name for reward in self._journal.rewards if self._settings.environment == RECORDED}
        for name in self._settings.rewards:
            if name in came_with_it:
                continue
            self._doing = f"reward {name}"
            rollout = rewards.FinishedRollout(
                inputs=session.inputs,
                seed=session.seed,
                steps=tuple(step.model_copy(deep=True) for step in steps),  # whatever is changed in it
                rewards=self._journal.rewards,
                messages=dict(session.messages),
                stop_reason=stop_reason,
            )
            chosen = evaluators.reward_of(name, self._settings, os.environ, JudgesRecorder(self._journal))
            with self._missing_allowed(name):
                values = await rewards.evaluate(chosen.place, chosen.function, rollout)
                for agent, value in values.items():
                    await session.reward(value, name, agent=agent)
        with self._missing_allowed("reward"):
            self._check_scored(session, stop_reason)

    @contextlib.contextmanager
    def _missing_allowed(self, name: str) -> Iterator[None]:
        """Where a missing score is a rejection by the settings' choice, or is not needed; else it flies on."""
        try:
            yield
        except rewards.NoScoreError as error:
            if self._settings.missing_score == "error":
                raise
            reason = _one_line(without_secrets(str(error), self._settings))
            log.warning("no score rollout_id=%s: %s", self._journal.rollout_id, reason)
            if self._settings.missing_score == "reject":
                self.missing_scores[name] = reason

    def _check_scored(self, session: Session, stop_reason: str) -> None:
        """Raises NoScoreError if an agent that is trained on has no reward at all, which would count as 0.

        Where the turns are over before any was given, 0 is what was earned.
        """
        settings = self._settings
        if settings.policy == "demonstration" or settings.missing_score == "unneeded" or stop_reason == "max_turns":
            return
        if self.missing_scores or self._journal.num_open or session.fault is not None:
            return  # there is a reason already
        spoke = {step.agent for step in self._journal.steps if step.llm is not None} or set(settings.agents)
        rewarded = {reward.agent for reward in self._journal.rewards}
        without = sorted(spoke - rewarded) if None not in rewarded else []
        if without:
            raise rewards.NoScoreError(
                f"no reward was given to {', '.join(without)}: let environment {settings.environment} give one, or "
                "name a reward function or evaluator (finetuning.reward_function.name)"
            )


class JudgesRecorder:
    """Makes steps of what judges are asked, in the journal of one attempt."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def clock(self) -> int:
        """Event time in ms."""
        return self._journal.clock()

    async def record(self, asked: rewards.Asked) -> None:
        """An LLM call of an agent that has no model group: it is never trained on."""
        await self._journal.record_step(
            self._journal.open_step(),
            began_ms=asked.began_ms,
            agent=f"{rewards.JUDGE}{asked.judge}",
            event_type="LLM_END",
            name=asked.model,
            data=asked.data,
            metadata=asked.metadata,
            usage_info=asked.usage,
        )


def without_secrets(message: str, settings: RolloutSettings) -> str:
    """A message with `${ENV}` in place of what it stands for in the settings."""
    written: dict[str, JsonValue] = {**settings.environment_config, "evaluators": dict(settings.evaluators)}
    return conceal(message, written, os.environ)


async def _stop(play: "asyncio.Task[str]", rollout_id: str) -> None:
    """Cancel what still runs; code that will not stop is left alone, and can record nothing any more."""
    if not play.done():
        play.cancel()
        await asyncio.wait({play}, timeout=GRACE_S)
    if play.done():
        _retrieve(play)
    else:
        log.warning("environment ignores that it was cancelled; it is left to itself rollout_id=%s", rollout_id)
        play.add_done_callback(_retrieve)


def _retrieve(play: "asyncio.Task[str]") -> None:
    """Look at a task's exception, so that asyncio does not report it as never seen."""
    if not play.cancelled():
        play.exception()


def _one_line(message: str) -> str:
    printable = message.encode(errors="backslashreplace").decode()  # a lone surrogate fits in no event
    line = " ".join(printable.split())
    return line if len(line) <= MAX_MESSAGE else line[: MAX_MESSAGE - 3] + "..."
