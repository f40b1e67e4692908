"""Faust as a thin at-least-once host: it joins the group, fetches and commits; what is committed is the folds' word.

Faust 0.15.3 may commit past a record that is not acknowledged, and takes about 0.1 ms a record through its streams. So
one Faust event is one fetched batch of raw records of one partition, and the offset that is committed is the
low-water mark of the fold that took it. No tables, no web server, no topics made, no decoding.
"""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

import faust
from yarl import URL

from rollstream.processors.faust_app import Batch, Host, Shell
from rollstream.processors.faust_consumer import Transport
from rollstream.schemas.topics import TOPICS

APP_ID = "rollstream-processors"
"""Consumer group of all processors."""
QUEUED_BATCHES = 4
"""Batches that wait for a fold; more would only be later."""
COMMIT_INTERVAL_S = 1.0
REBALANCE_TIMEOUT_S = 30.0


class BatchSchema(faust.Schema):
    """Hands a batch through as it is."""

    def loads_key(self, app: Any, message: Any, **options: Any) -> Any:
        return None

    def loads_value(self, app: Any, message: Any, **options: Any) -> Any:
        return message.value


def create_host(
    bootstrap_servers: str,
    shells: Iterable[Shell],
    *,
    client_id: str,
    session_timeout_s: float = 10.0,
    app_id: str = APP_ID,
) -> Host:
    """An app with one agent a shell. Start and stop it as a service in the running loop."""
    host = Host(
        app_id,
        broker=[URL(f"kafka://{address.strip()}") for address in bootstrap_servers.split(",")],
        broker_client_id=client_id,
        broker_session_timeout=session_timeout_s,
        broker_heartbeat_interval=session_timeout_s / 3,
        broker_rebalance_timeout=REBALANCE_TIMEOUT_S,
        broker_commit_interval=COMMIT_INTERVAL_S,
        producer_request_timeout=30.0,
        stream_buffer_maxsize=QUEUED_BATCHES,
        stream_wait_empty=False,
        store="memory://",
        table_standby_replicas=0,
        topic_allow_declare=False,
        topic_disable_leader=True,
        web_enabled=False,
        autodiscover=False,
    )
    host.transport = Transport([URL(f"kafka://{one.strip()}") for one in bootstrap_servers.split(",")], host)
    host.failed = asyncio.get_running_loop().create_future()
    host.shells = {TOPICS[shell.topic].name: shell for shell in shells}
    for name, shell in host.shells.items():
        topic = host.topic(name, schema=BatchSchema(allow_empty=True))
        host.agent(topic, name=shell.topic)(_agent_of(host, shell))
    return host


def _agent_of(host: Host, shell: Shell) -> Any:
    async def agent(batches: Any) -> None:
        async for batch in batches:
            if not host.failed.done():
                await _watched(host, _take(host, shell, batch))

    return agent


async def _take(host: Host, shell: Shell, batch: Batch) -> None:
    """Give its shell a batch of the present assignment; nothing comes between the look and its first step."""
    if batch.generation == host.generation:
        await shell.take(batch)


async def _watched(host: Host, work: Coroutine[Any, Any, None]) -> None:
    """Await `work` and keep its error for the service; Faust would log it and go on with the next batch."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task])
    finally:
        task.cancel()
    error = task.exception()
    if error is not None:
        host.fail(error)
