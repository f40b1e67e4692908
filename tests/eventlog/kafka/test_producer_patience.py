"""A partition without a leader: records wait for it, whatever the timeout of one request."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaTimeoutError, NotLeaderForPartitionError

from rollstream.eventlog.kafka.client import new_producer

WHERE = TopicPartition("rollstream.groups.v1", 0)
HOUR_S = 3600.0


def unconnected(make: Callable[..., Any] = new_producer, **options: Any) -> Any:
    producer = make(bootstrap_servers="127.0.0.1:1", request_timeout_ms=200, max_batch_size=1000, **options)
    producer._closed = True  # nothing has to be closed
    producer._txn_manager.set_pid_and_epoch(7, 0)
    return producer


async def after_an_hour_without_a_leader(producer: Any, monkeypatch: pytest.MonkeyPatch) -> "asyncio.Future[Any]":
    accumulator = producer._message_accumulator
    sent: asyncio.Future[Any] = await accumulator.add_message(WHERE, b"k", b"v", 1.0)
    later = time.monotonic() + HOUR_S
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: later)
        batches, is_without_leader = accumulator.drain_by_nodes(ignore_nodes=())
    assert not batches
    assert is_without_leader
    return sent


def test_a_record_waits_for_a_leader_and_keeps_its_sequence_number(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        ours = unconnected(patience_s=120.0)
        assert not (await after_an_hour_without_a_leader(ours, monkeypatch)).done()
        assert ours._txn_manager.sequence_number(WHERE) == 0

        plain = unconnected(AIOKafkaProducer, acks="all", enable_idempotence=True)
        failed = await after_an_hour_without_a_leader(plain, monkeypatch)
        assert isinstance(failed.exception(), NotLeaderForPartitionError), "aiokafka changed its rule: see new_producer"
        assert plain._txn_manager.sequence_number(WHERE) == 1

    asyncio.run(scenario())


def test_a_record_waits_for_room_as_long_as_its_sender_does(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        producer = unconnected(patience_s=0.6)
        monkeypatch.setattr(producer.client, "_wait_on_metadata", lambda topic: asyncio.sleep(0))
        monkeypatch.setattr(producer, "_partition", lambda topic, partition, *content: partition)
        sending = (WHERE.topic, b"v" * 900, None, WHERE.partition)
        await producer.send(*sending)
        began = time.monotonic()
        with pytest.raises(KafkaTimeoutError):
            await producer.send(*sending)
        assert time.monotonic() - began > 0.5

    asyncio.run(scenario())
