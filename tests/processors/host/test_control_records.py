"""The Faust host on a partition into which another program writes transactions: it passes over their ends."""

import asyncio
import uuid

import pytest

from rollstream.eventlog.log import TopicPartition
from rollstream.processors.assemble.shell import AssembleShell
from rollstream.processors.host.host import create_host
from rollstream.processors.host.watchdog import watch
from rollstream.schemas.kafka import KafkaSettings
from tests.rigs.services.transactions import own_topics, write_transactions
from tests.rigs.steps_rig import started

pytestmark = pytest.mark.kafka
STEPS = TopicPartition("steps", 0)
STALL_S = 1.2


def test_a_host_reads_on_behind_control_records_and_counts_as_up_to_date_at_them(kafka: KafkaSettings) -> None:
    async def scenario() -> None:
        async with own_topics(kafka) as log:
            shell = AssembleShell(log, None, service="p")
            host = create_host(log.kafka, [shell], client_id="p", app_id=f"control-{uuid.uuid4().hex[:8]}")
            await host.start()
            try:
                end = 0
                for number in range(3):
                    await log.send(started(number, size=1), partition=0)
                    await write_transactions(log, 1)
                    end = (await log.end_offsets("steps"))[0]
                    async with asyncio.timeout(30):
                        while host.positions().get(STEPS) != end:
                            await asyncio.sleep(0.02)
                assert (end, shell.position(0)) == (9, 8)
                watching = asyncio.create_task(watch(host, log, timeout_s=STALL_S))
                await asyncio.wait({watching}, timeout=2 * STALL_S)
                assert not watching.done(), watching
                watching.cancel()
            finally:
                await host.stop()

    asyncio.run(scenario())
