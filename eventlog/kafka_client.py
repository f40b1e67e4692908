"""What every use of aiokafka here shares: how to connect, how its records and errors become ours."""

import asyncio
import logging
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.errors import KafkaError, OffsetOutOfRangeError
from aiokafka.structs import ConsumerRecord

from rollstream.eventlog.log import Record, TopicPartition, truncated
from rollstream.schemas.errors import LogError
from rollstream.schemas.topics import BY_NAME, TOPICS

PATIENCE_S = 5.0
"""How long to try again where nothing listens."""
CONNECT_TIMEOUT_S = 15.0
"""How long a broker that took the connection may be slow."""
REQUEST_TIMEOUT_MS = 15_000
FETCH_BYTES = 1 << 20
"""Of one partition. A single record above it passes all the same: Kafka always returns the first batch whole."""

REFUSED = "Unable connect to"
"""How aiokafka's message of a failed connection begins."""

T = TypeVar("T")


def kafka_partition(where: TopicPartition) -> KafkaPartition:
    """The partition under its topic's name in Kafka."""
    return KafkaPartition(TOPICS[where.topic].name, where.partition)


def our_partition(where: KafkaPartition) -> TopicPartition:
    """The partition under its topic's short name."""
    return TopicPartition(BY_NAME[where.topic].short, where.partition)


def our_record(topic: str, found: "ConsumerRecord[bytes, bytes]") -> Record:
    """A record as the rest of rollstream sees it."""
    headers = tuple((name, content) for name, content in found.headers)
    return Record(topic, found.partition, found.offset, found.key, found.value, headers, found.timestamp)


def new_consumer(
    bootstrap_servers: str, client_id: str, *, max_wait_ms: int, fetch_bytes: int = FETCH_BYTES, **options: Any
) -> AIOKafkaConsumer:
    """A consumer that never skips: no automatic commit, no automatic reset of offsets."""
    return AIOKafkaConsumer(
        bootstrap_servers=bootstrap_servers,
        client_id=client_id,
        enable_auto_commit=False,
        auto_offset_reset="none",
        fetch_max_wait_ms=max_wait_ms,
        max_partition_fetch_bytes=fetch_bytes,
        request_timeout_ms=REQUEST_TIMEOUT_MS,
        **options,
    )


@contextmanager
def log_errors(doing: str) -> Iterator[None]:
    """Turn what aiokafka raises into LogError with what was being done."""
    try:
        yield
    except KafkaError as error:
        raise LogError(f"cannot {doing}: {error!r}") from error
    except TimeoutError as error:
        raise LogError(f"cannot {doing}: the broker does not answer") from error


async def connect(client: Any, bootstrap_servers: str) -> None:
    """Start an aiokafka client, trying again for PATIENCE_S. Raises LogError naming the address."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        with _quiet():
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                while not await _started(client):
                    if loop.time() > began + PATIENCE_S:
                        raise TimeoutError
                    await asyncio.sleep(0.2)
    except (TimeoutError, ValueError) as error:
        await stop(client)
        wrong = f": {error}" if isinstance(error, ValueError) else f" after {loop.time() - began:.0f} s"
        raise LogError(
            f"no Kafka broker answers at {bootstrap_servers}{wrong}; start one or correct bootstrap_servers"
        ) from None


async def stop(client: Any) -> None:
    """Stop an aiokafka client of any kind."""
    try:
        await (client.close() if hasattr(client, "close") else client.stop())
    except asyncio.CancelledError:  # with its broker away, aiokafka lets the end of a task of its own through
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        await client._client.close()


async def within(seconds: float, doing: str, work: Awaitable[T]) -> T:
    """Await `work` for at most `seconds`; raises LogError with what was being done."""
    with log_errors(doing):
        async with asyncio.timeout(seconds):
            return await work


async def out_of_range(consumer: AIOKafkaConsumer, error: OffsetOutOfRangeError) -> LogError:
    """TruncatedError for the partition and offset that Kafka refused."""
    asked: dict[KafkaPartition, int] = error.args[0]
    where, offset = next(iter(asked.items()))
    with log_errors("look up which offsets are kept"):
        begin = (await consumer.beginning_offsets([where]))[where]
        end = (await consumer.end_offsets([where]))[where]
    return truncated(our_partition(where), offset, begin, end)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep each failed attempt out of the log: one error says it when patience ends."""
    theirs = logging.getLogger("aiokafka")

    def keep(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(REFUSED)

    theirs.addFilter(keep)
    try:
        yield
    finally:
        theirs.removeFilter(keep)


async def _started(client: Any) -> bool:
    try:
        await client.start()
    except KafkaError:
        return False
    return True
