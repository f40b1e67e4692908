"""`trainer_adapters.X._type: rollstream`: submissions to the log, whose batches the learner trains.

Status is a fold over the log, so it answers after completion, and after a restart of the process.
"""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rollstream.eventlog import codec
from rollstream.harness.components import epochs, run_end
from rollstream.harness.components.interfaces import TrainerAdapter
from rollstream.harness.components.submission import epoch_of, num_members, submitted_groups
from rollstream.harness.config.components import written_of
from rollstream.harness.config.file import Loaded
from rollstream.harness.config.jobs import check_submission
from rollstream.harness.config.resolve import run_config_of
from rollstream.harness.runs.backend import Backend, open_backend, opened
from rollstream.harness.runs.preflight import is_served
from rollstream.schemas.config import OURS
from rollstream.schemas.errors import ConfigError, RollstreamError
from rollstream.schemas.events import EpochSealed
from rollstream.schemas.finetuning import (
    FinetuneConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    Trajectory,
    TrajectoryCollection,
)

FINAL = (TrainingStatusEnum.COMPLETED, TrainingStatusEnum.FAILED, TrainingStatusEnum.CANCELED)
RUN_NAME = "finetune"
"""Of a run that nobody has named."""
NOTHING_TRAINED = "No trajectories to train on"

logger = logging.getLogger(__name__)


class RollstreamTrainerAdapter(TrainerAdapter):
    """Submits to the run that is open in its workspace; opens one where nobody has. Connects to nothing before."""

    def __init__(self, adapter_config: Any) -> None:
        """The configuration has what `OurAdapterFields` says."""
        super().__init__(adapter_config)
        self._workspace: Path = adapter_config.workspace
        self._submitted: dict[str, int] = {}
        """Epoch by digest of what was submitted for it."""

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Take the configuration, and open the run's backend if nobody has. Raises RollstreamError.

        What an earlier process has submitted is sealed when this returns.
        """
        await super().initialize(run_config)
        if opened(self._workspace) is None:
            await open_backend(self.loaded(run_config), self._workspace, RUN_NAME)
        await self._begin_to_serve()
        backend = self._backend()
        for epoch in sorted(backend.job.submitted.keys() - backend.job.seals.keys()):
            await epochs.sealed(backend, epoch)  # so that nobody begins it again
        if not await self.is_healthy():
            raise ConfigError(f"trainer_adapters: the log of workspace {self._workspace} does not answer")

    def loaded(self, run_config: FinetuneConfig) -> Loaded:
        """The configuration of a run that is opened here, and the part of it that is stored. Raises ConfigError."""
        config = run_config_of(run_config)
        return Loaded(config, written_of(config), run_config)

    async def _begin_to_serve(self) -> None:
        """Start now: rollouts at the endpoint need it before anything is submitted."""
        backend = self._backend()
        if backend.config.served is not None:
            await backend.begin()
            version = backend.progress.version
            await backend.wait_for(lambda: is_served(backend.config, backend.progress, version) or None)

    async def is_healthy(self) -> bool:
        """Whether the log answers, its services are up and, once a job waits, a learner has taken it."""
        backend = opened(self._workspace)
        if backend is None:
            return False
        try:
            backend.check_services()
            await backend.log.end_offsets("jobs")
        except (RollstreamError, OSError) as error:
            logger.warning("not healthy: %s", error)
            return False
        return backend.job_progress.started is None or backend.spec.model_group in backend.view.claimed

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Have the learner train on these groups, in their order, with their rewards.

        Trajectories that say what is recorded travel by reference; others are written to the log first. The same
        collection gives the same reference. Raises ValueError if there is nothing to train on, ConfigError for what
        cannot be trained on, RunFailedError if the run or its services are over.
        """
        groups = [group for group in trajectories.trajectories if group]
        if not groups:
            raise ValueError("no trajectories to submit: every group is empty")
        backend = self._backend()
        check_submission(backend.spec, sum(map(num_members, groups)))
        await backend.begin()
        digest = codec.canonical_digest(trajectories.model_dump(mode="json"))
        epoch = self._submitted.get(digest, epoch_of(backend, groups))
        if epoch not in backend.job.seals:
            submitted = await submitted_groups(backend, epoch, groups)
            await epochs.submit(backend, epoch, submitted)
        self._submitted[digest] = epoch
        seal = await epochs.sealed(backend, epoch)
        if not seal.num_batches:
            causes = ", ".join(f"{count} {cause}" for cause, count in backend.job.rejected.get(epoch, {}).items())
            logger.warning("epoch %d: nothing is trained of what was submitted (rejected: %s)", epoch, causes)
        return self._ref(backend, trajectories.run_id, seal)

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """The status of a submission, from the log as read so far."""
        backend = self._backend()
        backend.check_services()
        return status_of(backend, ref)

    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        """The final status. Looks again when the log has news, and every `poll_interval` seconds at the latest.

        Where the model is served, its new version is too by then, so that what is rolled out there next is on-policy;
        once the run is over nothing is rolled out any more, and nothing is waited for. Raises what a service failed
        with.
        """
        backend = self._backend()
        while True:
            found = status_of(backend, ref)
            if found.status in FINAL and (backend.is_over or _is_served(backend, found)):
                return found
            await backend.changed(max(poll_interval, 0.001))

    @property
    def log_run_id(self) -> str:
        """The run's id on the log, which a trainer's own may differ from."""
        return self._backend().run.started.run_id

    @property
    def next_epoch(self) -> int:
        """The first epoch that is not sealed."""
        return epochs.next_epoch(self._backend())

    @property
    def seals(self) -> Mapping[int, EpochSealed]:
        """By epoch, as far as the run has come."""
        return self._backend().job.seals

    def tell_curriculum(self, percentile: float) -> None:
        """How far the trainer's curriculum has opened: recorded in the seal of every epoch submitted from now on."""
        backend = opened(self._workspace)
        if backend is not None:
            backend.curriculum_percentile = percentile

    def tell_empty(self, epoch: int, cause: str) -> None:
        """Nothing of an epoch is submitted, and why: a key of `untrained.EMPTY`."""
        backend = opened(self._workspace)
        if backend is not None:
            backend.empty_epochs[epoch] = cause

    def tell_left_out(self, epoch: int, trajectories: Iterable[Trajectory]) -> None:
        """The trajectories that the trainer's curriculum left out of an epoch; a component left out all others."""
        backend = opened(self._workspace)
        if backend is not None:
            names = (str((one.metadata or {}).get("trajectory_id")) for one in trajectories)
            backend.left_out[epoch + backend.epoch_offset] = frozenset(names)

    async def finish(self, outcome: tuple[bool, str] | None) -> None:
        """End a run that was opened here, and let go of it: completed, failed with a reason, or left open (None)."""
        backend = opened(self._workspace)
        if backend is None or not backend.is_own:
            return
        try:
            if outcome is not None and not backend.is_finished:
                await run_end.finish(backend, is_completed=outcome[0], message=outcome[1])
        finally:
            await backend.close()

    def log_progress(self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Into the log of this process."""
        logger.info("training of run %s: %s", ref.run_id, metrics)

    def _backend(self) -> Backend:
        backend = opened(self._workspace)
        if backend is None:
            raise ConfigError(f"trainer_adapters: no run is open in workspace {self._workspace}; call initialize first")
        return backend

    def _ref(self, backend: Backend, run_id: str, seal: EpochSealed) -> TrainingJobRef:
        return TrainingJobRef(
            run_id=run_id,
            backend=OURS,
            metadata={
                "run_id": backend.run.started.run_id,
                "job_id": backend.spec.job_id,
                "submission_id": backend.job.submitted.get(seal.epoch),
                "epoch": seal.epoch,
                "batch_index": seal.next_batch_index - 1 if seal.num_batches else None,
            },
        )


def _is_served(backend: Backend, status: TrainingJobStatus) -> bool:
    """Whether the version that an epoch was completed with is served; one that trained nothing has none."""
    version = (status.metadata or {}).get("version")
    return version is None or is_served(backend.config, backend.progress, int(version))


def status_of(backend: Backend, ref: TrainingJobRef) -> TrainingJobStatus:
    """A fold's answer: pending until the epoch is sealed, completed once its version is published."""
    metadata = ref.metadata or {}
    epoch = int(metadata.get("epoch", -1))
    status, message, percent = _state(backend, epoch)
    version = backend.job.yields.get(epoch)
    return TrainingJobStatus(
        run_id=ref.run_id,
        backend=ref.backend,
        status=status,
        progress=percent,
        message=message,
        metadata={**metadata, "version": version},
    )


def _state(backend: Backend, epoch: int) -> tuple[TrainingStatusEnum, str | None, float]:
    progress, job = backend.progress, backend.job_progress
    seal, version = backend.job.seals.get(epoch), backend.job.yields.get(epoch)
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
