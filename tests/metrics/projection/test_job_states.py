"""The states of runs and jobs, as commands have them too, and the times of jobs, epochs and validations."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollstream.eventlog.memory.log import MemoryLog
from rollstream.harness.runs.follower import TOPICS, read_runs
from rollstream.harness.upkeep.run_tables import OF_JOBS, OF_RUNS, jobs_table, runs_table, state_of_job
from rollstream.learner.shared_model_group.group_view import view
from rollstream.metrics.projection.connection import connect
from rollstream.metrics.projection.projector import project_to_end
from rollstream.schemas import events, ids
from rollstream.schemas.base import Event
from rollstream.schemas.events.run_states import run_state
from rollstream.schemas.settings import ArtifactRef, JobSettings, ModelSettings, PlanSettings, RolloutSettings
from tests.metrics.conftest import ask, empty_file


def project(path: Path, found: list[Event]) -> None:
    async def scenario() -> None:
        log = MemoryLog(num_partitions=2)
        await log.send_all(found)
        await project_to_end(log, path)

    asyncio.run(scenario())


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


def lives() -> Iterator[tuple[str, str, list[Event]]]:
    """Every life of a job with its run: its id, its state in the view, and its records. Runs are told apart by number.

    A job is named as those of a run or as those of a shared model group.
    """
    ends = [None, "succeeded", "failed", "cancelled", "failed then cancelled", "skipped"]
    causes = [None, "completed", "failed", "stopped", "abandoned"]
    choices = itertools.product(ends, [False, True], [False, True], causes, ["rl", "fine-tune"])
    for number, (end, is_started, has_progressed, cause, kind) in enumerate(choices):
        run_id = f"run-{number}"
        group = ids.model_group(run_id, ids.MODEL_GROUP)
        job_id = ids.job_id(run_id, "rl") if kind == "rl" else ids.fine_tune_job_id(group, "sft", "a" * 64)
        job = {"run_id": run_id, "time_ms": 1, "job_id": job_id, "model_group": group}
        settings = JobSettings(kind="rl", model=ModelSettings(path="m"))
        dataset = ArtifactRef(uri="x", sha256="0" * 64, size_bytes=1)
        started = {"name": "run", "config": {}, "seed": 0, "dataset": dataset, "num_examples": 1, "num_partitions": 2}
        found: list[Event] = [events.RunStarted(run_id=run_id, time_ms=1, **started)]
        if end == "skipped":
            found.append(events.JobSkipped(**job, job_kind="sft", num_examples=1, min_examples=10, version=0))
        else:
            found.append(events.JobSubmitted(**job, base_version=0, settings=settings))
            if is_started:
                plans = {"plan": PlanSettings(), "rollout": RolloutSettings(environment="e")}
                found.append(events.JobStarted(**job, base_version=0, **plans))
            if has_progressed:
                found.append(events.JobProgressed(**job, version=1, percent=0.0))
            for one in (end or "").split(" then "):
                makes = {"succeeded": {"final_version": 1}, "failed": {"error": "no room"}, "cancelled": {}}
                kinds = {"succeeded": events.JobSucceeded, "failed": events.JobFailed, "cancelled": events.JobCancelled}
                found += [kinds[one](**job, **makes[one])] if one else []
        if cause is not None:
            found.append(events.RunEnded(run_id=run_id, time_ms=2, cause=cause))
        is_going_on = "running" if is_started or has_progressed else "submitted"
        left = is_going_on if cause is None else "cancelled"
        yield job_id, (end or left).split(" then ")[0], found


def test_commands_and_the_view_have_the_same_state_of_a_job_in_every_life(tmp_path: Path) -> None:
    path, expected = empty_file(tmp_path), {job_id: state for job_id, state, _ in lives()}

    async def scenario() -> None:
        log = MemoryLog(num_partitions=2)
        for _, _, found in lives():
            await log.send_all(found)
        await project_to_end(log, path)
        runs = await read_runs(log)
        listed = {job_id: state_of_job(one, job) for one in runs for job_id, job in one.jobs.items()}
        assert listed == expected
        assert {one.run_id: run_state(one.ended) for one in runs} == dict(ask(path, "SELECT run_id, state FROM runs"))
        for job_id, state in expected.items():
            group = await view(log, ids.model_group(ids.run_of(job_id), ids.MODEL_GROUP))
            assert group.state.job(job_id).state == state, job_id
            await group.close()

    asyncio.run(scenario())
    assert dict(ask(path, "SELECT job_id, state FROM jobs")) == expected


def test_tables_of_all_runs_are_made_without_the_events_that_they_do_not_show(synthetic: Any) -> None:
    async def scenario() -> None:
        log = MemoryLog(num_partitions=2)
        for _, _, found in lives():
            await log.send_all(found)
        await log.send_all(list(synthetic.all_events()))
        whole = await read_runs(log)
        shown = {*OF_RUNS, *OF_JOBS}
        needless = {kind for kind, one in events.KINDS.items() if one.TOPIC in TOPICS and one not in shown}
        assert {"weights_loaded", "reference_scored", "submission_received"} < needless
        for kind in needless:
            headers = (("ce_type", f"rollstream.{kind}.v1".encode()),)
            await log.send_raw(events.KINDS[kind].TOPIC, key=b"run-1", value=b"not decoded", headers=headers)
        for table, needed in ((runs_table, OF_RUNS), (jobs_table, OF_JOBS)):
            unreadable = Counter[str]()
            assert table(await read_runs(log, unreadable, needed=needed)) == table(whole)
            assert not unreadable

    asyncio.run(scenario())


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
