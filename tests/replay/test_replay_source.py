"""Cost of reading one run in a log that holds many."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from rollstream.eventlog import reading
from rollstream.eventlog.codec import content_digest
from rollstream.eventlog.dead_letters import send_dead_letter
from rollstream.eventlog.log import Received, Record
from rollstream.eventlog.run_offsets import ends_now
from rollstream.replay.completeness import check_whole, compare_named
from rollstream.replay.report import Report
from rollstream.replay.source import read_run
from rollstream.replay.whole import check_runs
from rollstream.schemas import ids
from rollstream.schemas.base import Event
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.events import (
    EpochSealed,
    GroupClosed,
    JobSubmitted,
    JobSucceeded,
    RunEnded,
    RunStarted,
    TaskRequested,
)
from rollstream.schemas.settings import ArtifactRef, JobSettings, ModelSettings, RolloutSettings
from tests.rigs.counting_log import CountingLog

DATASET = ArtifactRef(uri="aa/aa", sha256="a" * 64, size_bytes=1)


async def run(log: CountingLog, run_id: str, *, starts: dict[str, int] | None = None, has_ended: bool = True) -> None:
    offsets = await ends_now(log) if starts is None else starts
    common = {"run_id": run_id, "time_ms": 1}
    await log.send(RunStarted(**common, name="n", config={}, seed=0, dataset=DATASET, num_examples=1, num_partitions=6))
    settings = JobSettings(kind="rl", model=ModelSettings(path="m"), num_versions=1)
    await log.send(
        JobSubmitted(
            **common,
            job_id=f"{run_id}/rl",
            model_group=f"{run_id}/policy",
            base_version=0,
            settings=settings,
            start_offsets=offsets,
        )
    )
    if has_ended:
        await log.send(RunEnded(**common, cause="completed"))


async def dead_task(log: CountingLog, run_id: str, index: int) -> None:
    """A record of `tasks` that is not an event, and its dead letter."""
    at = await log.send_raw("tasks", key=f"{run_id}/rl/e00000/t{index:05d}".encode(), value=b"{broken")
    record = Record(*at, b"k", b"{broken", (), 0)
    await send_dead_letter(log, record, service="p", stage="decode", error=ValueError("bad"))


@pytest.mark.parametrize("kinds", [("groups", "batches", "jobs", "weights"), None], ids=["an earlier version", "now"])
def test_topics_are_read_from_where_the_run_begins(kinds: tuple[str, ...] | None) -> None:
    async def scenario() -> None:
        log = CountingLog()
        for number in range(50):
            await run(log, f"run-{number}")
            for index in range(12):
                await dead_task(log, f"run-{number}", index)
                await log.send_raw("tasks", key=b"other", value=b"{}")
        known = await ends_now(log)
        await run(log, "run-50", starts={name: known[name] for name in kinds or known})
        for index in range(12):
            await dead_task(log, "run-50", index)
        log.num_read.clear()
        events = await read_run(log, "run-50")
        assert set(events.by_id) == {"run_started:run-50", "job_submitted:run-50/rl", "run_ended:run-50"}
        assert events.damaged == []
        assert log.num_read["groups"] == 2
        assert log.num_read["tasks"] == (12 if kinds is None else 51 * 24 - 12)
        assert log.num_read["dlq"] == (12 if kinds is None else 51 * 12)

    asyncio.run(scenario())


def test_a_run_that_begins_before_the_offsets_of_its_job_is_read_whole() -> None:
    async def scenario() -> None:
        log = CountingLog()
        await run(log, "run-0", starts={"groups": 2, "batches": 0, "jobs": 1, "weights": 0})
        events = await read_run(log, "run-0")
        assert len(events.by_id) == 3
        with pytest.raises(ConfigError, match="run run-9 does not exist"):
            await read_run(log, "run-9")

    asyncio.run(scenario())


def test_an_undecodable_record_of_a_run_with_a_longer_name_does_not_damage_this_one() -> None:
    async def scenario() -> None:
        log = CountingLog()
        await run(log, "demo")
        for key in (b"demo-2", b"demo-2/rl", b"demonstration"):
            await log.send_raw("groups", key=key, value=b"{broken")
        assert (await read_run(log, "demo")).damaged == []
        await log.send_raw("groups", key=b"demo", value=b"{broken")
        await log.send_raw("tasks", key=b"demo/rl/e00000/t00000", value=b"{broken")
        assert len((await read_run(log, "demo")).damaged) == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("num_runs", [10, 40])
def test_to_check_every_run_of_a_log_each_record_is_read_twice(num_runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once to find where each run's records lie. A poll may read some more than are asked for."""
    monkeypatch.setattr(reading, "MAX_RECORDS", 1)

    async def scenario() -> None:
        log = CountingLog()
        for number in range(num_runs):
            await run(log, f"run-{number}", has_ended=False)
            await log.send(RunEnded(run_id=f"run-{number}", time_ms=1, cause="stopped"))
            await dead_task(log, f"run-{number}", 0)
        log.num_read.clear()
        assert await check_runs(log) == []
        assert log.num_read == {"groups": 4 * num_runs, "jobs": 2 * num_runs, "tasks": 2 * num_runs, "dlq": num_runs}

    asyncio.run(scenario())


class BusyLog(CountingLog):
    """A run goes on while it is read: before each answer to where a topic ends, what comes next is written."""

    def __init__(self) -> None:
        super().__init__()
        self.to_come: dict[str, list[Event]] = {}
        """Events by the topic whose end is requested once the run's records are being read; each sent once."""
        self.is_read = False

    async def end_offsets(self, topic: str) -> dict[int, int]:
        """End offsets as in MemoryLog, after the events to come are sent."""
        self.is_read = self.is_read or topic == "dlq"
        await self.send_all(self.to_come.pop(topic, []) if self.is_read else [])
        return await super().end_offsets(topic)


COMMON: dict[str, Any] = {"run_id": "busy", "time_ms": 1}
GROUP = {"group_id": "busy/rl/e00000/t00000", "example_id": "x", "job_id": "busy/rl", "epoch": 0, "index": 0}


def sealed(run_id: str, epoch: int) -> EpochSealed:
    """One of a job that plans one manifest an epoch."""
    return EpochSealed(
        run_id=run_id,
        time_ms=1,
        job_id=f"{run_id}/rl",
        epoch=epoch,
        is_last=False,
        num_groups=1,
        num_trained_groups=1,
        num_batches=1,
        next_batch_index=epoch + 1,
        avg_reward=None,
        filtered_avg_reward=None,
        zero_variance_groups=0,
        curriculum_percentile=1.0,
        curriculum_sha256="",
    )


@pytest.mark.parametrize("checks_all", [False, True])
@pytest.mark.parametrize("between", ["weights", "jobs", "tasks", "batches", "groups"])
def test_a_request_and_its_answer_written_during_the_reading_are_not_missing(between: str, checks_all: bool) -> None:
    """The two records are written before the end of `between` is taken."""

    async def scenario() -> None:
        log = BusyLog()
        await run(log, "busy", has_ended=False)
        log.is_read = False
        task = TaskRequested(
            **COMMON,
            **GROUP,
            inputs={},
            num_rollouts=1,
            minimum=1,
            seed=1,
            min_version=0,
            settings=RolloutSettings(environment="e"),
        )
        closed = GroupClosed(**COMMON, **GROUP, reason="failed", is_viable=False, size=1, members=())
        job: dict[str, Any] = {"job_id": "busy/rl", "model_group": "busy/policy"}
        succeeded = JobSucceeded(**COMMON, **job, final_version=0)
        log.to_come[between] = [task, closed, succeeded, RunEnded(**COMMON, cause="completed")]
        if checks_all:
            assert await check_runs(log) == []
            return
        events = await read_run(log, "busy")
        check_whole(events)
        report = Report()
        compare_named(events, report)
        assert report.differences == []

    asyncio.run(scenario())


@pytest.mark.parametrize("num_epochs", [100, 200])
def test_naming_the_manifests_of_a_run_takes_steps_in_proportion_to_its_epochs(num_epochs: int) -> None:
    looked_up: Counter[str] = Counter()

    class Counting(dict[str, Received]):
        def __contains__(self, key: object) -> bool:
            looked_up[str(key)] += 1
            return super().__contains__(key)

    async def scenario() -> None:
        log = CountingLog()
        await run(log, "long")
        for epoch in range(num_epochs):
            await log.send(sealed("long", epoch))
        events = await read_run(log, "long")
        events.by_id = Counting(events.by_id)
        report = Report()
        compare_named(events, report)
        missing = [one for one in report.differences if "batch_planned:" in one.what]
        assert len(missing) == num_epochs
        assert max(looked_up.values()) <= 5

    asyncio.run(scenario())


@pytest.mark.parametrize("for_checks", [False, True])
def test_tasks_share_their_settings_and_hold_no_content_that_nothing_reads(for_checks: bool) -> None:
    async def scenario() -> None:
        log = CountingLog()
        await run(log, "long")
        task = TaskRequested(
            run_id="long",
            time_ms=1,
            group_id=ids.group_id("long", "rl", 0, 0),
            job_id="long/rl",
            epoch=0,
            index=0,
            example_id="x",
            inputs={"question": "?"},
            settings=RolloutSettings(environment="e"),
            num_rollouts=1,
            minimum=1,
            seed=1,
            min_version=0,
        )
        second_task = task.model_copy(
            update={"group_id": ids.group_id("long", "rl", 0, 1), "index": 1, "settings": task.settings.model_copy()}
        )
        await log.send(task)
        await log.send(second_task)
        events = await read_run(log, "long", for_checks=for_checks)
        first, second = (one.event for one in sorted(events.by_topic["tasks"], key=lambda one: one.event.event_id))
        assert isinstance(first, TaskRequested)
        assert isinstance(second, TaskRequested)
        assert first.settings is second.settings
        assert second.inputs == ({} if for_checks else {"question": "?"})
        digests = {one.digest for one in events.by_topic["tasks"]}
        assert digests == {content_digest(task), content_digest(second_task)}
        assert all(isinstance(one._digest, str) for found in events.by_topic.values() for one in found)

    asyncio.run(scenario())
