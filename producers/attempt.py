"""One attempt at one rollout, from RolloutStarted to its terminal event. What users' code raises ends here, as data."""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.attempts import Cause
from rollstream.eventlog.log import Encoded
from rollstream.producers import user_tasks
from rollstream.producers.engines.base import Engine
from rollstream.producers.evaluators import table
from rollstream.producers.rollout import registry, rewards
from rollstream.producers.rollout.continuing import RecordedAttempt, rewards_after_end
from rollstream.producers.rollout.environment import Environment
from rollstream.producers.rollout.gateway_interface import Gateway
from rollstream.producers.rollout.journal import Acknowledged, Emit, Journal
from rollstream.producers.rollout.reply import MAX_TURNS, Failure, is_exhaustion, is_only, plain
from rollstream.producers.rollout.session import Session
from rollstream.schemas import ids
from rollstream.schemas.base import Event
from rollstream.schemas.errors import (
    ConfigError,
    NotAllowedError,
    PromptRefusedError,
    RollstreamError,
    called_at,
    describe,
    is_of_users,
    message_of,
    retrieve_exception,
)
from rollstream.schemas.events import StepRecorded, TaskRequested
from rollstream.schemas.events.recorded import RECORDED
from rollstream.schemas.permissions import CODE, NOTHING, Permissions, environment_path
from rollstream.schemas.settings import RolloutSettings
from rollstream.schemas.variables import recordable, traceback_of

log = logging.getLogger(__name__)

GRACE_S = 1.0
"""Seconds for a cancelled environment to stop, before it is abandoned."""


def refusal(settings: RolloutSettings, permissions: Permissions) -> str | None:
    """The name in a task that this process does not allow, where, and the remedy; None if all are allowed.

    No code of users is imported or called.
    """
    checks = [functools.partial(_check_environment, settings, permissions)]
    checks += [functools.partial(_check_reward, name, settings, permissions) for name in settings.rewards]
    for check in checks:
        try:
            check()
        except NotAllowedError as error:
            return recordable(permissions.conceal(str(error)))
        except ConfigError:
            continue  # an unknown name or an unset variable fails the rollout, which says so
    return None


def _check_environment(settings: RolloutSettings, permissions: Permissions) -> None:
    permissions.check_code(settings.environment, "settings.environment")
    path = environment_path(settings.environment)
    permissions.expand(settings.environment_config, "settings.environment_config", path)
    if not settings.environment.startswith(CODE):
        registry.environment_config(settings.environment, settings.environment_config, permissions)


def _check_reward(name: str, settings: RolloutSettings, permissions: Permissions) -> None:
    block = settings.evaluators.get(name)
    if block is None:
        permissions.check_code(name, "settings.rewards")
    else:
        table.read(name, block, permissions)


async def run_rollout(
    task: TaskRequested,
    *,
    member: int,
    attempt: int,
    engine: Engine,
    emit: Callable[[Event], Awaitable[None]],
    clock: Callable[[], int],
    permissions: Permissions = NOTHING,
    artifacts: ArtifactStore | None = None,
    players: Mapping[str, str] | None = None,
    gateway: Gateway | None = None,
) -> None:
    """`record_rollout` for callers that want events, not records; a failure of the last allowed attempt is final."""

    async def emit_event(encoded: Encoded) -> None:
        await emit(encoded.event)

    await record_rollout(
        task,
        member=member,
        attempt=attempt,
        is_last=attempt + 1 >= task.settings.max_attempts,
        engine=engine,
        emit=emit_event,
        clock=clock,
        permissions=permissions,
        artifacts=artifacts,
        players=players,
        gateway=gateway,
    )


async def record_rollout(
    task: TaskRequested,
    *,
    member: int,
    attempt: int,
    is_last: bool,
    engine: Engine,
    emit: Emit,
    clock: Callable[[], int],
    permissions: Permissions = NOTHING,
    artifacts: ArtifactStore | None = None,
    players: Mapping[str, str] | None = None,
    acknowledged: Acknowledged | None = None,
    gateway: Gateway | None = None,
    before: RecordedAttempt | None = None,
) -> None:
    """Play member `member` of a task and emit its events; RolloutEnded or RolloutFailed is the last.

    `is_last`: whether any failure is final, because no further attempt is allowed. `clock()` gives event time in ms and
    never goes back. Environment, rewards and engine together have `rollout_timeout_s`. What `emit` raises is
    raised, and then there is no terminal event; before the first event, EnvironmentRunError, which is to end the
    process, if too many reward functions never returned. `permissions`: what the task may name. `artifacts`: where
    artifacts that its inputs name are read. `players`: by agent, in place of the opponents that are drawn for the task.
    `acknowledged`: of the log, for all emitted so far. `gateway`: where programs outside can play the rollout.
    `before`: what a process that is gone has recorded of this attempt, which is continued.

    1. RolloutStarted. 2. Each call and reward as it happens. 3. The environment stops, or is stopped; nothing more is
    recorded. 4. The terminal event.
    """
    rewards.check_threads()
    settings = task.settings
    journal = Journal(task, ids.rollout_id(task.group_id, member, attempt), emit, clock, acknowledged)
    if before is None:
        await journal.begin(member=member, attempt=attempt, seed=ids.member_seed(task.seed, member))
    else:
        journal.restore(before)
    runner = _AttemptRunner(task, member, engine, journal, permissions, artifacts, players, gateway, before is not None)
    play = user_tasks.create_task(runner.play())
    is_over = False
    try:
        await asyncio.wait({play}, timeout=settings.rollout_timeout_s)
        is_over, has_timed_out = True, not play.done()
    finally:
        journal.close(is_over=is_over)
        await _stop(play, journal.rollout_id)
    if journal.emit_error is not None:
        raise journal.emit_error
    failure = runner.timed_out() if has_timed_out else runner.failure(play)
    if failure is None:
        await journal.end(play.result(), runner.missing_scores)
        return
    message = recordable(permissions.conceal(failure.message))
    log.info("rollout failed rollout_id=%s cause=%s: %s", journal.rollout_id, failure.cause, message)
    # without an id: the terminal shows each message once
    log.error("%s%s", message, permissions.conceal(_traceback(failure.error)))
    await journal.fail(failure.cause, message, is_final=is_last or failure.is_final)


class _AttemptRunner:
    """Runs an environment and reward functions, and turns each exception that they raise into a cause."""

    def __init__(
        self,
        task: TaskRequested,
        member: int,
        engine: Engine,
        journal: Journal,
        permissions: Permissions,
        artifacts: ArtifactStore | None,
        players: Mapping[str, str] | None,
        gateway: Gateway | None,
        is_continued: bool,
    ) -> None:
        self._task = task
        self._is_continued = is_continued
        self._gateway = gateway
        self._players = players
        self._permissions = permissions
        self._artifacts = artifacts
        self._settings: RolloutSettings = task.settings
        self._member = member
        self._engine = engine
        self._journal = journal
        self._session: Session | None = None
        self.missing_scores: dict[str, str] = {}
        """Reasons for missing scores that are rejections, by reward name."""
        self._doing = f"environment {self._settings.environment}"
        self._ends = time.monotonic() + self._settings.rollout_timeout_s

    async def play(self) -> str:
        """Environment, then reward functions. Returns the stop reason."""
        environment = registry.build_environment(
            self._settings.environment, self._settings.environment_config, self._permissions
        )
        environment.check_agents(self._settings.agents)
        environment.check_inputs(self._task.inputs, self._task.example_id)
        self._session = session = Session(
            self._task,
            member=self._member,
            engine=self._engine,
            journal=self._journal,
            demonstrator=environment,
            opponents=self._players,
            play_scripted=environment.play_scripted,
            artifacts=self._artifacts,
            gateway=self._gateway,
            is_continued=self._is_continued,
        )
        stop_reason = await self._run(environment, session)
        await self._journal.fill_holes(next(iter(session.agents), "agent"))
        await self._reward(session, stop_reason)
        return stop_reason

    def timed_out(self) -> Failure:
        """The failure when the time is over."""
        limit_s = self._settings.rollout_timeout_s
        return Failure(Cause.TIMEOUT, f"{self._doing} timed out after {limit_s:g} s (rollout_timeout_s)")

    def failure(self, play: "asyncio.Task[str]") -> Failure | None:
        """The failure of a play that is done; None if it succeeded."""
        if self._session is not None and (failure := self._session.failure) is not None:
            if failure.cause == Cause.REWARD_ERROR and failure.error is not None:
                return Failure(failure.cause, _with_location(failure.error), failure.error)
            return failure
        if play.cancelled():
            return Failure(Cause.ENVIRONMENT_ERROR, f"{self._doing} cancelled itself; catch CancelledError in it")
        error = play.exception()
        if error is None:
            return self._left_open() if self._journal.num_open else None
        if isinstance(error, rewards.RewardError):
            return Failure(Cause.REWARD_ERROR, message_of(error), error)
        if is_only(error, PromptRefusedError):
            return Failure(Cause.ENGINE_ERROR, describe(error), error)
        text = _with_location(error) if isinstance(error, RollstreamError) else describe(error)
        return Failure(Cause.ENVIRONMENT_ERROR, f"{self._doing}: {text}", error)

    def _left_open(self) -> Failure:
        """The failure of an environment that went on after a call was left open or could not be recorded."""
        if self._journal.refusal is not None:
            return Failure(Cause.ENVIRONMENT_ERROR, f"{self._doing}: {self._journal.refusal}")
        unfinished = f"{self._journal.num_open} unfinished calls; await each call before returning"
        return Failure(Cause.ENVIRONMENT_ERROR, f"{self._doing} returned with {unfinished}")

    async def _run(self, environment: Environment, session: Session) -> str:
        try:
            with self._missing_allowed("reward"):
                await environment.run(session)
        except Exception as error:
            if not is_exhaustion(error):
                raise
            return MAX_TURNS
        return "done"

    async def _reward(self, session: Session, stop_reason: str) -> None:
        steps = rewards.played(self._journal.steps) if self._settings.rewards else ()
        # A reward that a recorded rollout brings under the name of a reward function takes its place.
        came_with_it = {reward.name for reward in self._journal.rewards if self._settings.environment == RECORDED}
        recorded = rewards_after_end(session.recorded, session.rewarded)  # by a process that is gone; they count
        own = [reward for reward in self._journal.rewards if reward.reward_index not in recorded]
        for index, name in enumerate(names := self._settings.rewards):
            if name in came_with_it or (name, None) in recorded.values():
                continue
            self._doing = f"reward {name}"
            before = [r for r in self._journal.rewards if r.name not in names[index:] or r.reward_index not in recorded]
            rollout = rewards.FinishedRollout(
                inputs=session.inputs,
                seed=session.seed,
                steps=tuple(map(_copied, steps)),  # whatever is changed in it
                rewards=tuple(before),
                messages={agent: tuple(plain(sent, "messages")) for agent, sent in session.messages.items()},
                stop_reason=stop_reason,
            )
            chosen = table.reward_of(name, self._settings, self._permissions, JudgesRecorder(self._journal), self._ends)
            rewards.check_own(name, chosen.location, own)
            with self._missing_allowed(name):
                values = await rewards.evaluate(chosen.location, chosen.function, rollout)
                for agent, value in values.items():
                    if (name, agent) not in recorded.values():
                        await session.reward(value, name, agent=agent)
        with self._missing_allowed("reward"):
            self._check_scored(session, stop_reason)

    @contextlib.contextmanager
    def _missing_allowed(self, name: str) -> Iterator[None]:
        """Suppress a missing score that is not needed, or that is a rejection according to the settings; any other is
        raised.
        """
        try:
            yield
        except rewards.NoScoreError as error:
            if self._settings.missing_score == "error":
                raise
            reason = recordable(self._permissions.conceal(message_of(error)))
            shown = self._permissions.conceal(_traceback(error))
            log.warning("no score rollout_id=%s: %s%s", self._journal.rollout_id, reason, shown)
            if self._settings.missing_score == "reject":
                self.missing_scores[name] = reason

    def _check_scored(self, session: Session, stop_reason: str) -> None:
        """Raises NoScoreError if an agent that is trained on has no reward that counts.

        If the turns are over before any was given, the reward is 0.
        """
        settings = self._settings
        if settings.policy == "demonstration" or settings.missing_score == "unneeded" or stop_reason == MAX_TURNS:
            return
        if self.missing_scores or self._journal.num_open or session.failure is not None:
            return  # there is a reason already
        if without := rewards.unscored(self._journal.steps, self._journal.rewards, settings, session.opponents):
            is_recorded = settings.environment == RECORDED  # `finetuning.reward_function` runs nothing for it
            where = "trajectory_builders.X.rewards" if is_recorded else "finetuning.reward_function.name"
            is_final = is_recorded and not settings.rewards  # a reward function may score the agents the next time
            raise (rewards.FinalNoScoreError if is_final else rewards.NoScoreError)(
                f"agents without a reward: {', '.join(without)} (one of weight 0 does not count); give one in "
                f"environment {settings.environment} by `await session.reward(...)`, which does nothing without "
                f"`await`, or name a reward function or evaluator that scores them ({where})"
            )


class JudgesRecorder:
    """Records calls to judges as steps, in the journal of one attempt."""

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


async def _stop(play: "asyncio.Task[str]", rollout_id: str) -> None:
    """Cancel what still runs; code that will not stop is left alone, and can record nothing any more."""
    if not play.done():
        play.cancel()
        await asyncio.wait({play}, timeout=GRACE_S)
    if play.done():
        retrieve_exception(play)
    else:
        log.warning(
            "environment ignores its cancellation and keeps running in the background rollout_id=%s", rollout_id
        )
        play.add_done_callback(retrieve_exception)


def _copied(step: StepRecorded) -> StepRecorded:
    """A copy whose JSON values are its own: the steps of a conversation share messages."""
    values = {name: plain(getattr(step, name), name) for name in ("data", "metadata", "usage_info")}
    return step.model_copy(update=values)


def _with_location(error: BaseException) -> str:
    """An error of rollstream, with the file and line of users' code that it came from."""
    location = called_at(error)
    return f"{message_of(error)} ({location})" if location else message_of(error)


def _traceback(error: BaseException | None) -> str:
    """The lines of an exception's traceback, if others' code raised it or caused it."""
    chain = error
    while chain is not None and not is_of_users(chain):
        chain = chain.__cause__
    if error is None or chain is None:
        return ""
    return traceback_of(error)
