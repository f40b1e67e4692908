"""Batches of records that the log makes: one future for a whole batch, where aiokafka has one for each record."""

import asyncio
from collections import deque
from functools import partial
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka.producer.message_accumulator import BatchBuilder

from rollstream.eventlog.log import Encoded, Position


def filled(producer: AIOKafkaProducer, left: deque[Encoded]) -> BatchBuilder:
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


def positions(first: Position, count: int) -> list[Position]:
    """Positions of a batch's records. Its offset is -1 if Kafka had the batch already and forgot where."""
    topic, partition, offset = first
    return [Position(topic, partition, offset if offset < 0 else offset + index) for index in range(count)]
