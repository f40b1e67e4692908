"""`trajectory_builders.X._type: rollstream`: tasks out to the producers, closed groups back as trajectories."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollstream.eventlog.log import EventLog
from rollstream.harness.components import epoch_events, epochs
from rollstream.harness.components.interfaces import EvaluationOutput, EvaluatorOutput, TrajectoryBuilder, item_of
from rollstream.harness.components.trajectories import read_groups
from rollstream.harness.config import dataset
from rollstream.harness.runs.run_handle import RunHandle, require_opened
from rollstream.harness.runs.validation import Validation, evaluated
from rollstream.schemas import ids
from rollstream.schemas.config import ValidationSection
from rollstream.schemas.events import GroupClosed, TaskRequested
from rollstream.schemas.finetuning import Trajectory, TrajectoryCollection

logger = logging.getLogger(__name__)


class RollstreamTrajectoryBuilder(TrajectoryBuilder):
    """Rolls every example of the dataset out; waits for its groups on the log. Connects to nothing by itself."""

    def __init__(self, trajectory_builder_config: Any) -> None:
        """The configuration has what `OurBuilderFields` says."""
        super().__init__(trajectory_builder_config)
        self._workspace: Path = trajectory_builder_config.workspace
        self._epochs: dict[str, int] = {}
        """Epoch in progress by the trainer's run id."""
        self._next_epoch = 0
        """The one after the last that was rolled out here, which may never be submitted."""

    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        """Ask for the rollouts of an epoch: `meta["epoch"]`, else the one after the last.

        What the log has of it already is not asked for again. Raises ValueError if the run has an epoch in progress,
        ConfigError without an open run, RunFailedError if the run or its services are over, or no rollout completed in
        several epochs.
        """
        if run_id in self._epochs:
            raise ValueError(f"run {run_id} is already in progress: finalize it first")
        handle = self._handle()
        epoch = _epoch_of(handle, meta)
        self._epochs[run_id] = epoch
        try:
            await handle.begin()
            await handle.wait_for_disk()
            await handle.check_rollouts()
            await epochs.start(handle, epoch, len(handle.examples))
            await self._ask(handle, _tasks(handle, epoch))
        except BaseException:
            del self._epochs[run_id]
            raise

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        """The trajectories of the epoch in progress, grouped by example, once all its groups are closed.

        Raises ValueError if none is in progress, RunFailedError if the run or its services are over.
        """
        if run_id not in self._epochs:
            raise ValueError(f"no rollouts of run {run_id} are in progress: call start_run first")
        handle = self._handle()
        epoch = self._epochs[run_id]
        try:
            wanted = _group_ids(handle, epoch)
            closed = await epochs.closed(handle, wanted)
            groups = await self.trajectories_of(handle.log, closed)
        finally:
            del self._epochs[run_id]
        self._next_epoch = epoch + 1
        return TrajectoryCollection(trajectories=[group for group in groups if group], run_id=run_id)

    async def prepared(self, handle: RunHandle, tasks: Sequence[TaskRequested]) -> Sequence[TaskRequested]:
        """The tasks as producers are asked for them. Override it to make their rollouts otherwise."""
        return tasks

    async def _ask(self, handle: RunHandle, tasks: Sequence[TaskRequested]) -> None:
        """Send the tasks whose groups the log does not know to be closed."""
        missing = [task for task in tasks if task.group_id not in handle.job.closed]
        await handle.send(await self.prepared(handle, missing) if missing else ())

    async def trajectories_of(self, log: EventLog, groups: Sequence[GroupClosed]) -> list[list[Trajectory]]:
        """Trajectories of closed groups for training: a list for each group. Raises ArtifactError, TruncatedError."""
        return await read_groups(log, groups)

    async def run_eval(self) -> EvaluationOutput:
        """Roll a dataset out once, without training on it: that of `run_configuration`, with its configuration.

        An example without a complete rollout is an item with an error and no score.
        """
        handle = self._handle()
        evaluation = self._evaluation(handle)
        await handle.begin()
        epoch = max(epochs.next_epoch(handle), self._next_epoch)
        tasks = evaluation.tasks(epoch, min_version=epochs.newest_planned(handle), time_ms=epochs.time_ms(handle))
        wanted = [task.group_id for task in tasks]
        with handle.job.awaiting(wanted):
            await self._ask(handle, tasks)
            closed = await epochs.closed(handle, wanted)
        items = tuple(item_of(group) for group in closed)
        version = max((member.max_version for group in closed for member in group.members), default=None)
        return EvaluationOutput(((self._reward_name(), EvaluatorOutput(items)),), metadata={"version": version})

    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Into the log of this process."""
        logger.info("rollouts of run %s: %s", run_id, metrics)

    def _handle(self) -> RunHandle:
        remedy = "give a trainer adapter of _type rollstream, or derived from that, the same `workspace`"
        return require_opened(self._workspace, f"{remedy}, and initialize it before this trajectory builder is used")

    def _evaluation(self, handle: RunHandle) -> Validation:
        """The current `run_configuration`, which differs while a trainer validates."""
        run = self.run_config.run_configuration if self.run_config is not None else None
        file, named = getattr(run, "config_file", None), getattr(run, "dataset", None)
        section = ValidationSection(
            dataset=dataset.validation_section(Path(named), handle.config.dataset) if named else None,
            config=Path(file) if isinstance(file, str | Path) else None,
        )
        examples, settings = list(handle.examples), handle.spec.rollout
        if section.dataset is not None or section.config is not None:
            config = handle.config.model_copy(update={"validation": section})
            examples, settings = evaluated(config, handle.run)
        return Validation(handle.run.started, handle.spec, examples, settings)

    def _reward_name(self) -> str:
        reward = self.trajectory_builder_config.reward
        return reward.name if reward is not None else "reward"


def _epoch_of(handle: RunHandle, meta: dict[str, Any] | None) -> int:
    written = (meta or {}).get("epoch")
    epoch = epochs.next_epoch(handle) if written is None else int(written) + handle.epoch_offset
    if epoch in handle.job.seals:
        raise ValueError(f"epoch {epoch} of run {handle.run.started.run_id} was submitted already; start a later epoch")
    return epoch


def _tasks(handle: RunHandle, epoch: int) -> list[TaskRequested]:
    """One an example."""
    return epoch_events.epoch_tasks(
        handle.run.started,
        handle.spec,
        handle.examples,
        epoch,
        min_version=epoch_events.min_version(handle.spec, epochs.base_version(handle), handle.job.num_planned),
        time_ms=epochs.time_ms(handle),
    )


def _group_ids(handle: RunHandle, epoch: int) -> list[str]:
    run_id = handle.run.started.run_id
    job = ids.name_of(handle.spec.job_id)
    return [ids.group_id(run_id, job, epoch, index) for index in range(len(handle.examples))]
