"""The state of jobs that have several ends or none, and the times of jobs, epochs and validations."""

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


def test_no_job_or_epoch_ends_before_it_began_whatever_its_event_time(tmp_path: Path, synthetic: Any) -> None:
    """The harness's event time is the wall clock's; that of closed groups stands still while no producer runs."""
    behind = {"epoch_sealed": 1_000, "job_succeeded": 2_000}
    made = [
        one.model_copy(update={"time_ms": behind[one.kind]}) if one.kind in behind else one
        for one in synthetic.all_events()
    ]
    path = empty_file(tmp_path)
    project(path, made)
    epochs = "SELECT DISTINCT sealed_at >= started_at, seconds >= 0, epoch_ms(sealed_event_time) FROM epochs"
    assert ask(path, epochs) == [(True, True, 1_000)]
    assert ask(path, "SELECT DISTINCT ended_at >= started_at, epoch_ms(ended_event_time) FROM jobs") == [(True, 2_000)]


def test_the_time_from_publication_to_load_is_that_of_the_records(tmp_path: Path, synthetic: Any) -> None:
    """A load copies the event time of what it loaded."""
    made = list(synthetic.all_events())
    published = next(one for one in made if isinstance(one, events.WeightsPublished))
    fields = {"run_id": published.run_id, "time_ms": published.time_ms, "model_group": published.model_group}
    loaded = events.WeightsLoaded(**fields, version=published.version, engine="e", num_skipped=0, seconds=0.1)

    async def scenario() -> None:
        log = MemoryLog(num_partitions=2)
        await log.send_all(made)
        await asyncio.sleep(0.05)
        await log.send(loaded)
        await project_to_end(log, path)

    path = empty_file(tmp_path)
    asyncio.run(scenario())
    took = "SELECT loaded_at - published_at >= to_milliseconds(50) FROM weight_loads JOIN weight_versions"
    assert ask(path, f"{took} USING (model_group, version)") == [(True,)]


def test_a_task_waits_from_its_record_to_that_of_its_groups_start(tmp_path: Path, synthetic: Any) -> None:
    made = list(synthetic.all_events())
    tasks = [one for one in made if one.kind == "task_requested"]
    later = [one for one in made if one.kind != "task_requested"]
    alone = tasks[0].model_copy(update={"group_id": f"{tasks[0].group_id}9"})

    async def scenario() -> None:
        log = MemoryLog(num_partitions=2)
        await log.send_all([*tasks, alone])
        await asyncio.sleep(0.05)
        await log.send_all(later)
        await project_to_end(log, path)

    path = empty_file(tmp_path)
    asyncio.run(scenario())
    assert ask(path, "SELECT DISTINCT wait_seconds BETWEEN 0.05 AND 60 FROM groups") == [(True,)]
    assert ask(path, "SELECT count(*) FROM groups") == [(len(tasks),)], "a task without a group has no row here"


def test_a_validation_never_ends_before_its_run_began_whatever_its_event_time(tmp_path: Path, synthetic: Any) -> None:
    changes = {"purpose": "validation", "time_ms": 1_000}
    made = [one.model_copy(update=changes) if one.kind == "group_closed" else one for one in synthetic.all_events()]
    path = empty_file(tmp_path)
    project(path, made)
    with connect(path, read_only=True) as connection:
        found = connection.execute(
            "SELECT DISTINCT v.ended_at >= r.started_at, epoch_ms(v.ended_event_time), r.ended_at >= r.started_at "
            "FROM validations v JOIN runs r USING (run_id)"
        ).fetchall()
    assert found == [(True, 1_000, True)]
