"""Gives the API key of the run's endpoint to the llms of a NAT configuration, and warns if none uses the endpoint."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from rollstream.harness.config.secret_texts import is_placeholder
from rollstream.harness.runs.preflight import is_at_endpoint, token_of
from rollstream.harness.services.addresses import url_host
from rollstream.schemas.config import RunConfig
from rollstream.schemas.variables import conceal

logger = logging.getLogger(__name__)


def give_key(finetune: Any, config: RunConfig, workspace: Path, env: Mapping[str, str]) -> None:
    """Set `api_key` of those models in this process only, after the configuration was stored.

    A key set by the user stays. `finetune` is repaired already (`repair`). Raises ConfigError.
    """
    token: str | None = None
    for model in _models(finetune).values():
        is_ours = is_at_endpoint(config, str(getattr(model, "base_url", None) or ""))
        if not is_ours or not hasattr(model, "api_key") or not _is_free(model.api_key):
            continue
        token = token or token_of(config, workspace, env)
        if token is not None:
            model.api_key = SecretStr(token)


def warn_of_models_elsewhere(finetune: Any, config: RunConfig) -> None:
    """Warn if no model of the configuration uses the run's endpoint: their answers are not trained on.

    A workflow behind its own server (`--endpoint`) has its models in another file.
    """
    urls = {name: str(getattr(model, "base_url", None) or "") for name, model in _models(finetune).items()}
    is_remote = finetune.run_configuration is not None and bool(finetune.run_configuration.endpoint)
    served = config.served
    if served is None or is_remote or not urls or any(is_at_endpoint(config, url) for url in urls.values()):
        return
    logger.warning(
        "llms: none uses this run's endpoint, so their answers have no token ids and are not trained on; set "
        "base_url to http://%s:%d/v1 (%s)",
        url_host(served.host),
        served.port,
        ", ".join(f"{name}: {conceal(url) or 'no base_url'}" for name, url in urls.items()),
    )


def _models(finetune: Any) -> Mapping[str, Any]:
    file = None if finetune.run_configuration is None else finetune.run_configuration.config_file
    return getattr(file, "llms", None) or {}


def _is_free(key: SecretStr | str | None) -> bool:
    text = key.get_secret_value() if isinstance(key, SecretStr) else key
    return is_placeholder(text or "")
