"""Settings of rollout engines, a class for each kind, and of a model that another server offers."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, JsonValue, field_validator, model_validator

from rollstream.schemas.base import UserPath
from rollstream.schemas.settings import Device, Settings


class ServedModel(Settings):
    """A model that others serve with OpenAI's API. The local configuration alone names it, never a record."""

    base_url: str
    """Up to the path before `/chat/completions`: `http://host:8000/v1`."""
    model: str | None = None
    """None: the only one that the server lists."""
    api_key_variable: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}$")
    """Environment variable with the key; none: requests bear no key."""
    api: Literal["chat", "completions"] = "chat"
    """`completions` sends the contents of the messages, joined by line ends: for base models."""
    timeout_s: float = Field(default=120.0, gt=0, le=3600)
    retries: int = Field(default=4, ge=0, le=20)
    """Further tries after one that failed for the moment: no answer, 408, 409, 425, 429, 5xx."""
    retry_wait_s: float = Field(default=1.0, gt=0, le=60)
    """Pause before the second try; each further one is twice as long, or what `Retry-After` says (60 s at most)."""
    max_concurrent: int = Field(default=32, ge=1)
    """Requests at a time."""

    @field_validator("base_url")
    @classmethod
    def _is_plain_url(cls, value: str) -> str:
        if not re.fullmatch(r"https?://[^/?#@\s]+(/[^?#\s]*)?", value):
            raise ValueError(f"{value[:100]!r} is not a URL like http://host:8000/v1, without user, query or fragment")
        return value


class EngineSettings(Settings):
    """Base of the settings of rollout engines: each kind has a class of its own, distinguished by `kind`."""

    LOADS_WEIGHTS: ClassVar[bool] = True
    """The engine can serve a model that the run trains."""
    READS_BASE_MODELS: ClassVar[bool] = False
    """The engine reads the folders of base models on this machine."""
    RECORDS_KEPT_IDS: ClassVar[bool | None] = False
    """The engine gives the ids that each token was sampled from, where `engines.base.keeps_ids` says so. None: only its
    package knows.
    """

    kind: str

    def in_folder(self, folder: Path) -> Self:
        """These settings, with `folder` for the files of an engine that writes some and names no other folder."""
        return self

    def unused(self, *, has_adapters: bool = True, has_full_weights: bool = True) -> dict[str, tuple[str, ...]]:
        """Keys that were given but have no effect, by reason and remedy. `has_...`: whether it serves such weights."""
        return {}

    @property
    def needed_device(self) -> str:
        """Device of this machine that it computes on; cpu also for those that choose it by themselves."""
        return "cpu"

    def _given(self, why: str, *names: str) -> dict[str, tuple[str, ...]]:
        """Those of the keys that were given, by the reason; empty if none was."""
        found = tuple(name for name in names if name in self.model_fields_set)
        return {why: found} if found else {}


class TransformersSettings(EngineSettings):
    """The engine that samples from a transformers model in the producers process."""

    READS_BASE_MODELS: ClassVar[bool] = True
    RECORDS_KEPT_IDS: ClassVar[bool | None] = True

    kind: Literal["transformers"] = "transformers"  # pyright: ignore[reportIncompatibleVariableOverride]
    device: Device = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    deterministic: bool = False
    """One sequence a forward, fixed threads, noise keyed by (seed, token index)."""
    threads: int | None = Field(default=None, ge=1)
    max_batch: int = Field(default=256, ge=1)
    """Most sequences generated together."""
    batching: Literal["continuous", "static"] = "continuous"
    """`continuous`: requests join and leave between two forwards, and cached keys and values of earlier prompts are
    reused. `static`: a batch runs to its end. With `deterministic` each request is a batch of its own."""
    prefix_cache_mb: int = Field(default=512, ge=0)
    """Keys and values of earlier prompts and answers that a model group's weight version keeps; 0: none."""
    kv_cache_mb: int | None = Field(default=None, ge=1)
    """Keys and values of all sequences that are being generated; others wait. None: a share of the free memory."""
    full_copies: int = Field(default=1, ge=1, le=2)
    """Modules of a model group with full weights. With 2 a new version is used at once while the one before ends its
    sequences in memory of its own; with 1 it waits for these. Adapters need no second module."""

    @property
    def needed_device(self) -> str:
        """See `EngineSettings`."""
        return self.device

    @property
    def is_continuous(self) -> bool:
        """Whether requests join between two forwards."""
        return self.batching == "continuous" and not self.deterministic

    def unused(self, *, has_adapters: bool = True, has_full_weights: bool = True) -> dict[str, tuple[str, ...]]:
        """See `EngineSettings`."""
        of_continuous = ("prefix_cache_mb", "kv_cache_mb", "full_copies")
        if self.deterministic:
            why = "deterministic generates one request at a time, without caches; leave it out, or deterministic"
            return self._given(why, "batching", "max_batch", *of_continuous)
        if not self.is_continuous:
            return self._given("batching is static; leave it out, or set batching: continuous", *of_continuous)
        why = "two versions of an adapter need no second copy of the model; leave it out"
        return {} if has_full_weights else self._given(why, "full_copies")


class ScriptedSettings(TransformersSettings):
    """The engine without a model, for tests. It accepts the keys of `transformers` and uses none of them."""

    RECORDS_KEPT_IDS = False

    kind: Literal["scripted"] = "scripted"  # pyright: ignore[reportIncompatibleVariableOverride]

    def unused(self, *, has_adapters: bool = True, has_full_weights: bool = True) -> dict[str, tuple[str, ...]]:
        """See `EngineSettings`."""
        names = [name for name in TransformersSettings.model_fields if name != "kind"]
        return self._given("the scripted engine does not use it; leave it out", *names)


class InstalledEngineSettings(EngineSettings):
    """Settings of a kind that an installed package brings, as written: `${NAME}` is expanded where the engine is built.

    `rollstream.producers.engines.table` knows the kind's own class.
    """

    RECORDS_KEPT_IDS: ClassVar[bool | None] = None

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, JsonValue]  # pyright: ignore[reportIncompatibleVariableOverride]


class OpenAISettings(ServedModel, EngineSettings):
    """The frozen engine over a server with OpenAI's API."""

    LOADS_WEIGHTS: ClassVar[bool] = False

    kind: Literal["openai"] = "openai"  # pyright: ignore[reportIncompatibleVariableOverride]


class VllmSettings(EngineSettings):
    """The engine over vLLM servers: one that it starts, or some that run already."""

    READS_BASE_MODELS: ClassVar[bool] = True
    RECORDS_KEPT_IDS: ClassVar[bool | None] = True

    kind: Literal["vllm"] = "vllm"  # pyright: ignore[reportIncompatibleVariableOverride]
    base_urls: tuple[str, ...] = Field(default=(), max_length=256)
    """Running servers (`http://host:8000`). None: one is started on a free port of 127.0.0.1, and ends with us."""
    executable: Annotated[str, AfterValidator(os.path.expanduser)] = Field(default="vllm", min_length=1)
    """Executable of the server to start: the command `vllm` of the environment in which vLLM is installed."""
    arguments: tuple[str, ...] = Field(default=(), max_length=100)
    """Further arguments of `vllm serve`."""
    folder: UserPath | None = None
    """Folder for the servers' weights and logs; servers must see it by the same path. None: `NAME-vllm` in the
    workspace."""
    api_key_variable: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}$")
    """Environment variable with the key of running servers."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_loras: int = Field(default=4, ge=2, le=64)
    """Versions of adapters that a server generates with at once: at least max_staleness + 2."""
    max_lora_rank: Literal[8, 16, 32, 64, 128, 256] = 64
    max_concurrent: int = Field(default=256, ge=1)
    """Requests at a time, of all servers together."""
    timeout_s: float = Field(default=600.0, gt=0, le=86400)
    """Timeout of one request."""
    start_timeout_s: float = Field(default=600.0, gt=0, le=86400)
    """Maximum time for a request or a version to wait while no server is ready, and for a server that we started to
    serve: after it, that one is restarted."""
    load_timeout_s: float = Field(default=300.0, gt=0, le=86400)
    """Maximum time for a server to load a version, once it has room for it. The other servers do not wait for it."""
    health_interval_s: float = Field(default=5.0, gt=0, le=3600)
    """Seconds between two health checks of a server."""
    health_timeout_s: float = Field(default=60.0, gt=0, le=3600)
    """A server whose workers do not answer within it is taken out of use; one that we started is restarted."""
    check_weights: bool = False
    """For full weights: compare the sums of every parameter (`/weight_checker`) between servers, and with a server's
    earlier sums if it returns with the newest version's label. Each version is hashed while requests wait."""

    @field_validator("base_urls")
    @classmethod
    def _are_plain_urls(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for one in value:
            ServedModel(base_url=one)
        if len(set(value)) < len(value):
            raise ValueError("names a server twice; remove one of the two")
        return value

    @model_validator(mode="after")
    def _servers_are_started_or_joined(self) -> Self:
        if self.base_urls and (self.arguments or self.executable != "vllm"):
            raise ValueError("executable and arguments are for a started server; remove them or base_urls")
        if not self.base_urls and self.api_key_variable:
            raise ValueError("api_key_variable is of running servers; name them as base_urls")
        return self

    def in_folder(self, folder: Path) -> Self:
        """See `EngineSettings`."""
        return self if self.folder is not None else self.model_copy(update={"folder": folder})

    def unused(self, *, has_adapters: bool = True, has_full_weights: bool = True) -> dict[str, tuple[str, ...]]:
        """See `EngineSettings`."""
        found: dict[str, tuple[str, ...]] = {}
        if self.base_urls:
            found |= self._given("the servers of base_urls are started already; give --dtype to those", "dtype")
        if not has_adapters:
            found |= self._given("the run has no adapters; leave it out", "max_loras", "max_lora_rank")
        if not has_full_weights and self.check_weights:
            found |= self._given("it compares full weights, and the run has adapters; leave it out", "check_weights")
        return found


ENGINES: Mapping[str, type[EngineSettings]] = {
    "transformers": TransformersSettings,
    "scripted": ScriptedSettings,
    "openai": OpenAISettings,
    "vllm": VllmSettings,
}
"""The table of built-in engines: settings by kind. `producers.engines.table` adds the kinds of installed packages."""


def _by_kind(value: Any) -> Any:
    """An engine's settings as the class of their kind."""
    if isinstance(value, EngineSettings):
        is_ours = isinstance(value, InstalledEngineSettings) or type(value) in ENGINES.values()
        return value if is_ours else InstalledEngineSettings(**value.model_dump())
    kind: Any = value.get("kind", "transformers") if isinstance(value, Mapping) else "transformers"  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    found = ENGINES.get(kind) if isinstance(kind, str) else None
    return (found or InstalledEngineSettings).model_validate(value)


EngineBlock = Annotated[
    TransformersSettings | ScriptedSettings | OpenAISettings | VllmSettings | InstalledEngineSettings,
    BeforeValidator(_by_kind),
]
"""`engine:` of a producers process or an endpoint."""
