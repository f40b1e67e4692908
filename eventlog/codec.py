"""Events to records and back: orjson values, CloudEvents 1.0 binary-mode headers, content digests."""

import hashlib
from binascii import unhexlify
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, NamedTuple

import orjson
from pydantic import BaseModel, ValidationError

from rollstream.eventlog.log import Headers, Received, Record, partition_of
from rollstream.schemas.base import Event, validator_of
from rollstream.schemas.errors import DecodeError, first_invalid
from rollstream.schemas.events import KINDS, Tick
from rollstream.schemas.topics import TOPICS

_SORTED = orjson.OPT_SORT_KEYS
_ONLY_JSON = orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_DATACLASS
"""Values that orjson would write as text or an object, though JSON has no such type, go to `_fields`, which refuses
them.
"""
_FEW_NESTED = 200
"""Values with so few arrays and objects cannot be nested too deeply to be written again."""

EMPTY_SHA256 = "0" * 64
"""Initial value of a hash chain."""

UPCASTERS: dict[tuple[str, int], Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""(kind, old version) -> the content of the next version. Pure; a golden file of each old version stays."""

_VALIDATORS: dict[str, dict[str, Callable[[Any], Event]]] = {
    topic: {kind: validator_of(event) for kind, event in KINDS.items() if topic == event.TOPIC} for topic in TOPICS
}
"""Validators by topic and kind, each of which makes an event of its content."""


class Encoded(NamedTuple):
    """An event as a record: what to send."""

    topic: str
    key: bytes
    value: bytes
    headers: Headers
    event: Event

    @property
    def digest(self) -> str:
        """Content digest of the event, computed when it is asked for."""
        return content_digest(self.event)


def encode(event: Event) -> Encoded:
    """Key, value and headers of an event."""
    content = _fields(event)
    value = orjson.dumps(content, default=_fields, option=_ONLY_JSON)
    key = event.key.encode()
    headers: Headers = (
        ("content-type", b"application/json"),
        ("ce_specversion", b"1.0"),
        ("ce_id", event.event_id.encode()),
        ("ce_source", b"rollstream"),
        ("ce_type", _type_of(content["kind"], content["v"])),
        ("ce_subject", key),
    )
    return Encoded(event.TOPIC, key, value, headers, event)


@cache
def _type_of(kind: str, version: int) -> bytes:
    return f"rollstream.{kind}.v{version}".encode()


def decode(record: Record, *, num_partitions: int | None = None) -> Received:
    """The event of a record. Raises DecodeError that says what is wrong with which record.

    `num_partitions`: partition count of its topic; if given, a record in a partition that its key
    does not belong to is refused.
    """
    event, content = parse(record.topic, record.value)
    key = event.key.encode()
    if record.key is not None and record.key != key:
        raise DecodeError(f"wrong key: record has {record.key!r}, event says {event.key!r}")
    if num_partitions is not None:
        own = event.partition if type(event) is Tick else partition_of(key, num_partitions)
        if record.partition != own:
            raise DecodeError(
                f"wrong partition: the record is in {record.partition}, and {event.event_id} belongs to {own}"
            )
    return Received(event, partial(_digest, content, event.UNDIGESTED), record.position, record.timestamp_ms)


def kind_of(record: Record) -> str | None:
    """The kind that a record's header names, without a look at its value; None if it names none."""
    for name, content in record.headers:
        if name == "ce_type":
            parts = content.split(b".")
            return parts[1].decode("ascii", "replace") if len(parts) == 3 else None
    return None


def event_id_of(record: Record) -> str:
    """The event id that a record's header names, without a look at its value; empty if it names none."""
    return next((content.decode(errors="replace") for name, content in record.headers if name == "ce_id"), "")


def parse(topic: str, value: bytes | None) -> tuple[Event, dict[str, Any]]:
    """Event and JSON content of a record's value. Raises DecodeError."""
    if value is None:
        raise DecodeError("null value")
    try:
        content = orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise DecodeError(f"not UTF-8 JSON: {error}") from error
    if not isinstance(content, dict):
        raise DecodeError("the value is not a JSON object")
    if len(value) > 2 * _FEW_NESTED and len(value) - len(value.replace(b"[", b"").replace(b"{", b"")) > _FEW_NESTED:
        _check_depth(content)  # `replace` finds what is rare by memchr, and `count` looks at each byte
    kind = content.get("kind")
    if not isinstance(kind, str) or (validate := _VALIDATORS[topic].get(kind)) is None:
        raise DecodeError(f"unknown kind {kind!r} for topic {topic}")
    if UPCASTERS:
        content = _upcast(kind, content)
    try:
        return validate(content), content
    except ValidationError as error:
        raise DecodeError(f"{kind}: {first_invalid(error)}") from error


def content_digest(event: Event) -> str:
    """sha256 (hex) of an event's canonical content: sorted keys, without the fields in `UNDIGESTED`."""
    return _digest(_own_fields(event), event.UNDIGESTED)


def chain(start: str, digests: Iterable[str]) -> str:
    """Chained digest: h = sha256(h + digest), beginning with sha256(start)."""
    sha256 = hashlib.sha256
    state = sha256(start.encode()).digest()
    for digest in digests:
        state = sha256(state + unhexlify(digest)).digest()
    return state.hex()


def canonical_digest(value: Any) -> str:
    """sha256 (hex) of a JSON value with sorted keys."""
    return hashlib.sha256(orjson.dumps(value, option=_SORTED)).hexdigest()


def _digest(content: dict[str, Any], undigested: frozenset[str]) -> str:
    """Digest of content that nobody needs after it: what is undigested is taken out of it."""
    for name in undigested:
        content.pop(name, None)
    return hashlib.sha256(orjson.dumps(content, default=_fields, option=_SORTED)).hexdigest()


def _fields(value: Any) -> dict[str, Any]:
    """The JSON content of an event, or of a model in it: its fields, named and ordered as in its class.

    To read only. Those that were added since it was published (`schemas.base.added`) are left out at their default.
    """
    added = _added(type(value))
    return _without(added, value) if added else vars(value)


def _own_fields(value: Any) -> dict[str, Any]:
    """The same in a dictionary of the caller's own."""
    return _without(_added(type(value)), value)


def _without(added: tuple[tuple[str, Any], ...], value: Any) -> dict[str, Any]:
    content = vars(value).copy()
    for name, default in added:
        if content[name] == default:
            del content[name]
    return content


@cache
def _added(kind: type[Any]) -> tuple[tuple[str, Any], ...]:
    """Its added fields and their defaults: calls of `exclude_if` would take longer than all else here."""
    if not issubclass(kind, BaseModel):
        raise TypeError(f"{kind.__name__} cannot be encoded as JSON")
    return tuple((name, field.default) for name, field in kind.model_fields.items() if field.exclude_if)


def _check_depth(content: dict[str, Any]) -> None:
    """Raises DecodeError for content that orjson reads and cannot write, so that no fold has to digest it."""
    try:
        orjson.dumps(content)
    except orjson.JSONEncodeError as error:
        raise DecodeError(f"the value is nested too deeply: {error}") from error


def _upcast(kind: str, content: dict[str, Any]) -> dict[str, Any]:
    version = content.get("v")
    while isinstance(version, int) and (kind, version) in UPCASTERS:
        content = UPCASTERS[kind, version](content)
        version = content["v"]
    return content
