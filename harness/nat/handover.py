"""The configuration of a run that `nat finetune` conducts: in its usable form and as written.

NAT passes components a configuration with `${ENV}` expanded, which must not be stored; the written form is read again
from the command's file. Repairs the configuration that `nat finetune` 1.9 passes to components. It is cyclic:
`finetuning.run_configuration.config_file` is the configuration that contains that `finetuning`, so printing or dumping
it, as NAT's own evaluation does, never ends. Its options `--dataset` and `--validation_dataset` are paths, but its
evaluation accepts only strings. Also converts data models of the finetuning harness between our classes and NAT's,
which have the same names, fields and JSON. FinetuneConfig is not converted, because NAT's may be cyclic; its fields are
read in place. Does not import NAT.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from rollstream.harness.config.checks import check_values
from rollstream.harness.config.components import written_of
from rollstream.harness.config.errors import explain
from rollstream.harness.config.file import Loaded, block_at, unexpanded
from rollstream.harness.config.nat_workflows import check_installed
from rollstream.harness.config.resolve import run_config_of, warn_unused
from rollstream.harness.nat.command import conceal_last_error, file_of_command, is_on_command_line
from rollstream.harness.nat.configs import NatCurriculum
from rollstream.harness.services.concealing import conceal_logs
from rollstream.schemas import finetuning
from rollstream.schemas.config import FinetuningSection, RunConfig
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.evaluators import kind_of
from rollstream.schemas.services import EndpointSection
from rollstream.schemas.variables import conceal_variables, expand, variables_in

_OPTIONS = (
    "dataset",
    "result_json_path",
    "endpoint",
    "endpoint_timeout",
    "validation_dataset",
    "validation_interval",
    "validation_config_file",
)
"""Options of the command that `finetuning.run_configuration` may have too; the command line wins."""


class _OnlyFinetuning(BaseModel):
    finetuning: FinetuningSection


def complete(finetune: Any) -> None:
    """Add to `finetune` the keys of the file's section that NAT drops: our curriculum's keys, run options.

    `finetune` is repaired already (`repair`); idempotent. Raises ConfigError for an unknown key, which NAT ignores.
    """
    section = _section()
    if section is None:
        return
    finetune.curriculum_learning = NatCurriculum(**section.curriculum_learning.model_dump())
    run, written = finetune.run_configuration, section.run_configuration
    if run is not None and written is not None:
        texts = {name: getattr(written, name) for name in written.model_fields_set if name in _OPTIONS}
        update = {name: value for name, value in texts.items() if not is_on_command_line(name)}
        finetune.run_configuration = run.model_copy(
            update={name: str(value) if isinstance(value, Path) else value for name, value in update.items()}
        )


def conceal_command() -> None:
    """Conceal the values of variables named in the command's file, in logs and in the last error.

    Raises ConfigError.
    """
    conceal_variables(variables_in(file_of_command()))
    conceal_logs()
    conceal_last_error()


def loaded_of(finetune: Any) -> Loaded:
    """The configuration to open a run with.

    Raises ConfigError. `finetune` is repaired and complete (`repair`, `complete`).
    """
    file = file_of_command()
    found = run_config_of(finetune)
    warn_unused(found, finetune, _section() or found.finetuning)
    config = unexpanded(_unexpanded(found, file), file, os.environ)
    written = written_of(config)
    check_values(written)
    return Loaded(config, written, finetune)


def _section() -> FinetuningSection | None:
    """`finetuning` of the command's file, validated by our stricter rules; None without a command."""
    file = file_of_command()
    if not file:
        return None
    written = {"finetuning": expand(file.get("finetuning"), os.environ)}
    try:
        return _OnlyFinetuning.model_validate(written).finetuning
    except ValidationError as error:
        raise ConfigError(explain(error, _OnlyFinetuning, file)) from error


def _unexpanded(config: RunConfig, written: Mapping[str, Any]) -> RunConfig:
    """Values sent in events, as written.

    Raises ConfigError if the written form is unknown and could contain a secret. Evaluators of other packages are left
    out, because they are not used here.
    """
    builder = config.builder
    evaluators = {name: block for name, block in config.evaluators.items() if kind_of(block.get("_type"))}
    if not written and (builder.environment_config or evaluators):
        raise ConfigError(
            "environment_config and eval.evaluators are stored as written, which is known only under `nat finetune "
            "--config_file`; remove them, or use that command"
        )
    block = block_at(written, "trajectory_builders", config.finetuning.trajectory_builder)
    given = {**builder.environment_config, **block_at(block, "environment_config")}
    as_written = {name: block_at(written, "eval", "evaluators", name) for name in evaluators}
    return config.model_copy(
        update={
            "builder": builder.model_copy(update={"environment_config": given}),
            "evaluators": as_written,
            "served": _unexpanded_token(config, written),
        }
    )


def _unexpanded_token(config: RunConfig, written: Mapping[str, Any]) -> EndpointSection | None:
    served = config.served
    if served is None or served.token is None:
        return served
    token = block_at(written, "trainer_adapters", config.finetuning.trainer_adapter, "endpoint").get("token")
    if not isinstance(token, str):
        location = finetuning.adapter_path(config.finetuning, "endpoint.token")
        raise ConfigError(
            f"{location}: is already expanded and cannot be stored; set ROLLSTREAM_ENDPOINT_TOKEN instead"
        )
    return served.model_copy(update={"token": token})


def repair(finetune: Any) -> None:
    """Cut the cycle and convert dataset paths to strings, in place. Idempotent."""
    run = finetune.run_configuration
    if run is None:
        return
    update: dict[str, Any] = {
        key: str(getattr(run, key)) for key in ("dataset", "validation_dataset") if getattr(run, key) is not None
    }
    file = run.config_file
    inner: Any = getattr(file, "finetuning", None)
    if isinstance(file, BaseModel) and getattr(inner, "run_configuration", None) is not None:
        plain = inner.model_copy(update={"run_configuration": None})
        update["config_file"] = file.model_copy(update={"finetuning": plain})
    if any(getattr(run, key) is not value for key, value in update.items()):
        finetune.run_configuration = run.model_copy(update=update)


def check_packages(finetune: Any, is_there: Callable[[str], bool] | None = None) -> None:
    """Raises ConfigError with the pip command if NAT's evaluation of this configuration would lack a package."""
    file = None if finetune.run_configuration is None else finetune.run_configuration.config_file
    check_installed(has_llms=bool(getattr(file, "llms", None)), is_there=is_there)


def as_ours(value: Any) -> Any:
    """A model, or lists of models, converted to our classes; ours are returned unchanged."""
    return _of(finetuning, value)


def as_nats(value: Any) -> Any:
    """A model, or lists of models, converted to NAT's classes."""
    from nat.data_models import finetuning as nats

    return _of(nats, value)


def _of(module: Any, value: Any) -> Any:
    if isinstance(value, list):
        return [_of(module, item) for item in value]
    if not isinstance(value, BaseModel):
        return value
    kind = getattr(module, type(value).__name__, None)
    if kind is None or isinstance(value, kind):
        return value
    return kind.model_validate(value.model_dump())
