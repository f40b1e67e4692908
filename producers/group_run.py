"""One task from its request to its settled group: waits for weights, opens the group, runs what is missing.

A group is settled when each member has a complete attempt or a final failure; a failed attempt is tried again until
the attempts are used up, and one whose producer was lost is not counted. What a group is worth is decided elsewhere.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from rollstream.eventlog.failpoints import failpoint
from rollstream.eventlog.log import EventLog, Record
from rollstream.producers.engine import Engine
from rollstream.producers.recovery import PRODUCER_LOST, GroupState, Member
from rollstream.producers.session import member_seed
from rollstream.producers.steps_writer import Outbox, StepsWriter
from rollstream.producers.strangers import Strangers
from rollstream.schemas import ids
from rollstream.schemas.base import Event
from rollstream.schemas.events import (
    GroupStarted,
    RolloutEnded,
    RolloutFailed,
    RolloutStarted,
    StepRecorded,
    TaskRequested,
)

RUN_ENDED = "run_ended"
CANCELLED = "cancelled"
TIMEOUT = "timeout"
MAX_LOST = 8
"""Attempts of a member beyond `max_attempts` that lost producers may cost; one that kills its producer has an end."""


class RunRollout(Protocol):
    """`rollout.run_rollout`: one attempt, told event by event; its last event is terminal.

    Whether a failure is final is decided here, from the attempts that really failed.
    """

    async def __call__(
        self,
        task: TaskRequested,
        *,
        member: int,
        attempt: int,
        engine: Engine,
        emit: Callable[[Event], Awaitable[None]],
        clock: Callable[[], int],
    ) -> None: ...


class Weights(Protocol):
    """The part of the weight follower that a task waits for."""

    async def wait_for(self, model_group: str, version: int) -> None:
        """Return once the engine holds at least `version`."""
        ...


@dataclass(frozen=True)
class Producer:
    """What all partitions of one process share."""

    log: EventLog
    engine: Engine
    weights: Weights
    rollout: RunRollout
    dead_letter: Callable[[Record, BaseException], Awaitable[object]]
    slots: asyncio.Semaphore
    """One for each rollout that may run at the same time."""
    name: str


class GroupRun:
    """One task of an owned partition while it is not settled."""

    def __init__(
        self,
        producer: Producer,
        writer: StepsWriter,
        strangers: Strangers,
        task: TaskRequested,
        state: GroupState | None,
    ) -> None:
        """`state`: of the group, if an earlier owner has started it."""
        self.task = task
        self.state = state
        """None until the group's start is acknowledged."""
        self._producer = producer
        self._writer = writer
        self._strangers = strangers
        self._stop: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def stop(self, cause: str) -> None:
        """Settle the group without running more of it."""
        if not self._stop.done():
            self._stop.set_result(cause)

    async def run(self) -> None:
        """Settle the task. Raises what a send raised, and what breaks the contract of `RunRollout`.

        1. Open the group, or decide what its predecessor left open. 2. Run what is missing. 3. Do it again if, by what
        a zombie wrote meanwhile, the group is not settled.
        """
        if self.state is None:
            stopped = await self._unless_stopped(self._weights(), None)
            self.state = await self._open(stopped)
        else:
            await self._fail_lost(self.state)
        await self._settle(self.state)
        while (found := await self._strangers.reopened(self.state)) is not None:
            self.state = found
            await self._fail_lost(found)
            await self._settle(found)

    async def _settle(self, state: GroupState) -> None:
        if state.is_settled:
            return
        left_s = (state.deadline_ms - self._writer.clock()) / 1000
        stopped = await self._unless_stopped(self._run_missing(state), max(0.0, left_s))
        if stopped is not None:
            await self._fail_rest(state, stopped)

    async def _unless_stopped(self, work: Coroutine[Any, Any, None], timeout_s: float | None) -> str | None:
        """Do the work; returns why it was cut short, None if it was not."""
        task = asyncio.create_task(work)
        try:
            if not self._stop.done():
                await asyncio.wait({task, self._stop}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
                return None
            return self._stop.result() if self._stop.done() else TIMEOUT
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def _weights(self) -> None:
        for model_group in sorted(set(self.task.settings.agents.values())):
            await self._producer.weights.wait_for(model_group, self.task.min_version)

    async def _open(self, void_cause: str | None) -> GroupState:
        started = self._started(size=0 if void_cause else self.task.num_rollouts, void_cause=void_cause)
        offset = await self._writer.send(started)
        failpoint("producer/after-group-started")
        return GroupState(started.group_id, started.size, started.time_ms + started.timeout_ms, offset)

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
            timeout_ms=max(1, int(settings.group_timeout_s * 1000)),
            seed=task.seed,
            reward_weights=settings.reward_weights,
            agents=settings.agents,
            void_cause=void_cause,
            owner=self._producer.name,
        )

    async def _run_missing(self, state: GroupState) -> None:
        await self._weights()
        async with asyncio.TaskGroup() as running:
            for index, member in state.members.items():
                if not member.is_settled:
                    running.create_task(self._run_member(index, member))

    async def _run_member(self, index: int, member: Member) -> None:
        while not member.is_settled:
            async with self._producer.slots:
                await self._run_attempt(index, member.next_attempt)

    async def _run_attempt(self, member: int, attempt: int) -> None:
        async def send(event: Event) -> None:
            if isinstance(event, RolloutFailed):
                is_final = self._num_failed(member) + 1 >= self.task.settings.max_attempts
                event = event.model_copy(update={"is_final": is_final})
            await self._send(event, member, attempt)

        async with Outbox(send) as outbox:
            await self._producer.rollout(
                self.task,
                member=member,
                attempt=attempt,
                engine=self._producer.engine,
                emit=outbox.put,
                clock=self._writer.clock,
            )
            if outbox.terminal is None:
                raise RuntimeError(f"{self._rollout_id(member, attempt)} returned without a terminal event")

    async def _send(self, event: Event, member: int, attempt: int) -> None:
        assert self.state is not None
        if isinstance(event, RolloutEnded):
            failpoint("producer/before-rollout-ended")
        await self._writer.send(event)
        if isinstance(event, StepRecorded):
            failpoint("producer/after-step")
        elif isinstance(event, RolloutStarted):
            self.state.begin(member, attempt)
        elif isinstance(event, RolloutEnded):
            self.state.complete(member, attempt)
        elif isinstance(event, RolloutFailed):
            is_counted = event.cause != PRODUCER_LOST
            self.state.fail(member, attempt, is_final=event.is_final, is_counted=is_counted)

    def _num_failed(self, member: int) -> int:
        return self.state.members[member].num_failed if self.state is not None else 0

    async def _fail_lost(self, state: GroupState) -> None:
        """Decide what the predecessor left open."""
        for index, member in state.members.items():
            if member.is_settled:
                continue
            max_attempts = self.task.settings.max_attempts
            is_used_up = member.num_failed >= max_attempts or member.next_attempt >= max_attempts + MAX_LOST
            for attempt in sorted(member.open_attempts):
                is_final = is_used_up and attempt + 1 == member.next_attempt
                await self._fail(index, attempt, PRODUCER_LOST, "its producer is gone", is_final=is_final)
            if is_used_up and not member.is_settled:
                await self._fail_next(index, member, PRODUCER_LOST, "its attempts are used up")

    async def _fail_rest(self, state: GroupState, stopped: str) -> None:
        """Fail for good what is not settled."""
        cause = TIMEOUT if stopped == TIMEOUT else CANCELLED
        message = f"its group was stopped: {stopped}"
        for index, member in state.members.items():
            for attempt in sorted(member.open_attempts):
                await self._fail(index, attempt, cause, message, is_final=True)
            if not member.is_settled:
                await self._fail_next(index, member, cause, message)

    async def _fail_next(self, member: int, state: Member, cause: str, message: str) -> None:
        attempt = state.next_attempt
        await self._send(self._rollout_started(member, attempt), member, attempt)
        await self._fail(member, attempt, cause, message, is_final=True)

    async def _fail(self, member: int, attempt: int, cause: str, message: str, *, is_final: bool) -> None:
        await self._send(self._failed(member, attempt, cause, message, is_final=is_final), member, attempt)

    def _rollout_started(self, member: int, attempt: int) -> RolloutStarted:
        return RolloutStarted(
            run_id=self.task.run_id,
            time_ms=self._writer.clock(),
            group_id=self.task.group_id,
            rollout_id=self._rollout_id(member, attempt),
            member=member,
            attempt=attempt,
            seed=member_seed(self.task, member),
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
