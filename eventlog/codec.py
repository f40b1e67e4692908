"""Events to records and back: orjson values, CloudEvents 1.0 binary-mode headers, content digests."""

import hashlib
import re
from binascii import unhexlify
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, cast

import orjson
from pydantic import BaseModel, ValidationError
from pydantic_core import SchemaValidator

from rollstream.eventlog.log import Encoded, Headers, Received, Record, partition_of
from rollstream.schemas.base import Event
from rollstream.schemas.errors import DecodeError, first_invalid
from rollstream.schemas.events import KINDS, Tick
from rollstream.schemas.topics import TOPICS

_SORTED = orjson.OPT_SORT_KEYS
_ONLY_JSON = orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_DATACLASS
"""Values that orjson would write as text or an object, though JSON has no such type, go to `_fields`, which refuses
them.
"""
_CANONICAL = _ONLY_JSON | _SORTED
DIGESTED = "ce_digested"
"""Header of a step or reward that is digested as it is written: the number of bytes of its value before the comma and
the fields that are not content. Its digest is sha256 of these bytes and a closing brace. Without the header it is that
of the content with sorted keys; all records were written so until 2026-11-28.
"""
HEADERS = {
    "content-type": "Always application/json.",
    "ce_specversion": "Version of CloudEvents, 1.0.",
    "ce_id": "Id of the event, derived from what happened; the first record with an id in its partition counts.",
    "ce_source": "Always rollstream.",
    "ce_type": "Kind and version of the event.",
    "ce_subject": "Key of the record.",
    DIGESTED: "Number of bytes of the value that the content digest covers, where it is digested as written.",
}
"""Meaning of the headers of a record, by name."""
_FEW_NESTED = 200
"""Values with so few arrays and objects cannot be nested too deeply to be written again."""

EMPTY_SHA256 = "0" * 64
"""Initial value of a hash chain."""

UPCASTERS: dict[tuple[str, int], Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""(kind, old version) -> the content of the next version. Pure; a golden file of each old version stays."""

_MIN_INT, _MAX_INT = -(2**63), 2**64 - 1
"""Bounds of the integers that orjson writes."""


def _validator_of(event: type[Event]) -> Callable[[Any], Event]:
    """Validator of an event that another program may have written: a number, which may come as text, must be finite,
    and an integer fit into 64 bits, because an event made from it could not be written, or not read, otherwise.
    """
    return SchemaValidator(_bounded(event.__pydantic_core_schema__), _use_prebuilt=False).validate_python


def _bounded(schema: Any) -> Any:
    """A core schema with a lower and an upper bound of each integer, and no infinite number."""
    if isinstance(schema, list):
        return [_bounded(one) for one in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    bounded = {name: _bounded(one) for name, one in cast("dict[Any, Any]", schema).items()}
    if bounded.get("type") == "int":
        bounded |= {} if {"ge", "gt"} & bounded.keys() else {"ge": _MIN_INT}
        bounded |= {} if {"le", "lt"} & bounded.keys() else {"le": _MAX_INT}
    if bounded.get("type") == "float":
        bounded["allow_inf_nan"] = False
    return bounded


_VALIDATORS: dict[str, dict[str, Callable[[Any], Event]]] = {
    topic: {kind: _validator_of(event) for kind, event in KINDS.items() if topic == event.TOPIC} for topic in TOPICS
}
"""Validators by topic and kind, each of which makes an event of its content."""


def encode(event: Event | Encoded) -> Encoded:
    """Key, value and headers of an event; what is encoded stays as it is."""
    if isinstance(event, Encoded):
        return event
    key = event.key.encode()
    kind: Any = event
    headers: Headers = (
        ("content-type", b"application/json"),
        ("ce_specversion", b"1.0"),
        ("ce_id", event.event_id.encode()),
        ("ce_source", b"rollstream"),
        ("ce_type", _type_of(kind.kind, kind.v)),
        ("ce_subject", key),
    )
    if event.DIGEST_OF == "content":
        value = orjson.dumps(_fields(event), default=_fields, option=_ONLY_JSON)
        return Encoded(event.TOPIC, key, value, headers, event)
    digested, rest = _parts(event)
    if event.DIGEST_OF == "record":
        headers += ((DIGESTED, b"%d" % len(digested)),)
    value = b"%b,%b" % (digested, orjson.dumps(rest, option=_CANONICAL)[1:])
    return Encoded(event.TOPIC, key, value, headers, event, len(digested))


def _parts(event: Event) -> tuple[bytes, dict[str, Any]]:
    """JSON of an event's content without the closing brace, as its record has it, and its undigested fields."""
    content = _own_fields(event)
    rest = {name: content.pop(name) for name in event.UNDIGESTED}
    option = _ONLY_JSON if event.DIGEST_OF == "record" else _CANONICAL
    return orjson.dumps(content, default=_fields, option=option)[:-1], rest


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
        own = own_partition(event, num_partitions)
        if record.partition != own:
            raise DecodeError(
                f"wrong partition: the record is in {record.partition}, and {event.event_id} belongs to {own}"
            )
    if event.DIGEST_OF == "record":
        digest = partial(_digest_received, record, content, event.UNDIGESTED)
    else:
        digest = partial(_digest, content, event.UNDIGESTED)
    return Received(event, digest, record.position, record.timestamp_ms)


def own_partition(event: Event, num_partitions: int) -> int:
    """The partition that an event belongs to, of a topic with that many."""
    return event.partition if type(event) is Tick else partition_of(event.key, num_partitions)


def kind_of(record: Record) -> str | None:
    """The kind that a record's header names, without a look at its value; None if it names none."""
    for name, content in record.headers:
        if name == "ce_type":
            parts = (content or b"").split(b".")
            return parts[1].decode("ascii", "replace") if len(parts) == 3 else None
    return None


def event_id_of(record: Record) -> str:
    """The event id that a record's header names, without a look at its value; empty if it names none."""
    found = next((content for name, content in record.headers if name == "ce_id"), None)
    return (found or b"").decode(errors="replace")


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


def digest_of(encoded: Encoded) -> str:
    """Content digest of an event that is encoded: of its record's bytes if they are written for it."""
    if encoded.num_digested:
        return _sha256_of(encoded.value, encoded.num_digested)
    return content_digest(encoded.event)


def content_digest(event: Event) -> str:
    """sha256 (hex) of an event's JSON without the fields in `UNDIGESTED`; of what, its `DIGEST_OF` says."""
    if event.DIGEST_OF == "record":
        written, _ = _parts(event)
        return _sha256_of(written, len(written))
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


def _digest_received(record: Record, content: dict[str, Any], undigested: frozenset[str]) -> str:
    """Digest of a record: of its own bytes if its header says how many, else of its content with sorted keys. A value
    that another program has written again, with the old headers, does not end so.
    """
    value = record.value
    for name, number in reversed(record.headers):
        if name == DIGESTED and value is not None and number and number.isdigit():
            end = int(number[:9])
            return _sha256_of(value, end) if _rest(undigested)(value, end) else _digest(content, undigested)
    return _digest(content, undigested)


@cache
def _rest(undigested: frozenset[str]) -> Callable[[bytes, int], re.Match[bytes] | None]:
    """Whether the undigested fields of an object, its end and nothing else follow in a value from a place on."""
    fields = [b'"%b":[^,{}]*' % name.encode() for name in sorted(undigested)]
    return re.compile(b",%b}" % b",".join(fields)).fullmatch


def _sha256_of(value: bytes, num_digested: int) -> str:
    return hashlib.sha256(value[:num_digested] + b"}").hexdigest()


def _digest(content: dict[str, Any], undigested: frozenset[str]) -> str:
    """Digest of content that nobody needs after it: what is undigested is taken out of it."""
    for name in undigested:
        content.pop(name, None)
    return hashlib.sha256(orjson.dumps(content, default=_fields, option=_SORTED)).hexdigest()


def _fields(value: Any) -> dict[str, Any]:
    """The JSON content of an event, or of a model in it: its fields, named and ordered as in its class.

    To read only. Those that were added since it was published (`schemas.base.added`) are left out at their default.
    """
    added = _ADDED[type(value)]
    return _without(added, value) if added else vars(value)


def _own_fields(value: Any) -> dict[str, Any]:
    """The same in a dictionary of the caller's own."""
    return _without(_ADDED[type(value)], value)


def _without(added: tuple[tuple[str, Any], ...], value: Any) -> dict[str, Any]:
    content = vars(value).copy()
    for name, default in added:
        if content[name] == default:
            del content[name]
    return content


class _AddedFields(dict[type[Any], tuple[tuple[str, Any], ...]]):
    """Added fields and their defaults by class: calls of `exclude_if` would take longer than all else here."""

    def __missing__(self, kind: type[Any]) -> tuple[tuple[str, Any], ...]:
        if not issubclass(kind, BaseModel):
            raise TypeError(f"{kind.__name__} cannot be encoded as JSON")
        fields = kind.model_fields.items()
        found = ((name, field.get_default(call_default_factory=True)) for name, field in fields if field.exclude_if)
        return self.setdefault(kind, tuple(found))


_ADDED = _AddedFields()


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
