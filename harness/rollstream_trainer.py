"""`trainers.X._type: rollstream`: a run epoch by epoch, with validation, curriculum, early stopping and files.

Epoch after epoch: validation if it is due, rollouts, curriculum, submission, training. With a staleness bound of k up
to k epochs are rolled out while earlier ones are trained.
"""

import asyncio
import logging
import math
import random
import secrets
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollstream.harness.classic.curriculum import choose, name_of, resumed, reward_stats, settings_of
from rollstream.harness.classic.files import ClassicFiles
from rollstream.harness.interfaces import Trainer, TrainerAdapter
from rollstream.harness.plateau import is_plateau
from rollstream.harness.rollstream_adapter import FINAL, NOTHING_TRAINED, RollstreamTrainerAdapter
from rollstream.processors.curriculum import Progress, begin
from rollstream.schemas import ids
from rollstream.schemas.config import OURS, EarlyStopping
from rollstream.schemas.errors import ComponentError, RunFailedError
from rollstream.schemas.finetuning import (
    FinetuneConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    Trajectory,
    TrajectoryCollection,
)
from rollstream.schemas.settings import CurriculumSettings

logger = logging.getLogger(__name__)


class RequiredValidationError(RunFailedError):
    """A validation failed in a run that must not go on without it."""


class RollstreamTrainer(Trainer):
    """Works with any builder and adapter; with our adapter it goes on with a run where the log says."""

    def __init__(self, trainer_config: Any, **kwargs: Any) -> None:
        """The configuration has what `OurTrainerFields` says."""
        super().__init__(trainer_config, **kwargs)
        self._early_stopping: EarlyStopping | None = trainer_config.early_stopping
        self._needs_validation: bool = trainer_config.validation_required
        self._settings = CurriculumSettings()
        self._run_id = ""
        self._first_epoch = 0
        self._is_over = False
        """The run that goes on has sealed its last epoch already."""
        self._job_refs: dict[int, TrainingJobRef] = {}
        self._statuses: dict[int, TrainingJobStatus] = {}
        self._outcome: tuple[bool, str] | None = None
        """Whether all went well, and what did not; none while it is not known."""
        self._end: str | None = None
        """Why the run ends before the epoch that is next."""
        self._files = ClassicFiles(Path())

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Initialize all three, and take up a run that goes on. Raises RollstreamError."""
        await super().initialize(run_config)
        self._files = ClassicFiles(run_config.output_dir)
        self._settings = settings_of(run_config.curriculum_learning)
        self._run_id, progress = f"{OURS}_run_{secrets.token_hex(4)}", begin(self._settings)
        adapter = self.trainer_adapter
        if isinstance(adapter, RollstreamTrainerAdapter):
            self._run_id, self._first_epoch = adapter.log_run_id, adapter.next_epoch
            progress = resumed(self._settings, adapter.seals)
            self._is_over = any(seal.is_last for seal in adapter.seals.values())
        self._note(progress)
        self._files.resume(self._run_id, self._first_epoch)

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Train up to epoch `num_epochs`; the status of every epoch that was done here, in order.

        An epoch without anything to train on is completed, and says so. Ends early after a failed one, and before one
        that there is a `reason_to_end`. Raises RollstreamError if the run, its services or its log are over.
        """
        under_way: deque[int] = deque()
        for epoch in range(num_epochs if self._is_over else self._first_epoch, num_epochs):
            try:
                ref = await self.run_epoch(epoch, self._run_id)
            except RequiredValidationError as error:
                self._statuses[epoch] = self._status(TrainingStatusEnum.FAILED, str(error))
                break
            if self._end:
                logger.info("run=%s ends before epoch=%d: %s", self._run_id, epoch, self._end)
                break
            if ref is None:
                self._statuses[epoch] = self._status(TrainingStatusEnum.COMPLETED, NOTHING_TRAINED)
            else:
                self._job_refs[epoch] = ref
                under_way.append(epoch)
            while len(under_way) > self._max_ahead and not self._failed:
                await self._complete(under_way.popleft())
            if self._failed:
                break
        while under_way and not self._failed:
            await self._complete(under_way.popleft())
        failed = self._failed
        self._outcome = (not failed, str(failed[0].message) if failed else "")
        return [self._statuses[epoch] for epoch in sorted(self._statuses)]

    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | None:
        """Validation if it is due, rollouts, curriculum, submission; None if there is nothing to train on.

        Nothing is rolled out where there is a `reason_to_end`. Raises RollstreamError; RequiredValidationError if a
        validation fails that must not.
        """
        await self._validate_if_due(epoch)
        self._end = self.reason_to_end(epoch)
        if self._end:
            return None
        assert self.trajectory_builder is not None
        meta = {"epoch": epoch, "run_id": run_id, "trainer_config": self.trainer_config}
        await self.trajectory_builder.start_run(run_id, meta)
        collection = _checked(await self.trajectory_builder.finalize(run_id, meta), epoch)
        if not any(collection.trajectories):
            logger.warning("epoch %d: no trajectories came of it", epoch)
            return None
        before = reward_stats(collection.trajectories)
        collection = self.apply_curriculum_learning(collection, epoch)
        self.log_progress(epoch, self._metrics(before, collection.trajectories))
        if not any(collection.trajectories):
            logger.warning("epoch %d: the curriculum leaves nothing to train on", epoch)
            return None
        return await self._adapter.submit(_of_epoch(collection, self._run_id, epoch))

    def reason_to_end(self, epoch: int) -> str | None:
        """Why the run ends, as completed, before this epoch; None: it goes on. Asked after the epoch's validation.

        Override it for a rule of your own: `reward_history` has what it needs.
        """
        return "validation no longer gets better" if self._has_plateaued else None

    @property
    def reward_history(self) -> Sequence[Mapping[str, Any]]:
        """`avg_reward` and what else is known of the run's epochs, oldest first; those before a restart too."""
        return tuple(self._files.rewards)

    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        """What became of every epoch's job, during the run and after it, and the histories of rewards."""
        for epoch, ref in self._job_refs.items():
            known = self._statuses.get(epoch)
            if self.trainer_adapter is not None and (known is None or known.status not in FINAL):
                self._statuses[epoch] = await self.trainer_adapter.status(ref)
        statuses = {epoch: self._statuses[epoch].model_dump(mode="json") for epoch in sorted(self._statuses)}
        return {
            "run_id": run_id,
            "num_epochs": len(self._files.metrics),
            "jobs": [{"epoch": epoch, **status} for epoch, status in statuses.items()],
            "reward_history": list(self._files.rewards),
            "validation_history": list(self._files.validations),
            "curriculum_state": self.get_curriculum_state(),
        }

    async def cleanup(self) -> None:
        """Cancel what is in flight, and end what the components opened themselves.

        What goes wrong here is raised after a run that went well, and never hides the error of another.
        """
        try:
            await _cancel(_tasks_of(self.trajectory_builder))
            if isinstance(self.trainer_adapter, RollstreamTrainerAdapter):
                await self.trainer_adapter.finish(self._outcome)
            self._files.finish(self._run_id)
        except Exception:
            if self._outcome is not None and self._outcome[0]:
                raise
            logger.exception("cleaning up failed")

    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Into the files of the run's output folder, or of another one."""
        logger.info("epoch %d: %s", epoch, metrics)
        if output_dir is not None:
            self._files.folder = Path(output_dir)
        self._files.add_epoch(self._run_id, epoch, metrics, self.get_curriculum_state())

    def apply_curriculum_learning(
        self, trajectory_collection: TrajectoryCollection, epoch: int
    ) -> TrajectoryCollection:
        """The groups to train on in this epoch, easiest first; the same collection if the curriculum is off."""
        if not self._settings.enabled:
            return trajectory_collection
        groups, state = trajectory_collection.trajectories, self._curriculum_state
        progress, kept = choose(
            groups,
            self._settings,
            Progress(state["current_percentile"], state["last_expansion_epoch"]),
            epoch,
            seed=ids.derive_seed(getattr(self._adapter.adapter_config, "seed", 0), "curriculum"),
            rng=random.Random(secrets.randbits(64)),
        )
        self._note(progress)
        state["total_groups"] = len(groups)
        state["included_groups"] = {name_of(groups[place], place, self._settings) for place, _ in kept}
        chosen = [[groups[place][member] for member in members] for place, members in kept]
        return TrajectoryCollection(trajectories=chosen, run_id=trajectory_collection.run_id)

    def _metrics(self, before: dict[str, Any], trained: list[list[Trajectory]]) -> dict[str, Any]:
        after = {f"filtered_{key.removeprefix('num_')}": value for key, value in reward_stats(trained).items()}
        percentile = self._curriculum_state["current_percentile"] if self._settings.enabled else 1.0
        return {**before, **after, "curriculum_percentile": percentile}

    async def _complete(self, epoch: int) -> None:
        self._statuses[epoch] = await self._adapter.wait_until_complete(self._job_refs[epoch])

    async def _validate_if_due(self, epoch: int) -> None:
        """Validate every so many epochs, once; a failure is noted with its reason."""
        run = self.run_config.run_configuration if self.run_config is not None else None
        if run is None or not (run.validation_dataset or run.validation_config_file):
            return
        if epoch % run.validation_interval or any(row["epoch"] == epoch for row in self._files.validations):
            return
        result = await self.run_validation_evaluation(epoch, self._run_id)
        self._files.add_validation(epoch, result)
        if self._needs_validation and "error" in result:
            raise RequiredValidationError(f"validation before epoch {epoch} failed: {result['error']}")

    def _note(self, progress: Progress) -> None:
        self._curriculum_state["current_percentile"] = progress.percentile
        self._curriculum_state["last_expansion_epoch"] = progress.last_expansion_epoch
        if isinstance(self.trainer_adapter, RollstreamTrainerAdapter):
            self.trainer_adapter.tell_curriculum(progress.percentile)

    def _status(self, status: TrainingStatusEnum, message: str) -> TrainingJobStatus:
        return TrainingJobStatus(run_id=self._run_id, backend=OURS, status=status, progress=100.0, message=message)

    @property
    def _adapter(self) -> TrainerAdapter:
        assert self.trainer_adapter is not None
        return self.trainer_adapter

    @property
    def _max_ahead(self) -> int:
        """Epochs that may be under way while the next one is rolled out."""
        return getattr(self._adapter.adapter_config, "max_staleness", 0)

    @property
    def _failed(self) -> list[TrainingJobStatus]:
        wrong = (TrainingStatusEnum.FAILED, TrainingStatusEnum.CANCELED)
        return [status for _, status in sorted(self._statuses.items()) if status.status in wrong]

    @property
    def _has_plateaued(self) -> bool:
        rewards = [row["avg_reward"] for row in self._files.validations if row.get("avg_reward") is not None]
        return is_plateau(rewards, self._early_stopping)


def _of_epoch(collection: TrajectoryCollection, run_id: str, epoch: int) -> TrajectoryCollection:
    """The collection, whose trajectories say which epoch they are of: equal ones of two epochs are two submissions."""
    groups = [
        [one if "epoch" in (one.metadata or {}) else _with_epoch(one, run_id, epoch) for one in group]
        for group in collection.trajectories
    ]
    return TrajectoryCollection(trajectories=groups, run_id=collection.run_id)


def _with_epoch(trajectory: Trajectory, run_id: str, epoch: int) -> Trajectory:
    metadata = {**(trajectory.metadata or {}), "run_id": run_id, "epoch": epoch}
    return trajectory.model_copy(update={"metadata": metadata})


def _checked(found: Any, epoch: int) -> TrajectoryCollection:
    """What a builder returned. Raises ComponentError if it is no collection, or a reward in it is no finite number."""
    if not isinstance(found, TrajectoryCollection):
        raise ComponentError(
            f"trajectory_builders: finalize returned a {type(found).__name__}, no TrajectoryCollection"
        )
    for group in found.trajectories:
        for trajectory in group:
            if not math.isfinite(trajectory.reward):
                raise ComponentError(
                    f"trajectory_builders: a trajectory of epoch {epoch} has the reward {trajectory.reward}, no finite "
                    f"number (metadata: {trajectory.metadata})"
                )
    return found


def _tasks_of(builder: Any) -> list[asyncio.Future[Any]]:
    """Evaluations that a builder written for NAT has in flight: a task, or a list of tasks, by run."""
    runs: Any = getattr(builder, "evaluation_runs", None)
    found: list[asyncio.Future[Any]] = []
    for value in runs.values() if isinstance(runs, dict) else ():
        several: Iterable[Any] = value if isinstance(value, list | tuple | set) else (value,)
        found += [one for one in several if isinstance(one, asyncio.Future)]
    return found


async def _cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    pending = [task for task in tasks if not task.done()]
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
