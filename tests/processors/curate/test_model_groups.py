"""Several model groups in a run: one job plans the tasks, and each is offered its own agents' trajectories of them."""

import pytest

from rollstream.processors.curate.curriculum import begin
from rollstream.schemas import ids
from rollstream.schemas.events import BatchPlanned, EpochSealed, JobStarted, TaskRequested, TrajectoryRejected
from rollstream.schemas.settings import CurriculumSettings, PlanSettings, RolloutSettings

MAIN, BESIDE = "run-1/rl", "run-1/rl-verifiers"
AGENTS = {"prover": "run-1/provers", "verifier": "run-1/verifiers", "judge": "run-1/judges"}


@pytest.fixture
def start(partition):
    """A run whose verifier is trained beside the prover; the judge is frozen. Returns the tasks of epoch 0."""

    def begun(*, agents=AGENTS, beside=None, base_version=0, **plan):
        partition.start_run()
        plan = {"tasks_per_epoch": 2, "num_generations": 2, **plan}
        rollout = RolloutSettings(environment="proof", agents=agents)
        for job_id, group, own in (
            (BESIDE, "run-1/verifiers", {"tasks_of": MAIN, **(beside or {})}),
            (MAIN, "run-1/provers", {}),
        ):
            partition.write(
                JobStarted(
                    run_id="run-1",
                    time_ms=1_000,
                    job_id=job_id,
                    model_group=group,
                    base_version=base_version if job_id == MAIN else 0,
                    plan=PlanSettings(**{**plan, **own}),
                    rollout=rollout,
                )
            )
        return [event for event in partition.start_epoch() if isinstance(event, TaskRequested)]

    return begun


@pytest.fixture
def close(partition, make_member):
    """Closes a task's group with a reward by agent for each of its rollouts."""

    def closed(task, *rewards, agents=AGENTS):
        members = []
        for number, by_agent in enumerate(rewards):
            for agent in agents:
                rollout = ids.rollout_id(task.group_id, number, 0)
                name = ids.trajectory_id(rollout, agent)
                version = task.wanted_version(agents[agent])
                members.append(
                    make_member(
                        task.group_id, number, by_agent[agent], version=version, agent=agent, trajectory_id=name
                    )
                )
        return partition.close(task, (), members=tuple(members), is_viable=True)

    return closed


def agents_of(batch):
    return {member.trajectory_id.rsplit("/", 1)[1] for member in batch.members}


GOOD = {"prover": 1.0, "verifier": 0.0, "judge": 0.5}
BAD = {"prover": 0.0, "verifier": 0.25, "judge": 0.5}


def test_a_job_beside_the_planning_one_asks_for_no_tasks_and_gets_its_own_agents(partition, start, close, pick):
    tasks = start()
    assert [task.job_id for task in tasks] == [MAIN, MAIN]
    outputs = [event for task in tasks for event in close(task, GOOD, BAD)]
    batches = {batch.job_id: batch for batch in pick(BatchPlanned, outputs)}
    assert {job: agents_of(batch) for job, batch in batches.items()} == {MAIN: {"prover"}, BESIDE: {"verifier"}}
    assert {job: batch.model_group for job, batch in batches.items()} == {
        MAIN: "run-1/provers",
        BESIDE: "run-1/verifiers",
    }
    assert all(len(batch.locators) == len(batch.members) == 4 for batch in batches.values())
    seals = pick(EpochSealed, outputs)
    assert [(seal.job_id, seal.epoch, seal.num_groups, seal.avg_reward) for seal in seals] == [
        (BESIDE, 0, 2, 0.125),
        (MAIN, 0, 2, 0.5),
    ]


def test_trajectories_of_a_frozen_model_group_are_in_the_ledger(start, close, pick):
    (first, _) = start()
    rejected = pick(TrajectoryRejected, close(first, GOOD, BAD))
    assert {(one.trajectory_id.rsplit("/", 1)[1], one.cause, one.job_id) for one in rejected} == {
        ("judge", "frozen", MAIN)
    }


def test_a_flat_agent_is_left_out_of_its_own_job_only(start, close, pick):
    tasks = start()
    flat = [{**GOOD, "verifier": 0.5}, {**BAD, "verifier": 0.5}]
    outputs = [*close(tasks[0], *flat), *close(tasks[1], GOOD, BAD)]
    assert {batch.job_id: len(batch.members) for batch in pick(BatchPlanned, outputs)} == {MAIN: 4, BESIDE: 2}
    flat_ones = [one for one in pick(TrajectoryRejected, outputs) if one.cause == "zero_variance"]
    assert {(one.job_id, one.group_id) for one in flat_ones} == {(BESIDE, tasks[0].group_id)}


def test_a_task_waits_for_a_version_of_each_model_group(partition, start, close):
    tasks = start(base_version=5, num_epochs=2)
    assert [(task.min_version, task.min_versions) for task in tasks] == [
        (5, {"run-1/judges": 0, "run-1/verifiers": 0})
    ] * 2
    close(tasks[0], {**GOOD, "verifier": 0.5}, {**BAD, "verifier": 0.5})
    close(tasks[1], {**GOOD, "verifier": 0.5}, {**BAD, "verifier": 0.5})
    requests = [event for event in partition.start_epoch(1) if isinstance(event, TaskRequested)]
    assert [(task.min_version, task.min_versions["run-1/verifiers"]) for task in requests] == [(6, 0)] * 2


def test_a_task_of_a_run_of_one_model_group_waits_for_one_version(partition, start, close, pick):
    agents = {"prover": "run-1/provers", "verifier": "run-1/verifiers"}
    tasks = start(agents=agents)
    (task, _) = tasks
    assert task.min_versions == {"run-1/verifiers": 0}
    partition.start_run("run-2")
    partition.start_job("run-2", tasks_per_epoch=1, num_generations=2)
    (alone,) = [event for event in partition.start_epoch(0, "run-2") if isinstance(event, TaskRequested)]
    assert alone.min_versions == {}
    assert b"min_versions" not in alone.model_dump_json().encode()


def test_the_curriculum_of_the_planning_job_counts_for_both(partition, start, close, pick):
    curriculum = CurriculumSettings(enabled=True, expansion_interval=1)
    tasks = start(num_epochs=2, curriculum=curriculum)
    seals = [seal for task in tasks for seal in pick(EpochSealed, close(task, GOOD, BAD))]
    assert {seal.curriculum_percentile for seal in seals} == {0.5}
    assert begin(curriculum).percentile == 0.3


def test_the_end_of_the_run_rejects_what_waits_of_both_jobs(partition, start, close, pick):
    (first, _) = start()
    close(first, GOOD, BAD)
    ended = pick(TrajectoryRejected, partition.end_run())
    assert {(one.job_id, one.cause, one.trajectory_id.rsplit("/", 1)[1]) for one in ended} == {
        (MAIN, "run_ended", "prover"),
        (BESIDE, "run_ended", "verifier"),
    }
