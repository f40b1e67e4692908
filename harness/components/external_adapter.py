"""A trainer adapter of another training backend, in a run on the log: its submissions are recorded, its status decides.

Trajectories are written to the log before they are submitted to the backend, and the submission is recorded after that,
so a resumed run submits at most the last epoch twice. The backend's references are kept in the workspace, so a resumed
run asks how the jobs of earlier epochs ended. There are no weight versions, because the backend holds the model.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from rollstream.eventlog.blocking_calls import retrying
from rollstream.eventlog.files import write_whole
from rollstream.harness.components import epochs, run_completion
from rollstream.harness.components.adapter import FINAL, RollstreamTrainerAdapter, num_ahead
from rollstream.harness.components.interfaces import TrainerAdapter
from rollstream.harness.components.submission import (
    digest_of,
    epoch_of,
    num_members,
    prepared_groups,
    submitted_groups,
)
from rollstream.harness.config.jobs import check_submission
from rollstream.harness.runs.run_handle import RunHandle
from rollstream.schemas.errors import ConfigError, RollstreamError, RunFailedError, describe
from rollstream.schemas.finetuning import (
    FinetuneConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    TrajectoryCollection,
    adapter_path,
)
from rollstream.schemas.settings import EXTERNAL
from rollstream.schemas.variables import conceal

FOLDER = "training_jobs"
"""Folder in the workspace with a file a run: the jobs that its backend was given."""

logger = logging.getLogger(__name__)


class GivenJob(BaseModel):
    """A job that the backend was given; without a reference it is known by its epoch only."""

    epoch: int
    ref: TrainingJobRef | None = None
    status: TrainingStatusEnum = TrainingStatusEnum.PENDING
    message: str | None = None


_FILE = TypeAdapter(list[GivenJob])


def recording(adapter: TrainerAdapter, handle: RunHandle, finetune: FinetuneConfig) -> TrainerAdapter:
    """The adapter to bind to a trainer: our own and derived adapters as they are, any other wrapped so that it is
    recorded. Raises ConfigError for an adapter that trains by itself while its configuration is derived from ours.
    """
    if isinstance(adapter, RollstreamTrainerAdapter):
        return adapter
    if handle.spec.job.kind != EXTERNAL:
        raise ConfigError(
            f"{adapter_path(finetune)}: {type(adapter).__name__} is not derived from "
            "RollstreamTrainerAdapter, but its configuration is from RollstreamTrainerAdapterConfig, whose model the "
            "learner trains; derive both, or derive the configuration from TrainerAdapterConfig for your own backend"
        )
    return ExternalAdapter(adapter, handle)


class ExternalAdapter(RollstreamTrainerAdapter):
    """Delegates to `inner` and records its submissions on the log."""

    def __init__(self, inner: TrainerAdapter, handle: RunHandle) -> None:
        TrainerAdapter.__init__(self, inner.adapter_config)
        self._inner = inner
        self._workspace = handle.workspace
        self._submitted = {}
        self._refs: dict[str, TrainingJobRef] = {}
        """Jobs by digest of the trajectories that were handed over in this process."""
        self._file = handle.workspace / FOLDER / f"{handle.run.started.run_id}.json"
        self._given: list[GivenJob] = []

    def __getattr__(self, name: str) -> Any:
        """Other attributes of `inner`, for trainers written for it."""
        return getattr(self.__dict__["_inner"], name)

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Initialize the backend's adapter, and wait for the jobs that earlier processes gave it.

        Raises ConfigError if the backend is not healthy or the end of an earlier job cannot be found out,
        RunFailedError if one failed, which has failed the run then.
        """
        await TrainerAdapter.initialize(self, run_config)
        await self._inner.initialize(run_config)
        handle = self._handle()
        await epochs.seal_submitted(handle)
        if not await self.is_healthy():
            location = adapter_path(run_config)
            raise ConfigError(
                f"{location}: its training backend is not healthy (is_healthy() returned false); start it first"
            )
        if handle.job_progress.outcome is None:
            await self._finish_earlier(handle)

    async def is_healthy(self) -> bool:
        """The backend's answer."""
        return await self._inner.is_healthy()

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Record the groups, submit them, record the submission; returns the backend's reference.

        A process submits the same collection once. Raises ValueError if there is nothing to train on, ConfigError for
        trajectories that cannot be recorded, RunFailedError if the run or its services are over.
        """
        trajectories, groups = prepared_groups(trajectories)
        digest = digest_of(trajectories)
        if digest in self._refs:
            return self._refs[digest]
        handle = self._handle()
        check_submission(handle.spec, sum(map(num_members, groups)))
        await handle.begin()
        epoch = epoch_of(handle, groups)
        submitted = await submitted_groups(handle, epoch, groups)
        ref = await self._inner.submit(trajectories)
        self._refs[digest] = ref
        self._given.append(GivenJob(epoch=epoch, ref=ref))
        await self._keep()  # before the seal, after which no process submits this epoch again
        await epochs.submit(handle, epoch, submitted)
        await epochs.sealed(handle, epoch)
        return ref

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """The backend's answer."""
        self._handle().check_services()
        return await self._kept(ref, await self._inner.status(ref))

    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        """The backend's final status. Raises RunFailedError if the run or its services are over before that."""
        status = await self._handle().during(self._inner.wait_until_complete(ref, poll_interval))
        return await self._kept(ref, status)

    def log_progress(self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Delegates to the backend's adapter."""
        self._inner.log_progress(ref, metrics, output_dir)

    async def _finish_earlier(self, handle: RunHandle) -> None:
        """Wait for the jobs of sealed epochs. Raises as `initialize`.

        Our trainer waits for a job before it submits those that are further ahead, so only the newest can have been in
        training. The file of a run that an earlier release began lacks the others.
        """
        seals = handle.job.seals
        self._given = [one for one in _read(self._file) if one.epoch in seals]
        known = {one.epoch for one in self._given if one.ref is not None or one.status in FINAL}
        trained = sorted(epoch for epoch, seal in seals.items() if seal.num_trained_groups)
        missing = [epoch for epoch in trained[-num_ahead(self.adapter_config) - 1 :] if epoch not in known]
        if missing:
            raise ConfigError(_unknown(self._file, self._given, missing))
        answered = {one.epoch for one in self._given if one.ref is None and one.status in FINAL}  # by the user
        for job in self._given:
            if job.ref is not None and job.status not in FINAL and job.epoch not in answered:
                logger.info("waiting for the training job of epoch=%d, which an earlier process submitted", job.epoch)
                await self._finish_job(job.epoch, job.ref)
        failure = run_completion.failure_of(self._given)
        if failure is not None:
            await run_completion.finalize_run(handle, is_completed=False, message=failure)
            raise RunFailedError(f"a training job of an earlier process failed: {failure}")

    async def _finish_job(self, epoch: int, ref: TrainingJobRef) -> None:
        """Wait for a job of an earlier process. Raises ConfigError if the backend raises, which may not know it."""
        try:
            await self.wait_until_complete(ref)
        except RollstreamError:
            raise
        except Exception as error:
            logger.info("the backend raised for the training job of epoch=%d", epoch, exc_info=error)
            raise ConfigError(
                f"{self._file}: the training backend did not say how the training job of epoch {epoch} ended: "
                f"{conceal(describe(error))}; resume the run once it can, or, if it no longer knows the job, write how "
                f'it ended in the file beside the others, e.g. {_entry(epoch)} (or "failed")'
            ) from error

    async def _kept(self, ref: TrainingJobRef, status: TrainingJobStatus) -> TrainingJobStatus:
        """The same status; a final one is kept for a process that resumes the run."""
        for job in self._given:
            if job.ref == ref and job.status not in FINAL and status.status in FINAL:
                job.status, job.message = TrainingStatusEnum(status.status), conceal(status.message or "") or None
                await self._keep()
        return status

    async def _keep(self) -> None:
        """Write the jobs to the workspace, retrying while the disk is full; they are on the disk then."""

        async def here(call: Callable[[], None]) -> None:
            call()  # one write after the other

        try:
            content = _FILE.dump_json(self._given, indent=1)
        except ValueError as error:  # a process that resumes the run asks its user
            logger.warning("the reference of a training job cannot be kept, as it is not JSON: %s", error)
            bare = [one if _is_json(one) else one.model_copy(update={"ref": None}) for one in self._given]
            content = _FILE.dump_json(bare, indent=1)
        await retrying(lambda: write_whole(self._file, content), f"write {self._file}", in_thread=here)


def _is_json(job: GivenJob) -> bool:
    try:
        return bool(job.model_dump_json())
    except ValueError:
        return False


def _read(path: Path) -> list[GivenJob]:
    """The jobs in a file; none if it is missing. Raises ConfigError if it cannot be read."""
    try:
        return _FILE.validate_json(path.read_bytes())
    except FileNotFoundError:
        return []
    except (OSError, ValidationError) as error:
        raise ConfigError(f"{path}: the training jobs of the run cannot be read: {error}; restore the file") from error


def _unknown(path: Path, given: list[GivenJob], missing: list[int]) -> str:
    """The error that nothing says how the jobs of some epochs ended."""
    several = ", ".join(map(str, missing))
    entry = _entry(missing[0])
    example = f" beside the others, e.g. {entry}" if given else f", e.g. [{entry}]"
    return (
        f"{path}: no reference to the training job of epoch {several}, so the backend cannot be asked how it ended; "
        f'look there, and write it in the file{example} (or "failed"), for each of these epochs'
    )


def _entry(epoch: int) -> str:
    """The text in the file for a job that is completed."""
    return GivenJob(epoch=epoch, status=TrainingStatusEnum.COMPLETED).model_dump_json(exclude_defaults=True)
