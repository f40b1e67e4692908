"""Lists, reads and redrives dead letters for `rollstream dlq`.

Works on any event log. A letter's number is its offset in `dlq`. Contains no formatting.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import orjson

from rollstream.eventlog import codec, dead_letters
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import (
    EventLog,
    Position,
    ReadableLog,
    Record,
    TopicPartition,
    check_record_size,
    format_position,
)
from rollstream.eventlog.reading import read_to_end
from rollstream.schemas.errors import DecodeError, LogError, TruncatedError
from rollstream.schemas.ids import run_of
from rollstream.schemas.topics import TOPICS

DLQ = TopicPartition("dlq", 0)
RECREATED = ("ce_", "content-type")
"""Beginnings of the headers that a corrected value brings with it."""


@dataclass(frozen=True, slots=True)
class Letter:
    """Metadata of one dead letter; its record is read on demand."""

    number: int
    time_ms: int
    came_from: Position | None
    """Position of its record; None if the letter does not name it."""
    service: str
    stage: str
    error: str
    """Full name of the exception's class."""
    reason: str
    key: bytes | None
    size_bytes: int
    """Size of the value as the letter holds it; 0 if it holds a reference."""
    runs: frozenset[str]
    """Runs that its key or its value names; none of a line, whose key is its file."""
    redriven_to: tuple[Position, ...] = ()
    """Positions to which its record was sent again, by this or another letter of the same record."""

    @property
    def is_line(self) -> bool:
        """Whether it is about a line that was to be ingested, which is not in the log."""
        return self.came_from is not None and self.came_from.topic == dead_letters.LINES


@dataclass(frozen=True, slots=True)
class Redrive:
    """A letter and the record to send for it."""

    letter: Letter
    record: Record


async def read_letters(log: ReadableLog, *, run: str | None = None) -> list[Letter]:
    """All letters, oldest first, or those of one run. Repeats after a crash are left out."""
    letters = await _read_all(log)
    first: dict[object, Letter] = {}
    for letter in letters:
        first.setdefault(_identity(letter), letter)
    return [letter for letter in first.values() if run is None or run in letter.runs]


def _identity(letter: Letter) -> object:
    """Equal for letters of the same record. Outside of the log's topics, a position may have several records."""
    if letter.came_from is None:
        return letter.number
    position = (letter.came_from, letter.stage)
    is_of_log = letter.came_from.topic in TOPICS
    return position if is_of_log else (*position, letter.key, letter.size_bytes, letter.reason)


async def read_letter(log: ReadableLog, number: int) -> tuple[Letter, Record]:
    """A letter and its record in `dlq`. Raises LogError if it does not exist."""
    record = await _fetch(log, number)
    letter = next((one for one in await _read_all(log) if one.number == number), None)
    if letter is None:
        raise LogError(
            f"record {number} of dlq marks a redrive and is not a dead letter; `rollstream dlq list` lists dead letters"
        )
    return letter, record


async def prepare(
    log: ReadableLog,
    artifacts: ArtifactStore,
    numbers: Sequence[int],
    *,
    value: bytes | None = None,
    force: bool = False,
    again: bool = False,
) -> list[Redrive]:
    """Check letters and prepare their records; nothing is sent yet.

    `value` replaces the record's own. Raises DecodeError if a record still cannot be decoded (`force` sends it anyway),
    LogError if it was already redriven (`again` sends it once more) or cannot be sent.
    """
    letters = {letter.number: letter for letter in await _read_all(log)}
    prepared: list[Redrive] = []
    for number in dict.fromkeys(numbers):
        stored = await _fetch(log, number)
        letter = letters.get(number)
        if letter is None or letter.came_from is None:
            raise LogError(
                f"record {number} of dlq has no source position, so it cannot be redriven; "
                f"`rollstream dlq show {number} --raw FILE` writes its bytes"
            )
        if letter.redriven_to and not again:
            where = ", ".join(map(format_position, letter.redriven_to))
            raise LogError(f"dead letter {number} was already redriven to {where}; --again sends it once more")
        if any(one.letter.came_from == letter.came_from for one in prepared):
            raise LogError(f"dead letter {number} has the same record as another given one; give only one of them")
        record = dead_letters.original(stored, artifacts)
        await _check_source(log, number, record)
        prepared.append(Redrive(letter, await _checked(log, number, _corrected(record, value), force=force)))
    return prepared


async def send(log: EventLog, prepared: Iterable[Redrive]) -> list[Position]:
    """Send the prepared records in turn; returns their new positions."""
    return [await dead_letters.send_again(log, one.record, one.letter.number) for one in prepared]


def remedies(letters: Sequence[Letter]) -> str:
    """Advice on correcting the records of letters: those of the log, and lines that were to be ingested."""
    texts = {
        False: "`dlq redrive NUMBER --value FILE` sends it corrected",
        True: "correct the line of a letter of service ingest in its file, and ingest it again",
    }
    are_lines = {letter.is_line for letter in letters}
    return "; ".join(text for is_line, text in texts.items() if is_line in are_lines)


def _corrected(record: Record, value: bytes | None) -> Record:
    """The record with another value; key and event headers are derived from it if it is an event.

    If the record was digested as it was written, so is the new one, in the form of this writer: its digest is part of
    a chain.
    """
    if value is None:
        return record
    try:
        event, _ = codec.parse(record.topic, value)
    except DecodeError:
        return replace(record, value=value)  # the check refuses it
    encoded = codec.encode(event)
    kept = tuple((name, content) for name, content in record.headers if not name.startswith(RECREATED))
    if any(name == codec.DIGESTED for name, _ in record.headers):
        return replace(record, key=encoded.key, value=encoded.value, headers=(*encoded.headers, *kept))
    own = tuple((name, content) for name, content in encoded.headers if name != codec.DIGESTED)
    return replace(record, key=encoded.key, value=value, headers=(*own, *kept))


async def _check_source(log: ReadableLog, number: int, record: Record) -> None:
    """Raises LogError for a letter whose record is not of this log."""
    if record.topic == dead_letters.LINES:
        file = (record.key or b"").decode(errors="replace")
        raise LogError(
            f"dead letter {number} is line {record.offset} of {file}, not a record of the log; correct the line and "
            "ingest it again"
        )
    if record.topic not in TOPICS or not 0 <= record.partition < await log.num_partitions(record.topic):
        raise LogError(
            f"dead letter {number} came from {format_position(record.position)}, but this partition does not "
            "exist; redrive it on the log that it came from"
        )


async def _checked(log: ReadableLog, number: int, record: Record, *, force: bool) -> Record:
    """The record in the partition that it is sent to: its event's own, or where it was if it cannot be decoded."""
    num_partitions = await log.num_partitions(record.topic)
    try:
        own = _in_own_partition(record, num_partitions)
        codec.decode(own, num_partitions=num_partitions)
        record = own
    except DecodeError as error:
        if not force:
            raise DecodeError(
                f"dead letter {number} still cannot be decoded: {error}; correct it with --value FILE, or send it "
                f"unchanged with --force"
            ) from error
    try:
        check_record_size(record.topic, record.key, record.value, record.headers)
    except LogError as error:
        raise LogError(f"dead letter {number} cannot be redriven: {error}") from error
    return record


def _in_own_partition(record: Record, num_partitions: int) -> Record:
    """The record where its event belongs. Raises DecodeError."""
    event, _ = codec.parse(record.topic, record.value)
    own = codec.own_partition(event, num_partitions)
    return replace(record, partition=own) if 0 <= own < num_partitions else record


async def _fetch(log: ReadableLog, number: int) -> Record:
    begin, end = (await log.begin_offsets("dlq"))[0], (await log.end_offsets("dlq"))[0]
    if not begin <= number < end:
        kept = f"topic dlq holds {begin} to {end - 1}" if end > begin else "topic dlq is empty"
        raise LogError(f"dead letter {number} does not exist ({kept}); `rollstream dlq list` lists all")
    try:
        return (await log.fetch([Position(*DLQ, number)]))[0]
    except TruncatedError as error:
        raise LogError(f"dead letter {number} was removed: {error}") from error


async def _read_all(log: ReadableLog) -> list[Letter]:
    """Every letter with the redrives recorded for it."""
    letters: list[Letter] = []
    found: list[dead_letters.Redriven] = []
    async for record in read_to_end(log, "dlq"):
        redriven = dead_letters.redriven(record)
        if redriven is None:
            letters.append(_letter_of(record))
        else:
            found.append(redriven)
    origins = {letter.number: letter.came_from or letter.number for letter in letters}
    sent: dict[object, tuple[Position, ...]] = {}
    for redriven in found:
        origin = origins.get(redriven.letter)
        sent[origin] = (*sent.get(origin, ()), redriven.to)
    return [replace(letter, redriven_to=sent.get(origins[letter.number], ())) for letter in letters]


def _letter_of(record: Record) -> Letter:
    headers = {name: (content or b"").decode(errors="replace") for name, content in record.headers}
    try:
        came_from = Position(*dead_letters.origin(record.headers))
    except LogError:
        came_from = None
    return Letter(
        number=record.offset,
        time_ms=record.timestamp_ms,
        came_from=came_from,
        service=headers.get(dead_letters.PREFIX + "connector.name", ""),
        stage=headers.get(dead_letters.PREFIX + "stage", ""),
        error=headers.get(dead_letters.PREFIX + "exception.class.name", ""),
        reason=headers.get(dead_letters.PREFIX + "exception.message", ""),
        key=record.key,
        size_bytes=len(record.value or b""),
        runs=frozenset() if came_from is not None and came_from.topic == dead_letters.LINES else _runs_of(record),
    )


def _runs_of(record: Record) -> frozenset[str]:
    named = {run_of(record.key.decode(errors="replace"))} if record.key else set[str]()
    try:
        content = orjson.loads(record.value or b"")
    except orjson.JSONDecodeError:
        content = None
    if isinstance(content, dict) and isinstance(content.get("run_id"), str):
        named.add(content["run_id"])
    return frozenset(named)
