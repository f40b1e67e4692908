"""A trainer adapter of another training backend, in a run on the log: its submissions are recorded, its status decides.

Trajectories are written to the log before they are submitted to the backend, and the submission is recorded after that,
so a resumed run submits at most the last epoch twice. There are no weight versions, because the backend holds the
model.
"""

from typing import Any

from rollstream.eventlog import codec
from rollstream.harness.components import epochs
from rollstream.harness.components.adapter import RollstreamTrainerAdapter
from rollstream.harness.components.interfaces import TrainerAdapter
from rollstream.harness.components.submission import epoch_of, num_members, submitted_groups
from rollstream.harness.config.jobs import check_submission
from rollstream.harness.runs.run_handle import RunHandle
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.finetuning import FinetuneConfig, TrainingJobRef, TrainingJobStatus, TrajectoryCollection
from rollstream.schemas.settings import EXTERNAL


def recording(adapter: TrainerAdapter, handle: RunHandle, finetune: FinetuneConfig) -> TrainerAdapter:
    """The adapter to bind to a trainer: our own and derived adapters as they are, any other wrapped so that it is
    recorded. Raises ConfigError for an adapter that trains by itself while its configuration is derived from ours.
    """
    if isinstance(adapter, RollstreamTrainerAdapter):
        return adapter
    if handle.spec.job.kind != EXTERNAL:
        raise ConfigError(
            f"trainer_adapters.{finetune.trainer_adapter}: {type(adapter).__name__} is not derived from "
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

    def __getattr__(self, name: str) -> Any:
        """Other attributes of `inner`, for trainers written for it."""
        return getattr(self.__dict__["_inner"], name)

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Initialize the backend's adapter. Raises ConfigError if the backend is not healthy."""
        await TrainerAdapter.initialize(self, run_config)
        await self._inner.initialize(run_config)
        handle = self._backend()
        for epoch in sorted(handle.job.submitted.keys() - handle.job.seals.keys()):
            await epochs.sealed(handle, epoch)  # so that no other process starts it again
        if not await self.is_healthy():
            location = f"trainer_adapters.{run_config.trainer_adapter}"
            raise ConfigError(
                f"{location}: its training backend is not healthy (is_healthy() returned false); start it first"
            )

    async def is_healthy(self) -> bool:
        """The backend's answer."""
        return await self._inner.is_healthy()

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Record the groups, submit them, record the submission; returns the backend's reference.

        A process submits the same collection once. Raises ValueError if there is nothing to train on, ConfigError for
        trajectories that cannot be recorded, RunFailedError if the run or its services are over.
        """
        groups = [group for group in trajectories.trajectories if group]
        if not groups:
            raise ValueError(
                "no trajectories to submit: every group is empty; relax the curriculum or the dataset's filter"
            )
        digest = codec.canonical_digest(trajectories.model_dump(mode="json"))
        if digest in self._refs:
            return self._refs[digest]
        handle = self._backend()
        check_submission(handle.spec, sum(map(num_members, groups)))
        await handle.begin()
        epoch = epoch_of(handle, groups)
        submitted = await submitted_groups(handle, epoch, groups)
        ref = await self._inner.submit(trajectories)
        self._refs[digest] = ref
        await epochs.submit(handle, epoch, submitted)
        await epochs.sealed(handle, epoch)
        return ref

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """The backend's answer."""
        self._backend().check_services()
        return await self._inner.status(ref)

    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        """The backend's final status. Raises RunFailedError if the run or its services are over before that."""
        return await self._backend().during(self._inner.wait_until_complete(ref, poll_interval))

    def log_progress(self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Delegates to the backend's adapter."""
        self._inner.log_progress(ref, metrics, output_dir)
