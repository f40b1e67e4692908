"""Documented commands and queries: commands have the options that they are shown with, queries can be answered."""

import asyncio
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from rollstream.eventlog.memory.log import MemoryLog
from rollstream.harness.cli.main import rollstream
from rollstream.metrics.projection.connection import connect
from rollstream.metrics.projection.database import Database
from rollstream.metrics.projection.projector import project_to_end
from rollstream.schemas.events import StepTrained
from tests.metrics.conftest import SyntheticRun

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
_SHELL = re.compile(r"^```(?:sh|console)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_SQL = re.compile(r"^```sql\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_ASKED = re.compile(r'rollstream sql "([^"]+)"')
_OURS = re.compile(r"^(?:\$ )?(?:docker compose run --rm \w+|rollstream) (.*)$")


def command_blocks() -> Iterator[list[list[str]]]:
    """Arguments of every `rollstream` command of each shell block, also of those that are run in a container."""
    for path in DOCUMENTS:
        for block in _SHELL.findall(path.read_text(encoding="utf-8")):
            lines = block.replace("\\\n", " ").replace(" && ", "\n").splitlines()
            found = (_OURS.match(line.strip()) for line in lines)
            yield [shlex.split(ours[1], comments=True) for ours in found if ours]


def commands() -> Iterator[list[str]]:
    for block in command_blocks():
        yield from block


def queries() -> Iterator[str]:
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        for block in _SQL.findall(text):
            yield from filter(str.strip, block.split(";"))
        yield from _ASKED.findall(text)


@pytest.mark.parametrize("arguments", list(commands()), ids=" ".join)
def test_a_command_of_the_documents_has_the_options_that_it_is_shown_with(arguments: list[str]) -> None:
    command: click.Command = rollstream
    context = click.Context(command)
    while isinstance(command, click.Group):
        _, found, arguments = command.resolve_command(context, list(arguments))
        assert found is not None, arguments
        command = found
    _, left_over, _ = command.make_parser(click.Context(command)).parse_args(list(arguments))
    assert left_over == []


def test_exports_of_a_block_write_different_files() -> None:
    export = rollstream.get_command(click.Context(rollstream), "export")
    assert export is not None
    for block in command_blocks():
        written = list[str]()
        for command in (one[1:] for one in block if one[0] == "export"):
            params = export.make_context("export", command, resilient_parsing=True).params
            written.append(str(params["output"] or f"{params['run']}-{params['format']}"))
        assert len(written) == len(set(written)), written


def test_every_query_of_the_documents_can_be_answered(tmp_path: Path) -> None:
    database = Database(tmp_path / "metrics.duckdb")
    try:
        found = list(queries())
        assert len(found) >= 6
        for query in found:
            database.cursor().execute(query)
    finally:
        database.close()


def test_the_idle_share_counts_a_version_that_has_one_of_the_phases_alone(tmp_path: Path) -> None:
    """A rollback waits and fetches nothing."""
    phases = ({"wait": 1.0, "fetch": 1.0, "forward_backward": 2.0}, {"wait": 10.0, "restore": 1.0}, {"fetch": 3.0})
    left = iter(phases)
    made = [
        event.model_copy(update={"seconds": next(left)}) if isinstance(event, StepTrained) else event
        for event in SyntheticRun().all_events()
    ]
    (query,) = [query for query in queries() if "the learner's time without work" in query]

    async def scenario() -> None:
        log = MemoryLog(num_partitions=2)
        await log.send_all(made)
        await project_to_end(log, tmp_path / "metrics.duckdb")

    asyncio.run(scenario())
    with connect(tmp_path / "metrics.duckdb", read_only=True) as connection:
        assert connection.execute(query).fetchall() == [("demo-000001", 15.0 / 18.0)]
