"""Events to records and back: orjson values, CloudEvents 1.0 binary-mode headers, content digests."""

import hashlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import orjson
from pydantic import ValidationError

from rollstream.eventlog.log import Headers, Received, Record, partition_of
from rollstream.schemas.base import Event
from rollstream.schemas.errors import DecodeError
from rollstream.schemas.events import KINDS, Tick
from rollstream.schemas.topics import TOPICS

EMPTY_SHA256 = "0" * 64
"""Where a hash chain begins."""

UPCASTERS: dict[tuple[str, int], Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""(kind, old version) -> the content of the next version. Pure; a golden file of each old version stays."""

_ALLOWED: dict[str, frozenset[str]] = {
    topic: frozenset(kind for kind, event in KINDS.items() if topic == event.TOPIC) for topic in TOPICS
}


class Encoded(NamedTuple):
    """An event as a record: what to send, and the digest of its content."""

    topic: str
    key: bytes
    value: bytes
    headers: Headers
    digest: str


def encode(event: Event) -> Encoded:
    """Key, value, headers and content digest of an event."""
    content = event.model_dump(mode="python")
    value = orjson.dumps(content)
    headers: Headers = (
        ("content-type", b"application/json"),
        ("ce_specversion", b"1.0"),
        ("ce_id", event.event_id.encode()),
        ("ce_source", b"rollstream"),
        ("ce_type", f"rollstream.{content['kind']}.v{content['v']}".encode()),
        ("ce_subject", event.key.encode()),
    )
    digest = _digest(content, event.UNDIGESTED)
    return Encoded(event.TOPIC, event.key.encode(), value, headers, digest)


def decode(record: Record, *, num_partitions: int | None = None) -> Received:
    """The event of a record. Raises DecodeError that says what is wrong with which record.

    `num_partitions`: partition count of its topic; if it is given, a record in another partition than its own is none.
    """
    event, content = parse(record.topic, record.value)
    if record.key is not None and event.key.encode() != record.key:
        raise DecodeError(f"wrong key: record has {record.key!r}, event says {event.key!r}")
    if num_partitions is not None:
        own = event.partition if isinstance(event, Tick) else partition_of(event.key, num_partitions)
        if record.partition != own:
            raise DecodeError(f"wrong partition: record lies in {record.partition}, {event.event_id} belongs to {own}")
    digest = _digest(content, event.UNDIGESTED)
    return Received(event, digest, record.position, record.timestamp_ms)


def parse(topic: str, value: bytes | None) -> tuple[Event, dict[str, Any]]:
    """Event and JSON content of a record's value. Raises DecodeError."""
    if value is None:
        raise DecodeError("null value")
    try:
        content = orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise DecodeError(f"not UTF-8 JSON: {error}") from error
    if not isinstance(content, dict):
        raise DecodeError("the value is no JSON object")
    kind = content.get("kind")
    if not isinstance(kind, str) or kind not in _ALLOWED[topic]:
        raise DecodeError(f"unknown kind {kind!r} for topic {topic}")
    content = _upcast(kind, content)
    try:
        return KINDS[kind].model_validate(content), content
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DecodeError(f"{kind}: {where}: {first['msg']}") from error


def content_digest(event: Event) -> str:
    """sha256 (hex) of an event's canonical content: sorted keys, without the fields in `UNDIGESTED`."""
    return _digest(event.model_dump(mode="python"), event.UNDIGESTED)


def chain(start: str, digests: Iterable[str]) -> str:
    """Chained digest: h = sha256(h + digest), beginning with sha256(start)."""
    state = hashlib.sha256(start.encode()).digest()
    for digest in digests:
        state = hashlib.sha256(state + bytes.fromhex(digest)).digest()
    return state.hex()


def canonical_digest(value: Any) -> str:
    """sha256 (hex) of a JSON value with sorted keys."""
    return hashlib.sha256(orjson.dumps(value, option=orjson.OPT_SORT_KEYS)).hexdigest()


def _digest(content: dict[str, Any], undigested: frozenset[str]) -> str:
    kept = {name: value for name, value in content.items() if name not in undigested}
    return hashlib.sha256(orjson.dumps(kept, option=orjson.OPT_SORT_KEYS)).hexdigest()


def _upcast(kind: str, content: dict[str, Any]) -> dict[str, Any]:
    version = content.get("v")
    while isinstance(version, int) and (kind, version) in UPCASTERS:
        content = UPCASTERS[kind, version](content)
        version = content["v"]
    return content
