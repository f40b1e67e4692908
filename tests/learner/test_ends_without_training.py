"""Ends of jobs without a batch: failed with the causes, unless the curriculum alone left nothing to train on."""

import asyncio
from typing import Any

import pytest

from rollstream.learner.untrained import EMPTY, NOTHING_SUBMITTED, Untrained
from rollstream.schemas.events import (
    JobFailed,
    JobStarted,
    JobSubmitted,
    JobSucceeded,
    SubmissionReceived,
    TrajectoryRejected,
)
from rollstream.schemas.events.training import RejectionCause
from rollstream.schemas.settings import PlanSettings, RolloutSettings


async def error_of(lab: Any) -> str:
    await lab.work(lab.has(JobFailed))
    (failed,) = await lab.events("jobs", JobFailed)
    return failed.error


def rejected(job: JobSubmitted, cause: RejectionCause, count: int) -> list[TrajectoryRejected]:
    of_job = {"run_id": job.run_id, "time_ms": 5, "job_id": job.job_id, "epoch": 0, "num_tokens": 1, "cause": cause}
    names = [{"group_id": f"g{n}", "rollout_id": f"g{n}/m0", "trajectory_id": f"{cause}{n}"} for n in range(count)]
    return [TrajectoryRejected.model_validate(of_job | name) for name in names]


def submitted_nothing(job: JobSubmitted, num_empty: dict[str, int]) -> SubmissionReceived:
    of_job = {"run_id": job.run_id, "time_ms": 5, "job_id": job.job_id, "epoch": 0, "submission_id": "s0"}
    return SubmissionReceived.model_validate(of_job | {"groups": (), "is_last": True, "num_empty": num_empty})


def test_a_job_that_trained_nothing_fails_with_the_causes(lab: Any) -> None:
    async def scenario() -> None:
        job = await lab.submit()
        await lab.log.send_all([*rejected(job, "zero_variance", 3), *rejected(job, "curriculum", 1)])
        await lab.seal(job, 0)
        reason = await error_of(lab)
        assert reason.startswith("nothing was trained (3 trajectories rejected: zero_variance, 1 trajectory rejected")
        assert reason.endswith("raise num_generations or the temperature, or change the reward")
        await lab.work(lab.has(JobFailed))  # a whole start more
        assert not await lab.events("jobs", JobSucceeded)
        assert len(await lab.events("jobs", JobFailed)) == 1

    asyncio.run(scenario())


def test_a_frozen_group_is_the_cause_only_without_another_one(lab: Any) -> None:
    async def scenario() -> None:
        job = await lab.submit()
        found = Untrained(job.job_id)
        for event in rejected(job, "frozen", 3):
            found.take(event)
        assert (found.is_curriculum_alone, found.counts) == (False, "3 trajectories rejected: frozen")
        for event in rejected(job, "zero_variance", 1):
            found.take(event)
        assert (found.is_curriculum_alone, found.counts) == (False, "1 trajectory rejected: zero_variance")
        assert found.reason.endswith("raise num_generations or the temperature, or change the reward")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("environment", "remedy"),
    [
        ("guess_number", "the environment made no model call: let it answer with `session.chat`"),
        ("command:python agent.py", "the environment made no model call"),
        ("recorded", "point the llm's base_url at the adapter's `endpoint`"),
        ("remote_workflow", "point the llm's base_url at the adapter's `endpoint`"),
    ],
)
def test_an_environment_without_model_calls_has_another_remedy_than_calls_without_token_ids(
    lab: Any, environment: str, remedy: str
) -> None:
    async def scenario() -> None:
        job = await lab.submit()
        found = Untrained(job.job_id)
        rollout = RolloutSettings(environment=environment)
        of_job = {"run_id": job.run_id, "time_ms": 1, "job_id": job.job_id, "model_group": job.model_group}
        found.take(JobStarted(**of_job, base_version=0, plan=PlanSettings(), rollout=rollout))
        for event in rejected(job, "no_token_ids", 2):
            found.take(event)
        assert f"2 trajectories rejected: no_token_ids); {remedy}" in found.reason

    asyncio.run(scenario())


@pytest.mark.parametrize("cause", ["no_trajectories", "nothing_submitted", None])
def test_a_job_that_was_given_nothing_fails(lab: Any, cause: str | None) -> None:
    async def scenario() -> None:
        job = await lab.submit()
        await lab.log.send(submitted_nothing(job, {} if cause is None else {cause: 1}))
        await lab.seal(job, 0)
        assert EMPTY[cause or NOTHING_SUBMITTED].format("1 epoch") in await error_of(lab)

    asyncio.run(scenario())


@pytest.mark.parametrize("beside", ["validation", "frozen", None])
def test_a_job_that_the_curriculum_alone_left_nothing_succeeds_with_its_base_version(
    lab: Any, beside: RejectionCause | None
) -> None:
    async def scenario() -> None:
        job = await lab.submit()
        await lab.log.send_all([submitted_nothing(job, {"curriculum": 1}), *rejected(job, "curriculum", 2)])
        await lab.log.send_all(rejected(job, beside, 2) if beside else [])
        await lab.seal(job, 0)
        await lab.work(lab.has(JobSucceeded))
        assert (await lab.events("jobs", JobSucceeded))[0].final_version == 0

    asyncio.run(scenario())
