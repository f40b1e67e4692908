"""Identities of topics: a topic that was deleted and made again has its old name and another id.

aiokafka 0.14 speaks Metadata up to version 5, which has no ids; version 10 is spelt out here.
"""

import base64
from io import BytesIO
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import NoError, for_code
from aiokafka.protocol.abstract import AbstractType
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Boolean, CompactArray, CompactString, Int16, Int32, Schema, TaggedFields

from rollstream.eventlog.kafka_client import log_errors
from rollstream.schemas.topics import BY_NAME, TOPICS

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

    def build(self, request_struct_class: type[_Question]) -> _Question:
        named = [(bytes(ID_BYTES), topic.name, {}) for topic in TOPICS.values()]
        return request_struct_class(named, False, False, False, {})


async def topic_ids(admin: AIOKafkaAdminClient) -> dict[str, str]:
    """Id by short name of the topics that exist, as Kafka writes it; empty before Kafka 2.8. Raises LogError."""
    try:
        with log_errors("look up the ids of topics"):
            answer: Any = await admin._send_request(_TopicIds())  # pyright: ignore[reportPrivateUsage]
    except NotImplementedError:  # aiokafka's word for a broker that does not know the request
        return {}
    return {
        BY_NAME[name].short: base64.urlsafe_b64encode(topic_id).rstrip(b"=").decode()
        for code, name, topic_id, *_ in answer.topics
        if for_code(code) is NoError
    }
