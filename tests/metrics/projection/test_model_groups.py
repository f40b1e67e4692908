"""Views of a run with several model groups: each epoch, member and staleness belongs to the job that trains it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollstream.eventlog.memory.log import MemoryLog
from rollstream.metrics.projection.connection import connect
from rollstream.metrics.projection.projector import project_to_end
from rollstream.schemas import ids
from rollstream.schemas.base import Event
from rollstream.schemas.events import (
    BatchPlanned,
    EpochStarted,
    GroupClosed,
    JobStarted,
    RolloutStarted,
    StepTrained,
    TrajectoryRejected,
)
from rollstream.schemas.events.training import BatchMember, MemberRef, RejectionCause
from rollstream.schemas.settings import PlanSettings, RolloutSettings
from tests.metrics.conftest import answers, empty_file

RUN, MAIN, BESIDE = "run-1", "run-1/rl", "run-1/rl-verifiers"
AGENTS = {"prover": f"{RUN}/provers", "verifier's": f"{RUN}/verifiers"}
GROUP = ids.group_id(RUN, "rl", 0, 0)


def members(group_id: str = GROUP, num: int = 2) -> list[MemberRef]:
    found: list[MemberRef] = []
    for number in range(num):
        rollout = ids.rollout_id(group_id, number, 0)
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


def step_of(batch: BatchPlanned) -> StepTrained:
    """The training of a batch."""
    return StepTrained(
        run_id=batch.run_id,
        time_ms=9,
        model_group=batch.model_group,
        job_id=batch.job_id,
        batch_id=batch.batch_id,
        epoch=batch.epoch,
        version=batch.yields_version,
        term=1,
        weights_sha256="1" * 64,
        num_optimizer_steps=1,
        metrics={},
        seconds={},
    )


def test_only_trained_batches_have_a_staleness_and_a_version_that_of_its_own_batch(tmp_path: Path) -> None:
    made = events()
    first, beside = (one for one in made if isinstance(one, BatchPlanned))
    old = tuple(member.model_copy(update={"staleness": 9}) for member in first.members)
    changes = {"batch_id": ids.batch_id(MAIN, 1), "index": 1, "trains_at_version": 1, "yields_version": 2}
    never = first.model_copy(update={**changes, "members": old})
    by_another_job = first.model_copy(
        update={"job_id": (job := f"{RUN}/next"), "batch_id": ids.batch_id(job, 0), "yields_version": 2}
    )
    steps = [step_of(first), step_of(by_another_job)]
    query = "SELECT model_group, version, max_staleness, num_trajectories FROM staleness"
    (rows,) = answers(tmp_path, [*made, never, by_another_job, *steps], query)
    assert beside.model_group == f"{RUN}/verifiers"
    assert rows == [(f"{RUN}/provers", version, 0, len(first.members)) for version in (1, 2)]


def test_members_and_staleness_are_those_of_the_job_that_trains_them(tmp_path: Path) -> None:
    async def scenario() -> tuple[list[Any], ...]:
        log, file = MemoryLog(num_partitions=2), empty_file(tmp_path)
        planned = events()
        await log.send_all([*planned, *(step_of(one) for one in planned if isinstance(one, BatchPlanned))])
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


def test_a_job_beside_has_its_epochs_and_validations_with_the_rewards_of_its_own_agents(tmp_path: Path) -> None:
    made = events()
    (closed,) = [event for event in made if isinstance(event, GroupClosed)]
    played = ids.group_id(RUN, "rl", 0, 1)
    one = closed.model_copy(update={"group_id": played, "purpose": "validation", "members": tuple(members(played, 1))})
    silent = one.model_copy(update={"group_id": ids.group_id(RUN, "rl", 0, 2), "members": (), "is_viable": False})
    two = one.model_copy(
        update={"group_id": (group := ids.group_id(RUN, "rl", 0, 3)), "members": tuple(members(group, 3))}
    )
    void = silent.model_copy(update={"group_id": ids.group_id(RUN, "rl", 0, 4), "purpose": "train"})
    epoch = EpochStarted(run_id=RUN, time_ms=1, job_id=MAIN, epoch=0)
    epochs, validations = answers(
        tmp_path,
        [*made, epoch, one, silent, two, void],
        "SELECT job_id, state, groups, avg_reward, zero_variance_groups, started_at IS NULL FROM epochs ORDER BY 1",
        "SELECT job_id, groups, num_trajectories, avg_reward FROM validations ORDER BY 1",
    )
    assert epochs == [(MAIN, "running", 2, 0.5, 0, False), (BESIDE, "running", 2, 10.5, 0, False)]
    # the mean over groups of their means: one has one rollout (reward 0), another three (0, 1, 2)
    assert validations == [(MAIN, 3, 4, 0.5), (BESIDE, 3, 4, 10.5)]


def test_the_rewards_of_a_frozen_model_group_count_in_no_job(tmp_path: Path) -> None:
    made = [event for event in events() if not (isinstance(event, JobStarted) and event.job_id == BESIDE)]
    (found,) = answers(tmp_path, made, "SELECT agent, job_id, count(*) FROM log.members GROUP BY ALL ORDER BY ALL")
    assert found == [("prover", MAIN, 2), ("verifier's", None, 2)]


def test_a_rejected_trajectory_is_wasted_though_another_agents_of_the_same_rollout_is_trained(tmp_path: Path) -> None:
    made = [event for event in events() if not (isinstance(event, BatchPlanned) and event.job_id == BESIDE)]
    first, second = (ids.rollout_id(GROUP, number, 0) for number in range(2))
    started = [
        RolloutStarted(run_id=RUN, time_ms=1, group_id=GROUP, rollout_id=rollout, member=number, attempt=0, seed=1)
        for number, rollout in enumerate((first, second))
    ]
    plan = next(event for event in made if isinstance(event, BatchPlanned))
    made[made.index(plan)] = plan.model_copy(update={"members": plan.members[:1]})
    closed = next(event for event in made if isinstance(event, GroupClosed))
    unknown = closed.members[0].model_copy(update={"num_without_logprobs": 2})
    made[made.index(closed)] = closed.model_copy(update={"members": (unknown, *closed.members[1:])})
    causes: list[tuple[str, str, str, RejectionCause]] = [
        (first, "verifier's", BESIDE, "no_logprobs"),
        (second, "verifier's", BESIDE, "zero_variance"),
        (second, "prover", MAIN, "left_over"),
    ]
    rejected = [
        TrajectoryRejected(
            run_id=RUN, time_ms=4, job_id=job_id, epoch=0, group_id=GROUP, rollout_id=rollout, cause=cause,
            trajectory_id=ids.trajectory_id(rollout, agent), num_tokens=5,
        )
        for rollout, agent, job_id, cause in causes
    ]  # fmt: skip
    trained = StepTrained(
        run_id=RUN, time_ms=5, model_group=AGENTS["prover"], job_id=MAIN, batch_id=plan.batch_id, epoch=0, version=1,
        term=1, weights_sha256="0" * 64, num_optimizer_steps=1, metrics={}, seconds={},
    )  # fmt: skip
    outcomes, wasted = answers(
        tmp_path,
        [*started, *made, *rejected, trained],
        "SELECT outcome, tokens FROM outcomes ORDER BY rollout_id",
        "SELECT cause, outcome, num_rollouts, num_tokens FROM wasted_tokens ORDER BY ALL",
    )
    assert outcomes == [("trained", 10), ("rejected", 10)]
    assert wasted == [
        ("left_over", "rejected", 1, 5),
        ("no_logprobs", "trained", 1, 7),
        ("zero_variance", "rejected", 1, 5),
    ]


@pytest.mark.parametrize("name", ["*", "$x", "/x", 'q"q', "verifier's"])
def test_an_agent_may_have_a_name_that_json_paths_give_a_meaning_to(tmp_path: Path, name: str) -> None:
    agents = {"prover": AGENTS["prover"], name: AGENTS["verifier's"]}
    rollout = RolloutSettings(environment="proof", agents=agents)
    made = [
        event.model_copy(update={"rollout": rollout}) if isinstance(event, JobStarted) else event for event in events()
    ]
    (found,) = answers(tmp_path, made, "SELECT agent, job_id FROM log.agent_jobs ORDER BY job_id = 'run-1/rl' DESC")
    assert found == [("prover", MAIN), (name, BESIDE)]
    assert answers(tmp_path, made, "SELECT count(*) FROM epochs", "SELECT count(*) FROM wasted_tokens")


def test_a_trajectory_that_waits_is_not_wasted_because_another_agents_was_rejected(tmp_path: Path) -> None:
    made = [event for event in events() if not (isinstance(event, BatchPlanned) and event.job_id == BESIDE)]
    rollouts = [ids.rollout_id(GROUP, number, 0) for number in range(2)]
    fields: dict[str, Any] = {"run_id": RUN, "time_ms": 1, "group_id": GROUP}
    started = [
        RolloutStarted(**fields, rollout_id=rollout, member=number, attempt=0, seed=1)
        for number, rollout in enumerate(rollouts)
    ]
    rejected = [
        TrajectoryRejected(
            **fields, job_id=BESIDE, epoch=0, rollout_id=rollout, cause="frozen",
            trajectory_id=ids.trajectory_id(rollout, "verifier's"), num_tokens=5,
        )
        for rollout in rollouts
    ]  # fmt: skip
    wasted, outcomes = answers(
        tmp_path,
        [*started, *made, *rejected],
        "SELECT cause, num_rollouts, num_tokens FROM wasted_tokens",
        "SELECT DISTINCT outcome FROM outcomes",
    )
    assert wasted == [("frozen", 2, 10)]
    assert outcomes == [("open",)]
