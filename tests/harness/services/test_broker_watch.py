"""Supervision of the broker: deaths are counted, forgiven after a while, and a full disk is waited for."""

import asyncio
import errno
import io
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollstream.eventlog.broker.broker import EmbeddedBroker
from rollstream.eventlog.broker.ports import answers
from rollstream.eventlog.broker.restarts import MAX_RESTARTS
from rollstream.eventlog.broker.watch import MIN_FREE_BYTES, keep_running
from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.harness.services.serving import keep_broker
from rollstream.schemas.errors import BrokerError, BrokerLostError
from rollstream.schemas.events import RunEnded


class Doomed:
    """A broker that has died; `outcomes` say of each restart whether it starts, and when it dies again."""

    def __init__(self, workspace: Path, outcomes: str) -> None:
        self.workspace = workspace
        self.outcomes = list(outcomes)
        """`x`: does not start; `l`: its data are gone; `d`: starts, and is dead when it is looked at; `r`: runs on."""
        self.is_running = False

    def restart(self) -> None:
        outcome = self.outcomes.pop(0)
        if outcome == "x":
            raise BrokerError(f"it ended at once, attempt {len(self.outcomes)} from the last")
        if outcome == "l":
            raise BrokerLostError("its data were removed")
        self.is_running = outcome == "r"

    def call_off_restart(self) -> None:
        """Restarts of this one take no time."""


def play(broker: Doomed, lines: list[str], **options: Any) -> None:
    """Watch until nothing is left to happen."""

    async def scenario() -> None:
        watching = asyncio.create_task(keep_running(broker, lines.append, first_backoff_s=0, check_s=0, **options))
        while broker.outcomes or not broker.is_running:
            await asyncio.sleep(0)
            if watching.done():
                watching.result()
        watching.cancel()

    asyncio.run(scenario())


def test_a_second_death_during_a_restart_is_tried_again(tmp_path: Path) -> None:
    lines: list[str] = []
    play(Doomed(tmp_path, "xdxr"), lines)
    assert lines == [
        "the broker died; restarting it",
        "the broker did not restart (it ended at once, attempt 3 from the last); restarting it",
        "the broker died; restarting it",
        "the broker did not restart (it ended at once, attempt 1 from the last); restarting it",
    ]


@pytest.mark.parametrize("outcomes", ["x" * MAX_RESTARTS, "d" * MAX_RESTARTS, "xdxdx"])
def test_deaths_in_a_row_end_the_watch_with_the_last_reason(outcomes: str, tmp_path: Path) -> None:
    reason = "the broker died" if outcomes.endswith("d") else r"the broker did not restart \(it ended at once.*\)"
    with pytest.raises(
        BrokerError, match=rf"exited {MAX_RESTARTS + 1} times in a row, last: {reason}; see .*broker.log"
    ):
        play(Doomed(tmp_path, outcomes), [])


def test_a_broker_whose_data_are_gone_ends_the_watch_at_once(tmp_path: Path) -> None:
    lines: list[str] = []
    with pytest.raises(BrokerLostError, match="its data were removed"):
        play(Doomed(tmp_path, "xlr"), lines)
    assert len(lines) == 2


class Slow(Doomed):
    """A broker whose restart lasts until it is called off."""

    def __init__(self, workspace: Path) -> None:
        super().__init__(workspace, "x")
        self.has_begun, self.is_called_off, self.has_ended = threading.Event(), threading.Event(), False

    def restart(self) -> None:
        self.has_begun.set()
        assert self.is_called_off.wait(20)
        time.sleep(0.1)
        self.has_ended = True
        raise BrokerError("called off")

    def call_off_restart(self) -> None:
        self.is_called_off.set()


def test_a_restart_has_ended_when_its_watch_is_cancelled(tmp_path: Path) -> None:
    async def scenario() -> None:
        broker = Slow(tmp_path)
        watching = asyncio.create_task(keep_running(broker, lambda _: None, first_backoff_s=0, check_s=0))
        assert await asyncio.to_thread(broker.has_begun.wait, 20)
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching
        assert broker.has_ended

    asyncio.run(scenario())


def test_a_broker_that_ran_for_a_while_is_forgiven_its_deaths(tmp_path: Path) -> None:
    play(Doomed(tmp_path, "xd" * MAX_RESTARTS + "r"), [], steady_s=0)


@pytest.mark.slow
@pytest.mark.parametrize("is_broker_alone", [False, True], ids=["the workspace's disk", "the disk of broker/ alone"])
def test_a_death_of_a_full_disk_waits_for_room_and_does_not_count(
    tmp_path: Path, small_disk: Callable[[int], Any], is_broker_alone: bool
) -> None:
    disk = small_disk(2)
    workspace = tmp_path / "w" if is_broker_alone else disk.folder
    if is_broker_alone:
        workspace.mkdir()
        (workspace / "broker").symlink_to(disk.folder)
    lines: list[str] = []

    class Filled(Doomed):
        def restart(self) -> None:
            disk.fill()
            super().restart()

    def notify(text: str) -> None:
        lines.append(text)
        if "paused" in text:
            disk.free()

    async def scenario() -> None:
        filled = Filled(workspace, "x" * (MAX_RESTARTS + 3) + "r")
        watching = asyncio.create_task(
            keep_running(filled, notify, first_backoff_s=0, check_s=0, min_free_bytes=1 << 20)
        )
        while filled.outcomes:
            await asyncio.sleep(0)
            assert not watching.done(), watching
        watching.cancel()

    asyncio.run(scenario())
    assert sum(f"paused: the disk of {workspace / 'broker'}" in line for line in lines) == MAX_RESTARTS + 3


@pytest.mark.kafka
@pytest.mark.slow
def test_a_broker_whose_disk_was_full_goes_on_with_all_that_was_acknowledged(small_disk: Callable[[int], Any]) -> None:
    async def scenario() -> None:
        disk = small_disk(128)
        with EmbeddedBroker(disk.folder / "w") as broker:
            log = KafkaLog(broker.kafka)
            await log.start()
            await log.ensure_topics(num_partitions=1)
            lines: list[str] = []
            watching = asyncio.create_task(keep_running(broker, lines.append, first_backoff_s=0.01))
            await log.send(RunEnded(run_id="r", time_ms=1, cause="failed"))  # a connected producer waits for the broker
            disk.fill()
            sent, last = await send_until_it_stops(log, broker)
            await wait_until(lambda: any("the disk of" in line for line in lines), watching)
            assert f"needs {MIN_FREE_BYTES:,} bytes" in lines[-1]
            disk.free()
            await wait_until(lambda: answers(int(broker.bootstrap_servers.rpartition(":")[2])), watching)
            await last
            assert (await log.end_offsets("groups"))[0] > sent + 1
            watching.cancel()
            await asyncio.wait({watching})
            await log.close()

    asyncio.run(scenario())


async def wait_until(condition: Callable[[], bool], watching: "asyncio.Task[None]") -> None:
    async with asyncio.timeout(120):
        while not condition():
            assert not watching.done(), watching
            await asyncio.sleep(0.02)


async def send_until_it_stops(log: KafkaLog, broker: EmbeddedBroker) -> tuple[int, "asyncio.Task[Any]"]:
    """Send to a broker whose disk is full until it dies; how many were acknowledged, and the last one, which waits."""
    sent = 0
    while True:
        event = RunEnded(run_id=f"r{sent}", time_ms=1, cause="failed", message=os.urandom(200_000).hex())
        sending = asyncio.create_task(log.send(event))
        while not sending.done() and broker.is_running:
            await asyncio.sleep(0.02)
        if not sending.done():
            return sent, sending
        sent += 1


class FullStream(io.StringIO):
    """A file on a full disk."""

    def write(self, s: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_the_service_of_a_broker_goes_on_though_its_output_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = Doomed(tmp_path, "r")

    async def scenario() -> None:
        serving = asyncio.create_task(keep_broker(broker))
        while not broker.is_running:
            await asyncio.sleep(0.01)
            if serving.done():
                serving.result()
        serving.cancel()

    monkeypatch.setattr("sys.stdout", FullStream())
    asyncio.run(asyncio.wait_for(scenario(), 30))
