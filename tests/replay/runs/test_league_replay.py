"""Groups of a league are folded again to the same matches; a changed draw, and a refused task, are told apart."""

import asyncio

from rollstream.replay import assembly
from rollstream.replay.report import Report
from rollstream.replay.source import of_type, read_run
from rollstream.replay.what_if.rewards import Grading, grade
from rollstream.schemas.events import GroupClosed, RunStarted, TaskRequested
from rollstream.schemas.settings import ArtifactRef
from tests.rigs.runs.league_rig import RUN, League, close_groups, play, task

DATASET = ArtifactRef(uri="memory://d", sha256="0" * 64, size_bytes=0)
STARTED = RunStarted(
    run_id=RUN, time_ms=1, name="run", config={}, seed=7, dataset=DATASET, num_examples=1, num_partitions=1
)


async def recorded(folder):
    """Four tasks, of which those that drew version 0 found it collected."""
    league = League(folder)
    await league.log.send(STARTED)
    first = await league.publish(0)
    await league.publish(1, 2)
    await league.collect(first)
    await play(league, *(task(index, 2) for index in range(6)))
    await close_groups(league)
    return league


async def compared(league, changed=lambda task: task):
    events = await read_run(league.log, RUN)
    closed = of_type(events.by_topic["groups"], GroupClosed)
    tasks = {one.group_id: changed(one) for one, _ in of_type(events.by_topic["tasks"], TaskRequested)}
    folded = [
        await assembly.fold(league.log, part) for part in assembly.ranges(RUN, (event for event, _ in closed), set())
    ]
    report = Report()
    assembly.compare(closed, folded, report, tasks)
    return report, [event for event, _ in closed]


def test_matches_and_refused_tasks_come_out_as_they_were_recorded(tmp_path):
    async def main():
        report, closed = await compared(await recorded(tmp_path))
        assert report.differences == []
        assert {len(event.matches) for event in closed if event.size == 2} == {2}
        assert {event.attempts[0].cause for event in closed if event.size == 1} == {"engine_error"}

    asyncio.run(main())


def test_a_group_with_other_opponents_than_its_task_draws_is_named(tmp_path):
    async def main():
        report, _ = await compared(
            await recorded(tmp_path), lambda task: task.model_copy(update={"seed": task.seed + 1})
        )
        assert any("opponents" in str(difference) for difference in report.differences)

    asyncio.run(main())


def test_a_what_if_scores_whom_it_can_train_and_no_opponent(tmp_path):
    async def main():
        league = await recorded(tmp_path)
        _, closed = await compared(league)
        tasks = [task(index, 2) for index in range(6)]
        inputs = {one.group_id: dict(one.inputs) for one in tasks}
        grading = Grading(tasks[0].settings, tasks[0].settings, inputs)
        end = (await league.log.end_offsets("steps"))[0]
        found = await grade(league.log, [assembly.Range(RUN, 0, 0, end, frozenset())], grading)
        assert set(found) == {member.trajectory_id for event in closed for member in event.members}

    asyncio.run(main())
