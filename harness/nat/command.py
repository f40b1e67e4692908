"""The running `nat finetune` command: its file as written, its options, the name of its run, its last error."""

import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from rollstream.harness.config.yaml import apply_overrides, read_yaml
from rollstream.harness.services.concealing import conceal_and_escape

_CONCEALED = "rollstream.harness.nat.command.concealed"
"""Key in a command's `meta`: its last error is concealed already."""


def file_of_command() -> dict[str, Any]:
    """The command's file with its overrides; empty without a command. Raises ConfigError."""
    path = _params().get("config_file")
    if path is None:
        return {}
    written = read_yaml(path)
    apply_overrides(written, _params().get("override") or ())
    return written


def is_on_command_line(option: str) -> bool:
    """Whether the user gave an option, so that it is not NAT's default."""
    context = click.get_current_context(silent=True)
    return context is not None and context.get_parameter_source(option) is ParameterSource.COMMANDLINE


def run_name() -> str | None:
    """The name of a new run, from the command's file; None without a command."""
    path = _params().get("config_file")
    return None if path is None else Path(path).stem


def conceal_last_error() -> None:
    """Conceal secrets in the error that the command ends with, whichever package raised it."""
    context = click.get_current_context(silent=True)
    if context is not None and not context.meta.get(_CONCEALED):
        context.meta[_CONCEALED] = True
        context.call_on_close(_conceal)


def _conceal() -> None:
    """NAT converts every error to a ClickException; click prints its message after the command's context is closed."""
    error = sys.exception()
    if isinstance(error, click.ClickException):
        error.message = conceal_and_escape(error.message)


def _params() -> dict[str, Any]:
    context = click.get_current_context(silent=True)
    return {} if context is None else context.params
