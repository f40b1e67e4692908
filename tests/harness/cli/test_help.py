"""The help of the commands: summaries, options and arguments."""

import importlib
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from rollstream.harness.cli.job_commands import jobs
from rollstream.harness.cli.main import COMMANDS, SUMMARIES


def command_of(name: str) -> click.Command:
    return getattr(importlib.import_module(f"rollstream.harness.cli.{COMMANDS[name]}"), name.replace("-", "_"))


def with_subcommands(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    for inner in command.commands.values() if isinstance(command, click.Group) else ():
        yield from with_subcommands(f"{name} {inner.name}", inner)


def test_every_command_is_listed_in_its_place() -> None:
    assert list(SUMMARIES) == list(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_summary_of_a_command_is_the_first_paragraph_of_its_help(name: str) -> None:
    """The list of commands repeats it, so that it imports none of their modules."""
    assert (command_of(name).help or "").split("\n\n")[0] == SUMMARIES[name]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_description(name: str) -> None:
    missing = [
        f"{path} {option.opts[0]}"
        for path, command in with_subcommands(name, command_of(name))
        for option in command.params
        if isinstance(option, click.Option) and not option.help
    ]
    assert not missing


def test_the_workspace_is_described_with_its_default_and_variable() -> None:
    output = " ".join(CliRunner().invoke(command_of("runs"), ["--help"]).output.split())
    assert "--workspace PATH The workspace: a folder" in output
    assert "[env var: ROLLSTREAM_WORKSPACE; default: .rollstream]" in output


def test_the_help_of_jobs_shows_the_argument_and_options_of_its_list() -> None:
    output = CliRunner().invoke(jobs, ["--help"]).output
    assert output.startswith("Usage: jobs [OPTIONS] [RUN|GROUP] | COMMAND [ARGS]...")
    for name in ("RUN/NAME", "-w, --workspace PATH", "--bootstrap_servers TEXT", "list", "show", "cancel"):
        assert name in output
    assert output.count("--help") == 1
