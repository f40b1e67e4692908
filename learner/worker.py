"""The learner's loop: every open job of its model groups in turn, and the handling of a job that fails."""

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.blocking_calls import NotNeededError, Retry
from rollstream.eventlog.log import EventLog
from rollstream.learner.checkpoints.faults import Faults
from rollstream.learner.collection import NeedsReader
from rollstream.learner.inbox import Inbox
from rollstream.learner.job_run import JobRun, LearnerContext
from rollstream.learner.model.loading import described_bases
from rollstream.learner.model.ranks import Ranks
from rollstream.learner.publisher import Publisher
from rollstream.schemas.errors import (
    FencedError,
    LogError,
    RollstreamError,
    TruncatedError,
    VersionDivergedError,
)
from rollstream.schemas.events import JobCancelled, JobFailed, JobSubmitted
from rollstream.schemas.permissions import NOTHING, Permissions
from rollstream.schemas.settings import EXTERNAL, FROZEN
from rollstream.schemas.variables import MAX_JOB_ERROR, recordable

logger = logging.getLogger(__name__)

POLL_S = 1.0


class Worker:
    """A learner process without its settings: give it a started log and an artifact store."""

    def __init__(
        self,
        log: EventLog,
        artifacts: ArtifactStore,
        *,
        name: str,
        checkpoints: Path,
        model_groups: tuple[str, ...] = (),
        threads: int | None = None,
        retry: Retry = Retry(),  # noqa: B008 -- frozen
        permissions: Permissions = NOTHING,
        ranks: Ranks = Ranks(),  # noqa: B008 -- a process alone has no state
    ) -> None:
        """`model_groups`: those to serve; none: every one that has an open job, what-ifs excepted. `permissions`: what
        jobs may name.

        `retry`: how long an artifact store that is away is tried again before the job fails. `ranks`: the processes
        that train together, of which this one is the first.
        """
        self._log = log
        self._artifacts = artifacts
        self._name = name
        self._checkpoints = checkpoints
        self._model_groups = model_groups
        self._threads = threads
        self._retry = retry
        self._permissions = permissions
        self._ranks = ranks
        self._needs = NeedsReader(log)
        self._publishers: dict[str, Publisher] = {}
        self._runs: dict[str, JobRun] = {}
        self._logged_bases = ""

    async def run(self) -> None:
        """Serve jobs until cancelled. Raises FencedError, VersionDivergedError, and LogError if the log is gone."""
        file = self._checkpoints / f"{quote(self._name, safe='')}.position.json"
        inbox = await Inbox.open(self._log, self._artifacts, file=file, model_groups=self._model_groups)
        training = ThreadPoolExecutor(max_workers=1, thread_name_prefix="training")
        writing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="writing")
        context = LearnerContext(
            self._log,
            inbox,
            training,
            writing,
            self._checkpoints,
            self._threads,
            self._retry,
            self._permissions,
            self._ranks,
        )
        logger.info("ready")
        try:
            while True:
                is_busy = await self._cancel_ended(context)
                current = await self._current(context)
                self._log_bases(current)
                for job in current:
                    is_busy |= await self._serve(job, context, is_alone=len(current) == 1)
                await inbox.poll(timeout_s=0.0 if is_busy else POLL_S)
                inbox.save()
        except asyncio.CancelledError:
            inbox.save(every_s=0.0)
            raise
        finally:
            await self._close(list(self._runs))
            for executor in (training, writing):
                await asyncio.to_thread(executor.shutdown)
            await inbox.close()

    async def _current(self, context: LearnerContext) -> list[JobSubmitted]:
        """The first open job of every model group; runs of closed jobs are let go, and groups whose run is over."""
        state = context.inbox.state
        current = [queue[0] for queue in state.queues.values()]
        self._publishers = {group: one for group, one in self._publishers.items() if group in state.groups}
        open_jobs = {job.job_id for job in current}
        await self._drop([group for group, run in self._runs.items() if run.job.job_id not in open_jobs])
        return current

    def _log_bases(self, current: Sequence[JobSubmitted]) -> None:
        """Log what several model groups in training hold in memory, once for each set of them."""
        models = {job.model_group: job.settings.model for job in current if job.settings.kind not in (EXTERNAL, FROZEN)}
        found = described_bases(models, self._ranks.num) if len(models) > 1 else ""
        if found not in ("", self._logged_bases):
            logger.info("base models: %s", found)
        self._logged_bases = found

    async def _close(self, model_groups: list[str]) -> None:
        """Drop runs, and the data that they read ahead."""
        for run in [self._runs.pop(group) for group in model_groups]:
            await run.close()

    async def _drop(self, model_groups: list[str]) -> None:
        """Drop runs, with the models that other processes have of them."""
        dropped = [self._runs[group] for group in model_groups]
        await self._close(model_groups)
        for run in dropped:
            await run.drop()

    async def _cancel_ended(self, context: LearnerContext) -> bool:
        """Cancel open jobs of runs that are over."""
        current = await self._current(context)
        jobs = [job for job in context.inbox.state.to_cancel() if job in current]
        for job in jobs:
            event = JobCancelled(
                run_id=job.run_id,
                time_ms=job.time_ms,
                job_id=job.job_id,
                model_group=job.model_group,
                cause=JobCancelled.BY_END,
            )
            await self._log.send(event)
        if jobs:
            await context.inbox.catch_up(("jobs",))
        return bool(jobs)

    async def _serve(self, job: JobSubmitted, context: LearnerContext, *, is_alone: bool) -> bool:
        """Take a job one piece further; False if it waits. Its own failure is an event and not the worker's end.

        Any other exception ends the worker: a restart tries the same again, until it fails the job (see `Faults`).
        """
        try:
            is_busy = await self._advance(job, context, is_alone=is_alone)
        except FencedError:
            raise
        except NotNeededError as error:
            logger.info("job=%s is over: %s", job.job_id, error)
            return True
        except VersionDivergedError as error:
            await self._fail(job, context, error)
            raise
        except RollstreamError as error:
            if self._ranks.is_stuck:
                self._keep(job, error)
                raise
            if isinstance(error, LogError) and not isinstance(error, TruncatedError):
                raise
            await self._fail(job, context, error)
            return True
        except Exception as error:
            self._keep(job, error)
            raise
        return is_busy

    def _keep(self, job: JobSubmitted, error: BaseException) -> None:
        """Keep an exception that ends this process, so that it does not end each one that is started after it."""
        run = self._runs.get(job.model_group)
        index = run.index if run is not None and run.job.job_id == job.job_id else None
        Faults(self._checkpoints, job, self._ranks.index).keep(error, index, is_certain=self._ranks.is_stuck)

    async def _advance(self, job: JobSubmitted, context: LearnerContext, *, is_alone: bool) -> bool:
        run = self._runs.get(job.model_group)
        if run is not None and run.job.job_id == job.job_id:
            is_busy = await run.advance(is_alone=is_alone)
            if is_busy:
                await context.inbox.catch_up(("jobs",))
            return is_busy
        if not context.inbox.is_followed(job):
            await context.inbox.follow(job)
            if not context.inbox.is_followed(job) or job.run_id in context.inbox.state.ended_runs:
                return True
        publisher = self._publishers.get(job.model_group)
        if publisher is None:
            publisher = Publisher(
                self._log,
                self._artifacts,
                context.inbox,
                self._needs,
                job.model_group,
                self._name,
                retry=self._retry,
                num_ranks=self._ranks.num,
            )
            await publisher.claim(job)
            self._publishers[job.model_group] = publisher
        run = JobRun(job, context, publisher)
        try:
            await run.start()
        except RollstreamError:
            await run.drop()
            raise
        self._runs[job.model_group] = run
        return True

    async def _fail(self, job: JobSubmitted, context: LearnerContext, error: RollstreamError) -> None:
        """Say that a job has failed. Raises FencedError if that is for another learner to say by now."""
        reason = recordable(self._permissions.conceal(str(error)), MAX_JOB_ERROR) or type(error).__name__
        logger.error("job=%s failed: %s", job.job_id, reason)
        publisher = self._publishers.get(job.model_group)
        if publisher is not None:
            await publisher.check_owner()
        await self._drop([group for group in self._runs if group == job.model_group])
        event = JobFailed(
            run_id=job.run_id,
            time_ms=job.time_ms,
            job_id=job.job_id,
            model_group=job.model_group,
            error=reason,
        )
        await self._log.send(event)
        await context.inbox.catch_up(("jobs",))
