"""The dead letters that a learner reads before it writes one: from where its own work begins, and once."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollstream.eventlog.dead_letters import origin, send_dead_letter
from rollstream.eventlog.log import Record, TopicPartition
from rollstream.learner.inbox import Inbox
from rollstream.learner.reading.letters import MAX_CUTS, Letters
from rollstream.schemas.events import LearnerClaimed
from tests.learner.conftest import submit

OLD = 500
BROKEN = b"\xff{"


async def add_dead_letter(log: Any, topic: str, offset: int) -> None:
    record = Record(topic, 0, offset, b"k", BROKEN, (), 0)
    await send_dead_letter(log, record, service="other", stage="decode", error=ValueError("bad"))


async def letters(log: Any) -> list[tuple[str, int]]:
    """Positions that the letters behind the old ones are about."""
    reader = await log.reader({TopicPartition("dlq", 0): OLD})
    found = [origin(record.headers) for record in await reader.poll(timeout_s=0)]
    await reader.close()
    return sorted((topic, offset) for topic, _, offset in found)


async def num_read(log: Any, work: Any) -> int:
    """Letters that are read meanwhile."""
    log.num_read.clear()
    await work
    return log.num_read["dlq"]


@pytest.fixture
def old_lab(counting_lab: Any) -> Any:
    """A log with OLD letters about records of a run that has ended."""

    async def fill() -> None:
        job = await submit(counting_lab, "run-old")
        ids = {"run_id": job.run_id, "time_ms": 1, "model_group": job.model_group, "learner": "one"}
        await counting_lab.log.send_all([LearnerClaimed(**ids, term=term) for term in (1, 2, 3, 4)])
        for offset in range(OLD):
            await add_dead_letter(counting_lab.log, "steps", offset)

    asyncio.run(fill())
    return counting_lab


def test_a_record_that_comes_while_a_learner_works_costs_the_letters_since_its_start(old_lab: Any) -> None:
    async def scenario() -> None:
        inbox = await Inbox.open(old_lab.log)
        await old_lab.log.send_raw("weights", key=b"x", value=BROKEN)
        assert await num_read(old_lab.log, inbox.catch_up()) == 0
        await submit(old_lab, "run-new")
        await old_lab.log.send_raw("batches", key=b"x", value=BROKEN)
        assert await num_read(old_lab.log, inbox.catch_up()) <= 2
        await inbox.close()
        assert await letters(old_lab.log) == [("batches", 0), ("weights", 4)]

    asyncio.run(scenario())


def test_a_restart_reads_the_letters_since_it_stopped_reading_and_writes_none_twice(
    old_lab: Any, tmp_path: Path
) -> None:
    async def scenario() -> None:
        file = tmp_path / "learner.position.json"
        inbox = await Inbox.open(old_lab.log, file=file)
        inbox.save(every_s=0.0)
        await inbox.close()
        for topic in ("jobs", "batches", "weights"):
            await old_lab.log.send_raw(topic, key=b"x", value=BROKEN)
        await add_dead_letter(old_lab.log, "batches", 0)  # another learner was faster
        for _ in range(3):  # the position was not saved again
            assert await num_read(old_lab.log, Inbox.open(old_lab.log, file=file)) <= 3
        assert await letters(old_lab.log) == [("batches", 0), ("jobs", 1), ("weights", 4)]

    asyncio.run(scenario())


def test_dead_letters_are_read_from_the_beginning_of_the_run(old_lab: Any) -> None:
    async def scenario() -> None:
        job = await submit(old_lab, "run-new")
        inbox = await Inbox.open(old_lab.log)
        for topic, key in (("batches", job.run_id), ("weights", job.model_group)):
            await old_lab.log.send_raw(topic, key=key.encode(), value=BROKEN)
        await inbox.catch_up()
        for _ in range(2):
            assert await num_read(old_lab.log, inbox.follow(job)) <= 2
        await inbox.close()
        assert await letters(old_lab.log) == [("batches", 0), ("weights", 4)]

    asyncio.run(scenario())


@pytest.mark.parametrize("num_later_runs", [0, MAX_CUTS + 5])
def test_a_first_start_reads_the_letters_since_the_run_before_the_first_record_that_it_reads(
    old_lab: Any, num_later_runs: int
) -> None:
    """No position file says how far an earlier learner came: `jobs` says where the runs began."""

    async def scenario() -> None:
        for number in range(30):
            await submit(old_lab, f"run-before-{number}")
        for topic in ("batches", "jobs", "weights"):
            await old_lab.log.send_raw(topic, key=b"x", value=BROKEN)
        await add_dead_letter(old_lab.log, "batches", 0)  # by an earlier learner
        for number in range(num_later_runs):
            await submit(old_lab, f"run-after-{number}")
        for _ in range(3):
            assert await num_read(old_lab.log, Inbox.open(old_lab.log)) <= 3
        assert await letters(old_lab.log) == [("batches", 0), ("jobs", 31), ("weights", 4)]

    asyncio.run(scenario())


@pytest.mark.parametrize("offsets", [None, {}, {"batches": 0, "jobs": 0, "weights": 0}, {"dlq": 10**9, "batches": 0}])
def test_start_offsets_without_dead_letters_have_all_of_them_read(old_lab: Any, offsets: dict[str, int] | None) -> None:
    async def scenario() -> None:
        await add_dead_letter(old_lab.log, "batches", 0)
        found = Letters(old_lab.log, ("jobs", "batches", "weights"))
        found.add_cut(offsets)
        assert await found.has(Record("batches", 0, 0, b"k", BROKEN, (), 0))
        assert not await found.has(Record("batches", 0, 1, b"k", BROKEN, (), 0))
        assert old_lab.log.num_read["dlq"] == OLD + 1

    asyncio.run(scenario())


def test_the_index_holds_the_letters_about_the_topics_of_a_learner_since_the_newest_run_began(old_lab: Any) -> None:
    async def scenario() -> None:
        found = Letters(old_lab.log, ("jobs", "batches", "weights"))
        sizes: set[int] = set()
        for run in range(20):
            await found.take_cut()
            record = None
            for number in range(10):
                at = await old_lab.log.send_raw("batches", key=b"x", value=BROKEN)
                await add_dead_letter(old_lab.log, "batches", at.offset)
                await add_dead_letter(old_lab.log, "steps", 100 * run + number)
                record = Record("batches", at.partition, at.offset, b"x", BROKEN, (), 0)
            assert record is not None
            assert await found.has(record)
            sizes.add(sum(len(one) for one in found._index._letters.values()))
        assert sizes == {10}

    asyncio.run(scenario())
