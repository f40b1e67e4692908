"""A reverse proxy that only passes requests on, or also waits for a record in Kafka: what any gateway costs.

    python -m benchmarks.bare_proxy URL [KAFKA.json]

Prints its address once it listens. `KAFKA.json` has a KafkaSettings; the record is the answer, acknowledged by all
replicas before it is passed on, in a topic of its own.
"""

import argparse
import asyncio
import contextlib
from pathlib import Path

import aiohttp
from aiohttp import web
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from rollstream.eventlog.kafka.security import client_options
from rollstream.schemas.kafka import KafkaSettings

TOPIC = "bare-proxy"


async def connected(kafka: KafkaSettings) -> AIOKafkaProducer:
    """A producer, and its topic."""
    options = client_options(kafka)
    admin = AIOKafkaAdminClient(**options)
    await admin.start()
    await admin.create_topics([NewTopic(TOPIC, 6, 1)])
    await admin.close()
    producer = AIOKafkaProducer(**options, acks="all", enable_idempotence=True, compression_type="lz4")
    await producer.start()
    return producer


async def serve(upstream: str, producer: AIOKafkaProducer | None) -> None:
    """Until cancelled."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def pass_on(request: web.Request) -> web.Response:
            headers = {"Content-Type": "application/json"}
            async with http.post(f"{upstream}{request.path}", data=await request.read(), headers=headers) as answered:
                body = await answered.read()
                status = answered.status
            if producer is not None:
                await producer.send_and_wait(TOPIC, body)
            return web.Response(body=body, status=status, content_type="application/json")

        app = web.Application()
        app.router.add_post("/{path:.*}", pass_on)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
        await asyncio.Event().wait()


async def main() -> None:
    """Serve with a producer, if Kafka is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("upstream")
    parser.add_argument("kafka", nargs="?", type=Path)
    given = parser.parse_args()
    async with contextlib.AsyncExitStack() as stack:
        producer = None
        if given.kafka is not None:
            producer = await connected(KafkaSettings.model_validate_json(given.kafka.read_text()))
            stack.push_async_callback(producer.stop)
        await serve(given.upstream, producer)


if __name__ == "__main__":
    asyncio.run(main())
