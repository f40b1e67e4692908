"""Components of NAT's own packages by their `_type`, which resolve to ours: their fields are mapped to ours.

A block may contain our fields too. Fields without a counterpart are accepted, with one warning per process.
"""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rollstream.harness.config.checks import warn_meaningless
from rollstream.harness.config.components import STRICT, OurAdapterFields, OurBuilderFields, OurTrainerFields
from rollstream.schemas.algorithm_settings import AlgorithmSettings
from rollstream.schemas.config import AdapterSection, TrainerSection
from rollstream.schemas.finetuning import TrainerAdapterConfig, TrainerConfig, TrajectoryBuilderConfig
from rollstream.schemas.settings import OptimizerSettings

BASE_MODEL = "Qwen/Qwen2.5-7B-Instruct"
LEARNING_RATE = 5e-5
"""ART's defaults."""


class ArtTrainerConfig(OurTrainerFields, TrainerConfig, name="openpipe_art_trainer"):
    """`trainers.X._type: openpipe_art_trainer`: our trainer in its epochwise mode."""

    model_config = STRICT

    planning: Literal["stream", "submitted"] = "submitted"

    def section(self) -> TrainerSection:
        """The frozen section that a run uses."""
        return super().section().model_copy(update={"planning": self.planning})


class ArtBuilderConfig(OurBuilderFields, TrajectoryBuilderConfig, name="openpipe_art_traj_builder"):
    """`trajectory_builders.X._type: openpipe_art_traj_builder`."""

    model_config = STRICT

    num_generations: int = Field(default=2, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _few_are_enough(cls, values: Any) -> Any:
        num = values.get("num_generations") if isinstance(values, dict) else None
        return {"min_generations": 1, **values} if num == 1 else values


class ArtBackend(BaseModel):
    """ART's server address and model. Only the base model is used here."""

    model_config = ConfigDict(extra="forbid")

    base_model: str = BASE_MODEL
    ip: str | None = None
    port: int | None = None
    name: str = "trainer_run"
    project: str = "trainer_project"
    api_key: str = "default"
    delete_old_checkpoints: bool = False
    init_args: dict[str, Any] | None = None
    engine_args: dict[str, Any] | None = None
    server_config: dict[str, Any] | None = None


class ArtTraining(BaseModel):
    """Arguments of TRL's trainer. Those without a counterpart are accepted and ignored."""

    model_config = ConfigDict(extra="allow")

    learning_rate: float | None = Field(default=None, gt=0)
    beta: float | None = Field(default=None, ge=0)
    weight_decay: float | None = Field(default=None, ge=0)
    adam_beta1: float | None = Field(default=None, ge=0, lt=1)
    adam_beta2: float | None = Field(default=None, ge=0, lt=1)
    adam_epsilon: float | None = Field(default=None, gt=0)
    max_grad_norm: float | None = Field(default=None, gt=0)
    warmup_steps: int | None = Field(default=None, ge=0)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] | None = None


class ArtAdapterConfig(OurAdapterFields, TrainerAdapterConfig, name="openpipe_art_trainer_adapter"):
    """`trainer_adapters.X._type: openpipe_art_trainer_adapter`.

    It trains a LoRA, as ART does, unless `model` is set.
    """

    model_config = STRICT

    backend: ArtBackend = Field(default_factory=ArtBackend)
    training: ArtTraining = Field(default_factory=ArtTraining)

    @model_validator(mode="before")
    @classmethod
    def _model_of_backend(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        backend, model = values.get("backend"), values.get("model", {})
        path = backend.get("base_model") if isinstance(backend, dict) else None
        path = path if isinstance(path, str) else BASE_MODEL
        is_named = not isinstance(model, dict) or "path" in model
        given = {key: value for key, value in values.items() if key != "training" or value is not None}
        return given if is_named else {**given, "model": {"lora": {}, **model, "path": path}}

    @model_validator(mode="after")
    def _warn_unused(self) -> Self:
        backend = sorted(self.backend.model_fields_set - {"base_model"})
        training = sorted(self.training.model_extra or {})
        names = [f"backend.{name}" for name in backend] + [f"training.{name}" for name in training]
        warn_meaningless("openpipe_art_trainer_adapter", names, "rollstream's own learner trains the model")
        return self

    def section(self) -> AdapterSection:
        """The frozen section that a run uses: learning rate and beta are passed to the optimizer and the loss."""
        section = super().section()
        return section.model_copy(
            update={
                "optimizer": _optimizer(self.training, section.optimizer),
                "algorithm": _algorithm(self.training, section.algorithm),
            }
        )


class DpoBuilderConfig(OurBuilderFields, TrajectoryBuilderConfig, name="dpo_traj_builder"):
    """`trajectory_builders.X._type: dpo_traj_builder`: preference pairs from scored candidates.

    One rollout per example is enough, because candidates are compared within a rollout.
    """

    model_config = STRICT

    num_generations: int = Field(default=1, ge=1)
    min_generations: int = Field(default=1, ge=1)
    drop_zero_variance: bool = False
    ttc_step_name: str = "dpo_candidate_move"
    """Name of the steps that hold candidates."""
    exhaustive_pairs: bool = True
    """Every better and worse candidate of a turn is a pair; else only the best with the worst."""
    min_score_diff: float = Field(default=0.0, ge=0)
    max_pairs_per_turn: int | None = Field(default=None, ge=1)
    reward_from_score_diff: bool = True
    """A pair's reward is the difference of its scores; else the chosen one's score."""
    require_multiple_candidates: bool = True
    custom_step_name: str | None = None

    @property
    def pairs(self) -> dict[str, Any]:
        """Settings of the pairs for the algorithm, which forms the pairs of a batch."""
        return {
            "exhaustive_pairs": self.exhaustive_pairs,
            "min_score_diff": self.min_score_diff,
            "max_pairs_per_turn": self.max_pairs_per_turn,
        }

    @model_validator(mode="after")
    def _warn_unused(self) -> Self:
        names = ["custom_step_name"] if self.custom_step_name is not None else []
        warn_meaningless("dpo_traj_builder", names, "name the steps by ttc_step_name")
        return self


def _optimizer(training: ArtTraining, settings: OptimizerSettings) -> OptimizerSettings:
    """Optimizer settings with the values of `training`, which `optimizer` overrides."""
    betas = (
        settings.betas[0] if training.adam_beta1 is None else training.adam_beta1,
        settings.betas[1] if training.adam_beta2 is None else training.adam_beta2,
    )
    given = {
        "learning_rate": LEARNING_RATE if training.learning_rate is None else training.learning_rate,
        "betas": betas,
        "eps": training.adam_epsilon,
        "weight_decay": training.weight_decay,
        "max_grad_norm": training.max_grad_norm,
        "warmup_steps": training.warmup_steps,
        "schedule": training.lr_scheduler_type,
    }
    wanted = {name: value for name, value in given.items() if value is not None}
    return OptimizerSettings(**{**wanted, **settings.model_dump(include=settings.model_fields_set)})


def _algorithm(training: ArtTraining, settings: AlgorithmSettings) -> AlgorithmSettings:
    """Algorithm settings with `training.beta` as the KL coefficient, unless `algorithm` sets it."""
    name = settings.KL_FIELD
    if training.beta is None or name is None or name in settings.model_fields_set:
        return settings
    type(settings).model_validate({name: training.beta})
    return settings.model_copy(update={name: training.beta})
