"""`trainers.X._type: rollstream`: conducts a run epoch by epoch, with validation, curriculum, early stopping and output
files. Each epoch: validation if it is due, rollouts, curriculum, submission, training. With a staleness bound of k, up
to k epochs are rolled out while earlier ones are trained.
"""

import asyncio
import logging
import random
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollstream.eventlog.blocking_calls import retrying
from rollstream.harness.components.adapter import FINAL, NOTHING_TRAINED, RollstreamTrainerAdapter, num_ahead
from rollstream.harness.components.curriculum import choose, name_of, resumed, reward_stats, settings_of
from rollstream.harness.components.history import EpochFiles
from rollstream.harness.components.interfaces import Trainer, TrainerAdapter
from rollstream.harness.components.submission import names_epoch, with_plain_rewards
from rollstream.learner.untrained import CURRICULUM, NO_TRAJECTORIES
from rollstream.processors.curate.curriculum import CurriculumProgress, begin
from rollstream.schemas import ids
from rollstream.schemas.config import OURS, EarlyStopping
from rollstream.schemas.errors import ComponentError, ConfigError, RunFailedError
from rollstream.schemas.finetuning import (
    FinetuneConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    Trajectory,
    TrajectoryCollection,
)
from rollstream.schemas.settings import MAX_REWARD_SUM, CurriculumSettings

logger = logging.getLogger(__name__)


class RequiredValidationError(RunFailedError):
    """A required validation failed."""


class RollstreamTrainer(Trainer):
    """Works with any builder and adapter; with our adapter it resumes a run from the log."""

    def __init__(self, trainer_config: Any, **kwargs: Any) -> None:
        """`trainer_config`: a configuration with the fields of `OurTrainerFields`."""
        super().__init__(trainer_config, **kwargs)
        self._early_stopping: EarlyStopping | None = trainer_config.early_stopping
        self._needs_validation: bool = trainer_config.validation_required
        self._settings = CurriculumSettings()
        self._run_id = ""
        self._first_epoch = 0
        self._is_over = False
        """Whether the resumed run has sealed its last epoch already."""
        self._job_refs: dict[int, TrainingJobRef] = {}
        self._statuses: dict[int, TrainingJobStatus] = {}
        self._outcome: tuple[bool, str] | None = None
        """Whether all succeeded, and the first error; None while it is not known."""
        self._end: str | None = None
        """Reason why the run ends before the next epoch."""
        self._files = EpochFiles(Path())

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Initialize all three components and restore the state of a resumed run. Raises RollstreamError."""
        await super().initialize(run_config)
        self._files = EpochFiles(run_config.output_dir)
        self._settings = settings_of(run_config.curriculum_learning)
        self._run_id, progress = f"{OURS}_run_{secrets.token_hex(4)}", begin(self._settings)
        adapter = self.trainer_adapter
        if isinstance(adapter, RollstreamTrainerAdapter):
            self._run_id, self._first_epoch = adapter.log_run_id, adapter.next_epoch
            progress = resumed(self._settings, adapter.seals)
            self._is_over = any(seal.is_last for seal in adapter.seals.values())
        self._remember(progress)
        self._files.resume(self._run_id, self._first_epoch)

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Train up to epoch `num_epochs`; returns the status of each epoch trained here, in order.

        An epoch without trajectories is completed with a message. Ends early after a failed epoch, and before an epoch
        with a `reason_to_end`. Raises RollstreamError if the run has ended or its services or its log failed,
        RuntimeError before `initialize`.
        """
        self._check_initialized()
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
                under_way.append(epoch)
            while len(under_way) > num_ahead(self._adapter.adapter_config) and not self._failed:
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

        Skips the rollouts if there is a `reason_to_end`. Raises RollstreamError; RequiredValidationError if a required
        validation fails.
        """
        self._check_initialized()
        await self._validate_if_due(epoch)
        self._end = self.reason_to_end(epoch)
        if self._end:
            return None
        assert self.trajectory_builder is not None
        meta = {"epoch": epoch, "run_id": run_id, "trainer_config": self.trainer_config}
        await self.trajectory_builder.start_run(run_id, meta)
        collection = _checked(await self.trajectory_builder.finalize(run_id, meta), epoch)
        if not any(collection.trajectories):
            logger.warning("epoch %d produced no trajectories", epoch)
            self._record_left_out(epoch, collection, collection)
            self._record_empty_epoch(epoch, NO_TRAJECTORIES)
            return None
        before = reward_stats(collection.trajectories)
        offered = collection
        collection = self.apply_curriculum_learning(collection, epoch)
        self._record_left_out(epoch, offered, collection)
        metrics = self._metrics(before, collection.trajectories)
        await self._once_disk_allows(lambda: self.log_progress(epoch, metrics))
        if not any(collection.trajectories):
            logger.warning("epoch %d: the curriculum filtered out all groups", epoch)
            self._record_empty_epoch(epoch, CURRICULUM)
            return None
        ref = await self._adapter.submit(_of_epoch(collection, self._run_id, epoch))
        self._job_refs[epoch] = ref
        return ref

    def reason_to_end(self, epoch: int) -> str | None:
        """The reason why the run ends, as completed, before this epoch; None to continue.

        Called after the epoch's validation. Override it for a custom stopping rule; `reward_history` has the rewards so
        far.
        """
        return "validation reward no longer improves" if self._should_stop_early else None

    @property
    def reward_history(self) -> Sequence[Mapping[str, Any]]:
        """`avg_reward` and further statistics by epoch, oldest first, including epochs before a restart."""
        return tuple(self._files.rewards)

    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        """The status of every epoch's job, during and after the run, and the reward histories.

        Each of `jobs` has NAT's `job_ref` (None if nothing was submitted) and `status` in addition to the epoch and the
        keys of the status; `total_epochs` counts submissions, `num_epochs` epochs.
        """
        for epoch, ref in self._job_refs.items():
            known = self._statuses.get(epoch)
            if self.trainer_adapter is not None and (known is None or known.status not in FINAL):
                self._statuses[epoch] = await self.trainer_adapter.status(ref)
        return {
            "run_id": run_id,
            "num_epochs": len(self._files.rewards),
            "total_epochs": len(self._job_refs),
            "jobs": [self._progress_record(epoch) for epoch in sorted(self._statuses)],
            "reward_history": list(self._files.rewards),
            "validation_history": list(self._files.validations),
            "curriculum_state": self.get_curriculum_state(),
        }

    def _progress_record(self, epoch: int) -> dict[str, Any]:
        ref, status = self._job_refs.get(epoch), self._statuses[epoch].model_dump(mode="json")
        return {
            "epoch": epoch,
            **status,
            "job_ref": None if ref is None else ref.model_dump(mode="json"),
            "status": status,
        }

    async def cleanup(self) -> None:
        """Cancel tasks in flight and close what the components opened.

        An error here is raised if the run succeeded, and never hides the run's own error.
        """
        try:
            await _cancel(
                [
                    *_tasks_in(getattr(self.trajectory_builder, "evaluation_runs", None)),
                    *_tasks_in(getattr(self.trainer_adapter, "training_jobs", None)),
                ]
            )
            if isinstance(self.trainer_adapter, RollstreamTrainerAdapter):
                await self.trainer_adapter.finish(self._outcome)
            if self._outcome is not None and self._outcome[0]:
                await self._once_disk_allows(lambda: self._files.finish(self._run_id))
            else:
                self._files.finish(self._run_id)
        except Exception:
            if self._outcome is not None and self._outcome[0]:
                raise
            logger.exception("cleanup failed")

    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Write to the files of the run's output folder, or of `output_dir` for this call.

        Raises RuntimeError before `initialize`, OSError if a file cannot be written; `run_epoch` waits for free disk
        space.
        """
        self._check_initialized()
        with self._files.in_folder(None if output_dir is None else Path(output_dir)):
            self._files.add_epoch(self._run_id, epoch, metrics, self.get_curriculum_state())
        logger.info("epoch %d: %s", epoch, metrics)

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
            CurriculumProgress(state["current_percentile"], state["last_expansion_epoch"]),
            epoch,
            seed=ids.derive_seed(getattr(self._adapter.adapter_config, "seed", 0), "curriculum"),
            rng=random.Random(secrets.randbits(64)),
        )
        self._remember(progress)
        state["total_groups"] = len(groups)
        state["included_groups"] = {name_of(groups[index], index, self._settings) for index, _ in kept}
        chosen = [[groups[index][member] for member in members] for index, members in kept]
        return TrajectoryCollection(trajectories=chosen, run_id=trajectory_collection.run_id)

    def _record_left_out(self, epoch: int, offered: TrajectoryCollection, kept: TrajectoryCollection) -> None:
        if isinstance(self.trainer_adapter, RollstreamTrainerAdapter):
            names = {id(one) for group in kept.trajectories for one in group}
            left_out = [one for group in offered.trajectories for one in group if id(one) not in names]
            self.trainer_adapter.record_left_out(epoch, left_out)

    def _metrics(self, before: dict[str, Any], trained: list[list[Trajectory]]) -> dict[str, Any]:
        after = {f"filtered_{key.removeprefix('num_')}": value for key, value in reward_stats(trained).items()}
        percentile = self._curriculum_state["current_percentile"] if self._settings.enabled else 1.0
        return {**before, **after, "curriculum_percentile": percentile}

    async def _complete(self, epoch: int) -> None:
        self._statuses[epoch] = await self._adapter.wait_until_complete(self._job_refs[epoch])

    async def _validate_if_due(self, epoch: int) -> None:
        """Validate at the configured interval, once per epoch; a failure is recorded with its reason."""
        run = self.run_config.run_configuration if self.run_config is not None else None
        if run is None or not (run.validation_dataset or run.validation_config_file):
            return
        if epoch % run.validation_interval or any(row["epoch"] == epoch for row in self._files.validations):
            return
        result = await self.run_validation_evaluation(epoch, self._run_id)
        await self._once_disk_allows(lambda: self._files.add_validation(self._run_id, epoch, result))
        if self._needs_validation and "error" in result:
            raise RequiredValidationError(
                f"validation before epoch {epoch} failed: {result['error']} (validation_required: false trains on)"
            )

    async def _once_disk_allows(self, write: Callable[[], None]) -> None:
        """Write files of the run, retrying while the disk is full. Raises OSError of any other cause at once."""

        async def here(call: Callable[[], None]) -> None:
            call()  # overridden methods are called in the thread of the event loop

        await retrying(write, f"write the histories in {self._files.folder}", in_thread=here)

    def _remember(self, progress: CurriculumProgress) -> None:
        self._curriculum_state["current_percentile"] = progress.percentile
        self._curriculum_state["last_expansion_epoch"] = progress.last_expansion_epoch
        if isinstance(self.trainer_adapter, RollstreamTrainerAdapter):
            self.trainer_adapter.record_curriculum(progress.percentile)

    def _record_empty_epoch(self, epoch: int, cause: str) -> None:
        if isinstance(self.trainer_adapter, RollstreamTrainerAdapter):
            self.trainer_adapter.record_empty_epoch(epoch, cause)

    def _status(self, status: TrainingStatusEnum, message: str) -> TrainingJobStatus:
        return TrainingJobStatus(run_id=self._run_id, backend=OURS, status=status, progress=100.0, message=message)

    def _check_initialized(self) -> None:
        if not self._run_id or self.trajectory_builder is None or self.trainer_adapter is None:
            raise RuntimeError("the trainer is not initialized: call bind_components(...) and initialize(...) first")

    @property
    def _adapter(self) -> TrainerAdapter:
        assert self.trainer_adapter is not None
        return self.trainer_adapter

    @property
    def _failed(self) -> list[TrainingJobStatus]:
        wrong = (TrainingStatusEnum.FAILED, TrainingStatusEnum.CANCELED)
        return [status for _, status in sorted(self._statuses.items()) if status.status in wrong]

    @property
    def _should_stop_early(self) -> bool:
        rewards = [row["avg_reward"] for row in self._files.validations if row.get("avg_reward") is not None]
        return should_stop_early(rewards, self._early_stopping)


def _of_epoch(collection: TrajectoryCollection, run_id: str, epoch: int) -> TrajectoryCollection:
    """The collection with the epoch in each trajectory's metadata, so that equal trajectories of two epochs are two
    submissions."""
    groups = [
        [one if names_epoch(one, run_id) else _with_epoch(one, run_id, epoch) for one in group]
        for group in collection.trajectories
    ]
    return TrajectoryCollection(trajectories=groups, run_id=collection.run_id)


def _with_epoch(trajectory: Trajectory, run_id: str, epoch: int) -> Trajectory:
    metadata = {**(trajectory.metadata or {}), "run_id": run_id, "epoch": epoch}
    return trajectory.model_copy(update={"metadata": metadata})


def _checked(found: Any, epoch: int) -> TrajectoryCollection:
    """The builder's result, with rewards as Python's floats.

    Raises ComponentError if it is not a collection, or one of its rewards is not a number or too large.
    """
    if not isinstance(found, TrajectoryCollection):
        raise ComponentError(
            f"trajectory_builders: finalize returned a {type(found).__name__}; expected a TrajectoryCollection"
        )
    try:
        found = with_plain_rewards(found)
    except ConfigError as error:
        raise ComponentError(f"trajectory_builders: epoch {epoch}: {error}") from error
    for group in found.trajectories:
        for trajectory in group:
            if not abs(trajectory.reward) <= MAX_REWARD_SUM:
                raise ComponentError(
                    f"trajectory_builders: a trajectory of epoch {epoch} has the reward {trajectory.reward}; "
                    f"expected a number up to {MAX_REWARD_SUM:g} (metadata: {trajectory.metadata})"
                )
    return found


def _tasks_in(runs: Any) -> list[asyncio.Future[Any]]:
    """Tasks in flight of a component written for NAT: a task or a list of tasks, by run or job."""
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


def should_stop_early(rewards: Sequence[float], settings: EarlyStopping | None) -> bool:
    """Whether none of the last `patience` mean rewards exceeded the best one before them."""
    if settings is None or not rewards:
        return False
    best, num_worse = rewards[0], 0
    for reward in rewards[1:]:
        if reward > best + settings.min_delta:
            best, num_worse = reward, 0
        else:
            num_worse += 1
    return num_worse >= settings.patience
