"""`trainer_adapters.X._type: rollstream`: submissions to the log, whose batches the learner trains.

Status is a fold over the log, so it answers after completion, and after a restart of the process.
"""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rollstream.harness.components import epochs, run_completion
from rollstream.harness.components.interfaces import TrainerAdapter
from rollstream.harness.components.submission import (
    digest_of,
    epoch_of,
    num_members,
    prepared_groups,
    submitted_groups,
)
from rollstream.harness.config.components import written_of
from rollstream.harness.config.file import Loaded
from rollstream.harness.config.jobs import check_submission
from rollstream.harness.config.resolve import run_config_of
from rollstream.harness.runs.preflight import is_served
from rollstream.harness.runs.run_handle import RunHandle, open_handle, opened, require_opened
from rollstream.schemas.config import OURS
from rollstream.schemas.errors import ConfigError, RollstreamError
from rollstream.schemas.events import EpochSealed
from rollstream.schemas.finetuning import (
    FinetuneConfig,
    TrainerAdapterConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    Trajectory,
    TrajectoryCollection,
)

FINAL = (TrainingStatusEnum.COMPLETED, TrainingStatusEnum.FAILED, TrainingStatusEnum.CANCELED)
RUN_NAME = "finetune"
"""Name of a run that was given none."""
NOTHING_TRAINED = "No trajectories to train on"

logger = logging.getLogger(__name__)


class RollstreamTrainerAdapter(TrainerAdapter):
    """Submits to the run that is open in its workspace; opens one where nobody has. Connects to nothing before."""

    def __init__(self, adapter_config: Any) -> None:
        """The configuration has what `OurAdapterFields` says."""
        super().__init__(adapter_config)
        self._workspace: Path = adapter_config.workspace
        self._submitted: dict[str, int] = {}
        """Epochs by digest of their submissions."""

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Take the configuration, and open the run if nobody has. Raises RollstreamError.

        What an earlier process has submitted is sealed when this returns.
        """
        await super().initialize(run_config)
        if opened(self._workspace) is None:
            await open_handle(self.loaded(run_config), self._workspace, RUN_NAME)
        await self._begin_to_serve()
        handle = self._handle()
        await epochs.seal_submitted(handle)
        if not await self.is_healthy():
            raise ConfigError(
                f"trainer_adapters: the log of workspace {self._workspace} does not answer; check that its broker runs"
            )

    def loaded(self, run_config: FinetuneConfig) -> Loaded:
        """The configuration of a run that is opened here, and the part of it that is stored. Raises ConfigError."""
        config = run_config_of(run_config)
        return Loaded(config, written_of(config), run_config)

    async def _begin_to_serve(self) -> None:
        """Start now: rollouts at the endpoint need it before anything is submitted."""
        handle = self._handle()
        if handle.config.served is not None:
            await handle.begin()
            version = handle.progress.version
            await handle.wait_for(lambda: is_served(handle.config, handle.progress, version) or None)

    async def is_healthy(self) -> bool:
        """Whether the log answers, its services are up and, once a job waits, a learner has taken it."""
        handle = opened(self._workspace)
        if handle is None:
            return False
        try:
            handle.check_services()
            await handle.log.end_offsets("jobs")
        except (RollstreamError, OSError) as error:
            logger.warning("not healthy: %s", error)
            return False
        return handle.job_progress.started is None or handle.spec.model_group in handle.view.claimed

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Have the learner train on these groups, in their order, with their rewards.

        Trajectories that say what is recorded travel by reference; others are written to the log first. The same
        collection gives the same reference. Raises ValueError if there is nothing to train on, ConfigError for
        trajectories that cannot be trained on, RunFailedError if the run or its services are over.
        """
        trajectories, groups = prepared_groups(trajectories)
        handle = self._handle()
        check_submission(handle.spec, sum(map(num_members, groups)))
        await handle.begin()
        digest = digest_of(trajectories)
        epoch = self._submitted.get(digest, epoch_of(handle, groups))
        if epoch not in handle.job.seals:
            submitted = await submitted_groups(handle, epoch, groups)
            await epochs.submit(handle, epoch, submitted)
        self._submitted[digest] = epoch
        seal = await epochs.sealed(handle, epoch)
        if not seal.num_batches:
            causes = ", ".join(f"{count} {cause}" for cause, count in handle.job.rejected.get(epoch, {}).items())
            logger.warning("epoch %d: none of the submitted trajectories are trained on (rejected: %s)", epoch, causes)
        return self._ref(handle, trajectories.run_id, seal)

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """The status of a submission, from the log as read so far."""
        handle = self._handle()
        handle.check_services()
        return status_of(handle, ref)

    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        """The final status. Looks again when the log has news, and every `poll_interval` seconds at the latest.

        Where the model is served, its new version is too by then, so that what is rolled out there next is on-policy;
        once the run is over nothing is rolled out any more, and nothing is waited for. Raises what a service failed
        with.
        """
        handle = self._handle()
        while True:
            found = status_of(handle, ref)
            if found.status in FINAL and (handle.is_over or _is_served(handle, found)):
                return found
            await handle.changed(max(poll_interval, 0.001))

    @property
    def log_run_id(self) -> str:
        """The run's id on the log, which a trainer's own may differ from."""
        return self._handle().run.started.run_id

    @property
    def next_epoch(self) -> int:
        """The first epoch that is not sealed."""
        return epochs.next_epoch(self._handle())

    @property
    def seals(self) -> Mapping[int, EpochSealed]:
        """Seals by epoch, as far as the run has come."""
        return self._handle().job.seals

    def record_curriculum(self, percentile: float) -> None:
        """Record the share of examples that the trainer's curriculum admits in the seal of every epoch submitted from
        now on.
        """
        handle = opened(self._workspace)
        if handle is not None:
            handle.curriculum_percentile = percentile

    def record_empty_epoch(self, epoch: int, cause: str) -> None:
        """Nothing of an epoch is submitted, and why: a key of `untrained.EMPTY`."""
        handle = opened(self._workspace)
        if handle is not None:
            handle.empty_epochs[epoch + handle.epoch_offset] = cause

    def record_left_out(self, epoch: int, trajectories: Iterable[Trajectory]) -> None:
        """The trajectories that the trainer's curriculum left out of an epoch; a component left out all others."""
        handle = opened(self._workspace)
        if handle is not None:
            names = (str((one.metadata or {}).get("trajectory_id")) for one in trajectories)
            handle.left_out[epoch + handle.epoch_offset] = frozenset(names)

    async def finish(self, outcome: tuple[bool, str] | None) -> None:
        """End a run that was opened here, and let go of it: completed, failed with a reason, or left open (None)."""
        handle = opened(self._workspace)
        if handle is None or not handle.is_own:
            return
        try:
            if outcome is not None and not handle.is_finished:
                await run_completion.finish(handle, is_completed=outcome[0], message=outcome[1])
        finally:
            await handle.close()

    def log_progress(self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Into the log of this process."""
        logger.info("training of run %s: %s", ref.run_id, metrics)

    def _handle(self) -> RunHandle:
        return require_opened(self._workspace, "call initialize of the trainer adapter first")

    def _ref(self, handle: RunHandle, run_id: str, seal: EpochSealed) -> TrainingJobRef:
        return TrainingJobRef(
            run_id=run_id,
            backend=OURS,
            metadata={
                "run_id": handle.run.started.run_id,
                "job_id": handle.spec.job_id,
                "submission_id": handle.job.submitted.get(seal.epoch),
                "epoch": seal.epoch,
                "batch_index": seal.next_batch_index - 1 if seal.num_batches else None,
            },
        )


def num_ahead(config: TrainerAdapterConfig) -> int:
    """Number of epochs that may be in training while the next one is rolled out."""
    return getattr(config, "max_staleness", 0)


def _is_served(handle: RunHandle, status: TrainingJobStatus) -> bool:
    """Whether the version that an epoch was completed with is served; one that trained nothing has none."""
    version = (status.metadata or {}).get("version")
    return version is None or is_served(handle.config, handle.progress, int(version))


def status_of(handle: RunHandle, ref: TrainingJobRef) -> TrainingJobStatus:
    """A fold's answer: pending until the epoch is sealed, completed once its version is published."""
    metadata = ref.metadata or {}
    epoch = int(metadata.get("epoch", -1))
    status, message, percent = _state(handle, epoch)
    version = handle.job.yields.get(epoch)
    return TrainingJobStatus(
        run_id=ref.run_id,
        backend=ref.backend,
        status=status,
        progress=percent,
        message=message,
        metadata={**metadata, "version": version},
    )


def _state(handle: RunHandle, epoch: int) -> tuple[TrainingStatusEnum, str | None, float]:
    progress, job = handle.progress, handle.job_progress
    seal, version = handle.job.seals.get(epoch), handle.job.yields.get(epoch)
    if seal is not None and not seal.num_batches:
        return TrainingStatusEnum.COMPLETED, NOTHING_TRAINED, 100.0
    if seal is not None and version is not None and progress.version >= version:
        return TrainingStatusEnum.COMPLETED, f"version {version} is published", 100.0
    if job.outcome == "failed":
        return TrainingStatusEnum.FAILED, job.error, 0.0
    if progress.ended is not None and progress.ended.cause == "failed":
        return TrainingStatusEnum.FAILED, progress.ended.message, 0.0
    if job.outcome is not None or progress.ended is not None:
        reason = progress.ended.cause if progress.ended is not None else job.error or str(job.outcome)
        return TrainingStatusEnum.CANCELED, f"the run is over: {reason}", 0.0
    if seal is None:
        return TrainingStatusEnum.PENDING, None, 0.0
    return TrainingStatusEnum.RUNNING, None, 0.0
