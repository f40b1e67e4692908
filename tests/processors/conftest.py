"""A partition of `groups` in a list, folded by curate as it grows, and short ways to write its records."""

from collections.abc import Iterable
from typing import Literal, TypeVar

import pytest

from rollstream.eventlog import codec
from rollstream.eventlog.log import Position, Received
from rollstream.processors.curate import fold as curate
from rollstream.schemas import ids
from rollstream.schemas.base import Event, Locator
from rollstream.schemas.events import (
    EpochStarted,
    GroupClosed,
    JobStarted,
    RollbackRequested,
    RunEnded,
    RunStarted,
    SubmissionReceived,
    TaskRequested,
)
from rollstream.schemas.events.rollouts import Policy
from rollstream.schemas.events.training import MemberRef, SubmittedGroup
from rollstream.schemas.settings import ArtifactRef, PlanSettings, RolloutSettings

E = TypeVar("E", bound=Event)


class GroupsPartition:
    """Records so far, the fold's state, and all that the fold has sent."""

    def __init__(self, num_examples=10):
        self.dataset = {f"x{number:03d}": {"number": number} for number in range(num_examples)}
        self.datasets = {}
        self.records = []
        self.sent = []
        self.state = curate.initial()
        self.time_ms = 1_000

    def write(self, event):
        """Append an event; returns what curate sends for it. Ends that curate sends to `groups` are appended too."""
        received = Received(event, codec.content_digest(event), Position("groups", 0, len(self.records)), 0)
        self.records.append(received)
        outputs = curate.evolve(self.state, received, self.datasets)
        self.sent += outputs
        for output in outputs:
            if isinstance(output, RunEnded):
                outputs = outputs + self.write(output)
        return outputs

    def start_run(self, run_id="run-1", *, seed=7, idle_timeout_s=3600.0):
        self.datasets[run_id] = self.dataset
        dataset = ArtifactRef(uri="memory:dataset", sha256="0" * 64, size_bytes=1)
        event = RunStarted(
            run_id=run_id,
            time_ms=self.time_ms,
            name="run",
            config={},
            seed=seed,
            dataset=dataset,
            num_examples=len(self.dataset),
            num_partitions=1,
            idle_timeout_s=idle_timeout_s,
        )
        return self.write(event)

    def start_job(self, run_id="run-1", name="rl", *, base_version=0, policy: Policy = "model", **plan):
        event = JobStarted(
            run_id=run_id,
            time_ms=self.time_ms,
            job_id=ids.job_id(run_id, name),
            model_group=ids.model_group(run_id, "policy"),
            base_version=base_version,
            plan=PlanSettings(**plan),
            rollout=RolloutSettings(environment="guess_number", policy=policy),
        )
        return self.write(event)

    def start_epoch(self, epoch=0, run_id="run-1", name="rl", num_tasks=0):
        job_id = ids.job_id(run_id, name)
        event = EpochStarted(run_id=run_id, time_ms=self.time_ms, job_id=job_id, epoch=epoch, num_tasks=num_tasks)
        return self.write(event)

    def start_submitted_epoch(self, epoch=0, run_id="run-1", num_tasks=3, num_rollouts=2, min_version=0):
        """An epoch whose tasks the harness itself asks for; returns them."""
        assert only(TaskRequested, self.start_epoch(epoch, run_id, num_tasks=num_tasks)) == []
        return [task_of(run_id, epoch, index, num_rollouts, min_version) for index in range(num_tasks)]

    def start(self, **plan):
        """A run, a job and its first epoch; returns the task requests."""
        self.start_run()
        self.start_job(**plan)
        return only(TaskRequested, self.start_epoch())

    def close(self, task, rewards, **changes):
        return self.write(closed(task, rewards, **changes))

    def submit(self, groups, epoch=0, run_id="run-1", **changes):
        """Groups as (group id, {trajectory id: reward})."""
        submitted = tuple(
            SubmittedGroup(group_id=group_id, trajectory_ids=tuple(rewards), rewards=tuple(rewards.values()))
            for group_id, rewards in groups
        )
        event = SubmissionReceived(
            run_id=run_id,
            time_ms=self.time_ms,
            job_id=ids.job_id(run_id, "rl"),
            submission_id=f"{run_id}/s{epoch}",
            epoch=epoch,
            groups=submitted,
            **changes,
        )
        return self.write(event)

    def roll_back(self, version, *, after=None, run_id="run-1", name="rl"):
        job = self.state.runs[run_id].jobs[f"{run_id}/{name}"]
        request = RollbackRequested(
            run_id=run_id,
            time_ms=self.time_ms,
            job_id=job.started.job_id,
            model_group=job.started.model_group,
            version=version,
            after_version=job.next_version if after is None else after,
        )
        return self.write(request)

    def end_run(self, run_id="run-1", cause: Literal["completed", "stopped"] = "completed"):
        return self.write(RunEnded(run_id=run_id, time_ms=self.time_ms, cause=cause))


def task_of(run_id, epoch, index, num_rollouts=2, min_version=0):
    """A task request as the harness writes it."""
    return TaskRequested(
        run_id=run_id,
        time_ms=1_000,
        group_id=ids.group_id(run_id, "rl", epoch, index),
        example_id=f"x{index:03d}",
        job_id=ids.job_id(run_id, "rl"),
        epoch=epoch,
        index=index,
        inputs={},
        num_rollouts=num_rollouts,
        minimum=1,
        seed=index,
        min_version=min_version,
        settings=RolloutSettings(environment="guess_number"),
    )


def member_of(group_id, number, reward, *, version=0, partition=0, **changes):
    rollout = ids.rollout_id(group_id, number, 0)
    fields = {
        "trajectory_id": ids.trajectory_id(rollout, "agent"),
        "rollout_id": rollout,
        "agent": "agent",
        "member": number,
        "digest": codec.canonical_digest([rollout, reward]),
        "reward": reward,
        "num_tokens": 20,
        "num_completion_tokens": 10,
        "min_version": version,
        "max_version": version,
    }
    return MemberRef(**(fields | changes))


def closed(task, rewards, *, version=None, members=None, **changes):
    """The GroupClosed of a task request, sampled at the oldest version that it allows."""
    at = task.min_version if version is None else version
    if members is None:
        members = tuple(member_of(task.group_id, number, reward, version=at) for number, reward in enumerate(rewards))
    fields = {
        "run_id": task.run_id,
        "time_ms": task.time_ms + 10,
        "group_id": task.group_id,
        "example_id": task.example_id,
        "job_id": task.job_id,
        "epoch": task.epoch,
        "index": task.index,
        "purpose": task.purpose,
        "policy": task.settings.policy,
        "reason": "complete",
        "is_viable": len(members) >= task.minimum,
        "size": task.num_rollouts,
        "members": members,
        "locators": tuple(Locator(partition=0, offset=task.index * 100 + index) for index in range(len(members))),
    }
    return GroupClosed(**(fields | changes))


def only(kind: type[E], events: Iterable[Event]) -> list[E]:
    return [event for event in events if isinstance(event, kind)]


@pytest.fixture(scope="session")
def new_partition():
    """Makes a fresh partition; stateless itself, so property tests may use it."""
    return GroupsPartition


@pytest.fixture
def partition():
    return GroupsPartition()


@pytest.fixture(scope="session")
def pick():
    """Events of one kind out of many."""
    return only


@pytest.fixture(scope="session")
def make_closed():
    """The GroupClosed of a task request."""
    return closed


@pytest.fixture(scope="session")
def make_member():
    """A member reference."""
    return member_of
