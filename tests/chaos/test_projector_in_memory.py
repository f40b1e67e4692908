"""The projector killed twenty times inside and after its transaction: its rows are those of an undisturbed one."""

import asyncio
import random
from typing import Any

import pytest

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.failpoints import FAILPOINTS, Killed, armed
from rollstream.eventlog.log import TopicPartition
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.metrics.projection.database import Database
from rollstream.metrics.projection.projector import Projector
from rollstream.schemas.topics import TOPICS
from tests.chaos import chaos_workload
from tests.chaos.chaos_compare import read_all
from tests.chaos.shells_rig import Processors, write

pytestmark = pytest.mark.slow
STEPS = 1200
KILLS = 20
SLICE = 60
POINTS = [name for name in FAILPOINTS if name.startswith("metrics/")]


class Slices:
    """A log whose readers pause after every few records, so that transactions are many."""

    def __init__(self, log):
        self._log = log
        self._has_paused = True

    def __getattr__(self, name):
        return getattr(self._reader if name in ("position", "close") else self._log, name)

    async def reader(self, start):
        self._reader = await self._log.reader(start)
        return self

    async def poll(self, *, timeout_s, max_records):
        self._has_paused = not self._has_paused
        if self._has_paused:
            return []
        return await self._reader.poll(timeout_s=timeout_s, max_records=min(max_records, SLICE))


async def project(log, path):
    database = Database(path)
    slices: Any = Slices(log)
    try:
        projector = Projector(slices, database)
        projector.stop()
        await projector.run()
    finally:
        database.close()


def tables(path):
    """All rows by table; offsets apart, without their clock time."""
    database = Database(path)
    try:
        cursor = database.cursor()
        names = cursor.execute("SELECT table_name FROM duckdb_tables() WHERE schema_name = 'log'").fetchall()
        rows = {name: cursor.execute(f'SELECT * FROM log."{name}" ORDER BY ALL').fetchall() for (name,) in names}
        return rows, {where: offset for where, offset in database.offsets().items() if offset}
    finally:
        database.close()


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """The log of a whole run, its processors killed now and then, so that it says things twice."""
    log, store = MemoryLog(), ArtifactStore(str(tmp_path_factory.mktemp("artifacts")))

    async def fill():
        workload = chaos_workload.make(STEPS, seed=3)
        await write(log, workload, store)
        processors = Processors(log, store, random.Random(3))
        await processors.live_and_die("assemble/after-trajectories-before-groups", kills=5)

    asyncio.run(fill())
    return log


@pytest.fixture(scope="module")
def undisturbed(log, tmp_path_factory):
    path = tmp_path_factory.mktemp("undisturbed") / "metrics.duckdb"
    asyncio.run(project(log, path))
    return tables(path)


@pytest.mark.parametrize("failpoint", POINTS)
def test_a_killed_projector_comes_to_the_rows_of_an_undisturbed_one(log, undisturbed, tmp_path, failpoint):
    async def go():
        rng = random.Random(failpoint)
        for _ in range(KILLS):
            with armed(failpoint, rng.randint(1, 3)), pytest.raises(Killed):
                await project(log, tmp_path / "metrics.duckdb")
        await project(log, tmp_path / "metrics.duckdb")
        ends = {topic: await log.end_offsets(topic) for topic in TOPICS}
        return {TopicPartition(topic, number): end for topic in ends for number, end in ends[topic].items()}

    ends = asyncio.run(go())
    rows, offsets = tables(tmp_path / "metrics.duckdb")
    assert {name: len(found) for name, found in rows.items()} == {n: len(found) for n, found in undisturbed[0].items()}
    assert rows == undisturbed[0]
    kept = {where: end for where, end in ends.items() if end}
    assert {where: at for where, at in offsets.items() if at} == kept
    assert {where: at for where, at in undisturbed[1].items() if at} == kept


def test_each_trajectory_of_the_log_has_one_row(log, undisturbed):
    rows, _ = undisturbed
    trajectories = asyncio.run(read_all(log, "trajectories"))
    ids = {dict(record.headers)["ce_id"] for record in trajectories}
    assert len(ids) < len(trajectories), "the killed processors have repeated some"
    assert len(rows["trajectory_assembled"]) == len(ids)
