"""The three interfaces of NVIDIA NeMo Agent Toolkit's finetuning harness (1.9), by the same names and signatures.

rollstream conducts its own runs by the log; these are for components that are written for both. Interfaces only.
"""

import logging
from abc import ABC, abstractmethod
from typing import Any

from rollstream.harness.evaluation import score_of, validation_metrics
from rollstream.schemas.errors import EnvironmentRunError
from rollstream.schemas.finetuning import (
    CurriculumLearningConfig,
    FinetuneConfig,
    TrainerAdapterConfig,
    TrainerConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrajectoryBuilderConfig,
    TrajectoryCollection,
)

_logger = logging.getLogger(__name__)


class TrajectoryBuilder(ABC):
    """Builds trajectories by running and scoring the workflow."""

    def __init__(self, trajectory_builder_config: TrajectoryBuilderConfig) -> None:
        self.trajectory_builder_config = trajectory_builder_config
        self.run_config: FinetuneConfig | None = None

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Take the run's configuration and its reward."""
        self.run_config = run_config
        self.trajectory_builder_config.reward = run_config.reward_function

    async def run_eval(self) -> Any:
        """Run NAT's evaluation. rollstream has none of its own: override it."""
        raise NotImplementedError("run_eval needs nvidia-nat-eval; override it")

    @abstractmethod
    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        """Begin to build trajectories."""

    @abstractmethod
    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        """The trajectories, in groups of one example each."""

    async def compute_reward(self, output_item: Any, meta: dict[str, Any] | None = None) -> float:
        """Reward of one evaluated item: its score. Raises EnvironmentRunError if it has none: that is never a 0."""
        score = score_of(output_item)
        if score is None:
            error = getattr(output_item, "error", None)
            raise EnvironmentRunError(f"example {output_item.id}: has no score ({error or repr(output_item.score)})")
        return score

    @abstractmethod
    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Tell how building goes."""


class TrainerAdapter(ABC):
    """Hands trajectories to a training backend."""

    def __init__(self, adapter_config: TrainerAdapterConfig) -> None:
        self.adapter_config = adapter_config
        self.run_config: FinetuneConfig | None = None

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Take the run's configuration and its reward."""
        self.run_config = run_config
        self.adapter_config.reward = run_config.reward_function

    @abstractmethod
    async def is_healthy(self) -> bool:
        """Whether the backend answers."""

    @abstractmethod
    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Submit trajectories for training."""

    @abstractmethod
    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Where a submitted job stands."""

    @abstractmethod
    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        """Final status of a job, asked for every `poll_interval` seconds."""

    @abstractmethod
    def log_progress(self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Tell how training goes."""


class Trainer(ABC):
    """Conducts epochs: trajectories from the builder, training by the adapter."""

    def __init__(self, trainer_config: TrainerConfig, **kwargs: Any) -> None:
        self.trainer_config = trainer_config
        self.run_config: FinetuneConfig | None = None
        self.curriculum_config: CurriculumLearningConfig | None = None
        self.trajectory_builder: TrajectoryBuilder | None = None
        self.trainer_adapter: TrainerAdapter | None = None
        self._curriculum_state: dict[str, Any] = {}

    async def bind_components(self, trajectory_builder: TrajectoryBuilder, trainer_adapter: TrainerAdapter) -> None:
        """Take the two other components."""
        self.trajectory_builder = trajectory_builder
        self.trainer_adapter = trainer_adapter

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Take the run's configuration and initialize the bound components."""
        self.run_config = run_config
        self.curriculum_config = run_config.curriculum_learning
        self._curriculum_state = {
            "current_percentile": run_config.curriculum_learning.initial_percentile,
            "last_expansion_epoch": -1,
            "total_groups": 0,
            "included_groups": set(),
        }
        self.trainer_config.reward = run_config.reward_function
        for component in (self.trajectory_builder, self.trainer_adapter):
            if component is not None:
                await component.initialize(run_config)

    @abstractmethod
    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | None:
        """Conduct one epoch (counted from 0); returns its training job."""

    @abstractmethod
    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Conduct the whole run; returns the status of all its jobs."""

    @abstractmethod
    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        """Metrics of a run."""

    @abstractmethod
    async def cleanup(self) -> None:
        """Let go of what the run held."""

    @abstractmethod
    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Tell how an epoch went."""

    async def run_validation_evaluation(self, epoch: int, run_id: str) -> dict[str, Any]:
        """Rewards on the validation dataset, by the builder's `run_eval` and without training.

        A failure is {"error": reason}, with no reward in it.
        """
        assert self.run_config is not None
        assert self.trajectory_builder is not None
        told = {"epoch": epoch, "dataset_type": "validation"}
        training = self.run_config.run_configuration
        if training is None:
            return {**told, "error": "finetuning.run_configuration: missing"}
        self.run_config.run_configuration = _for_validation(training)
        try:
            output = await self.trajectory_builder.run_eval()
            return {**self._calculate_validation_metrics(output), **told}
        except Exception as error:  # noqa: BLE001 -- whatever an evaluation raises; the reason is kept
            _logger.warning("validation before epoch %d failed: %s", epoch, error)
            return {**told, "error": str(error) or type(error).__name__}
        finally:
            self.run_config.run_configuration = training

    def _calculate_validation_metrics(self, eval_output: Any) -> dict[str, Any]:
        """avg_reward, min_reward, max_reward and num_examples of an evaluation, by the run's reward.

        Raises EnvironmentRunError if an example has no score.
        """
        reward = self.trainer_config.reward
        return validation_metrics(eval_output, reward.name if reward is not None else None)

    def apply_curriculum_learning(
        self, trajectory_collection: TrajectoryCollection, epoch: int
    ) -> TrajectoryCollection:
        """The groups that are to be trained on in this epoch. Override it."""
        raise NotImplementedError("override apply_curriculum_learning to filter groups")

    def get_curriculum_state(self) -> dict[str, Any]:
        """The curriculum's state and configuration, as JSON has them."""
        state, config = self._curriculum_state, self.curriculum_config
        included = sorted(state.get("included_groups", ()), key=str)
        return {**state, "included_groups": included, "config": config.model_dump() if config else None}


def _for_validation(training: Any) -> Any:
    """The same run configuration with the validation's dataset and, if there is one, its configuration."""
    dataset = training.validation_dataset
    return training.model_copy(
        update={
            "config_file": training.validation_config_file or training.config_file,
            "dataset": None if dataset is None else str(dataset),
        }
    )
