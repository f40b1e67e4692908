"""Checks of the configuration of a server that somebody else started, as the server reports it: settings that lead to
wrong results are refused.
"""

from collections.abc import Mapping
from typing import Any

from rollstream.eventlog.http.http_json import HttpServer, Limit, TryAgainError, UnreachableError, excerpt
from rollstream.schemas.errors import ModelError

SERVER_INFO = "/server_info"
PROCESSED = "processed_logprobs"
RAW_LOGPROBS = (
    f"gives log-probabilities of other distributions than it samples from; start it with --logprobs-mode {PROCESSED}"
)


def replicas_error(count: int) -> str:
    """The reason why data-parallel replicas cannot be used."""
    return (
        f"has {count} data-parallel replicas, and a version would reach one of them; start a server for each, and name "
        "all as base_urls"
    )


async def read_config(http: HttpServer, *, limit: Limit) -> Mapping[str, Any] | str:
    """Its configuration, or why it does not give it. Raises UnreachableError."""
    try:
        answered = await http.sent("GET", f"{SERVER_INFO}?config_format=json", limit=limit)
        if not 200 <= answered.status < 300:
            return f"{SERVER_INFO} answered {answered.status} {excerpt(answered.body)}"
        config = http.parsed(answered.body)["vllm_config"]
        assert isinstance(config, Mapping)
    except UnreachableError:
        raise
    except (AssertionError, LookupError, ModelError, TryAgainError, TypeError) as error:
        return f"{SERVER_INFO} gives no configuration: {type(error).__name__}: {error}"
    return config  # pyright: ignore[reportUnknownVariableType]


def number_in(config: Mapping[str, Any], section: str, name: str) -> int | None:
    """A number of its configuration; None if it does not say."""
    found = config.get(section)
    value = found.get(name) if isinstance(found, Mapping) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return value if isinstance(value, int) else None


def fault_of(config: Mapping[str, Any], *, max_loras: int | None) -> str | None:
    """The reason why the server cannot be used; None if it can. `max_loras`: number of adapters that it must hold at
    once; None: it is for full weights.
    """
    if (count := number_in(config, "parallel_config", "_api_process_count") or 1) > 1:
        return f"has {count} API server processes, and a version would reach one; start it with --api-server-count=1"
    if (count := number_in(config, "parallel_config", "data_parallel_size") or 1) > 1:
        return replicas_error(count)
    most = number_in(config, "lora_config", "max_loras")
    if max_loras is not None and most is not None and most < max_loras:
        return (
            f"has --max-loras {most} and would drop adapters in use, engine.max_loras is {max_loras}; start it with "
            f"--max-loras {max_loras}, or lower engine.max_loras"
        )
    model = config.get("model_config")
    mode = model.get("logprobs_mode", PROCESSED) if isinstance(model, Mapping) else PROCESSED  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return None if mode == PROCESSED else f"has --logprobs-mode {mode} and {RAW_LOGPROBS}"
