"""The configuration of a run that `nat finetune` conducts: as it is used, and as its file was written.

NAT hands components a configuration in which `${ENV}` is expanded already, and nothing of that may be stored. What was
written is read again from the file that the command was given.
"""

from collections.abc import Mapping
from typing import Any

import click
from pydantic import JsonValue

from rollstream.harness.config import overrides
from rollstream.harness.config.config_file import Loaded
from rollstream.harness.config.config_values import check_values
from rollstream.harness.config.finetune_config import run_config_of
from rollstream.harness.config.written_config import written_of
from rollstream.harness.config.yaml_reading import read_yaml
from rollstream.schemas.config import RunConfig
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.evaluators import MODELS


def loaded_of(finetune: Any) -> Loaded:
    """What a run is opened with. Raises ConfigError. `finetune` is repaired already (`repair`)."""
    config = _unexpanded(run_config_of(finetune), _file())
    written = written_of(config)
    check_values(written)
    return Loaded(config, written, finetune)


def _file() -> dict[str, JsonValue]:
    """The file of the command that is under way, with its overrides; empty without one."""
    context = click.get_current_context(silent=True)
    params = {} if context is None else context.params
    if params.get("config_file") is None:
        return {}
    written = read_yaml(params["config_file"])
    overrides.apply(written, params.get("override") or ())
    return written


def _unexpanded(config: RunConfig, written: Mapping[str, Any]) -> RunConfig:
    """What is sent in events, as it was written. Raises ConfigError if that is not known and could be a secret.

    Evaluators of other packages score nothing here and are left out.
    """
    builder = config.builder
    evaluators = {name: block for name, block in config.evaluators.items() if block.get("_type") in MODELS}
    if not written and (builder.environment_config or evaluators):
        raise ConfigError(
            "environment_config and eval.evaluators are stored as they were written, and only `nat finetune "
            "--config_file` says how; leave them out, or use that command"
        )
    block = _at(written, "trajectory_builders", config.finetuning.trajectory_builder)
    given = {**builder.environment_config, **_at(block, "environment_config")}
    as_written = {name: _at(written, "eval", "evaluators", name) for name in evaluators}
    return config.model_copy(
        update={"builder": builder.model_copy(update={"environment_config": given}), "evaluators": as_written}
    )


def _at(block: Mapping[str, Any], *path: str) -> dict[str, Any]:
    for key in path:
        block = block.get(key) or {}
    return dict(block)
