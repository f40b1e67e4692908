"""Faust as a thin at-least-once host: it joins the group, fetches and commits; the folds decide what is committed.

Faust 0.15.3 may commit past an unacknowledged record, and its streams take about 0.1 ms per record. So one Faust event
is one fetched batch of raw records of one partition, and the committed offset is the one that the shell reports. No
tables, web server, topic creation or decoding.
"""

import asyncio
from collections.abc import Iterable
from typing import Any

import faust
from yarl import URL

from rollstream.processors.host.app import Batch, Host, Shell
from rollstream.processors.host.consumer import Transport
from rollstream.schemas.kafka import KafkaSettings

SERVICE = "processors"
"""All of them share one consumer group."""
MAX_BUFFERED = 100_000
"""Never reached: a full buffer of one topic would hold Faust's only reading loop, and with it all the others."""
COMMIT_INTERVAL_S = 1.0
REBALANCE_TIMEOUT_S = 30.0


class BatchSchema(faust.Schema):
    """Passes a batch through unchanged."""

    def loads_key(self, app: Any, message: Any, **options: Any) -> Any:
        return None

    def loads_value(self, app: Any, message: Any, **options: Any) -> Any:
        return message.value


def create_host(
    kafka: KafkaSettings | str,
    shells: Iterable[Shell],
    *,
    client_id: str,
    session_timeout_s: float = 10.0,
    app_id: str | None = None,
) -> Host:
    """An app with one agent per shell. Start and stop it as a service in the running loop.

    `kafka`: how to connect; a bare host:port means neither TLS nor SASL.
    """
    kafka = KafkaSettings.of(kafka)
    addresses = [URL(f"kafka://{address.strip()}") for address in kafka.bootstrap_servers.split(",")]
    host = Host(
        app_id or kafka.group(SERVICE),
        broker=addresses,
        broker_client_id=client_id,
        broker_session_timeout=session_timeout_s,
        broker_heartbeat_interval=session_timeout_s / 3,
        broker_rebalance_timeout=REBALANCE_TIMEOUT_S,
        broker_commit_interval=COMMIT_INTERVAL_S,
        producer_request_timeout=30.0,
        stream_buffer_maxsize=MAX_BUFFERED,
        stream_wait_empty=False,
        store="memory://",
        table_standby_replicas=0,
        topic_allow_declare=False,
        topic_disable_leader=True,
        web_enabled=False,
        autodiscover=False,
    )
    host.kafka = kafka
    host.transport = Transport(addresses, host)
    host.failed = asyncio.get_running_loop().create_future()
    host.shells = {kafka.topic_name(shell.topic): shell for shell in shells}
    for name, shell in host.shells.items():
        topic = host.topic(name, schema=BatchSchema(allow_empty=True))
        host.agent(topic, name=shell.topic)(_agent_of(host, shell))
    return host


def _agent_of(host: Host, shell: Shell) -> Any:
    name = host.kafka.topic_name(shell.topic)

    async def agent(batches: Any) -> None:
        async for batch in batches:
            if not host.failed.done():
                task = host.taking[name] = host.watched(_take(host, shell, batch))
                try:
                    await asyncio.wait([task])
                finally:
                    task.cancel()
            if batch.generation == host.generation:
                host.queued[name] -= 1
            host.changed.set()

    return agent


async def _take(host: Host, shell: Shell, batch: Batch) -> None:
    """Give a batch of the current assignment to its shell; there is no await between the check and the shell's first
    step."""
    if batch.generation == host.generation:
        await shell.take(batch)
