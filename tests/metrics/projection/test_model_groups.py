"""Views of a run with several model groups: each epoch, member and staleness belongs to the job that trains it."""

import asyncio
from pathlib import Path
from typing import Any

from rollstream.eventlog.memory.log import MemoryLog
from rollstream.metrics.projection.database import connect
from rollstream.metrics.projection.projector import project_to_end
from rollstream.schemas import ids
from rollstream.schemas.base import Event
from rollstream.schemas.events import BatchPlanned, GroupClosed, JobStarted
from rollstream.schemas.events.training import BatchMember, MemberRef
from rollstream.schemas.settings import PlanSettings, RolloutSettings
from tests.metrics.conftest import empty_file

RUN, MAIN, BESIDE = "run-1", "run-1/rl", "run-1/rl-verifiers"
AGENTS = {"prover": f"{RUN}/provers", "verifier's": f"{RUN}/verifiers"}
GROUP = ids.group_id(RUN, "rl", 0, 0)


def members() -> list[MemberRef]:
    found: list[MemberRef] = []
    for number in range(2):
        rollout = ids.rollout_id(GROUP, number, 0)
        for index, agent in enumerate(AGENTS):
            found.append(
                MemberRef(
                    trajectory_id=ids.trajectory_id(rollout, agent),
                    rollout_id=rollout,
                    agent=agent,
                    member=number,
                    digest="0" * 64,
                    reward=float(number + 10 * index),
                    num_tokens=5,
                    num_completion_tokens=2,
                    min_version=0,
                    max_version=0,
                )
            )
    return found


def events() -> list[Event]:
    rollout = RolloutSettings(environment="proof", agents=AGENTS)
    jobs = [
        JobStarted(
            run_id=RUN,
            time_ms=1,
            job_id=job_id,
            model_group=AGENTS[agent],
            base_version=0,
            plan=PlanSettings(tasks_of="" if job_id == MAIN else MAIN),
            rollout=rollout,
        )
        for job_id, agent in zip((MAIN, BESIDE), AGENTS, strict=True)
    ]
    closed = GroupClosed(
        run_id=RUN,
        time_ms=2,
        group_id=GROUP,
        example_id="x",
        job_id=MAIN,
        epoch=0,
        index=0,
        reason="complete",
        is_viable=True,
        size=2,
        members=tuple(members()),
    )
    batches = [
        BatchPlanned(
            run_id=RUN,
            time_ms=3,
            batch_id=ids.batch_id(job_id, 0),
            job_id=job_id,
            model_group=AGENTS[agent],
            epoch=0,
            index=0,
            trains_at_version=0,
            yields_version=1,
            members=tuple(
                BatchMember(
                    trajectory_id=member.trajectory_id,
                    rollout_id=member.rollout_id,
                    group_id=GROUP,
                    digest=member.digest,
                    reward=member.reward,
                    staleness=staleness,
                )
                for member in members()
                if member.agent == agent
            ),
            seed=1,
            curriculum_sha256="0" * 64,
            previous_sha256="0" * 64,
        )
        for staleness, (job_id, agent) in enumerate(zip((MAIN, BESIDE), AGENTS, strict=True))
    ]
    return [*jobs, closed, *batches]


def test_members_and_staleness_are_those_of_the_job_that_trains_them(tmp_path: Path) -> None:
    async def scenario() -> tuple[list[Any], ...]:
        log, file = MemoryLog(num_partitions=2), empty_file(tmp_path)
        await log.send_all(events())
        await project_to_end(log, file)
        with connect(file, read_only=True) as connection:
            return tuple(
                connection.execute(query).fetchall()
                for query in (
                    "SELECT job_id, avg(reward) FROM log.members GROUP BY 1 ORDER BY 1",
                    "SELECT model_group, version, mean_staleness FROM staleness",
                )
            )

    by_job, staleness = asyncio.run(scenario())
    assert by_job == [(MAIN, 0.5), (BESIDE, 10.5)]
    assert staleness == [(f"{RUN}/provers", 1, 0.0), (f"{RUN}/verifiers", 1, 1.0)]
