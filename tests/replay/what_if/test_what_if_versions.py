"""Versions in a what-if that leaves out a batch: rollbacks and the evaluation gate go by its own ones."""

from typing import Any

import pytest

from rollstream.replay.what_if.plan import filtering, replan
from rollstream.schemas import ids
from rollstream.schemas.events import BatchPlanned, TaskRequested
from rollstream.schemas.settings import CurriculumSettings, JobSettings, JobSpec, ModelSettings
from tests.processors.conftest import GroupsPartition, closed, member_of, only, task_of

PLAN: dict[str, Any] = {"tasks_per_epoch": 1, "num_generations": 2, "num_epochs": 5, "revision": 3}


class Recorded:
    """A run of one group an epoch, and its manifests in a what-if by other rewards."""

    def __init__(self, **plan):
        self.partition = GroupsPartition()
        self.partition.start_run()
        self.partition.start_job(**PLAN | plan)
        self.job = self.partition.records[-1].event

    def train(self, epoch, *, validation=None, version=None):
        if validation is not None:
            newest = self.partition.state.runs["run-1"].jobs["run-1/rl"].next_version
            name = ids.validation_group_id("run-1", "rl", epoch, "abcd1234", 0)
            task = task_of("run-1", epoch, 0, num_rollouts=1).model_copy(update={"group_id": name})
            member = member_of(name, 0, validation, version=newest)
            self.partition.write(closed(task, (), members=(member,), purpose="validation"))
        (task,) = only(TaskRequested, self.partition.start_epoch(epoch))
        self.partition.close(task, [0.0, 1.0], version=version)

    def what_if(self, left_out, **plan):
        """(epoch, version yielded, version adopted) of each manifest; these epochs' rewards are equal."""
        trajectories = [
            ids.trajectory_id(ids.rollout_id(ids.group_id("run-1", "rl", epoch, 0), number, 0), "agent")
            for epoch in left_out
            for number in range(2)
        ]
        spec = JobSpec(
            "other/rl",
            "other/policy",
            JobSettings(kind="rl", model=ModelSettings(path="model")),
            self.job.plan.model_copy(update=plan),
            self.job.rollout,
        )
        rewards = dict.fromkeys(trajectories, 0.5)
        made = replan(self.partition.records, self.job, spec, "other", rewards, self.partition.datasets)
        return manifests(made.events), made.rejected


def manifests(events):
    return [(one.epoch, one.yields_version, one.adopts) for one in only(BatchPlanned, events)]


def rolled_back(version):
    run = Recorded()
    for epoch in range(3):
        run.train(epoch)
    run.partition.start_epoch(3)
    run.partition.roll_back(version)
    (task,) = only(TaskRequested, run.partition.sent)[-1:]
    run.partition.close(task, [0.0, 1.0], version=3)
    run.train(4)
    return run


@pytest.mark.parametrize(
    ("left_out", "version", "planned"),
    [
        ([], 2, [(0, 1, None), (1, 2, None), (2, 3, None), (3, 4, 2), (4, 5, None)]),
        ([1], 2, [(0, 1, None), (2, 2, None), (3, 3, 1), (4, 4, None)]),
        ([1], 1, [(0, 1, None), (2, 2, None), (3, 3, 1), (4, 4, None)]),
        ([0, 1], 1, [(2, 1, None), (3, 2, 0), (4, 3, None)]),
        ([2], 2, [(0, 1, None), (1, 2, None), (3, 3, None), (4, 4, None)]),
    ],
)
def test_a_rollback_returns_to_what_was_planned_by_then_and_makes_stale_what_was_sampled_before(
    left_out, version, planned
):
    run = rolled_back(version)
    found, rejected = run.what_if(left_out)
    assert found == planned
    assert rejected.get("stale", 0) == (2 if any(adopts is not None for *_, adopts in planned) else 0)
    if not left_out:
        assert manifests(run.partition.sent) == planned


@pytest.mark.parametrize(
    ("left_out", "planned"),
    [
        ([], [(0, 1, None), (1, 2, None), (2, 3, 1), (2, 4, None)]),
        ([0], [(1, 1, None), (2, 2, 0), (2, 3, None)]),
    ],
)
def test_the_gate_judges_the_version_that_stands_for_the_one_that_was_validated(left_out, planned):
    run = Recorded(gate={"min_reward": 0.5})
    run.train(0)
    run.train(1, validation=1.0)
    run.train(2, validation=0.0)
    assert run.what_if(left_out)[0] == planned


def test_a_group_is_as_old_as_in_the_versions_of_the_what_if():
    run = Recorded(max_staleness=1)
    for epoch, version in enumerate([0, 1, 2, 2]):
        run.train(epoch, version=version)
    made, rejected = run.what_if([0], max_staleness=0)
    assert made == [(1, 1, None), (2, 2, None)]
    assert rejected["stale"] == 2


@pytest.mark.parametrize("name", ["seeded_subsample", "groups_by_example", "filter_single_group"])
def test_how_a_curriculum_filters_does_not_alone_make_it_filter(name):
    job = Recorded(curriculum=CurriculumSettings(enabled=True)).job
    changed = job.plan.curriculum.model_copy(update={name: False})
    settings = JobSettings(kind="rl", model=ModelSettings(path="model"))
    spec = JobSpec(
        "other/rl", "other/policy", settings, job.plan.model_copy(update={"curriculum": changed}), job.rollout
    )
    assert filtering(job, spec) is spec
