"""The data models of NVIDIA NeMo Agent Toolkit's finetuning harness (1.9), by the same names and fields.

Models only: the three interfaces are in `rollstream.harness`. Mutable and lenient as theirs are, so that
a component written for their harness runs unchanged; what rollstream's own YAML accepts is stricter (`config.py`).
"""

from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator


class EpisodeItemRole(StrEnum):
    """Role of the speaker in an episode item."""

    USER = "user"
    ASSISTANT = "assistant"
    SYSTEM = "system"
    FUNCTION = "function"
    TOOL = "tool"
    ENVIRONMENT = "environment"
    OTHER = "other"


class EpisodeItem(BaseModel):
    """One message of an episode. An assistant's message carries its log-probabilities."""

    role: EpisodeItemRole
    content: str
    logprobs: Any | None = None
    metadata: dict[Any, Any] | None = None

    @model_validator(mode="after")
    def _assistant_has_logprobs(self) -> "EpisodeItem":
        if self.role == EpisodeItemRole.ASSISTANT and self.logprobs is None:
            raise ValueError("logprobs must be provided for assistant role")
        return self


class OpenAIMessage(BaseModel):
    """A chat message in OpenAI's form."""

    role: str
    content: str


class DPOItem(BaseModel):
    """A prompt with a preferred and a rejected response."""

    prompt: list[OpenAIMessage] | str
    chosen_response: str
    rejected_response: str


class Trajectory(BaseModel):
    """One episode and its reward."""

    episode: list[EpisodeItem] | list[DPOItem]
    reward: float
    shaped_rewards: list[float] | None = None
    metadata: dict[Any, Any] | None = None


class TrajectoryCollection(BaseModel):
    """Groups of trajectories (outer list: groups; inner list: the trajectories of one example)."""

    trajectories: list[list[Trajectory]]
    run_id: str


class TrainingJobRef(BaseModel):
    """A submitted training job."""

    run_id: str
    backend: str
    metadata: dict[Any, Any] | None = None


class TrainingStatusEnum(StrEnum):
    """Status of a training job."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"


class TrainingJobStatus(BaseModel):
    """Status of a training job; `progress` in percent."""

    run_id: str
    backend: str
    status: TrainingStatusEnum
    progress: float | None = None
    message: str | None = None
    metadata: dict[Any, Any] | None = None


class RewardFunctionConfig(BaseModel):
    """The evaluator or reward that scores a trajectory."""

    name: str


class ComponentConfig(BaseModel):
    """Base of a component's configuration; `class X(TrainerConfig, name="x")` gives it the YAML `_type: x`."""

    model_config = ConfigDict(populate_by_name=True)

    STATIC_TYPE: ClassVar[str | None] = None
    type: str = Field(default="unknown", alias="_type")
    reward: RewardFunctionConfig | None = None

    @classmethod
    def static_type(cls) -> str | None:
        """The `_type` of this class, none if it has no name."""
        return cls.STATIC_TYPE

    @classmethod
    def __pydantic_init_subclass__(cls, name: str | None = None, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if name is not None:
            cls.STATIC_TYPE = name
            cls.model_fields["type"].default = name
            cls.model_rebuild(force=True)

    def model_post_init(self, context: Any, /) -> None:
        """A class that has a name is of that type, whatever the file calls it."""
        if self.STATIC_TYPE is not None:
            self.type = self.STATIC_TYPE
            self.model_fields_set.discard("type")

    def __init_subclass__(cls, name: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)


class TrainerConfig(ComponentConfig):
    """Configuration of a trainer."""


class TrajectoryBuilderConfig(ComponentConfig):
    """Configuration of a trajectory builder."""


class TrainerAdapterConfig(ComponentConfig):
    """Configuration of a trainer adapter."""


TrainerConfigT = TypeVar("TrainerConfigT", bound=TrainerConfig)
TrajectoryBuilderConfigT = TypeVar("TrajectoryBuilderConfigT", bound=TrajectoryBuilderConfig)
TrainerAdapterConfigT = TypeVar("TrainerAdapterConfigT", bound=TrainerAdapterConfig)


class CurriculumLearningConfig(BaseModel):
    """Curriculum learning by percentile of the examples' rewards."""

    enabled: bool = False
    initial_percentile: float = Field(default=0.3, gt=0, le=1)
    increment_percentile: float = Field(default=0.2, gt=0, le=1)
    expansion_interval: int = Field(default=5, ge=1)
    min_reward_diff: float = 0.1
    sort_ascending: bool = False
    random_subsample: float | None = None


class FinetuneRunConfig(BaseModel):
    """Options of one run from the command line."""

    config_file: Path | BaseModel | None = None
    dataset: str | Path | None = None
    result_json_path: str = "$"
    endpoint: str | None = None
    endpoint_timeout: int = 300
    override: tuple[tuple[str, str], ...] = ()
    validation_dataset: str | Path | None = None
    validation_interval: int = Field(default=5, ge=1)
    validation_config_file: str | Path | None = None


class ComponentNames(Protocol):
    """The names of a run's three component blocks, as the `finetuning` section has them."""

    @property
    def trainer(self) -> str | None: ...

    @property
    def trajectory_builder(self) -> str | None: ...

    @property
    def trainer_adapter(self) -> str | None: ...


def builder_path(names: ComponentNames, key: str = "") -> str:
    """Path of the run's trajectory builder in the configuration file, or of a key in its block."""
    return _below(f"trajectory_builders.{names.trajectory_builder}", key)


def adapter_path(names: ComponentNames, key: str = "") -> str:
    """Path of the run's trainer adapter in the configuration file, or of a key in its block."""
    return _below(f"trainer_adapters.{names.trainer_adapter}", key)


def trainer_path(names: ComponentNames, key: str = "") -> str:
    """Path of the run's trainer in the configuration file, or of a key in its block."""
    return _below(f"trainers.{names.trainer}", key)


def _below(block: str, key: str) -> str:
    return f"{block}.{key}" if key else block


class FinetuneConfig(BaseModel):
    """The `finetuning` section."""

    enabled: bool = False
    trainer: str | None = None
    trajectory_builder: str | None = None
    trainer_adapter: str | None = None
    reward_function: RewardFunctionConfig | None = None
    target_functions: list[str] = Field(default_factory=lambda: ["<workflow>"])
    target_model: str | None = None
    curriculum_learning: CurriculumLearningConfig = Field(default_factory=CurriculumLearningConfig)
    num_epochs: int = Field(default=1, ge=1)
    output_dir: Path = Path("./.tmp/nat/finetuning/")
    run_configuration: FinetuneRunConfig | None = None

    @model_validator(mode="after")
    def _enabled_names_components(self) -> "FinetuneConfig":
        for name in ("trainer", "trajectory_builder", "trainer_adapter"):
            if self.enabled and getattr(self, name) is None:
                raise ValueError(f"{name} must be specified when finetuning is enabled")
        return self
