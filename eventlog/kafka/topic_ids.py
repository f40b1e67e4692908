"""Topic ids: a topic that was deleted and created again has the same name but another id. aiokafka 0.14 supports
Metadata requests up to version 5, which have no ids; version 10 is defined here. The ids of a workspace's topics are
remembered, because committed offsets are deleted with a topic and a new topic of the same name would look unread.
"""

import asyncio
import base64
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import NoError, UnknownTopicOrPartitionError, for_code
from aiokafka.protocol.abstract import AbstractType
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Boolean, CompactArray, CompactString, Int16, Int32, Schema, TaggedFields

from rollstream.eventlog.files import read_json, update_json
from rollstream.eventlog.kafka.client import log_errors
from rollstream.schemas.errors import LogError, TruncatedError
from rollstream.schemas.kafka import KafkaSettings
from rollstream.schemas.topics import TOPICS

ID_BYTES = 16


class _Id(AbstractType[bytes]):
    @classmethod
    def decode(cls, data: BytesIO) -> bytes:
        return data.read(ID_BYTES)

    @classmethod
    def encode(cls, value: bytes) -> bytes:
        return value


_TEXT = CompactString("utf-8")


class _Answer(Response):
    API_KEY = 3  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]
    API_VERSION = 10  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "brokers",
            CompactArray(("node_id", Int32), ("host", _TEXT), ("port", Int32), ("rack", _TEXT), ("tags", TaggedFields)),
        ),
        ("cluster_id", _TEXT),
        ("controller_id", Int32),
        (
            "topics",
            CompactArray(
                ("error_code", Int16),
                ("name", _TEXT),
                ("topic_id", _Id),
                ("is_internal", Boolean),
                (
                    "partitions",
                    CompactArray(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", CompactArray(Int32)),
                        ("isr", CompactArray(Int32)),
                        ("offline_replicas", CompactArray(Int32)),
                        ("tags", TaggedFields),
                    ),
                ),
                ("authorized_operations", Int32),
                ("tags", TaggedFields),
            ),
        ),
        ("authorized_operations", Int32),
        ("tags", TaggedFields),
    )


class _Question(RequestStruct):
    API_KEY = 3
    API_VERSION = 10
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _Answer
    SCHEMA = Schema(
        ("topics", CompactArray(("topic_id", _Id), ("name", _TEXT), ("tags", TaggedFields))),
        ("allow_auto_topic_creation", Boolean),
        ("include_cluster_authorized_operations", Boolean),
        ("include_topic_authorized_operations", Boolean),
        ("tags", TaggedFields),
    )


class _TopicIds(Request[_Question]):
    API_KEY = 3

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)

    def build(self, request_struct_class: type[_Question]) -> _Question:
        named = [(bytes(ID_BYTES), name, {}) for name in self._names]
        return request_struct_class(named, False, False, False, {})


async def topic_ids(admin: AIOKafkaAdminClient, kafka: KafkaSettings) -> dict[str, str] | None:
    """Id by short name of the topics that exist, as Kafka writes it.

    None before Kafka 2.8, and if it answers for no topic whether it exists. Raises LogError.
    """
    try:
        with log_errors("look up the ids of topics", kafka, "Describe"):
            # pyright: ignore[reportPrivateUsage]
            answer: Any = await admin._send_request(_TopicIds(map(kafka.topic_name, TOPICS)))
    except NotImplementedError:  # raised by aiokafka if the broker does not support the request
        return None
    return ids_in(answer.topics, kafka)


def ids_in(answered: Iterable[tuple[Any, ...]], kafka: KafkaSettings) -> dict[str, str] | None:
    """The same by the topics of an answer: error code, name, id and what else there is of each."""
    topics = [(for_code(code), name, topic_id) for code, name, topic_id, *_ in answered]
    if all(error not in (NoError, UnknownTopicOrPartitionError) for error, *_ in topics):
        return None
    return {
        short: base64.urlsafe_b64encode(topic_id).rstrip(b"=").decode()
        for error, name, topic_id in topics
        if error is NoError and (short := kafka.short_name(name)) is not None
    }


Known = dict[str, dict[str, str]]
"""Topic ids by cluster id and short name."""
Found = tuple[str, dict[str, str] | None]
"""Cluster id, and topic ids by short name; None if Kafka has none."""
GONE_AFTER = 3
"""Consecutive lookups without a topic before it counts as deleted: a starting broker may not list it yet."""

logger = logging.getLogger(__name__)


def check_topics(folder: Path, cluster_id: str, found: Mapping[str, str] | None) -> None:
    """Compare topic ids, if there are any, with those seen before from this workspace folder, and remember new ones.

    A failed write is only logged. Raises TruncatedError naming a topic that was deleted and created again.
    """
    if found is None:
        return
    path = folder / "topics.json"
    known = read_json(path)
    before = known.get(cluster_id, {})
    for topic, topic_id in found.items():
        if before.get(topic, topic_id) != topic_id:
            raise TruncatedError(
                f"topic {topic} was deleted and created again (id {before[topic]}, now {topic_id}): its offsets "
                f"restarted at 0 and earlier records are lost; use another workspace, or remove {path}, "
                f"metrics.duckdb and checkpoints/*.position.json there to continue with the remaining records"
            )
    if not found.keys() <= before.keys():
        try:
            update_json(path, lambda known: {**known, cluster_id: {**known.get(cluster_id, {}), **found}})
        except OSError as error:
            logger.warning("cannot save the topic ids: %s", error)


def clusters_of(folder: Path) -> set[str]:
    """The clusters that a workspace folder has used."""
    return set(read_json(folder / "topics.json"))


def only_cluster(folder: Path) -> str | None:
    """The only cluster that a workspace folder has used; None if there are several or none."""
    known = clusters_of(folder)
    return next(iter(known)) if len(known) == 1 else None


async def watch_topics(folder: Path, look_up: Callable[[], Awaitable[Found]], *, every_s: float) -> None:
    """Compare topic ids periodically until cancelled.

    A failed lookup is repeated the next time. Raises TruncatedError naming a topic that was deleted, or deleted and
    created again.
    """
    missing: dict[str, int] = {}
    while True:
        await asyncio.sleep(every_s)
        try:
            cluster_id, found = await look_up()
        except LogError:
            continue
        check_topics(folder, cluster_id, found)
        if found is None:
            continue
        known = read_json(folder / "topics.json").get(cluster_id, {})
        missing = {topic: missing.get(topic, 0) + 1 for topic in known.keys() - found}
        for topic in sorted(topic for topic, times in missing.items() if times >= GONE_AFTER):
            raise TruncatedError(
                f"topic {topic} was deleted with its records and offsets; use another workspace, or remove "
                f"{folder / 'topics.json'} to continue without them"
            )
