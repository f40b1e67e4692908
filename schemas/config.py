"""The YAML file of a run in NAT's shape: its sections, ours (`_type: rollstream`) and foreign blocks.

Models only: frozen, unknown keys forbidden. Reading a file, `${ENV}`, overrides and the wording of errors stand in
`rollstream.harness.config_file`; what becomes of the values in `rollstream.harness.settings`.
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

from rollstream.schemas.services import EngineSettings
from rollstream.schemas.settings import (
    AlgorithmSettings,
    CurriculumSettings,
    ModelSettings,
    OptimizerSettings,
    Sampling,
    Settings,
)

OURS = "rollstream"
COMPONENT_SECTIONS = ("trajectory_builders", "trainer_adapters", "trainers")


class ForeignBlock(BaseModel):
    """A block of another `_type`, kept as it is and not used by rollstream's own run."""

    model_config = ConfigDict(frozen=True, extra="allow")

    type: str = Field(alias="_type")


class RewardFunctionSection(Settings):
    """The reward that a run is trained on."""

    name: str


class BuilderFields(BaseModel):
    """`trajectory_builders.X`: where rollouts are made, and how."""

    bootstrap_servers: str = "embedded"
    """`embedded`, or host:port of a running Kafka."""
    services: Literal["managed", "external"] = "managed"
    """managed: started and stopped by `finetune`; external: they run already."""
    environment: str | None = None
    """A registered name or `python:module.function`; none: the workflow's."""
    environment_config: dict[str, JsonValue] = Field(default_factory=dict)
    rewards: tuple[str, ...] = ()
    reward_weights: dict[str, FiniteFloat] = Field(default_factory=dict)
    modules: tuple[str, ...] = ()
    """Python modules that register environments and rewards."""
    agents: tuple[str, ...] = ("agent",)
    """Names of the environment's agents; all are played by the trained model."""
    num_generations: int = Field(default=8, ge=1)
    min_generations: int = Field(default=2, ge=1)
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
        if self.min_generations > self.num_generations:
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
    seed: int = Field(default=0, ge=0)

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


class TrainerFields(BaseModel):
    """`trainers.X`: how a run is conducted."""

    planning: Literal["stream", "submitted"] = "stream"
    run_idle_timeout_s: float = Field(default=3600.0, gt=0)


class TrainerSection(TrainerFields, Settings):
    """What a run uses of its trainer's block."""

    type: Literal["rollstream"] = Field(default="rollstream", alias="_type")


class WorkflowSection(Settings):
    """The agent that is trained. A plain string in the file is its `environment`."""

    type: Literal["rollstream"] = Field(default="rollstream", alias="_type")
    environment: str


class DatasetSection(Settings):
    """A file of examples: JSON lines or one JSON list of objects."""

    type: Literal["json", "jsonl"] = Field(default="jsonl", alias="_type")
    file_path: Path
    id_key: str = "id"


class EvalGeneral(Settings):
    """What all evaluations share."""

    dataset: DatasetSection | None = None
    max_concurrency: int = Field(default=8, ge=1)
    output_dir: Path | None = None


class EvalSection(Settings):
    """NAT's evaluation section; evaluators of other packages are kept as they are."""

    general: EvalGeneral = Field(default_factory=EvalGeneral)
    evaluators: dict[str, ForeignBlock] = Field(default_factory=dict)


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


def _whose(value: Any) -> str:
    """Tag of a component block, given as read from the file or as a model."""
    if isinstance(value, BaseModel):
        return "foreign" if isinstance(value, ForeignBlock) else "ours"
    block_type: Any = value.get("_type") if isinstance(value, dict) else OURS  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return "ours" if block_type == OURS else "foreign"


_Foreign = Annotated[ForeignBlock, Tag("foreign")]
BuilderBlock = Annotated[Annotated[BuilderSection, Tag("ours")] | _Foreign, Discriminator(_whose)]
AdapterBlock = Annotated[Annotated[AdapterSection, Tag("ours")] | _Foreign, Discriminator(_whose)]
TrainerBlock = Annotated[Annotated[TrainerSection, Tag("ours")] | _Foreign, Discriminator(_whose)]


class ConfigFile(Settings):
    """A whole file."""

    llms: dict[str, ForeignBlock] = Field(default_factory=dict)
    workflow: WorkflowSection | None = None
    eval: EvalSection = Field(default_factory=EvalSection)
    trajectory_builders: dict[str, BuilderBlock]
    trainer_adapters: dict[str, AdapterBlock]
    trainers: dict[str, TrainerBlock]
    finetuning: FinetuningSection

    @field_validator("workflow", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return {"environment": value} if isinstance(value, str) else value


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
    validation: ValidationSection | None = None
    endpoint: str | None = None
    """Base URL of a remote workflow that plays the rollouts; none: the environment does."""
    endpoint_timeout: int = Field(default=300, ge=1)
    """Seconds that one answer of the endpoint may take."""
