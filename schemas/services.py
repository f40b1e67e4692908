"""Settings that each long-running service is started with (command line and environment; no run is named here)."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator

from rollstream.schemas.algorithms import Algorithm
from rollstream.schemas.base import UserPath
from rollstream.schemas.engine_settings import (
    EngineBlock,
    EngineSettings,
    OpenAISettings,
    ServedModel,
    TransformersSettings,
)
from rollstream.schemas.kafka import KafkaSection, KafkaSettings, Servers, connection, given
from rollstream.schemas.permissions import check_entry, entries_in
from rollstream.schemas.settings import MAX_SESSION_S, ModelSettings, OptimizerSettings, Settings
from rollstream.schemas.trackers import Tracker


class ServiceSettings(Settings):
    """Settings common to all services: addresses of the log and the artifacts, and a folder for the service's own
    files.
    """

    bootstrap_servers: Servers
    kafka: KafkaSection = Field(default_factory=KafkaSection)
    """Connection to the brokers: TLS, SASL and topics."""
    artifact_uri: str
    workspace: UserPath
    name: str
    """Stable name of this process: engine id, learner id, consumer's client id."""
    num_partitions: int | None = Field(default=None, ge=1)
    """As in a run's configuration."""
    allow: tuple[str, ...] = ()
    """Names allowed in records beside registered ones: `python:module.attribute`, `${VARIABLE}`, URLs, `model:PATH`,
    `file:PATH`.
    """

    @field_validator("allow", mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return entries_in(value) if isinstance(value, str) else value

    @field_validator("allow")
    @classmethod
    def _are_entries(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for entry in value:
            check_entry(entry)
        return value

    @property
    def connection(self) -> KafkaSettings:
        """Connection settings for clients of the log. Raises ConfigError for settings that contradict each other."""
        return connection(self.bootstrap_servers, given(self.kafka), None)


def _served(written: Any) -> Any:
    return {"base_url": written} if isinstance(written, str) else written


class ModelGroupSection(Settings):
    """`model_groups.X`: one of several model groups of a run; what is not given is the adapter's own."""

    model: ModelSettings | None = None
    algorithm: Algorithm | None = None
    optimizer: OptimizerSettings | None = None
    frozen: bool = False
    """Its weights are sampled from and stay as they are."""
    version: str | None = None
    """`RUN@VERSION` or `RUN/GROUP@VERSION` that it begins with; none: its base model."""
    endpoint: Annotated[ServedModel | None, BeforeValidator(_served)] = None
    """A model that others serve, which makes the model group a frozen one; only a URL: its `base_url`."""

    @property
    def is_trained(self) -> bool:
        """Whether it has jobs that train it."""
        return not self.frozen and self.endpoint is None


def in_workspace(engine: EngineSettings, service: ServiceSettings) -> EngineSettings:
    """An engine that writes files does so in the workspace, unless it names another folder."""
    return engine.in_folder(service.workspace.absolute() / f"{service.name}-{engine.kind}")


MODEL_ALIASES = ("claude-*", "gpt-*", "codex-*", "o[1-9]*")
"""Names of models that agents as shipped ask for."""


class GatewaySection(Settings):
    """Address at which programs outside the producers process play rollouts, and its limits."""

    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    """0: the port of the process before, if it is free, else any; the one taken is in `gateway-NAME.json` of the
    workspace."""
    allowed_hosts: tuple[str, ...] = ()
    """Names by which it may be asked beside its own address (the header `Host`)."""
    model_aliases: tuple[str, ...] = MODEL_ALIASES
    """Patterns (`*`, `?`, `[...]`) of further names of a rollout's first agent. Empty: none."""
    max_concurrent_calls: int = Field(default=64, ge=1)
    """Maximum number of concurrent calls of one rollout; further ones are refused (429)."""
    requests_per_minute: int | None = Field(default=None, ge=1)
    """Maximum requests a minute of one key to the APIs' routes; further ones are refused (429). None: any number."""
    calls_per_key: int | None = Field(default=None, ge=1)
    """Requests of one key at once, which may be for several rollouts; more are refused (429). None: any number."""

    def of_process(self, number: int) -> "GatewaySection":
        """Settings for the first, second, ... producers process of a machine: ports that are set follow one another."""
        if not self.port:
            return self
        return self.model_copy(update={"port": min(self.port + number - 1, 65535)})


class PaceSettings(Settings):
    """Limits on how far ahead of the learner groups are started."""

    max_staleness: int = Field(ge=1)
    """Maximum staleness of the run."""
    num_producers: int = Field(default=1, ge=1)
    """Processes that share its tasks."""


class ProducerSettings(ServiceSettings):
    """A process that owns tasks partitions."""

    engine: EngineBlock = Field(default_factory=TransformersSettings)
    served_models: dict[str, OpenAISettings] = Field(default_factory=dict)
    """Models that other servers offer in place of the engine's, by model group (`RUN/GROUP`, or `GROUP` of any run)."""
    max_concurrent_rollouts: int = Field(default=256, ge=1)
    tick_interval_s: float = Field(default=1.0, gt=0)
    session_timeout_s: float = Field(default=10.0, gt=0, le=MAX_SESSION_S)
    """After so long without a heartbeat its partitions go to another process."""
    modules: tuple[str, ...] = ()
    """Python modules to import first: users' environments and rewards."""
    gateway: GatewaySection | None = None
    """Gateway for external programs; it listens from the start. None: on 127.0.0.1 from the first such rollout on."""
    pace: PaceSettings | None = None
    """Limits groups in progress by the learner's lag and speed. None: a group starts once its version is loaded."""
    runs: tuple[str, ...] = ()
    """Runs whose tasks are worked on; those of others are left to the processes that serve them. None: all."""


LOOPBACK = ("127.0.0.1", "::1", "localhost")


class EndpointSection(Settings):
    """An OpenAI-compatible endpoint that answers with the model being trained."""

    host: str = "127.0.0.1"
    port: int = Field(default=8765, ge=0, le=65535)
    """0: any free port; the one taken is written to `NAME.json` of the workspace, and kept over restarts if it can be.
    """
    model_name: str = "policy"
    """Name of the model in requests; the model group's own name is accepted too."""
    token: str | None = None
    """Requests must bear it (`Authorization: Bearer`); only as `${NAME}`, which is expanded where it is used."""
    token_file: UserPath | None = None
    """Requests must bear the token in it. Neither: that of ROLLSTREAM_ENDPOINT_TOKEN, else a random one, which is
    in `NAME.token` of the workspace."""
    requires_token: bool = True
    """False: whoever reaches the port may ask; only on a loopback address."""
    allowed_hosts: tuple[str, ...] = ()
    """Names by which the endpoint may be asked beside its own address (the header `Host`): those of a proxy, say."""
    model_aliases: tuple[str, ...] = MODEL_ALIASES
    """Patterns (`*`, `?`, `[...]`) of further names of the model group. Empty: none."""
    engine: EngineBlock = Field(default_factory=TransformersSettings)
    max_new_tokens: int = Field(default=1024, ge=1)
    """Default for requests that set no limit; reduced to the space that the model has left."""
    wait_timeout_s: float = Field(default=120.0, gt=0)
    """Maximum seconds for a request to wait for the weight version that it needs."""
    requests_per_minute: int | None = Field(default=None, ge=1)
    """Maximum requests per minute of one key; further ones are refused (429). None: any number."""
    calls_per_key: int | None = Field(default=None, ge=1)
    """Requests of one key at once; more are refused (429). None: any number."""


class EndpointSettings(EndpointSection, ServiceSettings):
    """A process that serves one model group."""

    model_group: str
    temperature: float | None = Field(default=None, gt=0)
    """Sampling temperature that the loss assumes for answers by `model_name`; None: any."""
    algorithm: str = ""
    """Algorithm that compares those answers with the policy by ratios; empty: none does, or it is not known."""


class ProcessorSettings(ServiceSettings):
    """A Faust worker: assembly and curation."""

    session_timeout_s: float = Field(default=10.0, gt=0, le=MAX_SESSION_S)
    stall_timeout_s: float = Field(default=30.0, gt=0)
    """Maximum seconds without progress on a partition with records to read; then the worker ends and is restarted."""


class LearnerSettings(ServiceSettings):
    """A learner process."""

    model_groups: tuple[str, ...] = ()
    """Model groups to serve; empty: every one that has an open job, what-ifs excepted."""
    threads: int | None = Field(default=None, ge=1)
    ranks: int = Field(default=1, ge=1)
    """Processes of this machine that train together. Above 1 torchrun starts them, unless it has started this one."""


class TrackerServiceSettings(ServiceSettings):
    """A process that copies metrics to an experiment tracker. It runs beside the metrics service, on its machine."""

    tracker: Tracker
    runs: tuple[str, ...] = ()
    """Runs to copy. None: each that has not ended when the service finds it."""


class MetricsSettings(ServiceSettings):
    """The projector, only owner of the DuckDB file, and its SQL service."""

    port: int = Field(default=0, ge=0, le=65535)
    """0: any free port; the one taken is written to `metrics.json` of the workspace."""
