"""The consumer of the host as it stops: nothing that it opened stays open."""

import asyncio
from typing import Any

import pytest

from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.eventlog.kafka.security import client_options
from rollstream.processors.assemble.shell import AssembleShell
from rollstream.processors.host.client import MetadataConsumer
from rollstream.processors.host.host import create_host
from rollstream.schemas.topics import TOPICS

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(180)]


def test_a_consumer_whose_stop_is_cancelled_or_fails_leaves_no_connection_open(kafka):
    async def open_connections(*, fails: bool) -> list[bool]:
        consumer = MetadataConsumer(lambda where, offset: "", **client_options(kafka), group_id=f"stop-{fails}")
        await consumer.start()
        consumer.subscribe([TOPICS["groups"].name])
        async with asyncio.timeout(120):
            while not consumer.assignment():
                await asyncio.sleep(0.1)
        stopping = asyncio.create_task(consumer.stop())
        await asyncio.sleep(0)
        if fails:
            coordinator: Any = consumer._coordinator
            coordinator._coordination_task.cancel()
        else:
            stopping.cancel()
        await asyncio.wait({stopping})
        return [connection.connected() for connection in consumer._client._conns.values()]

    async def go() -> None:
        async with KafkaLog(kafka) as log:
            await log.ensure_topics(num_partitions=6)
        assert not any(await open_connections(fails=False) + await open_connections(fails=True))

    asyncio.run(go())


def test_a_rebalance_while_the_host_stops_leaves_no_connection_open(kafka):
    async def go() -> None:
        async with KafkaLog(kafka) as log:
            await log.ensure_topics(num_partitions=6)
            shell = AssembleShell(log, None, service="p")
            host: Any = create_host(kafka, [shell], client_id="p", app_id="stop-rebalance")
            await host.start()
            async with asyncio.timeout(120):
                while not host.consumer.assignment():
                    await asyncio.sleep(0.1)
            client = host.consumer._thread.client._client
            host._on_rebalance_when_stopped()
            await host.stop()
            assert not any(connection.connected() for connection in client._conns.values())

    asyncio.run(go())
