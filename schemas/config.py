"""The YAML file of a run in NAT's shape: its sections, ours (`_type: rollstream`) and foreign blocks.

Models only: frozen, unknown keys forbidden. Reading a file, `${ENV}`, overrides and the wording of errors stand in
`rollstream.harness.config.config_file`; what becomes of the values in `rollstream.harness.config.settings`.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    FiniteFloat,
    JsonValue,
    Tag,
    field_validator,
    model_validator,
)

from rollstream.schemas.dataset import DatasetSection
from rollstream.schemas.finetuning import TrainerAdapterConfig, TrainerConfig, TrajectoryBuilderConfig
from rollstream.schemas.services import EndpointSection, EngineSettings
from rollstream.schemas.settings import (
    AlgorithmSettings,
    CurriculumSettings,
    ModelSettings,
    OptimizerSettings,
    Sampling,
    Settings,
)

OURS = "rollstream"
NAMED_SECTIONS = (
    "functions",
    "function_groups",
    "middleware",
    "llms",
    "embedders",
    "memory",
    "object_stores",
    "retrievers",
    "ttc_strategies",
    "authentication",
)
"""Sections of named blocks that are kept as they are."""
COMPONENT_SECTIONS = ("trajectory_builders", "trainer_adapters", "trainers")


class ForeignBlock(BaseModel):
    """A block that others validate, kept as it is."""

    model_config = ConfigDict(frozen=True, extra="allow")

    type: str = Field(alias="_type")


class RewardFunctionSection(Settings):
    """The reward that a run is trained on."""

    name: str


class BuilderFields(BaseModel):
    """`trajectory_builders.X`: where rollouts are made, and how."""

    model_config = ConfigDict(allow_inf_nan=False)

    bootstrap_servers: str = "embedded"
    """`embedded`, or host:port of a running Kafka."""
    services: Literal["managed", "external"] = "managed"
    """managed: started and stopped by `finetune`; external: they run already."""
    environment: str | None = None
    """A registered name or `python:module.function`; none: the workflow's."""
    environment_config: dict[str, JsonValue] = Field(default_factory=dict)
    rewards: tuple[str, ...] = ()
    reward_weights: dict[str, FiniteFloat] = Field(default_factory=dict)
    missing_score: Literal["error", "reject"] = "error"
    """A rollout without a score fails and is tried again, or is rejected as `no_score`; it never counts as 0."""
    modules: tuple[str, ...] = ()
    """Python modules that register environments and rewards."""
    agents: tuple[str, ...] = ("agent",)
    """Names of the environment's agents; all are played by the trained model."""
    num_generations: int = Field(default=8, ge=1)
    min_generations: int = Field(default=2, ge=1)
    """Fewest complete rollouts of a group to train on; of a smaller group, all of it."""
    drop_zero_variance: bool = True
    sampling: Sampling = Field(default_factory=Sampling)
    engine: EngineSettings = Field(default_factory=EngineSettings)
    max_turns: int = Field(default=16, ge=1)
    max_attempts: int = Field(default=3, ge=1)
    rollout_timeout_s: float = Field(default=120.0, gt=0)
    group_timeout_s: float = Field(default=600.0, gt=0)
    max_concurrent_rollouts: int = Field(default=256, ge=1)
    num_partitions: int = Field(default=6, ge=1)
    num_producers: int = Field(default=1, ge=1)
    num_processors: int = Field(default=1, ge=1)
    session_timeout_s: float = Field(default=10.0, gt=0)
    tick_interval_s: float = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _minimum_fits(self) -> Self:
        is_given = "min_generations" in self.model_fields_set
        if is_given and self.min_generations > self.num_generations:
            raise ValueError(f"min_generations {self.min_generations} is more than num_generations")
        return self


class BuilderSection(BuilderFields, Settings):
    """What a run uses of its trajectory builder's block."""

    type: Literal["rollstream"] = Field(default="rollstream", alias="_type")


class WarmStart(Settings):
    """An SFT job on the environment's demonstrations, before the RL job."""

    num_epochs: int = Field(default=1, ge=1)
    tasks_per_epoch: int = Field(default=8, ge=1)
    batches_per_epoch: int = Field(default=1, ge=1)
    num_generations: int = Field(default=8, ge=1)
    mini_batches: int = Field(default=1, ge=1)
    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings)
    in_forks: bool = False
    """Also in a run that branches from a version of another one, which has trained weights to begin with."""


class AdapterFields(BaseModel):
    """`trainer_adapters.X`: what the learner trains, and how."""

    model: ModelSettings
    algorithm: AlgorithmSettings = Field(default_factory=AlgorithmSettings)
    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings)
    max_staleness: int = Field(default=0, ge=0)
    batches_per_epoch: int = Field(default=1, ge=1)
    tasks_per_epoch: int = Field(default=8, ge=1)
    warm_start: WarmStart | None = None
    artifact_uri: str | None = None
    """An fsspec URI; none: a folder of the workspace."""
    checkpoint_every: int = Field(default=1, ge=1)
    keep_last: int = Field(default=8, ge=1)
    keep_every: int = Field(default=50, ge=1)
    threads: int | None = Field(default=None, ge=1)
    seed: int = Field(default=0, ge=0, lt=2**64)

    @model_validator(mode="after")
    def _batches_fit_staleness(self) -> Self:
        needed = self.batches_per_epoch - 1
        if self.max_staleness < needed:
            raise ValueError(
                f"max_staleness {self.max_staleness} is too small: {self.batches_per_epoch} batches an epoch "
                f"need at least {needed}"
            )
        return self


class AdapterSection(AdapterFields, Settings):
    """What a run uses of its trainer adapter's block."""

    type: Literal["rollstream"] = Field(default="rollstream", alias="_type")


class EarlyStopping(Settings):
    """End a run in order once its validation no longer gets better."""

    patience: int = Field(default=3, ge=1)
    """Validations in a row without a better mean reward."""
    min_delta: float = Field(default=0.0, ge=0)
    """A mean reward counts as better if it is above the best one so far by more than this."""


class TrainerFields(BaseModel):
    """`trainers.X`: how a run is conducted."""

    model_config = ConfigDict(allow_inf_nan=False)

    planning: Literal["stream", "submitted"] = "stream"
    run_idle_timeout_s: float = Field(default=3600.0, gt=0)
    early_stopping: EarlyStopping | None = None
    """Of the classic way, epoch by epoch; none: all epochs are trained."""
    validation_required: bool = False
    """A failed validation ends the run as failed; off: it is noted with its reason, and training goes on."""


class TrainerSection(TrainerFields, Settings):
    """What a run uses of its trainer's block."""

    type: Literal["rollstream"] = Field(default="rollstream", alias="_type")


class WorkflowSection(Settings):
    """The agent that is trained. A plain string in the file is its `environment`."""

    type: Literal["rollstream"] = Field(default="rollstream", alias="_type")
    environment: str


class EvalGeneral(Settings):
    """What all evaluations share."""

    dataset: DatasetSection | None = None
    max_concurrency: int = Field(default=8, ge=1)
    output_dir: Path | None = None
    output: JsonValue = None
    workflow_alias: str | None = None
    profiler: JsonValue = None
    validate_llm_endpoints: bool = False
    per_input_user_id: bool = True


class EvalSection(Settings):
    """NAT's evaluation section. Evaluators are kept as they are: `rollstream.schemas.evaluators` has those of ours."""

    general: EvalGeneral = Field(default_factory=EvalGeneral)
    evaluators: dict[str, ForeignBlock] = Field(default_factory=dict)


class RunConfigurationSection(Settings):
    """`finetuning.run_configuration`: what the command line says about a run; its options win over the file."""

    config_file: Path | None = None
    dataset: Path | None = None
    result_json_path: str = "$"
    endpoint: str | None = None
    endpoint_timeout: int = Field(default=300, ge=1)
    override: tuple[tuple[str, str], ...] = ()
    validation_dataset: Path | None = None
    validation_interval: int = Field(default=5, ge=1)
    validation_config_file: Path | None = None

    @field_validator("endpoint")
    @classmethod
    def _is_url(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError(f"{value!r} is no URL; give one such as http://localhost:8000")
        return value


class FinetuningSection(Settings):
    """`finetuning`: NAT's fields; the curriculum is a superset of theirs."""

    enabled: bool = True
    trainer: str
    trajectory_builder: str
    trainer_adapter: str
    reward_function: RewardFunctionSection | None = None
    target_functions: tuple[str, ...] = ("<workflow>",)
    target_model: str | None = None
    curriculum_learning: CurriculumSettings = Field(default_factory=CurriculumSettings)
    num_epochs: int = Field(default=1, ge=1)
    output_dir: Path = Path(".rollstream/output")
    run_configuration: RunConfigurationSection | None = None


def _whose(value: Any) -> str:
    """Tag of a workflow's block, given as read from the file or as a model."""
    if isinstance(value, BaseModel):
        return "ours" if isinstance(value, WorkflowSection) else "foreign"
    block_type: Any = value.get("_type", OURS) if isinstance(value, dict) else OURS  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return "ours" if block_type == OURS else "foreign"


WorkflowBlock = Annotated[
    Annotated[WorkflowSection, Tag("ours")] | Annotated[ForeignBlock, Tag("foreign")], Discriminator(_whose)
]


class ConfigFile(Settings):
    """A whole file. What stands in the sections that only NAT uses is kept as it is.

    A component's block is an instance of its own configuration class; `rollstream.harness.config.config_model` says
    which.
    """

    general: dict[str, JsonValue] = Field(default_factory=dict)
    functions: dict[str, JsonValue] = Field(default_factory=dict)
    function_groups: dict[str, JsonValue] = Field(default_factory=dict)
    middleware: dict[str, JsonValue] = Field(default_factory=dict)
    llms: dict[str, JsonValue] = Field(default_factory=dict)
    embedders: dict[str, JsonValue] = Field(default_factory=dict)
    memory: dict[str, JsonValue] = Field(default_factory=dict)
    object_stores: dict[str, JsonValue] = Field(default_factory=dict)
    optimizer: dict[str, JsonValue] = Field(default_factory=dict)
    retrievers: dict[str, JsonValue] = Field(default_factory=dict)
    ttc_strategies: dict[str, JsonValue] = Field(default_factory=dict)
    authentication: dict[str, JsonValue] = Field(default_factory=dict)
    workflow: WorkflowBlock | None = None
    eval: EvalSection = Field(default_factory=EvalSection)
    trajectory_builders: dict[str, TrajectoryBuilderConfig]
    trainer_adapters: dict[str, TrainerAdapterConfig]
    trainers: dict[str, TrainerConfig]
    finetuning: FinetuningSection


class ValidationSection(Settings):
    """Validation during a run: rewards on other examples, which are not trained on."""

    dataset: DatasetSection | None = None
    """None: the dataset of `config`."""
    interval: int = Field(default=5, ge=1)
    """Epochs from one validation to the next; the first one comes before epoch 0."""
    config: Path | None = None
    """A whole configuration file for validation; none: the run's own."""


class RunConfig(Settings):
    """The parts of a file that one run uses."""

    builder: BuilderSection
    adapter: AdapterSection
    trainer: TrainerSection
    finetuning: FinetuningSection
    dataset: DatasetSection | None
    environment: str
    reward_functions: tuple[str, ...] = ()
    evaluators: dict[str, dict[str, JsonValue]] = Field(default_factory=dict)
    """`eval.evaluators` by name, with their `_type`, as written (`${ENV}` not expanded)."""
    validation: ValidationSection | None = None
    endpoint: str | None = None
    """Base URL of a remote workflow that plays the rollouts; none: the environment does."""
    endpoint_timeout: int = Field(default=300, ge=1)
    """Seconds that one answer of the endpoint may take."""
    served: EndpointSection | None = None
    """How the trained model is served to others by OpenAI's chat completions; none: it is not."""
    result_json_path: str = "$"
    """Where the answer stands in what the endpoint returns (`$`: all of it)."""
