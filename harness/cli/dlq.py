"""Commands `dlq list`, `dlq show` and `dlq redrive`: options and formatting only; `dead_letters` does the work."""

import json
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from rollstream.harness.cli.shared_options import BOOTSTRAP_SERVERS, WORKSPACE
from rollstream.harness.services.workspace import Workspace, on_log

if TYPE_CHECKING:
    from rollstream.eventlog.log import EventLog, Record
    from rollstream.harness.upkeep.dead_letters import Letter

REASON_CHARS = 100
CUT_BYTES = 2000

T = TypeVar("T")


@click.group()
def dlq() -> None:
    """Show dead letters and send their records again."""


@dlq.command("list")
@click.option("--run", metavar="RUN", help="Only dead letters of this run.")
@click.option("--limit", type=click.IntRange(min=1), help="Maximum number of dead letters, newest first to keep.")
@click.option("--json", "as_json", is_flag=True, help="As a JSON list.")
@BOOTSTRAP_SERVERS
@WORKSPACE
def list_letters(
    run: str | None, limit: int | None, as_json: bool, bootstrap_servers: str | None, workspace: Path
) -> None:
    """List the dead letters, newest last."""
    from rollstream.harness.upkeep.dead_letters import read_letters, remedies
    from rollstream.harness.upkeep.run_tables import as_table

    letters = _on_the_log(workspace, bootstrap_servers, lambda log: read_letters(log, run=run))
    letters = letters[-limit:] if limit else letters
    if as_json:
        click.echo(json.dumps([_fields(letter) for letter in letters], indent=2))
    elif not letters:
        click.echo("no dead letters" + (f" of run {run}" if run else ""))
    else:
        header = ("number", "time", "record", "service", "stage", "redriven", "reason")
        click.echo(as_table(header, [_row(letter) for letter in letters]))
        click.echo(f"`dlq show NUMBER` shows one; {remedies(letters)}", err=True)


@dlq.command()
@click.argument("number", type=click.IntRange(min=0))
@click.option(
    "--limit", type=click.IntRange(min=0), default=CUT_BYTES, help="Maximum number of bytes of the value to show."
)
@click.option("--raw", type=click.Path(path_type=Path), help="Write the value's bytes to a file, unchanged.")
@BOOTSTRAP_SERVERS
@WORKSPACE
def show(number: int, limit: int, raw: Path | None, bootstrap_servers: str | None, workspace: Path) -> None:
    """Show dead letter NUMBER: headers, reason, and the value of its record."""
    from rollstream.eventlog.artifacts import ArtifactStore
    from rollstream.eventlog.dead_letters import original
    from rollstream.harness.upkeep.dead_letters import read_letter, remedies
    from rollstream.schemas.errors import ConfigError

    letter, stored = _on_the_log(workspace, bootstrap_servers, lambda log: read_letter(log, number))
    record = original(stored, ArtifactStore(Workspace(workspace).artifact_uri())) if letter.came_from else stored
    if raw is not None:
        if record.value is None:
            raise ConfigError(
                f"dead letter {number} has a null value; there are no bytes to write to {raw}; leave out --raw"
            )
        raw.write_bytes(record.value)
    click.echo("\n".join(_report(letter, stored, record, limit)))
    if letter.is_line:
        click.echo(remedies([letter]), err=True)


@dlq.command()
@click.argument("numbers", type=click.IntRange(min=0), nargs=-1, required=True)
@click.option("--value", type=click.Path(path_type=Path), help="Send this file's bytes in place of the record's value.")
@click.option("--force", is_flag=True, help="Send it even if it still cannot be decoded as an event of its topic.")
@click.option("--again", is_flag=True, help="Send it even if it has already been redriven.")
@BOOTSTRAP_SERVERS
@WORKSPACE
def redrive(
    numbers: tuple[int, ...],
    value: Path | None,
    force: bool,
    again: bool,
    bootstrap_servers: str | None,
    workspace: Path,
) -> None:
    """Send the records of dead letters NUMBERS again, each to its topic and to the partition where its event belongs.

    All are checked before the first is sent. If sending one fails, those before it are sent: `dlq list` shows which.
    """
    from rollstream.eventlog.artifacts import ArtifactStore
    from rollstream.eventlog.log import format_position
    from rollstream.harness.upkeep.dead_letters import prepare, send
    from rollstream.schemas.errors import ConfigError

    if value is not None and len(set(numbers)) > 1:
        raise ConfigError("--value FILE replaces the value of one dead letter; give exactly one NUMBER")
    corrected = value.read_bytes() if value is not None else None
    artifacts = ArtifactStore(Workspace(workspace).artifact_uri())

    async def go(log: "EventLog") -> list[str]:
        prepared = await prepare(log, artifacts, numbers, value=corrected, force=force, again=again)
        positions = await send(log, prepared)
        return [
            f"dead letter {one.letter.number}: sent to {format_position(to)}"
            for one, to in zip(prepared, positions, strict=True)
        ]

    for line in _on_the_log(workspace, bootstrap_servers, go):
        click.echo(line)


def _on_the_log(
    workspace: Path, bootstrap_servers: str | None, work: "Callable[[EventLog], Coroutine[Any, Any, T]]"
) -> T:
    return on_log(Workspace(workspace), bootstrap_servers, "rollstream-dlq", work)


def _row(letter: "Letter") -> tuple[object, ...]:
    from rollstream.eventlog.log import format_position

    reason = _line(letter.reason)
    reason = reason if len(reason) <= REASON_CHARS else reason[: REASON_CHARS - 1] + "…"
    came_from = format_position(letter.came_from) if letter.came_from else "unknown"
    sent = ", ".join(map(format_position, letter.redriven_to))
    return letter.number, _time(letter.time_ms), came_from, letter.service, letter.stage, sent, reason


def _fields(letter: "Letter") -> dict[str, object]:
    where = letter.came_from
    return {
        "number": letter.number,
        "time": _time(letter.time_ms),
        "topic": where.topic if where else None,
        "partition": where.partition if where else None,
        "offset": where.offset if where else None,
        "service": letter.service,
        "stage": letter.stage,
        "error": letter.error,
        "reason": letter.reason,
        "key": None if letter.key is None else letter.key.decode(errors="replace"),
        "size_bytes": letter.size_bytes,
        "runs": sorted(letter.runs),
        "redriven_to": [to._asdict() for to in letter.redriven_to],
    }


def _report(letter: "Letter", stored: "Record", record: "Record", limit: int) -> list[str]:
    from rollstream.eventlog.log import format_position

    lines = [f"dead letter {letter.number} of {_time(letter.time_ms)}"]
    lines.append(f"record: {format_position(letter.came_from) if letter.came_from else 'unknown'}")
    lines += [f"service: {letter.service}, stage {letter.stage}", f"reason: {letter.error}: {_line(letter.reason)}"]
    lines += [f"redriven to: {format_position(to)}" for to in letter.redriven_to]
    lines.append(f"key: {_shown(record.key, limit)}")
    lines += ["headers:", *(f"  {_line(name)}: {_shown(content, limit)}" for name, content in stored.headers)]
    size = "null" if record.value is None else f"{len(record.value)} bytes"
    return [*lines, f"value ({size}):", _shown(record.value, limit)]


def _shown(content: bytes | None, limit: int) -> str:
    """Text as it is, anything else as hex, cut to `limit` bytes; control characters are escaped."""
    if content is None:
        return "null"
    kept = content[:limit]
    rest = f"... ({len(content) - limit} bytes more)" if len(content) > limit else ""
    try:
        content.decode()
        text = kept.decode(errors="ignore")
    except UnicodeDecodeError:
        text = ""
    is_text = all(character.isprintable() or character in "\n\t" for character in text)
    return (text if is_text and (text or not kept) else f"hex {kept.hex(' ')}") + rest


def _line(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)


def _time(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
