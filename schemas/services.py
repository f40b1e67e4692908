"""What each long-running service is started with (command line and environment; no run is named here)."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from rollstream.schemas.settings import Settings


class ServiceSettings(Settings):
    """What every service needs: where the log, the artifacts and its own files are."""

    bootstrap_servers: str
    artifact_uri: str
    workspace: Path
    name: str
    """Stable name of this process: engine id, learner id, consumer's client id."""
    num_partitions: int = Field(default=6, ge=1)


class EngineSettings(Settings):
    """The rollout engine of a producers process."""

    kind: Literal["transformers", "scripted"] = "transformers"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    deterministic: bool = False
    """One sequence a forward, fixed threads, noise keyed by (seed, token index)."""
    threads: int | None = Field(default=None, ge=1)
    max_batch: int = Field(default=256, ge=1)
    """Most sequences generated together."""


class ProducerSettings(ServiceSettings):
    """A process that owns tasks partitions."""

    engine: EngineSettings = Field(default_factory=EngineSettings)
    max_concurrent_rollouts: int = Field(default=256, ge=1)
    tick_interval_s: float = Field(default=1.0, gt=0)
    session_timeout_s: float = Field(default=10.0, gt=0)
    """After so long without a heartbeat its partitions go to another process."""
    modules: tuple[str, ...] = ()
    """Python modules to import first: users' environments and rewards."""


class EndpointSection(Settings):
    """An OpenAI-compatible endpoint that answers with the model being trained."""

    host: str = "127.0.0.1"
    port: int = Field(default=8765, ge=0, le=65535)
    """0: any free port; the one taken is written to `NAME.json` of the workspace."""
    model_name: str = "policy"
    """What requests call the model; the model group's own name is known too."""
    token_file: Path | None = None
    """Requests must bear the token in it; none: that of ROLLSTREAM_ENDPOINT_TOKEN, if it is set."""
    engine: EngineSettings = Field(default_factory=EngineSettings)
    max_new_tokens: int = Field(default=1024, ge=1)
    """Of a request that says nothing; what the model has no room for is cut."""
    wait_timeout_s: float = Field(default=120.0, gt=0)
    """So long may a request wait for the weight version that it needs."""


class EndpointSettings(EndpointSection, ServiceSettings):
    """A process that serves one model group."""

    model_group: str


class ProcessorSettings(ServiceSettings):
    """A Faust worker: assembly and curation."""

    session_timeout_s: float = Field(default=10.0, gt=0)
    stall_timeout_s: float = Field(default=30.0, gt=0)
    """So long may a partition stand still with records to read; then the worker ends, to be started again."""


class LearnerSettings(ServiceSettings):
    """A learner process."""

    model_groups: tuple[str, ...] = ()
    """Model groups to serve; empty: every one that has an open job."""
    threads: int | None = Field(default=None, ge=1)


class MetricsSettings(ServiceSettings):
    """The projector, only owner of the DuckDB file, and its SQL service."""

    port: int = Field(default=0, ge=0, le=65535)
    """0: any free port; the one taken is written to `metrics.json` of the workspace."""
