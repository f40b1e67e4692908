"""The state of jobs in the table `jobs`, where a job has several ends or none."""

import asyncio
from pathlib import Path
from typing import Any

from rollstream.eventlog.memory.log import MemoryLog
from rollstream.metrics.projection.database import connect
from rollstream.metrics.projection.projector import project_to_end
from rollstream.schemas import events
from rollstream.schemas.base import Event
from tests.metrics.conftest import empty_file


def project(path: Path, found: list[Event]) -> None:
    async def scenario() -> None:
        log = MemoryLog(num_partitions=2)
        await log.send_all(found)
        await project_to_end(log, path)

    asyncio.run(scenario())


def ask(path: Path, sql: str) -> list[Any]:
    with connect(path, read_only=True) as connection:
        return connection.execute(sql).fetchall()


def test_the_first_end_of_a_job_counts_and_the_runs_end_where_it_has_none(tmp_path: Path, synthetic: Any) -> None:
    """As for the learner, `rollstream jobs` and `jobs show`."""
    made = [event for event in synthetic.all_events() if not isinstance(event, events.JobSucceeded)]
    ended = [event for event in made if isinstance(event, events.RunEnded)]
    path = empty_file(tmp_path)
    project(path, [event for event in made if event not in ended])
    assert set(ask(path, "SELECT state, error FROM jobs")) == {("running", None)}
    other = empty_file(tmp_path)
    job = {"run_id": ended[0].run_id, "time_ms": 1, "model_group": "g", "job_id": f"{ended[0].run_id}/rl"}
    twice = [events.JobFailed(**job, error="no room"), events.JobCancelled(**job), events.JobFailed(**job, error="x")]
    project(other, [*made, *twice])
    found = ask(other, "SELECT state, error, ended_at IS NULL FROM jobs ORDER BY state")
    assert found == [("cancelled", "the run ended", False), ("failed", "no room", False)]
