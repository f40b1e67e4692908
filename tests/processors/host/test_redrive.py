"""A record that is sent again joins its group while that is open; else the ledger has the cause `late`."""

import asyncio

import pytest

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import TopicPartition
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.harness.upkeep import dead_letters
from rollstream.metrics.projection.database import Database
from rollstream.metrics.projection.projector import Projector
from rollstream.processors.assemble.shell import AssembleShell
from rollstream.processors.host.app import Batch
from rollstream.schemas import ids
from rollstream.schemas.events import GroupClosed
from tests.rigs.steps_rig import attempt, failed, group, started, tick

BEGIN, STEP, OTHER_STEP, REWARD, END = range(5)
"""Records of an attempt of the rig, in their order."""


class Line:
    """A log of one partition, assembly on it, and what metrics make of it."""

    def __init__(self, path):
        self.log = MemoryLog(num_partitions=1)
        self.database = Database(path)
        self._store = ArtifactStore("/nowhere")
        self._shell = AssembleShell(self.log, None, service="processors-1")

    async def write(self, *events):
        for event in events:
            await self.log.send(event)
        await self.assemble()

    async def poison(self, event):
        """An event that was damaged on its way: it is a dead letter now."""
        made = codec.encode(event)
        await self.log.send_raw("steps", key=made.key, value=made.value[:-1], headers=made.headers, partition=0)
        await self.assemble()

    async def redrive(self, number, event):
        """Send the whole event in place of what the letter holds."""
        value = codec.encode(event).value
        await dead_letters.send(self.log, await dead_letters.prepare(self.log, self._store, [number], value=value))
        await self.assemble()

    async def assemble(self):
        position = self._shell.position(0) or 0
        reader = await self.log.reader({TopicPartition("steps", 0): position})
        if records := await reader.poll(timeout_s=0):
            await self._shell.take(Batch(0, 1, records))
            await self._shell.drain()

    async def closed(self):
        reader = await self.log.reader({TopicPartition("groups", 0): 0})
        events = [codec.decode(record).event for record in await reader.poll(timeout_s=0)]
        return [event for event in events if isinstance(event, GroupClosed)]

    async def ask(self, sql):
        projector = Projector(self.log, self.database)
        projector.stop()
        await projector.run()
        return self.database.cursor().execute(sql).fetchall()

    async def outcomes(self):
        found = await self.ask("SELECT rollout_id, outcome, cause, tokens FROM outcomes ORDER BY ALL")
        assert len({row[0] for row in found}) == len(found), "one row an attempt"
        return {row[0].partition("/t0000")[2]: row[1:] for row in found}


@pytest.fixture
def line(tmp_path):
    line = Line(tmp_path / "metrics.duckdb")
    yield line
    line.database.close()


@pytest.mark.parametrize("which", [BEGIN, STEP, OTHER_STEP, REWARD, END])
def test_a_record_of_an_open_group_joins_it(line, which):
    async def go():
        records = attempt()
        await line.write(started(0, size=1), *records[:which])
        await line.poison(records[which])
        if which < END:
            await line.write(*records[which + 1 : END])
        await line.redrive(0, records[which])
        if which < END:
            await line.write(records[END])
        (closed,) = await line.closed()
        assert [(one.outcome, one.num_tokens) for one in closed.attempts] == [("complete", 8)]
        assert await line.outcomes() == {"0/m0/a0": ("open", "waiting", 8)}
        assert await line.ask("SELECT count(*) FROM late_records") == [(0,)]

    asyncio.run(go())


def test_a_step_that_comes_after_its_attempt_was_decided_without_it_is_late(line):
    async def go():
        records = attempt()
        await line.write(started(0, size=1), *records[:OTHER_STEP])
        await line.poison(records[OTHER_STEP])
        await line.write(*records[REWARD:])
        assert await line.outcomes() == {"0/m0/a0": ("rejected", "incomplete", 4)}
        await line.redrive(0, records[OTHER_STEP])
        assert await line.outcomes() == {"0/m0/a0": ("rejected", "late", 8)}
        assert await line.ask("SELECT kind, index, group_closed FROM late_records") == [("step", 1, "failed")]
        assert len(await line.closed()) == 1

    asyncio.run(go())


def test_an_end_that_comes_after_its_group_timed_out_is_late(line):
    async def go():
        records = attempt()
        await line.write(started(0, size=1), *records[:END])
        await line.poison(records[END])
        await line.write(tick(1000))
        assert await line.outcomes() == {"0/m0/a0": ("failed", "timeout", 8)}
        await line.redrive(0, records[END])
        assert await line.outcomes() == {"0/m0/a0": ("rejected", "late", 8)}
        assert await line.ask("SELECT kind, group_closed FROM late_records") == [("ended", "timeout")]

    asyncio.run(go())


def test_a_groups_beginning_that_comes_after_its_records_lets_it_close(line):
    async def go():
        await line.poison(started(0))
        await line.write(*attempt(0, 0), *attempt(0, 1)[:END], tick(5000))
        assert await line.closed() == []
        await line.redrive(0, started(0))
        await line.write(tick(5000))
        (closed,) = await line.closed()
        assert (closed.reason, closed.is_viable, closed.attempts) == ("timeout", False, ())
        assert await line.outcomes() == {"0/m0/a0": ("rejected", "late", 8), "0/m1/a0": ("dead", "late", 8)}

    asyncio.run(go())


def test_a_record_that_is_sent_again_though_it_counted_changes_nothing(line):
    async def go():
        records = attempt()
        await line.write(started(0, size=2), *records[:STEP])
        await line.poison(records[STEP])
        await line.write(*records[STEP:])
        before = await line.outcomes()
        await line.redrive(0, records[STEP])
        assert await line.outcomes() == before == {"0/m0/a0": ("open", "assembling", 8)}
        await line.write(*attempt(0, 1))
        (closed,) = await line.closed()
        assert closed.reason == "complete"

    asyncio.run(go())


def test_the_outcomes_of_all_attempts_add_up_whatever_came_late(line):
    async def go():
        late = [attempt(index) for index in range(4)]
        for index, records in enumerate(late):
            await line.write(started(index, size=2), *records[:index], *records[index + 1 :])
            await line.poison(records[index])
        await line.write(*attempt(0, 1), *attempt(1, 1)[:END], failed(2, 1, 0), *attempt(2, 1, 1), tick(9000))
        for index, records in enumerate(late):
            await line.redrive(index, records[index])
        stray = attempt(3, 1, 5)
        await line.write(stray[STEP], attempt(1, 1)[END], *attempt(2, 1, 2))
        found = await line.outcomes()
        assert found == {
            "0/m0/a0": ("open", "waiting", 8),
            "0/m1/a0": ("open", "waiting", 8),
            "1/m0/a0": ("rejected", "late", 8),
            "1/m1/a0": ("rejected", "late", 8),
            "2/m0/a0": ("rejected", "late", 8),
            "2/m1/a0": ("failed", "engine_error", 0),
            "2/m1/a1": ("open", "waiting", 8),
            "2/m1/a2": ("rejected", "late", 8),
            "3/m0/a0": ("rejected", "late", 8),
            "3/m1/a5": ("dead", "late", 4),
        }
        written = {
            getattr(one, "rollout_id", None)
            for one in [codec.decode(record).event for record in await _decodable(line.log)]
        } - {None}
        assert len(found) == len(written)
        assert ids.rollout_id(group(3), 1, 5) in written
        counts = await line.ask("SELECT sum(n) FROM (SELECT outcome, cause, count(*) AS n FROM outcomes GROUP BY ALL)")
        assert counts == [(len(written),)]

    asyncio.run(go())


async def _decodable(log):
    reader = await log.reader({TopicPartition("steps", 0): 0})
    return [record for record in await reader.poll(timeout_s=0) if record.value.endswith(b"}")]
