"""Shared code for aiokafka clients: connecting, converting records and errors, batches of records.

Also looks up the committed offsets and members of consumer groups without joining them.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import GroupAuthorizationFailedError, KafkaError, OffsetOutOfRangeError, for_code
from aiokafka.producer.message_accumulator import BatchBuilder
from aiokafka.structs import ConsumerRecord

from rollstream.eventlog.kafka.access import DENIED, denied, why_refused
from rollstream.eventlog.kafka.membership import MemberConsumer
from rollstream.eventlog.kafka.security import client_options
from rollstream.eventlog.log import Encoded, Position, Record, TopicPartition, truncated
from rollstream.schemas.errors import AccessDeniedError, ConfigError, LogError, TopicError
from rollstream.schemas.kafka import KafkaSettings

PATIENCE_S = 5.0
"""Seconds for which a connection is retried while nothing listens."""
CONNECT_TIMEOUT_S = 15.0
"""Maximum seconds for a broker to answer once it has accepted the connection."""
REQUEST_TIMEOUT_MS = 15_000
CLOSE_TIMEOUT_S = 5.0
"""Maximum seconds for which a producer that is closed waits for acknowledgements. Without a limit of ours it would wait
until its brokers are back, because a producer of `new_producer` never gives up a batch.
"""
DISCONNECT_TIMEOUT_S = 2.0
"""Maximum seconds for its connections to close then, and for its task to end."""
END_PAUSE_S = 0.1
FETCH_BYTES = 1 << 20
"""Bytes fetched of one partition. A single larger record passes all the same: Kafka always returns the first batch
whole.
"""

EXPECTED = ("Unable connect to", "Unable to request metadata", "Unexpected error during InitProducerIdRequest")
"""Beginnings of aiokafka's messages about a failed connection."""
LOGGERS = ("aiokafka", "aiokafka.producer.sender")
"""Loggers of those messages: a filter applies to its own logger only, not to those below it."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


def kafka_partition(kafka: KafkaSettings, where: TopicPartition) -> KafkaPartition:
    """The partition under its topic's name in Kafka."""
    return KafkaPartition(kafka.topic_name(where.topic), where.partition)


def our_partition(kafka: KafkaSettings, where: KafkaPartition) -> TopicPartition:
    """The partition under its topic's short name. Raises TopicError for a topic outside the topic table."""
    short = kafka.short_name(where.topic)
    if short is None:
        raise TopicError(
            f"topic {where.topic} is not in the topic table with prefix {kafka.topic_prefix}; "
            "correct kafka.topic_prefix"
        )
    return TopicPartition(short, where.partition)


def our_record(topic: str, found: "ConsumerRecord[bytes, bytes]") -> Record:
    """A record as the rest of rollstream sees it."""
    headers = tuple((name, content) for name, content in found.headers)
    return Record(topic, found.partition, found.offset, found.key, found.value, headers, found.timestamp)


def new_consumer(
    kafka: KafkaSettings, client_id: str, *, max_wait_ms: int, fetch_bytes: int = FETCH_BYTES, **options: Any
) -> AIOKafkaConsumer:
    """A consumer that never skips: no automatic commit, no automatic reset of offsets. Raises ConfigError."""
    return MemberConsumer(
        **client_options(kafka),
        client_id=client_id,
        enable_auto_commit=False,
        auto_offset_reset="none",
        fetch_max_wait_ms=max_wait_ms,
        max_partition_fetch_bytes=fetch_bytes,
        request_timeout_ms=REQUEST_TIMEOUT_MS,
        **options,
    )


@contextmanager
def log_errors(doing: str, kafka: KafkaSettings | None = None, operation: str = "") -> Iterator[None]:
    """Convert errors of aiokafka to LogError with the failed operation, or to AccessDeniedError if an ACL is missing;
    `operation` is the ACL operation.
    """
    try:
        yield
    except KafkaError as error:
        if (refused := denied(error, doing, kafka, operation)) is not None:
            raise refused from error
        raise LogError(f"cannot {doing}: {error!r}; see the broker's log") from error
    except TimeoutError as error:
        raise LogError(
            f"cannot {doing}: the broker does not answer; check that it runs and that bootstrap_servers names it"
        ) from error


async def connect(client: Any, kafka: KafkaSettings) -> None:
    """Start an aiokafka client, with retries for PATIENCE_S.

    Raises LogError naming the address and the cause, AccessDeniedError as soon as Kafka refuses the client.
    """
    began = time.monotonic()
    why: LogError | str = ""
    try:
        with _quiet():
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                while not await _started(client, kafka):
                    why = await why_refused(kafka) or ""
                    if isinstance(why, AccessDeniedError) or time.monotonic() > began + PATIENCE_S:
                        raise TimeoutError
                    await asyncio.sleep(0.2)
    except TimeoutError:
        await stop(client)
        if isinstance(why, AccessDeniedError):
            raise why from None
        raise _no_broker(kafka, f" after {time.monotonic() - began:.0f} s{f' ({why})' if why else ''}") from None
    except ValueError as error:  # of an address
        await stop(client)
        if isinstance(error, ConfigError):
            raise
        raise _no_broker(kafka, f": {error}") from None
    except asyncio.CancelledError:
        await stop(client)
        raise


def _no_broker(kafka: KafkaSettings, why: str) -> LogError:
    return LogError(
        f"cannot reach a Kafka broker at {kafka.bootstrap_servers}{why}; start one or correct bootstrap_servers"
    )


def new_producer(*, patience_s: float, **options: Any) -> AIOKafkaProducer:
    """An idempotent producer that waits for the leader of a partition without limit, and `patience_s` for room to add a
    record.

    aiokafka limits both by the timeout of one request. It fails a batch that waits longer while its partition has no
    leader, even one that it has sent, and goes on with the next sequence number: Kafka then refuses every later record
    of the partition as out of order. The sender's own deadline fails a record instead.
    """
    producer = AIOKafkaProducer(acks="all", enable_idempotence=True, **options)
    producer._message_accumulator._batch_ttl = math.inf
    producer._request_timeout_ms = int(patience_s * 1000)
    return producer


async def stop(client: Any) -> None:
    """Stop an aiokafka client of any kind."""
    try:
        await (client.close() if hasattr(client, "close") else client.stop())
    except asyncio.CancelledError:  # without a broker, aiokafka lets the cancellation of its own task escape
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        await client._client.close()


async def stop_producer(producer: AIOKafkaProducer) -> None:
    """Flush and stop a producer; after CLOSE_TIMEOUT_S, disconnect it without the records that are left."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await producer.flush()
            await producer.stop()
    except TimeoutError:
        logger.warning("records were not acknowledged within %.0f s of closing; they are given up", CLOSE_TIMEOUT_S)
        producer._closed = True
        await asyncio.wait({asyncio.create_task(producer.client.close())}, timeout=DISCONNECT_TIMEOUT_S)
        sender: Any = producer._sender
        await _end(sender.sender_task)


async def _end(task: "asyncio.Task[Any]") -> None:
    """End a task that awaits others when it is cancelled, which may wait for a closed client without end."""
    with suppress(TimeoutError):
        async with asyncio.timeout(DISCONNECT_TIMEOUT_S):
            while not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=END_PAUSE_S)


async def within(
    seconds: float, doing: str, work: Awaitable[T], *, kafka: KafkaSettings | None = None, operation: str = ""
) -> T:
    """Await `work` for at most `seconds`; raises LogError with the failed operation, like `log_errors`."""
    with log_errors(doing, kafka, operation):
        async with asyncio.timeout(seconds):
            return await work


async def out_of_range(kafka: KafkaSettings, consumer: AIOKafkaConsumer, error: OffsetOutOfRangeError) -> LogError:
    """TruncatedError for the partition and offset that Kafka refused."""
    asked: dict[KafkaPartition, int] = error.args[0]
    where, offset = next(iter(asked.items()))
    with log_errors("look up the retained offsets", kafka, "Describe"):
        begin = (await consumer.beginning_offsets([where]))[where]
        end = (await consumer.end_offsets([where]))[where]
    return truncated(our_partition(kafka, where), offset, begin, end)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the log messages of failed attempts; one error is raised when retries end."""
    theirs = [logging.getLogger(name) for name in LOGGERS]

    def keep(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(EXPECTED)

    for logger in theirs:
        logger.addFilter(keep)
    try:
        yield
    finally:
        for logger in theirs:
            logger.removeFilter(keep)


async def _started(client: Any, kafka: KafkaSettings) -> bool:
    try:
        await client.start()
    except DENIED as error:
        await stop(client)
        raise denied(error, "start a producer", kafka, "Write of a topic, or IdempotentWrite") or error from error
    except KafkaError:
        return False
    return True


ATTEMPTS = 20
"""A broker that has just started looks for its coordinator first."""


class GroupMember(NamedTuple):
    """A client that Kafka counts as a member of a consumer group."""

    client_id: str
    host: str


async def committed_offsets(admin: AIOKafkaAdminClient, kafka: KafkaSettings, group: str) -> dict[TopicPartition, int]:
    """Next offset by partition of our topics; empty if the group never committed. Raises LogError."""
    with log_errors(f"read the committed offsets of group {group}", kafka, "Describe"):
        found = await _patiently(group, lambda: admin.list_consumer_group_offsets(group))
    return {
        our_partition(kafka, where): committed.offset
        for where, committed in found.items()
        if kafka.short_name(where.topic)
    }


async def group_members(admin: AIOKafkaAdminClient, kafka: KafkaSettings, group: str) -> list[GroupMember]:
    """Members of a consumer group; a killed client is included until its session times out. Raises LogError."""

    async def describe() -> list[GroupMember]:
        response: Any
        (response,) = await admin.describe_consumer_groups([group])
        error_code, *_, members = response.groups[0][:6]
        if error_code:
            raise for_code(error_code)(group)
        return [GroupMember(client_id, host.lstrip("/")) for _, client_id, host, *_ in members]

    with log_errors(f"list the members of consumer group {group}", kafka, "Describe"):
        return await _patiently(group, describe)


async def _patiently(group: str, ask: Callable[[], Awaitable[T]]) -> T:
    for _ in range(ATTEMPTS - 1):
        try:
            return await ask()
        except GroupAuthorizationFailedError as error:
            raise GroupAuthorizationFailedError(group) from error
        except KafkaError as error:
            if not error.retriable:
                raise
            await asyncio.sleep(0.2)
    return await ask()


def filled_batch(producer: AIOKafkaProducer, left: deque[Encoded]) -> BatchBuilder:
    """A batch of the first records in `left` that are of one topic, which are removed there; of no more than fit."""
    batch = producer.create_batch()
    topic = left[0].topic
    while left and left[0].topic == topic:
        one = left[0]
        if batch.append(timestamp=None, key=one.key, value=one.value, headers=list(one.headers)) is None:
            break  # it is full; an empty one takes any record
        left.popleft()
    batch.close()
    return batch


def outcome_of(sent: "asyncio.Future[Any]") -> "asyncio.Future[Any]":
    """A future that may be failed by its owner without an end of aiokafka's, which has to be heard of to the end."""
    own: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    sent.add_done_callback(partial(_pass_on, own))
    return own


def _pass_on(own: "asyncio.Future[Any]", sent: "asyncio.Future[Any]") -> None:
    error = None if sent.cancelled() else sent.exception()
    if own.done():
        return
    if sent.cancelled():
        own.cancel()
    elif error is not None:
        own.set_exception(error)
    else:
        own.set_result(sent.result())


def positions_of(first: Position, count: int) -> list[Position]:
    """Positions of a batch's records. Its offset is -1 if Kafka had the batch already and forgot where."""
    topic, partition, offset = first
    return [Position(topic, partition, offset if offset < 0 else offset + index) for index in range(count)]
