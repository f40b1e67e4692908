"""The YAML file of a run in NAT's shape: its sections, ours (`_type: rollstream`) and foreign blocks."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

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

from rollstream.schemas import ids
from rollstream.schemas import services as section
from rollstream.schemas.algorithms import Algorithm, GrpoSettings
from rollstream.schemas.base import UserPath
from rollstream.schemas.engine_settings import EngineBlock, TransformersSettings
from rollstream.schemas.evaluators import DatasetSection
from rollstream.schemas.finetuning import TrainerAdapterConfig, TrainerConfig, TrajectoryBuilderConfig, adapter_path
from rollstream.schemas.kafka import KafkaSection, Servers
from rollstream.schemas.league import LeagueSettings
from rollstream.schemas.services import EndpointSection, ModelGroupSection
from rollstream.schemas.settings import (
    MAX_MEMBERS,
    MAX_REFILLS,
    MAX_SESSION_S,
    MAX_TASKS,
    MAX_TIMEOUT_S,
    Agents,
    CurriculumSettings,
    EarlyStopping,
    GateSettings,
    GroupName,
    ModelSettings,
    OptimizerSettings,
    Sampling,
    Settings,
    WarmStart,
)
from rollstream.schemas.trackers import Tracker

OURS = "rollstream"
MAX_IDLE_S = 1e12
"""Maximum idle time-out of a run, 31,700 years: in milliseconds it is below the largest event time."""
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
OWN_OF_GROUPS = ("model", "algorithm", "optimizer")
"""Blocks that a model group has of its adapter unless it has its own."""


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

    bootstrap_servers: Servers = "embedded"
    """`embedded`, or host:port of a running Kafka."""
    kafka: KafkaSection = Field(default_factory=KafkaSection)
    """Connection to the broker: TLS, SASL and topics."""
    services: Literal["managed", "external"] = "managed"
    """managed: started and stopped by `finetune`; external: they run already."""
    environment: str | None = None
    """A registered name or `python:module.function`; none: the workflow's."""
    environment_config: dict[str, JsonValue] = Field(default_factory=dict)
    rewards: tuple[str, ...] = ()
    reward_weights: dict[str, FiniteFloat] = Field(default_factory=dict)
    missing_score: Literal["error", "reject"] = "error"
    """A rollout without a score fails and is tried again (not a NAT workflow's), or is rejected as `no_score`; it never
    counts as 0."""
    modules: tuple[str, ...] = ()
    """Python modules that register environments and rewards."""
    agents: Agents = ("agent",)
    """Names of the environment's agents, all played by the trained model; or the model group of each."""
    league: LeagueSettings | None = None
    """Past, frozen and scripted opponents beside the newest weights; None: these play every agent."""
    num_generations: int = Field(default=8, ge=1, le=MAX_MEMBERS)
    min_generations: int = Field(default=2, ge=1)
    """Fewest complete rollouts of a group to train on; of a smaller group, all of it."""
    oversampling: int = Field(default=0, ge=0, le=MAX_MEMBERS)
    """Rollouts of a task beyond num_generations. Its group closes once num_generations are complete, without the
    slowest ones; short rollouts are then trained on more often than long ones."""
    responses_per_step: int = Field(default=1, ge=1)
    """Above 1 the rollouts of a task are a tree's branches; num_generations must be a power of it."""
    drop_zero_variance: bool = True
    drop_dead_branches: bool | None = None
    """Train on no answer that the agent discarded (a rejected summary, a repeated call); none: where agents outside
    play, by `environment: gateway` or `command:PROGRAM`."""
    renderer: str = Field(default="auto", min_length=1)
    """Parses tool calls and bridges prompts: `auto`, `none` or the name of a family in the library `renderers`."""
    sampling: Sampling = Field(default_factory=Sampling)
    engine: EngineBlock = Field(default_factory=TransformersSettings)
    max_turns: int = Field(default=16, ge=1)
    max_attempts: int = Field(default=3, ge=1)
    rollout_timeout_s: float = Field(default=120.0, gt=0, le=MAX_TIMEOUT_S)
    group_timeout_s: float = Field(default=600.0, gt=0, le=MAX_TIMEOUT_S)
    """Seconds after which a group closes with its complete members; time spent waiting for a slot does not count."""
    max_concurrent_rollouts: int = Field(default=256, ge=1)
    follow_lag: bool = False
    """If max_staleness is above 0: start groups when the learner's lag and speed call for them, not as early as
    allowed.
    """
    num_partitions: int | None = Field(default=None, ge=1)
    """Partitions of the topics that are read by several processes; none: as many as there are, or 6 in a new log."""
    num_producers: int = Field(default=1, ge=1)
    num_processors: int = Field(default=1, ge=1)
    session_timeout_s: float = Field(default=10.0, gt=0, le=MAX_SESSION_S)
    tick_interval_s: float = Field(default=1.0, gt=0)
    gateway: section.GatewaySection = Field(default_factory=section.GatewaySection)
    """Gateway of the producers, at which external agents play rollouts."""

    def pace(self, max_staleness: int) -> section.PaceSettings | None:
        """Settings by which the producers follow the learner; None if nothing is held back, as in an on-policy run."""
        if not self.follow_lag or not max_staleness:
            return None
        return section.PaceSettings(max_staleness=max_staleness, num_producers=self.num_producers)

    @model_validator(mode="after")
    def _minimum_fits(self) -> Self:
        if "min_generations" in self.model_fields_set and self.min_generations > self.num_generations:
            raise ValueError(f"min_generations {self.min_generations} exceeds num_generations; lower it")
        if self.num_generations + self.oversampling > MAX_MEMBERS:
            raise ValueError(f"num_generations and oversampling exceed {MAX_MEMBERS} together; lower oversampling")
        if self.oversampling and self.responses_per_step > 1:
            raise ValueError(
                "oversampling has no meaning where responses_per_step is above 1: a tree needs all of its rollouts; "
                "remove one of them"
            )
        return self


class BuilderSection(BuilderFields, Settings):
    """The keys of a trajectory builder's block that a run uses."""

    type: Literal["rollstream"] = Field(default="rollstream", alias="_type")


class AdapterFields(BaseModel):
    """`trainer_adapters.X`: what the learner trains, and how."""

    model: ModelSettings
    algorithm: Algorithm = Field(default_factory=GrpoSettings)
    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings)
    max_staleness: int = Field(default=0, ge=0)
    batches_per_epoch: int = Field(default=1, ge=1)
    tasks_per_epoch: int = Field(default=8, ge=1, le=MAX_TASKS)
    max_refills: int = Field(default=0, ge=0, le=MAX_REFILLS)
    warm_start: WarmStart | None = None
    artifact_uri: str | None = None
    """An fsspec URI; none: a folder of the workspace."""
    checkpoint_every: int = Field(default=1, ge=1)
    keep_last: int = Field(default=8, ge=1)
    keep_every: int = Field(default=50, ge=1)
    threads: int | None = Field(default=None, ge=1)
    ranks: int = Field(default=1, ge=1)
    """Processes that train together, which torchrun starts; each has a GPU of its own, if there are any."""
    seed: int = Field(default=0, ge=0, lt=2**64)
    model_groups: dict[GroupName, ModelGroupSection] = Field(default_factory=dict)
    """Settings in which the model groups named in `trajectory_builders.X.agents` differ from the rest of the block."""
    export_untrained: bool = False
    """Leave the base model in output_dir where nothing was trained; off: a run that trained nothing leaves none."""

    @model_validator(mode="after")
    def _batches_fit_staleness(self) -> Self:
        if self.max_staleness < self.batches_per_epoch - 1:
            why = f"{self.batches_per_epoch} batches per epoch need at least {self.batches_per_epoch - 1}; raise it"
            raise ValueError(f"max_staleness {self.max_staleness} is too small; {why}")
        return self

    def of_group(self, name: str) -> Self:
        """The settings of one model group: what `model_groups` does not give is the same for all."""
        own = self.model_groups.get(name, ModelGroupSection())
        given = {key: getattr(own, key) for key in OWN_OF_GROUPS}
        return self.model_copy(update={key: value for key, value in given.items() if value is not None})


class AdapterSection(AdapterFields, Settings):
    """The keys of a trainer adapter's block that a run uses."""

    type: Literal["rollstream"] = Field(default="rollstream", alias="_type")


class TrainerFields(BaseModel):
    """`trainers.X`: how a run is conducted."""

    model_config = ConfigDict(allow_inf_nan=False)

    planning: Literal["stream", "submitted"] = "stream"
    run_idle_timeout_s: float = Field(default=3600.0, gt=0, le=MAX_IDLE_S)
    early_stopping: EarlyStopping | None = None
    """Early stopping of epochwise runs; None: all epochs are trained."""
    evaluation_gate: GateSettings | None = None
    """Streamed runs only."""
    validation_required: bool = False
    """A failed validation ends the run as failed; off: it is noted with its reason, and training goes on. If a service,
    the log or the artifact store fails meanwhile, the run stays open.
    """
    trackers: tuple[Tracker, ...] = ()
    """Experiment trackers that get a copy of the run's metrics."""


class TrainerSection(TrainerFields, Settings):
    """The keys of a trainer's block that a run uses."""

    type: Literal["rollstream"] = Field(default="rollstream", alias="_type")


class WorkflowSection(Settings):
    """The agent that is trained. A plain string in the file is its `environment`."""

    type: Literal["rollstream"] = Field(default="rollstream", alias="_type")
    environment: str


class EvalGeneral(Settings):
    """Settings that all evaluations share."""

    dataset: DatasetSection | None = None
    max_concurrency: int = Field(default=8, ge=1)
    output_dir: UserPath | None = None
    output: JsonValue = None
    workflow_alias: str | None = None
    profiler: JsonValue = None
    validate_llm_endpoints: bool = False
    per_input_user_id: bool = True


class EvalSection(Settings):
    """NAT's evaluation section. Evaluators are kept as written; `rollstream.schemas.evaluators` has built-in ones."""

    general: EvalGeneral = Field(default_factory=EvalGeneral)
    evaluators: dict[str, ForeignBlock] = Field(default_factory=dict)


class RunConfigurationSection(Settings):
    """`finetuning.run_configuration`: what the command line says about a run; its options win over the file."""

    config_file: UserPath | None = None
    dataset: UserPath | None = None
    result_json_path: str = "$"
    endpoint: str | None = None
    endpoint_timeout: int = Field(default=300, ge=1)
    override: tuple[tuple[str, str], ...] = ()
    validation_dataset: UserPath | None = None
    validation_interval: int = Field(default=5, ge=1)
    validation_config_file: UserPath | None = None

    @field_validator("endpoint")
    @classmethod
    def _is_url(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError(f"{value!r} is not a URL; give one such as http://localhost:8000")
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
    output_dir: UserPath = Path(".rollstream/output")
    run_configuration: RunConfigurationSection | None = None


def _whose(value: Any) -> str:
    """Tag of a workflow's block, given as read from the file or as a model."""
    if isinstance(value, BaseModel):
        return "ours" if isinstance(value, WorkflowSection) else "foreign"
    block_type = cast("dict[str, Any]", value).get("_type", OURS) if isinstance(value, dict) else OURS
    return "ours" if block_type == OURS else "foreign"


WorkflowBlock = Annotated[
    Annotated[WorkflowSection, Tag("ours")] | Annotated[ForeignBlock, Tag("foreign")], Discriminator(_whose)
]


class ConfigFile(Settings):
    """A whole file. Sections that only NAT uses are kept as they are.

    A component's block is an instance of its own configuration class; `rollstream.harness.config.blocks` says
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
    config: UserPath | None = None
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
    """Endpoint that serves the trained model with OpenAI's chat completions API; None: the model is not served."""
    result_json_path: str = "$"
    """JSON path of the answer in the endpoint's response (`$`: all of it)."""
    nat_workflow: str | None = None
    """`_type` of a workflow that NAT's runtime plays in the process of `finetune`; none: an environment does."""
    is_external: bool = False
    """The trainer adapter is of another training backend: no model is trained here, and `adapter` says nothing."""

    @property
    def agents(self) -> dict[str, str]:
        """Name of the model group by agent."""
        named = self.builder.agents
        return named if isinstance(named, dict) else dict.fromkeys(named, ids.MODEL_GROUP)

    def by_group(self) -> dict[str, "RunConfig"]:
        """The configuration as it applies to each model group, by name in the order of the agents."""
        names = dict.fromkeys(self.agents.values()) or {ids.MODEL_GROUP: None}
        return {name: self.model_copy(update={"adapter": self.adapter.of_group(name)}) for name in names}

    def group_path(self, name: str, key: str) -> str:
        """Path of a model group's `model`, `algorithm` or `optimizer`: in its own section where that gives one."""
        own = getattr(self.adapter.model_groups.get(name), key.partition(".")[0], None)
        return adapter_path(self.finetuning, key if own is None else f"model_groups.{name}.{key}")

    def trained(self) -> dict[str, "RunConfig"]:
        """Those of `by_group` that are trained; the job of the first plans the tasks."""
        groups = self.adapter.model_groups
        return {name: one for name, one in self.by_group().items() if name not in groups or groups[name].is_trained}
