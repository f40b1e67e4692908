"""Conducts one run on its log: follows it, writes its missing events, watches its services, and closes them in order.

There are two front ends: `Conductor.conduct`, where the log itself asks for epoch after epoch, and the handle of
harness' components, which ask for them.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Self, TypeVar

from rollstream.eventlog.broker.watch import keep_running
from rollstream.eventlog.codec import kind_of
from rollstream.eventlog.log import EventLog, Record, TopicPartition
from rollstream.eventlog.reading import decode_or_none, read_to_end
from rollstream.eventlog.recent_set import RecentSet
from rollstream.harness.runs.driver import is_over, lacking, located, reason_to_stop
from rollstream.harness.runs.follower import Follower, follow, records_of
from rollstream.harness.runs.outcome import NOT_ITS_OWN
from rollstream.harness.runs.plan import RunPlan
from rollstream.harness.runs.progress import Progress
from rollstream.harness.runs.run_context import RunContext, WorkspaceLease
from rollstream.harness.runs.validation import Validation
from rollstream.schemas import ids
from rollstream.schemas.base import Event
from rollstream.schemas.config import RunConfig
from rollstream.schemas.errors import LogError, RunFailedError
from rollstream.schemas.events import EpochStarted, GroupClosed, RolloutFailed, RunStarted
from rollstream.schemas.events.recorded import MADE_ELSEWHERE

POLL_S = 0.5
MAX_SENT = 20_000
"""Events that are remembered as sent: those of the newest epochs."""
MAX_FAILED_EPOCHS = 3
"""Epochs in a row without a completed rollout, after which a run stops."""
FAILURE_KINDS = frozenset({"group_closed", "rollout_failed"})
FAILURE_POLL_S = 1.0

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Conductor:
    """A run that is conducted. Use it as an async context, or `start` and `close` it."""

    def __init__(
        self,
        log: EventLog,
        run: RunPlan,
        on_progress: Callable[[Progress], None] = lambda _: None,
        *,
        on_activity: Callable[[], None] = lambda: None,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        """All callbacks run in the event loop and return at once.

        `on_progress`: after every batch of records, and every POLL_S without any. `on_activity`: groups were closed, or
        the run came further, so restarts of services are forgiven. `on_event`: every event of the run, closed groups
        included, which are not decoded otherwise.
        """
        self.log = log
        self.run = run
        self.progress = Progress(run.started.run_id)
        self.on_activity = on_activity
        self.on_begun: Callable[[], None] = lambda: None
        """Called once the start of a new run is acknowledged."""
        self._on_progress = on_progress
        self._on_event = on_event
        self.num_changes = 0
        """Number of changes of the run's log, and of services that ended."""
        self._changed = asyncio.Event()
        self._sent = RecentSet(MAX_SENT)
        self._held = AsyncExitStack()
        self._background: list[asyncio.Task[None]] = []
        self._following: asyncio.Task[None] | None = None
        """The background task that reads the log."""
        self._completed: dict[str, int] = {}
        """Newest epoch by job with a completed rollout, at least the newest that was sealed before this process."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self, *background: Coroutine[Any, Any, None]) -> None:
        """Begin to follow the log, and to look after what else the run needs. Raises LogError."""
        try:
            await self._begin_to_follow()
        except BaseException:
            for work in background:
                work.close()
            await self.close()
            raise
        for work in background:
            self._run_in_background(work)

    async def _begin_to_follow(self) -> None:
        run_id = self.run.started.run_id
        follower = await follow(self.log, run_id, from_end=self.run.is_new, on_event=self._on_event)
        self._held.push_async_callback(follower.close)
        self.progress = await follower.catch_up()
        jobs = self.progress.jobs.items()
        self._completed = {job_id: job.sealed.epoch for job_id, job in jobs if job.sealed is not None}
        self._following = self._run_in_background(self._follow(follower))

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._wake())
        self._background.append(task)
        return task

    async def close(self) -> None:
        """Let go of everything, in order. Closing twice changes nothing."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        self._background.clear()
        await self._held.aclose()

    def hold(self, stack: AsyncExitStack) -> None:
        """Let go of `stack` too when this is closed."""
        self._held.push_async_callback(stack.aclose)

    async def conduct(
        self, validation: Validation | None = None, may_start_epoch: Callable[[], bool] = lambda: True
    ) -> Progress:
        """Give the log what it lacks until nothing is left to conduct; where the run is then.

        A restart writes what is lacking again under the same ids. Raises what the log, a service or the broker failed
        with. `may_start_epoch`: whether there is room on the disk for a next epoch.
        """
        return await self._unless(self._conducted(validation, may_start_epoch), self._failed())

    async def _conducted(self, validation: Validation | None, may_start_epoch: Callable[[], bool]) -> Progress:
        validated = -1
        while True:
            seen = self.num_changes
            await self.check_rollouts()
            await self.announce(may_start_epoch, validation)
            validated = await self._validate(validation, validated)
            if is_over(self.progress, self.run.jobs, validation):
                return self.progress
            await self.changed(POLL_S, since=seen)

    async def _validate(self, validation: Validation | None, asked: int) -> int:
        """Ask for the validation that is due, once; the newest epoch asked for. Only the run's end waits for it."""
        progress = self.progress
        epoch = validation.due_epoch(progress) if validation is not None and progress.ended is None else None
        if validation is None or epoch is None or epoch <= asked:
            return asked
        await self.log.send_all(validation.due_tasks(epoch, progress))
        return epoch

    async def announce(
        self, may_start_epoch: Callable[[], bool] = lambda: True, validation: Validation | None = None
    ) -> None:
        """Write what the log lacks at this moment for the run to go on: a new run at first, then its first job.

        The run's start is acknowledged before its jobs are sent: they are in another topic, and a job without its run's
        start could be all that a kill leaves.
        An epoch whose validation an evaluation gate judges begins once that is over.
        """
        progress = self.progress
        events = self._unsent(lacking(progress, self.run.started, self.run.jobs))
        if validation is not None:
            events = [event for event in events if not _is_held(event, validation, progress)]
        if any(isinstance(event, EpochStarted) for event in events) and not may_start_epoch():
            return
        events = await located(self.log, progress, events)
        beginning = [event for event in events if isinstance(event, RunStarted)]
        await self.send(beginning)
        if beginning:
            self.on_begun()
        await self.send(events)

    async def check_rollouts(self) -> None:
        """Raises RunFailedError once none of a job's rollouts has completed in the newest MAX_FAILED_EPOCHS epochs.

        Only epochs that were sealed since this process began count, so that the run can go on once the cause is
        removed. Rollouts that are made elsewhere do not count, nor do those of validations.
        """
        for spec in self.run.jobs:
            job = self.progress.job(spec.job_id)
            if spec.is_frozen or spec.plan.tasks_of or spec.rollout.environment in MADE_ELSEWHERE:
                continue
            if job.sealed is None or job.sealed.is_last:
                continue
            known = max(self._completed.get(spec.job_id, -1), job.rewards[-1][0] if job.rewards else -1)
            if job.sealed.epoch - known >= MAX_FAILED_EPOCHS:
                await self._check_epochs(spec.job_id, known, job.sealed.epoch)

    async def _check_epochs(self, job_id: str, known: int, newest: int) -> None:
        run_id, failed, last = self.run.started.run_id, set[int](), None
        async for received in records_of(self.log, "groups", run_id, run_id, ()):
            event = received.event
            if not isinstance(event, GroupClosed) or event.job_id != job_id or event.purpose != "train":
                continue
            if not known < event.epoch <= newest:
                continue
            if event.members or any(one.outcome in ("complete", "rejected") for one in event.attempts):
                known = event.epoch
            elif any(one.outcome == "failed" and one.cause not in NOT_ITS_OWN for one in event.attempts):
                failed.add(event.epoch)
                last = event
        failed = {epoch for epoch in failed if epoch > known}
        if last is None or len(failed) < MAX_FAILED_EPOCHS:
            self._completed[job_id] = known if failed else newest
            return
        failure = await _failure_of(self.log, last)
        why = "" if failure is None else f"; the last failed by {failure.cause}: {failure.message}"
        raise RunFailedError(
            f"no rollout of job {job_id} completed in the last {len(failed)} epochs{why}; remove the cause"
        )

    async def send(self, events: Sequence[Event]) -> None:
        """Write events that this process has not written yet, in order; returns when they are acknowledged."""
        unsent = self._unsent(events)
        if unsent:
            await self.log.send_all(unsent)
            for event in unsent:
                self._sent.add(event.event_id)

    def _unsent(self, events: Sequence[Event]) -> list[Event]:
        return [event for event in events if event.event_id not in self._sent]

    async def wait_for(self, answer: Callable[[], T | None]) -> T:
        """The first result of `answer` that is not None; it is called again whenever the run's log has changed.

        Raises RunFailedError if the run ends, its job cannot be done or its services fail before there is an answer.
        """
        while True:
            found = answer()
            if found is not None:
                return found
            self.check()
            await self.changed(None)

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which does not follow the run. Raises RunFailedError if the run or its services are
        over before, and cancels it then.
        """
        return await self._unless(work, self.wait_for(lambda: None))

    async def changed(self, timeout_s: float | None, *, since: int | None = None) -> None:
        """Wait until the run's log has changed, at most `timeout_s`; `since`: what `num_changes` was, else from now on.

        Raises what a service failed with.
        """
        self.check_services()
        if since in (None, self.num_changes):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()

    @property
    def is_over(self) -> bool:
        """Whether the log says that nothing can go on: the run has ended, or a job of it cannot be done."""
        return reason_to_stop(self.progress, self.run.jobs) is not None

    def check(self) -> None:
        """Raises RunFailedError if the run cannot go on, or what a service failed with."""
        self.check_services()
        reason = reason_to_stop(self.progress, self.run.jobs)
        if reason is not None:
            raise RunFailedError(reason)

    def check_services(self) -> None:
        """Raises what a service, the broker or the reading of the log failed with; RunFailedError if the program ends:
        its event loop cancels all tasks, and nothing of the log is read any more.
        """
        for task in self._background:
            if task.done() and not task.cancelled():
                task.result()
        if self._following is not None and self._following.cancelling():  # which may not have reached the task yet
            raise RunFailedError("the program ends, and its event loop has cancelled the run's background work")

    async def _failed(self) -> Any:
        """Raises what a service, the broker or the reading of the log fails with."""
        while True:
            await self.changed(None)

    async def _unless(self, work: Coroutine[Any, Any, T], over: Coroutine[Any, Any, Any]) -> T:
        """The result of `work`; it is cancelled once `over` raises, which is then raised."""
        working, waiting = asyncio.create_task(work), asyncio.create_task(over)
        try:
            await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else await waiting
        finally:
            for task in (working, waiting):
                task.cancel()
            await asyncio.gather(working, waiting, return_exceptions=True)

    async def _follow(self, follower: Follower) -> None:
        while True:
            before = follower.num_changes
            self._on_progress(self.progress)
            self.progress = await follower.advance(POLL_S)
            if follower.num_changes > before:
                self.on_activity()
                self._wake()

    def _wake(self) -> None:
        self.num_changes += 1
        self._changed.set()
        self._changed = asyncio.Event()


def _is_held(event: Event, validation: Validation, progress: Progress) -> bool:
    if not isinstance(event, EpochStarted) or event.job_id != validation.spec.job_id:
        return False
    return validation.holds(event.epoch, progress)


def background_work(
    lease: WorkspaceLease, run: RunContext, config: RunConfig, notify: Callable[[str], None]
) -> list[Coroutine[Any, Any, None]]:
    """Background work of a conducted run: its services and an embedded broker are kept running, and what its signs of
    life fail with is raised.

    Where services run elsewhere, and their logs with them, the first failed rollout is reported from the log.
    """
    work: list[Coroutine[Any, Any, None]] = [run.supervisor.watch()]
    if lease.broker is not None:
        work.append(keep_running(lease.broker, notify))
    if run.signs is not None:
        work.append(_raised_by(run.signs))
    if config.builder.services == "external":
        work.append(_first_failure_reported(run.log, run.run.started.run_id, notify))
    return work


async def _raised_by(signs: "asyncio.Task[None]") -> None:
    """Raises what the task fails with, which goes on until the run is ended."""
    await asyncio.shield(signs)


async def _first_failure_reported(log: EventLog, run_id: str, report: Callable[[str], None]) -> None:
    try:
        await report_first_failure(log, run_id, await ends_of(log), report)
    except LogError as error:  # the run itself meets what the log refuses
        logger.info("the first failure of run_id=%s is not looked for any more: %s", run_id, error)


async def ends_of(log: EventLog) -> dict[TopicPartition, int]:
    """Offsets from which failures are looked for. Raises LogError."""
    ends = {topic: await log.end_offsets(topic) for topic in ("steps", "groups")}
    return {TopicPartition(topic, number): end for topic, found in ends.items() for number, end in found.items()}


async def report_first_failure(
    log: EventLog, run_id: str, starts: Mapping[TopicPartition, int], report: Callable[[str], None]
) -> None:
    """Read `steps` and `groups` from `starts` on, and return once a failure of the run was reported. Raises LogError.

    A failure is known as soon as it is in `steps`, and one from before `starts` when its group is closed. Records of
    other kinds are fetched and not decoded.
    """
    reader = await log.reader(starts)
    try:
        while True:
            for record in await reader.poll(timeout_s=FAILURE_POLL_S):
                failed = await _failure_in(log, run_id, record)
                if failed is not None:
                    report(f"rollout {failed.rollout_id} failed: {failed.cause}: {failed.message}")
                    return
    finally:
        await reader.close()


async def _failure_in(log: EventLog, run_id: str, record: Record) -> RolloutFailed | None:
    is_run = record.key is not None and ids.is_key_of_run(record.key, run_id)
    received = decode_or_none(record) if is_run and kind_of(record) in FAILURE_KINDS else None
    event = None if received is None else received.event
    if isinstance(event, GroupClosed):
        return await _failure_of(log, event)
    return event if isinstance(event, RolloutFailed) and event.cause not in NOT_ITS_OWN else None


async def _failure_of(log: EventLog, closed: GroupClosed) -> RolloutFailed | None:
    """The first failure in a closed group that names what went wrong."""
    wanted = {one.rollout_id for one in closed.attempts if one.outcome == "failed" and one.cause not in NOT_ITS_OWN}
    at = closed.steps_at
    if not wanted or at is None:
        return None
    async for record in read_to_end(log, "steps", {at.partition: at.first_offset}, {at.partition: at.last_offset + 1}):
        received = decode_or_none(record)
        event = None if received is None else received.event
        if isinstance(event, RolloutFailed) and event.rollout_id in wanted:
            return event
    return None
