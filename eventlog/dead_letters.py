"""Dead letters: records that cannot be used, unchanged, with the reason in Kafka Connect's error headers.

`send_dead_letter` writes one, `original` restores the record, `send_again` sends it to its topic again and writes
a redrive record to the dead-letter topic, which `redriven` reads. `DeadLetterIndex` tells which records have a dead
letter: readers that read a partition again skip them, even if newer code could decode them, because nobody has answered
them at that offset. A redriven record counts.
"""

import asyncio
import base64
from collections import deque
from collections.abc import Container, Set
from typing import NamedTuple

import orjson
from pydantic import ValidationError

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.blocking_calls import put
from rollstream.eventlog.log import EventLog, Headers, Position, Record, TopicPartition, format_position, record_size
from rollstream.eventlog.reading import read_to_end
from rollstream.schemas.errors import LogError
from rollstream.schemas.settings import ArtifactRef
from rollstream.schemas.topics import BY_NAME, TOPICS
from rollstream.schemas.variables import conceal

PREFIX = "__connect.errors."
"""Prefix of Kafka Connect's error headers."""
REFERENCE = "rollstream.reference"
"""Header that holds the artifact (JSON) in place of a value above the record limit."""
WHOLE = "rollstream.reference.record"
"""Header that holds the artifact of the whole record, if its key and headers alone are above the limit."""
REDRIVEN_FROM = "rollstream.redriven.from"
"""Header of a record that was sent again: topic, partition and offset of its letter."""
REDRIVEN_TO = "rollstream.redriven.to"
"""Header of the record in `dlq` that marks a redrive: the new position of the redriven record."""
FOLD = "fold"
"""Stage of a record that is an event, and on which a fold raised."""
LINES = "ingest"
"""Topic named in letters of lines that could not be ingested: the key is their file, the offset the line's number."""
MAX_MESSAGE_BYTES = 4096
REFERENCE_BYTES = 8192
"""More than a reference in a header takes."""


async def send_dead_letter(
    log: EventLog,
    record: Record,
    *,
    service: str,
    stage: str,
    error: BaseException,
    artifacts: ArtifactStore | None = None,
) -> Position:
    """Write a dead letter for a record; returns once all replicas have it.

    Raises LogError if the record exceeds the size limit and there is no artifact store for its bytes,
    StoreUnavailableError if the store is unreachable for minutes.
    """
    why = _headers(record, service, stage, error)
    theirs = _without_ours(record.headers)
    limit = TOPICS["dlq"].max_record_bytes
    if record_size(record.key, record.value, (*why, *theirs)) <= limit:
        return await log.send_raw("dlq", key=record.key, value=record.value, headers=(*why, *theirs))
    if artifacts is None:
        raise LogError(
            f"{format_position(record.position)} is too large for a dead letter, and "
            "there is no artifact store for its bytes; set artifact_uri"
        )
    if record.value is not None and record_size(record.key, None, (*why, *theirs)) <= limit - REFERENCE_BYTES:
        reference = await _put(artifacts, record.value, ".record")
        return await log.send_raw("dlq", key=record.key, value=None, headers=(*why, (REFERENCE, reference), *theirs))
    reference = await _put(artifacts, _pack(record), ".record.json")
    return await log.send_raw("dlq", key=None, value=None, headers=(*why, (WHOLE, reference)))


async def _put(artifacts: ArtifactStore, data: bytes, suffix: str) -> bytes:
    ref = await put(artifacts, data, suffix, "store the bytes of a dead letter")
    return ref.model_dump_json().encode()


def original(letter: Record, artifacts: ArtifactStore) -> Record:
    """The record that a letter contains or refers to. Raises LogError, or ArtifactError if its bytes are missing."""
    topic, partition, offset = origin(letter.headers)
    by_name = _by_name(letter.headers)
    key, value, headers = letter.key, letter.value, _without_ours(letter.headers)
    if REFERENCE in by_name:
        value = artifacts.read(stored_at(by_name[REFERENCE]))
    elif WHOLE in by_name:
        key, value, headers = _unpack(artifacts.read(stored_at(by_name[WHOLE])))
    return Record(topic, partition, offset, key, value, headers, letter.timestamp_ms)


def stored_at(reference: bytes | None) -> ArtifactRef:
    """The artifact that a dead letter's header names. Raises LogError if it names none."""
    try:
        return ArtifactRef.model_validate_json(reference or b"")
    except ValidationError as error:
        raise LogError(
            "a header of a dead letter does not name the artifact with its bytes; rollstream did not write it, leave "
            "it out"
        ) from error


class Redriven(NamedTuple):
    """Contents of a redrive record."""

    letter: int
    """Offset of the letter in `dlq`."""
    to: Position
    """Position of the record that was sent."""


async def send_again(log: EventLog, record: Record, letter: int) -> Position:
    """Send a letter's record to its partition.

    1. The record is acknowledged. 2. The redrive record is acknowledged. After a crash between the two the record may
    be sent once more; readers drop the repeat.
    """
    source = format_position(Position("dlq", 0, letter)).encode()
    theirs = tuple((name, content) for name, content in record.headers if name != REDRIVEN_FROM)
    to = await log.send_raw(
        record.topic,
        key=record.key,
        value=record.value,
        headers=(*theirs, (REDRIVEN_FROM, source)),
        partition=record.partition,
    )
    target = orjson.dumps([to.topic, to.partition, to.offset])
    await log.send_raw("dlq", key=record.key, value=None, headers=((REDRIVEN_FROM, source), (REDRIVEN_TO, target)))
    return to


def redriven(record: Record) -> Redriven | None:
    """Parse a redrive record of `dlq`; None for a letter."""
    headers = _by_name(record.headers)
    if record.value is not None or REDRIVEN_TO not in headers or PREFIX + "topic" in headers:
        return None
    try:
        topic, partition, offset = orjson.loads(headers[REDRIVEN_TO])
        letter = int(headers[REDRIVEN_FROM].rpartition(b"@")[2])
        return Redriven(letter, Position(str(topic), int(partition), int(offset)))
    except (KeyError, TypeError, ValueError):
        return None


def _by_name(headers: Headers) -> dict[str, bytes]:
    """Contents by name, without those that are null."""
    return {name: content for name, content in headers if content is not None}


def _without_ours(headers: Headers) -> Headers:
    return tuple((n, c) for n, c in headers if not n.startswith(PREFIX) and n not in (REFERENCE, WHOLE))


def _pack(record: Record) -> bytes:
    headers = [(name, _to_text(content)) for name, content in record.headers]
    return orjson.dumps({"key": _to_text(record.key), "value": _to_text(record.value), "headers": headers})


def _unpack(packed: bytes) -> tuple[bytes | None, bytes | None, Headers]:
    content = orjson.loads(packed)
    headers = tuple((name, _to_bytes(text)) for name, text in content["headers"])
    return _to_bytes(content["key"]), _to_bytes(content["value"]), headers


def _to_text(content: bytes | None) -> str | None:
    return None if content is None else base64.b64encode(content).decode("ascii")


def _to_bytes(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)


def _headers(record: Record, service: str, stage: str, error: BaseException) -> Headers:
    topic = TOPICS[record.topic].name if record.topic in TOPICS else record.topic
    texts = {
        "topic": topic,
        "partition": str(record.partition),
        "offset": str(record.offset),
        "connector.name": service,
        "task.id": "0",
        "stage": stage,
        "class.name": type(error).__name__,
        "exception.class.name": f"{type(error).__module__}.{type(error).__qualname__}",
        "exception.message": conceal(str(error)),
        "exception.stacktrace": "",
    }
    return tuple((PREFIX + name, _cut(text)) for name, text in texts.items())


def _cut(text: str) -> bytes:
    whole = text.encode(errors="replace")
    return whole[:MAX_MESSAGE_BYTES].decode(errors="ignore").encode()


def is_of_fold(headers: Headers) -> bool:
    """Whether a dead letter is about an event on which a fold raised."""
    return dict(headers).get(PREFIX + "stage") == FOLD.encode()


def origin(headers: Headers) -> tuple[str, int, int]:
    """Short topic, partition and offset of a dead letter's source. Raises LogError if its headers lack them."""
    by_name = _by_name(headers)
    try:
        name = by_name[PREFIX + "topic"].decode()
        where = int(by_name[PREFIX + "partition"]), int(by_name[PREFIX + "offset"])
    except (KeyError, ValueError) as error:
        raise LogError(
            "the headers of a dead letter lack its source position; rollstream did not write it, leave it out"
        ) from error
    return (BY_NAME[name].short if name in BY_NAME else name), *where


class DeadLetterIndex:
    """Offsets of dead-lettered records by partition, as far as `dlq` has been read."""

    def __init__(self, log: EventLog, topics: Container[str] | None = None) -> None:
        """`topics`: only letters about records of these topics count; None: all."""
        self._log = log
        self._topics = topics
        self._begin: int | None = None
        """Offset of `dlq` from which on no letter is missing."""
        self.num_read = 0
        """Number of records of `dlq` read so far: shows that a long read makes progress."""
        self._next_offset = 0
        self._letters: dict[TopicPartition, dict[int, int]] = {}
        """Offset of the first letter about a dead record, by partition and the record's offset."""
        self._fold_errors: dict[TopicPartition, set[int]] = {}
        """Offsets of dead records on which a fold raised, by partition."""
        self._waiting: dict[TopicPartition, deque[tuple[int, int]]] = {}
        """The same in the order of the letters, without those that `needed_from` has passed."""
        self._num_drops = 0
        self._reading = asyncio.Lock()

    async def refresh(self, since: int = 0) -> None:
        """Read `dlq` from the offset `since` to its end; concurrent calls wait and read nothing twice."""
        async with self._reading:
            begin, end = (await self._log.begin_offsets("dlq"))[0], (await self._log.end_offsets("dlq"))[0]
            since = max(since, begin) if since <= end else begin
            if self._begin is None:
                self._begin = self._next_offset = since
            while since < self._begin:
                known_from, num_drops = self._begin, self._num_drops
                await self._read(since, known_from)
                if (self._begin, self._num_drops) == (known_from, num_drops):  # no letters were forgotten meanwhile
                    self._begin = since
            await self._read(self._next_offset, end)
            self._next_offset = max(self._next_offset, end)
            self._waiting = {
                where: deque(sorted((letter, offset) for offset, letter in letters.items()))
                for where, letters in self._letters.items()
            }

    async def _read(self, begin: int, end: int) -> None:
        if begin >= end:
            return
        async for record in read_to_end(self._log, "dlq", {0: begin}, {0: end}):
            self.num_read += 1
            if redriven(record) is not None:
                continue
            try:
                topic, partition, offset = origin(record.headers)
            except LogError:
                continue  # not written by rollstream
            if self._topics is not None and topic not in self._topics:
                continue
            where = TopicPartition(topic, partition)
            if is_of_fold(record.headers):
                self._fold_errors.setdefault(where, set()).add(offset)
            letters = self._letters.setdefault(where, {})
            letters[offset] = min(record.offset, letters.get(offset, record.offset))

    def offsets(self, where: TopicPartition) -> Set[int]:
        """Offsets of the dead-lettered records of a partition; the set grows when `refresh` finds more."""
        return self._letters.setdefault(where, {}).keys()

    def poison(self, where: TopicPartition) -> Set[int]:
        """Those of them on which a fold raised."""
        return self._fold_errors.setdefault(where, set())

    def needed_from(self, where: TopicPartition, commit_offset: int) -> int:
        """The offset of `dlq` to read from for a partition that is read again from its commit offset.

        Commit offsets only grow from one `refresh` to the next. Letters about earlier records are forgotten: `refresh`
        reads them again for an assignment that begins before this offset, because the commit was lost.
        """
        waiting = self._waiting.get(where)
        while waiting and waiting[0][1] < commit_offset:
            letter, offset = waiting.popleft()
            self._forget(where, offset, letter)
        return waiting[0][0] if waiting else self._next_offset

    def drop(self, where: TopicPartition) -> None:
        """Forget the letters about a partition's records; `refresh` reads them again for an assignment of it."""
        letters = self._letters.pop(where, {})
        self._fold_errors.pop(where, None)
        self._waiting.pop(where, None)
        self._num_drops += 1
        if letters:
            self._begin = max(self._begin or 0, max(letters.values()) + 1)

    def _forget(self, where: TopicPartition, offset: int, letter: int) -> None:
        self._letters[where].pop(offset, None)
        self._fold_errors.get(where, set[int]()).discard(offset)
        self._begin = max(self._begin or 0, letter + 1)
