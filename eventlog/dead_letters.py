"""Dead letters: a record that cannot be used, as it came, with why; Kafka Connect's error headers.

`send_dead_letter` writes one, `original` gives the record back, `send_again` sends it to where it came from and leaves
a note of that beside the letters, which `redriven` reads. What to do with a letter is for who reads.
"""

import base64
from typing import NamedTuple

import orjson

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import EventLog, Headers, Position, Record, record_size
from rollstream.schemas.errors import LogError
from rollstream.schemas.settings import ArtifactRef
from rollstream.schemas.topics import BY_NAME, TOPICS

PREFIX = "__connect.errors."
REFERENCE = "rollstream.reference"
"""Header that holds the artifact (JSON) in place of a value above the record limit."""
WHOLE = "rollstream.reference.record"
"""Header that holds the artifact of the whole record, if its key and headers alone are above the limit."""
REDRIVEN_FROM = "rollstream.redriven.from"
"""Header of a record that was sent again: topic, partition and offset of its letter."""
REDRIVEN_TO = "rollstream.redriven.to"
"""Header of a note in `dlq` that a letter was redriven: where its record lies now."""
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
    """Keep a record that cannot be used; returns once all replicas have the letter.

    Raises LogError if the record is above the limit and there is no artifact store for its bytes.
    """
    why = _headers(record, service, stage, error)
    theirs = _without_ours(record.headers)
    limit = TOPICS["dlq"].max_record_bytes
    if record_size(record.key, record.value, (*why, *theirs)) <= limit:
        return await log.send_raw("dlq", key=record.key, value=record.value, headers=(*why, *theirs))
    if artifacts is None:
        raise LogError(f"{record.topic}/{record.partition}@{record.offset} is too large for a dead letter")
    if record.value is not None and record_size(record.key, None, (*why, *theirs)) <= limit - REFERENCE_BYTES:
        reference = artifacts.put_bytes(record.value, ".record").model_dump_json().encode()
        return await log.send_raw("dlq", key=record.key, value=None, headers=(*why, (REFERENCE, reference), *theirs))
    reference = artifacts.put_bytes(_pack(record), ".record.json").model_dump_json().encode()
    return await log.send_raw("dlq", key=None, value=None, headers=(*why, (WHOLE, reference)))


def original(letter: Record, artifacts: ArtifactStore) -> Record:
    """The record that a letter holds or refers to. Raises LogError, and ArtifactError if its bytes are gone."""
    topic, partition, offset = origin(letter.headers)
    told = dict(letter.headers)
    key, value, headers = letter.key, letter.value, _without_ours(letter.headers)
    if REFERENCE in told:
        value = artifacts.read(ArtifactRef.model_validate_json(told[REFERENCE]))
    elif WHOLE in told:
        key, value, headers = _unpack(artifacts.read(ArtifactRef.model_validate_json(told[WHOLE])))
    return Record(topic, partition, offset, key, value, headers, letter.timestamp_ms)


class Redriven(NamedTuple):
    """What a note says."""

    letter: int
    """Offset of the letter in `dlq`."""
    to: Position
    """Where the record was sent."""


async def send_again(log: EventLog, record: Record, letter: int) -> Position:
    """Send a letter's record to its own partition. 1. The record is acknowledged. 2. The note of it is.

    A crash between the two leaves no note; sent once more, the record is a repeat that readers drop.
    """
    source = f"dlq/0@{letter}".encode()
    theirs = tuple((name, content) for name, content in record.headers if name != REDRIVEN_FROM)
    to = await log.send_raw(
        record.topic,
        key=record.key,
        value=record.value,
        headers=(*theirs, (REDRIVEN_FROM, source)),
        partition=record.partition,
    )
    note = orjson.dumps([to.topic, to.partition, to.offset])
    await log.send_raw("dlq", key=record.key, value=None, headers=((REDRIVEN_FROM, source), (REDRIVEN_TO, note)))
    return to


def redriven(record: Record) -> Redriven | None:
    """What a record of `dlq` says if it is a note; None for a letter."""
    told = dict(record.headers)
    if record.value is not None or REDRIVEN_TO not in told or PREFIX + "topic" in told:
        return None
    try:
        topic, partition, offset = orjson.loads(told[REDRIVEN_TO])
        letter = int(told[REDRIVEN_FROM].rpartition(b"@")[2])
        return Redriven(letter, Position(str(topic), int(partition), int(offset)))
    except (KeyError, TypeError, ValueError):
        return None


def _without_ours(headers: Headers) -> Headers:
    return tuple((n, c) for n, c in headers if not n.startswith(PREFIX) and n not in (REFERENCE, WHOLE))


def _pack(record: Record) -> bytes:
    headers = [(name, _to_text(content)) for name, content in record.headers]
    return orjson.dumps({"key": _to_text(record.key), "value": _to_text(record.value), "headers": headers})


def _unpack(packed: bytes) -> tuple[bytes | None, bytes | None, Headers]:
    content = orjson.loads(packed)
    headers = tuple((name, _to_bytes(text) or b"") for name, text in content["headers"])
    return _to_bytes(content["key"]), _to_bytes(content["value"]), headers


def _to_text(content: bytes | None) -> str | None:
    return None if content is None else base64.b64encode(content).decode("ascii")


def _to_bytes(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)


def _headers(record: Record, service: str, stage: str, error: BaseException) -> Headers:
    topic = TOPICS[record.topic].name if record.topic in TOPICS else record.topic
    told = {
        "topic": topic,
        "partition": str(record.partition),
        "offset": str(record.offset),
        "connector.name": service,
        "task.id": "0",
        "stage": stage,
        "class.name": type(error).__name__,
        "exception.class.name": f"{type(error).__module__}.{type(error).__qualname__}",
        "exception.message": str(error),
        "exception.stacktrace": "",
    }
    return tuple((PREFIX + name, _cut(text)) for name, text in told.items())


def _cut(text: str) -> bytes:
    whole = text.encode(errors="replace")
    return whole[:MAX_MESSAGE_BYTES].decode(errors="ignore").encode()


def origin(headers: Headers) -> tuple[str, int, int]:
    """Short topic, partition and offset that a dead letter came from. Raises LogError if it does not say."""
    told = dict(headers)
    try:
        name = told[PREFIX + "topic"].decode()
        where = int(told[PREFIX + "partition"]), int(told[PREFIX + "offset"])
    except (KeyError, ValueError) as error:
        raise LogError("a dead letter without its origin in the headers") from error
    return (BY_NAME[name].short if name in BY_NAME else name), *where
