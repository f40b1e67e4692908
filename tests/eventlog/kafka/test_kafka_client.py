"""Clients of Kafka that are being connected when whoever wanted them gives up."""

import asyncio

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from rollstream.eventlog.kafka.client import connect
from rollstream.eventlog.kafka.security import client_options
from rollstream.schemas.kafka import KafkaSettings


@pytest.mark.parametrize("kind", [AIOKafkaConsumer, AIOKafkaProducer])
def test_a_client_whose_connecting_is_cancelled_is_closed(kind: type[AIOKafkaConsumer | AIOKafkaProducer]) -> None:
    async def scenario() -> None:
        asked, over = asyncio.Event(), asyncio.Event()

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.set()
            await over.wait()
            writer.close()
            await writer.wait_closed()

        async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
            kafka = KafkaSettings(bootstrap_servers=f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
            client = kind(**client_options(kafka))
            connecting = asyncio.create_task(connect(client, kafka))
            await asked.wait()
            connecting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await connecting
            over.set()
            assert client._closed

    asyncio.run(scenario())
