"""What is under way when a broker goes and does not come back ends with one clear error."""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from rollstream.eventlog.broker import EmbeddedBroker
from rollstream.eventlog.kafka_log import KafkaLog
from rollstream.eventlog.log import TopicPartition
from rollstream.eventlog.reading import read_to_end
from rollstream.schemas.errors import LogError
from rollstream.schemas.events import RunEnded

pytestmark = [pytest.mark.kafka, pytest.mark.slow]


async def read_from_a_broker_that_goes(workspace: Path) -> None:
    with EmbeddedBroker(workspace) as broker:
        log = KafkaLog(broker.bootstrap_servers)
        await log.start()
        await log.ensure_topics(num_partitions=1)
        await log.send(RunEnded(run_id="r", time_ms=1, cause="stopped"))
        readers = [await log.reader({TopicPartition("jobs", 0): 0}) for _ in range(8)]
        for reader in readers:
            await reader.poll(timeout_s=0.1)
        told = json.loads((workspace / "broker" / "broker.json").read_text())
        os.kill(told["broker_pid"], signal.SIGKILL)
        with pytest.raises(LogError, match="cannot look up the offsets of topic groups"):
            async for _ in read_to_end(log, "groups", ends={0: 2}, silence_s=1.0):
                pass  # as if another record had not been read yet
        for reader in readers:
            await reader.close()
        await log.close()


def test_reading_to_the_end_and_closing_readers_end_when_the_broker_is_gone(tmp_path: Path) -> None:
    asyncio.run(asyncio.wait_for(read_from_a_broker_that_goes(tmp_path), 120))
