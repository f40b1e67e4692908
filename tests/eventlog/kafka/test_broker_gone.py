"""Work in progress ends with one clear error when a broker goes and does not come back."""

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import pytest

from rollstream.eventlog.broker.broker import EmbeddedBroker
from rollstream.eventlog.kafka import client
from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.eventlog.log import TopicPartition
from rollstream.eventlog.reading import read_to_end
from rollstream.schemas.errors import LogError
from rollstream.schemas.events import RunEnded, TaskCancelled

pytestmark = [pytest.mark.kafka, pytest.mark.slow]


async def read_from_a_broker_that_goes(workspace: Path) -> None:
    with EmbeddedBroker(workspace) as broker:
        log = KafkaLog(broker.kafka)
        await log.start()
        await log.ensure_topics(num_partitions=1)
        await log.send(RunEnded(run_id="r", time_ms=1, cause="stopped"))
        readers = [await log.reader({TopicPartition("jobs", 0): 0}) for _ in range(8)]
        for reader in readers:
            await reader.poll(timeout_s=0.1)
        reported = json.loads((workspace / "broker" / "broker.json").read_text())
        os.kill(reported["broker_pid"], signal.SIGKILL)
        with pytest.raises(LogError, match="cannot look up the offsets of topic groups"):
            async for _ in read_to_end(log, "groups", ends={0: 2}, silence_s=1.0):
                pass  # as if another record had not been read yet
        for reader in readers:
            await reader.close()
        await log.close()


async def until_all_threads_stand(pid: int) -> None:
    """A thread of a stopped process may go on for a moment, and answer."""
    while any(
        path.read_text().rpartition(")")[2].split()[0] != "T" for path in Path(f"/proc/{pid}/task").glob("*/stat")
    ):
        await asyncio.sleep(0.01)


async def send_to_a_broker_that_pauses(workspace: Path) -> None:
    ended = RunEnded(run_id="r", time_ms=1, cause="stopped")
    cancelled = TaskCancelled(run_id="r", time_ms=1, group_id="r/g", cause="stopped")
    with EmbeddedBroker(workspace) as broker:
        async with KafkaLog(broker.kafka, send_timeout_s=3) as log, KafkaLog(broker.kafka) as patient:
            await log.ensure_topics(num_partitions=1)
            await patient.send(ended)  # a cold broker may take longer
            await log.send(ended)
            await log.send_all([cancelled], partition=0)
            pid = json.loads((workspace / "broker" / "broker.json").read_text())["broker_pid"]
            os.kill(pid, signal.SIGSTOP)
            await until_all_threads_stand(pid)
            try:
                first = asyncio.create_task(log.send(ended))
                await asyncio.sleep(1)
                several = asyncio.create_task(log.send_all([ended, ended]))
                batch = asyncio.create_task(log.send_all([cancelled, cancelled], partition=0))
                for sending, topic in ((first, "groups"), (several, "groups"), (batch, "tasks")):
                    with pytest.raises(LogError, match=f"cannot send to topic {topic}: no acknowledgement within 3 s"):
                        await sending
            finally:
                os.kill(pid, signal.SIGCONT)
            await patient.send(ended)  # as may one that was paused
            where = await log.send(ended)
            assert where.offset >= 3


def test_each_send_without_an_acknowledgement_fails_at_its_own_time(tmp_path: Path) -> None:
    asyncio.run(asyncio.wait_for(send_to_a_broker_that_pauses(tmp_path), 240))


def test_reading_to_the_end_and_closing_readers_end_when_the_broker_is_gone(tmp_path: Path) -> None:
    asyncio.run(asyncio.wait_for(read_from_a_broker_that_goes(tmp_path), 120))


async def close_with_an_unacknowledged_record(workspace: Path, how: signal.Signals) -> tuple[float, list[str]]:
    """Seconds until a log is closed without its broker, and the tasks that it leaves behind."""
    ended = RunEnded(run_id="r", time_ms=1, cause="stopped")
    with EmbeddedBroker(workspace) as broker:
        log = KafkaLog(broker.kafka, send_timeout_s=0.5)
        await log.start()
        await log.ensure_topics(num_partitions=1)
        await log.send(ended)
        pid = json.loads((workspace / "broker" / "broker.json").read_text())["broker_pid"]
        os.kill(pid, how)
        try:
            with pytest.raises(LogError, match="no acknowledgement within 0 s"):
                await log.send(ended)
            began = time.monotonic()
            async with asyncio.timeout(60):
                await log.close()
            took_s = time.monotonic() - began
            await asyncio.sleep(0.3)  # the sender's pause before its next attempt
            left = [repr(task) for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        finally:
            if how == signal.SIGSTOP:
                os.kill(pid, signal.SIGCONT)
    return took_s, left


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_log_closes_soon_although_its_broker_never_acknowledges_a_record(
    how: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "CLOSE_TIMEOUT_S", 1.0)
    took_s, left = asyncio.run(close_with_an_unacknowledged_record(tmp_path, how))
    assert took_s < 1.0 + client.DISCONNECT_TIMEOUT_S + 2.0
    assert left == []
