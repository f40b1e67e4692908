"""The three interfaces of NVIDIA NeMo Agent Toolkit's finetuning harness (1.9), with the same names and signatures, for
components written for both. Interfaces only.

The result of evaluating a dataset: a score or an error by example, in the shape of NAT's output. A missing score is
never a number: it is an error with its reason.
"""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from rollstream.processors.curate.candidates import mean, rollout_rewards
from rollstream.schemas import errors
from rollstream.schemas.errors import OF_LOG_AND_STORE, EnvironmentRunError, RollstreamError, RunFailedError
from rollstream.schemas.events import GroupClosed
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
from rollstream.schemas.variables import conceal

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
        """Roll out and score the dataset of `run_configuration`, for validation.

        Override it; raises NotImplementedError otherwise.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no run_eval, so it cannot validate: derive it from "
            "RollstreamTrajectoryBuilder, whose run_eval rolls the dataset out and scores it by the run's rewards and "
            "eval.evaluators, or override run_eval (docs/extending.md)"
        )

    @abstractmethod
    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        """Start building trajectories."""

    @abstractmethod
    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        """The trajectories, in groups of one example each."""

    async def compute_reward(self, output_item: Any, meta: dict[str, Any] | None = None) -> float:
        """Reward of one evaluated item: its score.

        Raises EnvironmentRunError if the score is missing; it never becomes 0.
        """
        score = score_of(output_item)
        if score is None:
            reason = error_of(output_item) or repr(output_item.score)
            raise EnvironmentRunError(f"example {output_item.id} has no score ({reason}); have it scored")
        return score

    @abstractmethod
    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Log the progress of building."""


class TrainerAdapter(ABC):
    """Submits trajectories to a training backend."""

    def __init__(self, adapter_config: TrainerAdapterConfig) -> None:
        self.adapter_config = adapter_config
        self.run_config: FinetuneConfig | None = None

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Take the run's configuration and its reward."""
        self.run_config = run_config
        self.adapter_config.reward = run_config.reward_function

    @abstractmethod
    async def is_healthy(self) -> bool:
        """Whether the backend is reachable and ready."""

    @abstractmethod
    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Submit trajectories for training."""

    @abstractmethod
    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Status of a submitted job."""

    @abstractmethod
    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        """Final status of a job, polled every `poll_interval` seconds."""

    @abstractmethod
    def log_progress(self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Log the progress of training."""


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
        """Bind the two other components."""
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
        """Release the run's resources."""

    @abstractmethod
    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Log the result of an epoch."""

    async def run_validation_evaluation(self, epoch: int, run_id: str) -> dict[str, Any]:
        """Rewards on the validation dataset, by the builder's `run_eval` and without training.

        A failure is {"error": reason} without rewards. Raises LogError, StoreUnavailableError, RunFailedError if
        the log, the artifact store, a service or the run itself cannot go on, which tells nothing of the model.
        """
        if self.run_config is None or self.trajectory_builder is None:
            raise RuntimeError("the trainer is not initialized: call bind_components(...) and initialize(...) first")
        metrics = {"epoch": epoch, "dataset_type": "validation"}
        training = self.run_config.run_configuration
        if training is None:
            return {**metrics, "error": "finetuning.run_configuration: missing"}
        self.run_config.run_configuration = _for_validation(training)
        try:
            output = await self.trajectory_builder.run_eval()
            return {**self._calculate_validation_metrics(output), **metrics}
        except (RunFailedError, *OF_LOG_AND_STORE):
            raise
        except Exception as error:
            is_known = isinstance(error, RollstreamError)
            reason = conceal(str(error) if is_known else errors.describe(error))
            traceback = None if is_known else error
            _logger.warning("validation before epoch %d failed: %s", epoch, reason, exc_info=traceback)
            return {**metrics, "error": reason}
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
        """The groups to train on in this epoch. Override it."""
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


REASONS_TOLD = 3


@dataclass(frozen=True, slots=True)
class EvaluationItem:
    """One example: its score, or why it has none."""

    id: str
    score: float | None
    error: str | None = None
    reasoning: Any = None


@dataclass(frozen=True, slots=True)
class EvaluatorOutput:
    """One evaluator's result for a dataset."""

    eval_output_items: tuple[EvaluationItem, ...]

    @property
    def average_score(self) -> float | None:
        """Mean over the examples that have a score."""
        scores = [item.score for item in self.eval_output_items if item.score is not None]
        return mean(scores) if scores else None


@dataclass(frozen=True, slots=True)
class EvaluationOutput:
    """The result of an evaluation run: pairs of evaluator name and output, one or more."""

    evaluation_results: tuple[tuple[str, EvaluatorOutput], ...]
    workflow_interrupted: bool = False
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])


def item_of(group: GroupClosed) -> EvaluationItem:
    """The mean reward of a closed group's complete rollouts; without any, the reason."""
    if group.members:
        return EvaluationItem(group.example_id, mean(rollout_rewards(group.members)))
    causes = sorted({attempt.cause or attempt.outcome for attempt in group.attempts})
    return EvaluationItem(group.example_id, None, group.void_cause or ", ".join(causes) or group.reason)


def validation_metrics(output: Any, reward: str | None) -> dict[str, Any]:
    """{avg_reward, min_reward, max_reward, num_examples} of the evaluator called `reward`, else of the first one.

    `output` is an `EvaluationOutput` or what NAT's evaluation returns. Raises EnvironmentRunError if an example has no
    score, naming some with their reasons, or if there are no examples.
    """
    results = list(output.evaluation_results)
    chosen = [found for name, found in results if name == reward] or [found for _, found in results[:1]]
    items: Sequence[Any] = chosen[0].eval_output_items if chosen else ()
    missing = [item for item in items if score_of(item) is None]
    if missing:
        reasons = "; ".join(f"{item.id}: {error_of(item) or 'no score'}" for item in missing[:REASONS_TOLD])
        raise EnvironmentRunError(
            f"{len(missing)} of {len(items)} examples have no score ({reasons}); have them scored"
        )
    if not items:
        raise EnvironmentRunError("the validation evaluated no example; add examples to its dataset")
    scores = [float(item.score) for item in items]
    return {
        "avg_reward": mean(scores),
        "min_reward": min(scores),
        "max_reward": max(scores),
        "num_examples": len(scores),
    }


def score_of(item: Any) -> float | None:
    """An evaluated item's score as a number; None if it is missing, not a number, or accompanied by an error."""
    score = item.score
    if error_of(item) is not None or isinstance(score, bool) or not isinstance(score, Real):  # numpy's, too
        return None
    try:
        found = float(score)
    except (OverflowError, ValueError):
        return None
    return found if math.isfinite(found) else None


def error_of(item: Any) -> str | None:
    """The error of an evaluator that failed on an item: the item's `error`, or the exception that NAT's `BaseEvaluator`
    and `AtifBaseEvaluator` record as the reasoning of a score of 0.0.
    """
    reasoning = getattr(item, "reasoning", None)
    match getattr(item, "error", None), reasoning:
        case None | "", {"error": str(text), **others} if not others and text.startswith("Evaluator error: "):
            return text
        case None | "", _:
            return None
        case error, _:
            return str(error)
