"""Writes docs/commands.md: the commands with their options, from click, and the environment variables.

`make docs` runs it; tests/test_reference_pages.py compares the page with the commands and the code.
"""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click

from rollstream.harness.cli.main import rollstream

PAGE = Path(__file__).with_suffix(".md")
HEAD = """# Commands and environment variables

`make docs` writes this page from the commands' own help (`rollstream COMMAND --help`). Exit status: 0, or 1 after an
error, which is printed as one line; 2 for options that are wrong, and 130 after Ctrl-C. `rollstream --debug COMMAND`
shows tracebacks.
"""
VARIABLES = {
    "Commands and services": {
        "ROLLSTREAM_WORKSPACE": "The workspace, by default `.rollstream`; `--workspace` wins.",
        "ROLLSTREAM_BOOTSTRAP_SERVERS": "host:port of Kafka, for `serve` and the commands with `--bootstrap_servers`. "
        "`finetune` and `ingest` take it from their file.",
        "ROLLSTREAM_KAFKA_...": "A key of a [`kafka` block](configuration.md#trajectory_buildersxkafka), for example "
        "`ROLLSTREAM_KAFKA_PASSWORD_FILE`. An unknown key is an error.",
        "ROLLSTREAM_ARTIFACT_URI": "The artifact store of `serve` and of commands that read weights; `finetune` and "
        "`ingest` take it from their file.",
        "ROLLSTREAM_DEBUG": "Any text: show tracebacks, as `--debug` does.",
    },
    "Services": {
        "ROLLSTREAM_ALLOW": "`--allow` of `serve`, several entries separated by blanks ([security.md](security.md)).",
        "ROLLSTREAM_NUM_PARTITIONS": "`num_partitions` of a service's settings.",
        "ROLLSTREAM_LOG_LEVEL": "Level of the log of `serve`: DEBUG, INFO (the default), WARNING, ERROR or CRITICAL.",
        "ROLLSTREAM_ENDPOINT_TOKEN": "Key of the endpoint ([gateway.md](gateway.md)).",
        "ROLLSTREAM_TEACHER_API_KEY": "Key that the learner sends to `teacher_url` ([algorithms.md](algorithms.md)).",
        "ROLLSTREAM_PARENT": "Set by `finetune` for its services, which end with the process that it names.",
    },
    "The embedded broker": {
        "ROLLSTREAM_CACHE": "Folder of the downloaded Kafka, by default `~/.cache/rollstream`.",
        "ROLLSTREAM_MAVEN_REPOSITORY": "URL of a Maven repository to download it from, in place of Maven Central.",
    },
    "Set for the program of `environment: command:PROGRAM`": {
        "ROLLSTREAM_ROLLOUT_URL": "URL of the rollout: its rewards and its end ([gateway.md](gateway.md)).",
        "ROLLSTREAM_ROLLOUT_ID": "The rollout's id.",
        "ROLLSTREAM_TASK": "The task as JSON, up to 100 kB; standard input always has it.",
    },
    "docker compose": {
        "ROLLSTREAM_ROLLOUT_PORT": "Port of the host's 127.0.0.1 at which agents play rollouts (8766).",
        "ROLLSTREAM_GPU_LEARNER": "GPU of the learner, by index or UUID (0).",
        "ROLLSTREAM_GPU_PRODUCERS": "GPU of the producers of the profile `gpu` (1).",
        "ROLLSTREAM_GPU_VLLM_1": "GPU of the first vLLM server (1).",
        "ROLLSTREAM_GPU_VLLM_2": "GPU of the second one (2).",
        "ROLLSTREAM_VLLM_MODEL": "Model of the vLLM servers, the base model of the runs (`/data/models/base`).",
        "ROLLSTREAM_VLLM_IMAGE": "vLLM's image for GPUs.",
        "ROLLSTREAM_VLLM_CPU_IMAGE": "vLLM's image for CPUs.",
        "ROLLSTREAM_VLLM_KVCACHE_GB": "Memory in GB for keys and values of a vLLM server on the CPU (4).",
    },
    "Tests": {
        "ROLLSTREAM_VLLM": "Path of the command `vllm` for the tests marked `vllm`.",
        "ROLLSTREAM_TEST_DEVICE": "Device of the tests marked `gpu`.",
        "ROLLSTREAM_FAILPOINT": "`NAME:N`: kill the process at the N-th hit of a failpoint "
        "([CONTRIBUTING.md](../CONTRIBUTING.md#crash-tests)).",
        "ROLLSTREAM_FAILPOINT_ONCE": "Folder that remembers a hit, so that it kills only once.",
    },
}
"""Environment variables by what reads them."""


def commands(command: click.Command, context: click.Context) -> Iterator[tuple[click.Command, click.Context]]:
    """Every command below a group, with its context, in the order of the help."""
    if not isinstance(command, click.Group):
        return
    for name in command.list_commands(context):
        inner = command.get_command(context, name)
        assert inner is not None
        below = click.Context(inner, info_name=name, parent=context)
        yield inner, below
        yield from commands(inner, below)


def section(command: click.Command, context: click.Context) -> Iterator[str]:
    """Heading, usage, help and options of a command."""
    yield f"\n### {context.command_path}\n"
    yield f"`{context.command_path} {' '.join(command.collect_usage_pieces(context))}`\n"
    yield _paragraphs(command.help or "")
    options = [one for one in command.params if isinstance(one, click.Option)]
    if options:
        yield "\n| option | value | default | |\n| --- | --- | --- | --- |"
    for option in options:
        info = option.to_info_dict()
        names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
        cells = (names, _value(option, context), _default(info), f"{option.help}{_variable(option)}")
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _paragraphs(text: str) -> str:
    """A help's paragraphs, and blocks that click leaves as they are (`\\b`) in a fence."""
    parts = [
        f"```text\n{part.removeprefix(chr(8)).strip(chr(10))}\n```" if part.startswith("\b") else " ".join(part.split())
        for part in inspect.cleandoc(text).split("\n\n")
    ]
    return "\n\n".join(parts)


def _value(option: click.Option, context: click.Context) -> str:
    if option.is_flag:
        return ""
    name = option.make_metavar(context).removesuffix(" RANGE")
    return f"`{name}`" + (", repeatable" if option.multiple else "")


def _default(info: dict[str, object]) -> str:
    default = info["default"]
    is_given = isinstance(default, str | int | float | Path) and not isinstance(default, bool) and default != ""
    return "required" if info["required"] else f"`{default}`" if is_given else ""


def _variable(option: click.Option) -> str:
    return f" Environment: `{option.envvar}`." if isinstance(option.envvar, str) else ""


def page() -> str:
    """The whole page."""
    lines = [HEAD, "## Environment variables"]
    for title, variables in VARIABLES.items():
        lines += [f"\n### {title}\n", "| variable | |", "| --- | --- |"]
        lines += [f"| `{name}` | {text} |" for name, text in variables.items()]
    lines.append("\n## Commands")
    for command, context in commands(rollstream, click.Context(rollstream, info_name="rollstream")):
        lines += section(command, context)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
