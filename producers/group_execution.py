"""One task from its request to its settled group: waits for weights and a slot, opens the group, runs what is missing.

A group is settled when each member has a complete attempt or a final failure, or enough members are complete; a failed
attempt is tried again until none is left, one whose producer was lost is not counted.
"""

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollstream.eventlog.attempts import Cause, counts_as_attempt
from rollstream.eventlog.codec import encode
from rollstream.eventlog.failpoints import failpoint
from rollstream.eventlog.log import Encoded, EventLog, Record
from rollstream.producers.engines.base import Engine
from rollstream.producers.league.draw import opponents_of, seats_of
from rollstream.producers.league.opponents import OpponentWeights
from rollstream.producers.rollout.continuing import RecordedAttempt
from rollstream.producers.slots import Pace, Slot, Slots
from rollstream.producers.steps_writer import Outbox, StepsWriter
from rollstream.producers.takeover import ForeignWrites, GroupProgress, MemberState
from rollstream.producers.taking_up import continued_attempts, extend
from rollstream.schemas import ids
from rollstream.schemas.errors import ModelError, NotAllowedError
from rollstream.schemas.events import (
    GroupStarted,
    RolloutEnded,
    RolloutFailed,
    RolloutStarted,
    StepRecorded,
    TaskRequested,
)
from rollstream.schemas.revisions import NEWEST_GROUP_REVISION
from rollstream.schemas.settings import EXTERNAL, RolloutSettings
from rollstream.schemas.variables import conceal

RUN_ENDED = "run_ended"
EXTENSION_SHARE = 0.1
"""Share of a group's time by which a waiting member extends its deadline, and which a killed producer may cost it."""
MAX_LOST = 8
"""Attempts of a member beyond `max_attempts` that lost producers may cost; one that kills its producer has an end."""

logger = logging.getLogger(__name__)


class RecordRollout(Protocol):
    """`attempt.record_rollout`: plays one attempt and emits its events; the last one is terminal.

    `is_last`: whether a failure of it is final. `acknowledged`: returns once all that was emitted is acknowledged.
    `before`: what a process that is gone has recorded of the attempt, which goes on from there.
    """

    async def __call__(
        self,
        task: TaskRequested,
        *,
        member: int,
        attempt: int,
        is_last: bool,
        engine: Engine,
        emit: Callable[[Encoded], Awaitable[None]],
        clock: Callable[[], int],
        acknowledged: Callable[[], Awaitable[None]],
        before: RecordedAttempt | None = None,
    ) -> None: ...


class Weights(Protocol):
    """The part of the weight follower that a task waits for."""

    async def wait_for(self, model_group: str, version: int) -> None:
        """Return once the engine holds at least `version`. Raises NotAllowedError if it may not load it."""
        ...


@dataclass(frozen=True)
class WorkerContext:
    """Objects and settings that all partitions of one process share."""

    log: EventLog
    engine: Engine
    weights: Weights
    rollout: RecordRollout
    dead_letter: Callable[[Record, BaseException], Awaitable[object]]
    slots: Slots
    runs: frozenset[str]
    """Runs whose tasks are worked on; empty: all runs."""
    name: str
    refusal: Callable[[RolloutSettings], str | None] = lambda settings: None
    """Reason why a task must not run at all: it names something that this process does not allow."""
    pace: Pace = field(default_factory=Pace)
    opponents: OpponentWeights | None = None
    """Loads the weights of opponents; None: tasks that have some are refused."""


class GroupExecution:
    """One task of an owned partition while it is not settled."""

    def __init__(
        self,
        producer: WorkerContext,
        writer: StepsWriter,
        foreign_writes: ForeignWrites,
        task: TaskRequested,
        state: GroupProgress | None,
    ) -> None:
        """`state`: of the group, if an earlier owner has started it."""
        self.task = task
        self.state = state
        """None until the group's start is acknowledged."""
        self._producer = producer
        self._writer = writer
        self._foreign_writes = foreign_writes
        self._stop: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._is_recovered = state is not None
        self._continued: dict[tuple[int, int], RecordedAttempt] = {}
        """Attempts that another process began and this one continues, by member and attempt."""
        self._turn = producer.slots.next_turn(is_first=task.purpose == "validation")
        self._first_slot: Slot | None = None
        """Slot that the group was started with, until its first rollout takes it."""
        self._held: list[str] = []
        """Opponents whose weights stay loaded meanwhile."""
        self._num_waiting = 0
        """Members in a wait that does not count as rollout time."""
        self._left_ms = 0
        """Event time that the group still had when the first of them began to wait."""

    def stop(self, cause: str) -> None:
        """Complete the group without running more of it."""
        if not self._stop.done():
            self._stop.set_result(cause)

    async def run(self) -> None:
        """Complete the task. Raises the exception of a send, and errors that break the contract of `RecordRollout`.

        1. Open the group once its first rollout has a slot, or decide what its predecessor left open. 2. Run what is
        missing. 3. Repeat that if the group is not settled because a zombie wrote meanwhile.
        """
        refusal = None if self._stop.done() else self._producer.refusal(self.task.settings)
        if refusal is not None:
            return await self._refuse(refusal)
        try:
            if self.state is None:
                stopped = await self._unless_stopped(self._may_start(), None)
                self.state = await self._open(size=0 if stopped else self.task.num_rollouts, void_cause=stopped)
            else:
                self._continued = await continued_attempts(self._producer.log, self._writer, self.task, self.state)
                await self._fail_lost(self.state)
            await self._complete_with_foreign_writes(self.state)
        except (NotAllowedError, ModelError) as error:  # of weights that are waited for; those of a rollout are its own
            await self._refuse(
                str(error), Cause.NOT_ALLOWED if isinstance(error, NotAllowedError) else Cause.ENGINE_ERROR
            )
        finally:
            self._producer.pace.leave(self.task.group_id)
            self._producer.slots.release(self._first_slot)
            if self._producer.opponents is not None:
                self._producer.opponents.release(self._held)

    async def _complete_with_foreign_writes(self, state: GroupProgress) -> None:
        await self._complete(state)
        while (found := await self._foreign_writes.reopened(state)) is not None:
            self.state = state = found
            await self._fail_lost(state)
            await self._complete(state)

    async def _refuse(self, reason: str, cause: str = Cause.NOT_ALLOWED) -> None:
        """Complete a task of which nothing is run: a group of one rollout, which failed for good with the reason."""
        reason = conceal(reason)
        logger.error("task refused: %s", reason)  # without an id: `finetune` shows each message once
        logger.info("refused group_id=%s", self.task.group_id)
        if self.state is None:
            self.state = await self._open(size=1, void_cause=None)
        else:
            await self._fail_lost(self.state)
        await self._fail_rest(self.state, cause, reason)

    async def _complete(self, state: GroupProgress) -> None:
        if state.is_settled:
            return
        stopped = await self._unless_stopped(self._run_missing(state), state)
        if stopped is not None:
            cause = Cause.TIMEOUT if stopped == Cause.TIMEOUT else Cause.CANCELLED
            await self._fail_rest(state, cause, f"its group was stopped: {stopped}")

    async def _unless_stopped(self, work: Coroutine[Any, Any, None], state: GroupProgress | None) -> str | None:
        """Do the work; returns why it was cut short, None if it was not. `state`: whose deadline cuts it short."""
        task = asyncio.create_task(work)
        try:
            while not (task.done() or self._stop.done()):
                left_s = (state.deadline_ms - self._writer.clock()) / 1000 if state is not None else None
                if left_s is not None and left_s <= 0:
                    return Cause.TIMEOUT
                await asyncio.wait({task, self._stop}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else self._stop.result()
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def _may_start(self) -> None:
        """Return with the first rollout's slot, once its weights are there."""
        await self._weights()
        await self._producer.pace.admit(self.task)
        self._first_slot = self._producer.slots.ask(self._turn)
        await self._first_slot

    async def _weights(self) -> None:
        if self.task.settings.policy == EXTERNAL:
            return
        for model_group in sorted(set(self.task.settings.agents.values())):
            await self._producer.weights.wait_for(model_group, self.task.wanted_version(model_group))
        await self._hold_opponents()

    async def _hold_opponents(self) -> None:
        """Have the opponents' weights until the task is settled. No slot is held yet, so who holds both goes on."""
        players, league = sorted(set(opponents_of(self.task).values())), self.task.settings.league
        if league is None or not players or self._held:
            return
        if self._producer.opponents is None:
            raise ModelError(f"task {self.task.group_id} has opponents; give the worker OpponentWeights")
        await self._producer.opponents.hold(players, league.max_loaded, self.task.run_id)
        self._held = players

    async def _open(self, *, size: int, void_cause: str | None) -> GroupProgress:
        started = self._started(size=size, void_cause=void_cause)

        def opened(offset: int) -> None:  # at once, because no commit may pass the record
            end_ms = started.time_ms + started.timeout_ms
            self.state = GroupProgress(started.group_id, started.size, end_ms, offset, enough=started.enough)

        await self._writer.send(encode(started), opened)
        failpoint("producer/after-group-started")
        assert self.state is not None
        return self.state

    def _started(self, *, size: int, void_cause: str | None) -> GroupStarted:
        task, settings = self.task, self.task.settings
        return GroupStarted(
            run_id=task.run_id,
            time_ms=self._writer.clock(),
            group_id=task.group_id,
            example_id=task.example_id,
            job_id=task.job_id,
            epoch=task.epoch,
            index=task.index,
            purpose=task.purpose,
            policy=settings.policy,
            size=size,
            minimum=task.minimum if size else 0,
            enough=task.enough if size == task.num_rollouts else 0,
            drop_dead_branches=settings.drop_dead_branches,
            timeout_ms=self._timeout_ms(),
            seed=task.seed,
            reward_weights=settings.reward_weights,
            void_cause=void_cause,
            owner=self._producer.name,
            revision=NEWEST_GROUP_REVISION,
            **seats_of(task)._asdict(),
        )

    async def _run_missing(self, state: GroupProgress) -> None:
        if self._is_recovered:
            await self._without_time(state, asyncio.ensure_future(self._weights()))
        async with asyncio.TaskGroup() as running:
            missing = [one for one in state.members.items() if not one[1].is_settled]
            tasks = [running.create_task(self._run_member(state, *one)) for one in missing]
            for task in tasks:
                task.add_done_callback(lambda _: state.is_settled and [one.cancel() for one in tasks])
        for index, member in (one for one in missing if not one[1].is_settled):
            for attempt in sorted(member.open_attempts):
                await self._fail(index, attempt, Cause.OVERSAMPLED, "enough of its group are complete", is_final=True)

    async def _run_member(self, state: GroupProgress, index: int, member: MemberState) -> None:
        slots = self._producer.slots
        while not member.is_settled:
            slot, self._first_slot = self._first_slot or slots.ask(self._turn), None
            try:
                await self._without_time(state, slot)
                going = [attempt for owner, attempt in self._continued if owner == index]
                await self._run_attempt(index, going[0] if going else member.next_attempt)
            finally:
                slots.release(slot)

    async def _without_time(self, state: GroupProgress, awaited: "asyncio.Future[None]") -> None:
        """Await without counting it as rollout time: while a member waits, the group's time left does not change.

        The deadline moves on in the log ahead of event time, so that no record closes the group meanwhile.
        """
        if awaited.done():
            return awaited.result()
        step_ms = self._timeout_ms() * EXTENSION_SHARE
        if not self._num_waiting:
            self._left_ms = max(state.deadline_ms - self._writer.clock(), int(step_ms * 2))
        self._num_waiting += 1
        try:
            while not awaited.done():
                until_ms = min(step_ms, state.deadline_ms - self._writer.clock() - step_ms)
                await asyncio.wait({awaited}, timeout=max(until_ms, 0) / 1000)
                is_over = awaited.done() and self._num_waiting == 1
                if self._writer.clock() + self._left_ms - state.deadline_ms >= (1 if is_over else step_ms / 2):
                    await extend(self._writer, self._producer.name, self.task, state, self._left_ms)
            awaited.result()
        finally:
            self._num_waiting -= 1
            awaited.cancel()

    def _timeout_ms(self) -> int:
        return max(1, int(self.task.settings.group_timeout_s * 1000))

    async def _run_attempt(self, member: int, attempt: int) -> None:
        async with Outbox(self._writer, functools.partial(self._landed, member=member, attempt=attempt)) as outbox:
            await self._producer.rollout(
                self.task,
                member=member,
                attempt=attempt,
                is_last=self._num_failed(member) + 1 >= self.task.settings.max_attempts,
                engine=self._producer.engine,
                emit=outbox.put,
                clock=self._writer.clock,
                acknowledged=outbox.acknowledged,
                before=self._continued.pop((member, attempt), None),
            )
            if outbox.terminal is None:
                raise RuntimeError(f"{self._rollout_id(member, attempt)} returned without a terminal event")

    async def _send(self, encoded: Encoded, member: int, attempt: int) -> None:
        await self._writer.send(encoded, lambda _: self._landed(encoded, member, attempt))

    def _landed(self, encoded: Encoded, member: int, attempt: int) -> None:
        assert self.state is not None
        event = encoded.event
        if isinstance(event, StepRecorded):
            failpoint("producer/after-step")
        elif isinstance(event, RolloutStarted):
            self.state.begin(member, attempt)
        elif isinstance(event, RolloutEnded):
            self.state.complete(member, attempt)
        elif isinstance(event, RolloutFailed):
            self.state.fail(member, attempt, is_final=event.is_final, is_counted=counts_as_attempt(event.cause))

    def _num_failed(self, member: int) -> int:
        return self.state.members[member].num_failed if self.state is not None else 0

    async def _fail_lost(self, state: GroupProgress) -> None:
        """Decide what the predecessor left open and nobody continues."""
        going = {index for index, _ in self._continued}
        for index, member in state.members.items():
            if member.is_settled or index in going:
                continue
            max_attempts = self.task.settings.max_attempts
            is_used_up = member.num_failed >= max_attempts or member.next_attempt >= max_attempts + MAX_LOST
            for attempt in sorted(member.open_attempts):
                is_final = is_used_up and attempt + 1 == member.next_attempt
                await self._fail(index, attempt, Cause.PRODUCER_LOST, "its producer is gone", is_final=is_final)
            if is_used_up and not member.is_settled:
                await self._fail_next(index, member, Cause.PRODUCER_LOST, "its attempts are used up")

    async def _fail_rest(self, state: GroupProgress, cause: str, message: str) -> None:
        """Fail for good what is not settled."""
        for index, member in state.members.items():
            for attempt in sorted(member.open_attempts):
                await self._fail(index, attempt, cause, message, is_final=True)
            if not member.is_settled:
                await self._fail_next(index, member, cause, message)

    async def _fail_next(self, member: int, state: MemberState, cause: str, message: str) -> None:
        attempt = state.next_attempt
        await self._send(encode(self._rollout_started(member, attempt)), member, attempt)
        await self._fail(member, attempt, cause, message, is_final=True)

    async def _fail(self, member: int, attempt: int, cause: str, message: str, *, is_final: bool) -> None:
        await self._send(encode(self._failed(member, attempt, cause, message, is_final=is_final)), member, attempt)

    def _rollout_started(self, member: int, attempt: int) -> RolloutStarted:
        return RolloutStarted(
            run_id=self.task.run_id,
            time_ms=self._writer.clock(),
            group_id=self.task.group_id,
            rollout_id=self._rollout_id(member, attempt),
            member=member,
            attempt=attempt,
            seed=ids.member_seed(self.task.seed, member),
        )

    def _failed(self, member: int, attempt: int, cause: str, message: str, *, is_final: bool) -> RolloutFailed:
        return RolloutFailed(
            run_id=self.task.run_id,
            time_ms=self._writer.clock(),
            group_id=self.task.group_id,
            rollout_id=self._rollout_id(member, attempt),
            cause=cause,
            message=message,
            is_final=is_final,
        )

    def _rollout_id(self, member: int, attempt: int) -> str:
        return ids.rollout_id(self.task.group_id, member, attempt)
