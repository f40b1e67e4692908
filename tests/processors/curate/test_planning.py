"""Planning of manifests from closed groups: order, hash chain, staleness, carry-over, submissions, rejection causes."""

from dataclasses import fields
from typing import ClassVar

import pytest

from rollstream.eventlog import codec
from rollstream.processors.curate.candidates import Candidate
from rollstream.processors.curate.state import num_batches
from rollstream.schemas import ids
from rollstream.schemas.events import BatchPlanned, EpochSealed, TaskCancelled, TaskRequested, TrajectoryRejected
from rollstream.schemas.settings import PlanSettings

TWO_BATCHES = {"tasks_per_epoch": 4, "batches_per_epoch": 2, "max_staleness": 1, "num_generations": 2}


def causes(events):
    return [(event.group_id[-6:], event.cause) for event in events if isinstance(event, TrajectoryRejected)]


def groups_in(batch):
    return list(dict.fromkeys(int(member.group_id[-5:]) for member in batch.members))


def test_an_epoch_at_staleness_zero_is_one_batch_in_task_order(partition):
    tasks = partition.start(tasks_per_epoch=3, num_generations=2, base_version=4)
    for task in (tasks[2], tasks[0]):
        assert partition.close(task, [0.0, 1.0]) == []
    batch, sealed = partition.close(tasks[1], [0.5, 1.0])
    assert groups_in(batch) == [0, 1, 2]
    assert [locator.offset for locator in batch.locators] == [0, 1, 100, 101, 200, 201]
    assert (batch.index, batch.trains_at_version, batch.yields_version) == (0, 4, 5)
    assert batch.previous_sha256 == codec.EMPTY_SHA256
    assert batch.seed == ids.derive_seed(7, batch.batch_id)
    assert [member.staleness for member in batch.members] == [0] * 6
    assert [member.reward for member in batch.members] == [0.0, 1.0, 0.5, 1.0, 0.0, 1.0]
    assert isinstance(sealed, EpochSealed)
    assert (sealed.num_groups, sealed.num_trained_groups, sealed.num_batches, sealed.next_batch_index) == (3, 3, 1, 1)
    assert sealed.avg_reward == sealed.filtered_avg_reward == pytest.approx((0.5 + 0.75 + 0.5) / 3)
    assert sealed.is_last
    assert sealed.curriculum_percentile == 1.0


def test_manifests_are_chained_by_the_digest_of_the_one_before(partition, pick):
    tasks = partition.start(tasks_per_epoch=1, num_generations=2, num_epochs=3)
    for epoch in range(1, 3):
        partition.close(tasks[0], [0.0, 1.0])
        tasks = partition.start_epoch(epoch)
    partition.close(tasks[0], [0.0, 1.0])
    first, second, third = pick(BatchPlanned, partition.sent)
    assert second.previous_sha256 == codec.content_digest(first)
    assert third.previous_sha256 == codec.content_digest(second)
    assert [batch.trains_at_version for batch in (first, second, third)] == [0, 1, 2]
    assert [sealed.is_last for sealed in pick(EpochSealed, partition.sent)] == [False, False, True]


def test_untrainable_trajectories_are_rejected_with_their_cause(partition, make_member):
    tasks = partition.start(tasks_per_epoch=6, num_generations=3)
    assert causes(partition.close(tasks[0], [1.0])) == [("t00000", "not_viable")]
    assert causes(partition.close(tasks[1], [1.0, 1.0])) == [("t00001", "zero_variance")] * 2
    mixed = (
        make_member(tasks[2].group_id, 0, 0.0),
        make_member(tasks[2].group_id, 1, 0.5, num_completion_tokens=0),
        make_member(tasks[2].group_id, 2, 1.0),
    )
    assert causes(partition.close(tasks[2], (), members=mixed)) == [("t00002", "no_token_ids")]
    blind = tuple(make_member(tasks[3].group_id, member, member, has_logprobs=member == 0) for member in range(3))
    assert causes(partition.close(tasks[3], (), members=blind)) == [
        ("t00003", "no_logprobs"),
        ("t00003", "no_logprobs"),
        ("t00003", "not_viable"),
    ]
    assert partition.close(tasks[4], (), reason="failed") == []
    batch, sealed = partition.close(tasks[5], [0.0, 1.0, 0.5])
    assert groups_in(batch) == [2, 5]
    assert [member.rollout_id[-5:-3] for member in batch.members] == ["m0", "m2", "m0", "m1", "m2"]
    assert (sealed.num_groups, sealed.num_trained_groups, sealed.zero_variance_groups) == (6, 2, 1)
    assert sealed.avg_reward == pytest.approx((1.0 + 0.5 + 1.0 + 0.5) / 4)
    assert sealed.filtered_avg_reward == 0.5


def test_demonstrations_need_neither_variance_nor_log_probabilities_nor_fresh_versions(partition, make_member):
    plan = {"tasks_per_epoch": 2, "num_generations": 1, "min_generations": 1, "num_epochs": 2}
    tasks = partition.start(policy="demonstration", base_version=9, **plan)
    assert [task.min_version for task in tasks] == [9, 9]
    first, last = [
        partition.close(task, (), members=(make_member(task.group_id, 0, 1.0, has_logprobs=False),)) for task in tasks
    ]
    assert first == []
    batch, sealed = last
    assert [member.staleness for member in batch.members] == [0, 0]
    assert sealed.zero_variance_groups == 2


def test_agents_of_one_group_are_compared_each_with_itself(partition, make_member):
    (task,) = partition.start(tasks_per_epoch=1, num_generations=2)
    members = tuple(
        make_member(task.group_id, number, reward, agent=agent, trajectory_id=f"{task.group_id}/m{number}/a0/{agent}")
        for agent, reward in (("x", 0.0), ("o", 1.0))
        for number in range(2)
    )
    assert {cause for _, cause in causes(partition.close(task, (), members=members))} == {"zero_variance"}


@pytest.mark.parametrize("is_adaptive", [True, False])
@pytest.mark.parametrize(("revision", "is_judged_by_agent"), [(3, False), (4, True)])
def test_the_curriculum_compares_rewards_of_one_agent_since_revision_4(
    partition, make_member, pick, is_adaptive, revision, is_judged_by_agent
):
    """In a zero-sum game each rollout's mean is the same: in the first example each agent wins once, in the second
    "x" always wins."""
    plan = {"tasks_per_epoch": 2, "num_generations": 2, "num_epochs": 2, "drop_zero_variance": False}
    curriculum = {"enabled": True, "steer": is_adaptive, "initial_percentile": 1.0, "explore_share": 0.0}
    partition.dataset = {name: {"name": name} for name in ("balanced", "unbalanced")}
    tasks = partition.start(**plan, revision=revision, curriculum=curriculum)
    balanced, unbalanced = sorted(tasks, key=lambda task: task.example_id)

    def played(task, winners):
        rewards = [(number, agent, float(agent == winner)) for number, winner in enumerate(winners) for agent in "xo"]
        name = f"{task.group_id}/m{{}}/a0/{{}}"
        return tuple(
            make_member(task.group_id, number, reward, agent=agent, trajectory_id=name.format(number, agent))
            for number, agent, reward in rewards
        )

    outputs = [*partition.close(balanced, (), members=played(balanced, "xo"))]
    outputs += partition.close(unbalanced, (), members=played(unbalanced, "xx"))
    expected = {"balanced"} if is_judged_by_agent else {"balanced", "unbalanced"}
    if is_adaptive:
        assert {task.example_id for task in pick(TaskRequested, partition.start_epoch(1))} == expected
    else:
        trained = {tasks[index].example_id for index in groups_in(pick(BatchPlanned, outputs)[0])}
        assert trained == expected


def test_an_epoch_without_a_trainable_group_is_sealed_empty(partition, pick):
    tasks = partition.start(tasks_per_epoch=2, num_generations=2)
    partition.close(tasks[0], ())
    outputs = partition.close(tasks[1], ())
    assert pick(BatchPlanned, outputs) == []
    (sealed,) = pick(EpochSealed, outputs)
    assert (sealed.avg_reward, sealed.filtered_avg_reward, sealed.num_batches) == (None, None, 0)


def test_batches_fill_in_record_order_and_are_ordered_by_task(partition):
    tasks = partition.start(**TWO_BATCHES)
    assert [task.min_version for task in tasks] == [0, 0, 0, 0]
    partition.close(tasks[3], [0.0, 1.0])
    (first,) = partition.close(tasks[1], [0.0, 1.0])
    assert groups_in(first) == [1, 3]
    assert partition.close(tasks[0], [0.0, 1.0]) == []
    second, sealed = partition.close(tasks[2], [0.0, 1.0], version=1)
    assert groups_in(second) == [0, 2]
    assert [member.staleness for member in second.members] == [1, 1, 0, 0]
    assert (sealed.num_batches, sealed.next_batch_index) == (2, 2)


def test_a_closing_checks_only_its_own_group_for_staleness_until_the_next_version(partition):
    class Counted(Candidate):
        checked: ClassVar[list[int]] = []

        def is_stale(self, version, bound, oldest=0):
            self.checked.append(self.index)
            return super().is_stale(version, bound, oldest)

    tasks = partition.start(**TWO_BATCHES | {"tasks_per_epoch": 8})
    job = partition.state.runs["run-1"].jobs["run-1/rl"]
    for task in tasks[:3]:
        partition.close(task, [0.0, 1.0])
        job.ready[-1] = Counted(*(getattr(job.ready[-1], one.name) for one in fields(Candidate)))
    assert Counted.checked == []
    (batch,) = partition.close(tasks[3], [0.0, 1.0])
    assert groups_in(batch) == [0, 1, 2, 3]


def test_left_over_groups_are_carried_into_the_next_epoch_while_they_are_fresh(partition):
    tasks = partition.start(num_epochs=2, **TWO_BATCHES)
    for task in tasks[:3]:
        partition.close(task, [0.0, 1.0])
    (_, _, sealed) = partition.close(tasks[3], [1.0, 1.0])
    assert (sealed.num_batches, sealed.num_trained_groups) == (1, 2)
    tasks = partition.start_epoch(1)
    assert [task.min_version for task in tasks] == [0, 1, 1, 1]
    (batch,) = partition.close(tasks[1], [0.0, 1.0])
    assert [member.group_id[-13:] for member in batch.members[::2]] == ["e00000/t00002", "e00001/t00001"]
    assert [member.staleness for member in batch.members] == [1, 1, 0, 0]


@pytest.mark.parametrize(("num_tasks", "batches_per_epoch"), [(4, 2), (8, 3), (5, 4), (2, 4), (10, 4), (3, 1)])
def test_a_plan_knows_how_many_batches_its_groups_fill(partition, pick, num_tasks, batches_per_epoch):
    how = {"tasks_per_epoch": num_tasks, "batches_per_epoch": batches_per_epoch, "max_staleness": 9, "num_epochs": 5}
    tasks, batches = partition.start(num_generations=2, **how), []
    for epoch in range(5):
        for task in tasks if epoch == 0 else partition.start_epoch(epoch):
            batches += pick(BatchPlanned, partition.close(task, [0.0, 1.0], version=task.min_version))
    assert len(batches) == num_batches(PlanSettings(**how))


def test_carried_groups_are_rejected_when_they_grow_too_old_or_the_job_ends(partition):
    plan = {"tasks_per_epoch": 4, "batches_per_epoch": 2, "max_staleness": 1, "num_generations": 2, "num_epochs": 2}
    tasks = partition.start(**plan)
    for task in tasks[:3]:
        partition.close(task, [0.0, 1.0], version=0)
    partition.close(tasks[3], [0.0, 0.0])
    tasks = partition.start_epoch(1)
    fresh = [partition.close(task, [0.0, 1.0], version=1) for task in tasks[:2]]
    assert [len(outputs) for outputs in fresh] == [1, 0]
    assert partition.close(tasks[2], [0.0, 1.0], version=0, members=None)[0].cause == "stale"
    outputs = partition.close(tasks[3], (), version=1)
    assert causes(outputs) == [("t00001", "left_over")] * 2
    assert outputs[-1].is_last


def test_a_group_older_than_the_bound_is_rejected_stale_as_a_whole(partition, make_member):
    tasks = partition.start(base_version=5, tasks_per_epoch=1, num_generations=2, max_staleness=2)
    assert tasks[0].min_version == 5
    members = tuple(make_member(tasks[0].group_id, number, number, version=2 + number) for number in range(2))
    assert causes(partition.close(tasks[0], (), members=members)) == [("t00000", "stale")] * 2


def submitted_job(partition, **plan):
    partition.start_run()
    partition.start_job(planning="submitted", num_generations=2, **plan)


def everything(tasks, reward=0.5):
    return [(task.group_id, {f"{task.group_id}/m{number}/a0/agent": reward for number in range(2)}) for task in tasks]


def test_a_submission_is_planned_in_its_order_with_its_rewards_and_the_rest_is_rejected(partition, pick):
    submitted_job(partition)
    tasks = partition.start_submitted_epoch(num_tasks=3)
    for task in tasks:
        assert partition.close(task, [1.0, 1.0]) == []
    trajectory = {(task.index, number): f"{task.group_id}/m{number}/a0/agent" for task in tasks for number in range(2)}
    outputs = partition.submit(
        [
            (tasks[2].group_id, {trajectory[2, 1]: 0.25, "unknown": 1.0, trajectory[2, 0]: 0.75}),
            (tasks[0].group_id, {trajectory[0, 1]: 0.5}),
            ("unknown", {"unknown": 1.0}),
        ]
    )
    assert causes(outputs) == [("t00000", "curriculum"), ("t00001", "curriculum"), ("t00001", "curriculum")]
    (batch,) = pick(BatchPlanned, outputs)
    assert [member.trajectory_id for member in batch.members] == [trajectory[2, 1], trajectory[2, 0], trajectory[0, 1]]
    assert [member.reward for member in batch.members] == [0.25, 0.75, 0.5]
    assert [locator.offset for locator in batch.locators] == [201, 200, 1]
    assert isinstance(outputs[-1], EpochSealed)
    assert outputs[-1].filtered_avg_reward == 0.5
    assert partition.submit([(tasks[1].group_id, {trajectory[1, 0]: 1.0})]) == []


@pytest.mark.parametrize("is_first_whole", [True, False])
def test_the_parts_of_a_submission_count_once_it_is_complete(partition, is_first_whole):
    submitted_job(partition, curriculum={"enabled": True})
    tasks = partition.start_submitted_epoch(num_tasks=4)
    for task in tasks:
        partition.close(task, [0.0, 1.0])
    names = [f"{task.group_id}/m{number}/a0/agent" for task in tasks for number in range(2)]
    for num_before, part in enumerate((names[:2], names[6:])):  # a submitter that was killed before the last record
        assert partition.submit([], not_offered=part, num_before=num_before, is_part=True) == []
    if is_first_whole:
        outputs = partition.submit([], not_offered=names[2:3])
    else:
        assert partition.submit([], not_offered=names[2:3], is_part=True) == []
        outputs = partition.submit([], not_offered=names[4:5], num_before=1)
    withheld = [event.trajectory_id for event in outputs[:-1] if event.cause == "not_submitted"]
    assert withheld == (names[2:3] if is_first_whole else [names[2], names[4]])
    assert len(outputs) == 8 + 1


def test_a_group_that_closes_after_its_epoch_was_submitted_is_late(partition, pick):
    submitted_job(partition, num_epochs=2)
    tasks = partition.start_submitted_epoch(num_tasks=2)
    partition.close(tasks[0], [0.0, 1.0])
    outputs = partition.submit(everything(tasks[:1]))
    assert (len(pick(BatchPlanned, outputs)), len(pick(EpochSealed, outputs))) == (1, 1)
    outputs = partition.close(tasks[1], [0.0, 1.0])
    assert causes(outputs) == [("t00001", "late")] * 2
    assert partition.close(tasks[1], [0.0, 1.0]) == []


def test_an_empty_submission_seals_its_epoch_empty(partition, pick):
    submitted_job(partition)
    (task,) = partition.start_submitted_epoch(num_tasks=1)
    partition.close(task, [0.0, 1.0])
    outputs = partition.submit([], curriculum_percentile=0.3)
    assert causes(outputs) == [("t00000", "curriculum")] * 2
    (sealed,) = pick(EpochSealed, outputs)
    assert (sealed.num_batches, sealed.curriculum_percentile, sealed.is_last) == (0, 0.3, True)


def test_a_seal_has_the_submitters_curriculum_percentile_and_whether_it_is_the_last(partition, pick):
    submitted_job(partition, num_epochs=9, curriculum={"enabled": True})
    for epoch in range(3):
        tasks = partition.start_submitted_epoch(epoch, num_tasks=2, min_version=epoch)
        for task in tasks:
            partition.close(task, [0.0, 1.0])
        partition.submit(everything(tasks), epoch, curriculum_percentile=0.3 + epoch / 10, is_last=epoch == 2)
    sealed = pick(EpochSealed, partition.sent)
    assert [one.curriculum_percentile for one in sealed] == [0.3, 0.4, 0.5]
    assert [one.is_last for one in sealed] == [False, False, True]
    assert [batch.trains_at_version for batch in pick(BatchPlanned, partition.sent)] == [0, 1, 2]


def test_epochs_may_overlap_within_the_staleness_bound(partition, pick):
    submitted_job(partition, num_epochs=2, max_staleness=1)
    first = partition.start_submitted_epoch(0, num_tasks=1)
    second = partition.start_submitted_epoch(1, num_tasks=1)
    for task in (*first, *second):
        partition.close(task, [0.0, 1.0])
    partition.submit(everything(first), 0)
    partition.submit(everything(second), 1)
    batches = pick(BatchPlanned, partition.sent)
    assert [[member.staleness for member in batch.members] for batch in batches] == [[0, 0], [1, 1]]


def test_a_run_that_ends_before_its_submission_leaves_every_trajectory_one_outcome(partition, pick):
    submitted_job(partition)
    tasks = partition.start_submitted_epoch(num_tasks=2)
    partition.close(tasks[0], [0.0, 1.0])
    outputs = partition.end_run(cause="stopped")
    assert causes(outputs) == [("t00000", "run_ended")] * 2
    assert [event.group_id for event in pick(TaskCancelled, outputs)] == [tasks[1].group_id]
    assert causes(partition.close(tasks[1], [0.0, 1.0])) == [("t00001", "run_ended")] * 2
    stray = tasks[0].model_copy(update={"group_id": "run-1/rl/recorded/t00000"})
    assert causes(partition.close(stray, [0.0, 1.0])) == [("t00000", "run_ended")] * 2
    for task in (*tasks, stray):
        assert partition.close(task, [0.0, 1.0]) == []


def test_without_steering_an_epoch_is_filtered_when_it_is_all_there(partition, pick):
    curriculum = {"enabled": True, "steer": False}
    tasks = partition.start(tasks_per_epoch=5, num_generations=2, curriculum=curriculum)
    for task, rewards in zip(tasks, ([0.0, 0.2], [0.0, 0.0], [0.8, 1.0], [0.5, 0.7]), strict=False):
        assert partition.close(task, rewards) == []
    outputs = partition.close(tasks[4], [0.5, 0.55])
    assert causes(outputs) == [
        *[("t00000", "curriculum")] * 2,
        *[("t00001", "zero_variance")] * 2,
        *[("t00003", "curriculum")] * 2,
        *[("t00004", "curriculum")] * 2,
    ]
    assert groups_in(pick(BatchPlanned, outputs)[0]) == [2]
    assert pick(EpochSealed, outputs)[0].curriculum_percentile == 0.3


@pytest.mark.parametrize(("knows", "nats", "is_kept"), [(True, False, False), (True, True, True), (False, False, True)])
def test_a_single_group_is_filtered_only_by_a_plan_that_knows_of_it(partition, pick, knows, nats, is_kept):
    curriculum = {"enabled": True, "steer": False, "filter_single_group": not nats}
    (task,) = partition.start(tasks_per_epoch=1, num_generations=2, curriculum=curriculum, knows_single_group=knows)
    assert bool(pick(BatchPlanned, partition.close(task, [0.5, 0.55]))) == is_kept


def test_a_plan_that_compares_answers_takes_single_rollouts_without_log_probabilities(partition, make_member):
    plan = {"drop_zero_variance": False, "needs_logprobs": False, "num_generations": 1}
    tasks = partition.start(tasks_per_epoch=2, **plan)
    blind = (make_member(tasks[0].group_id, 0, 1.0, has_logprobs=False),)
    assert partition.close(tasks[0], (), members=blind) == []
    empty = (make_member(tasks[1].group_id, 0, 1.0, num_completion_tokens=0),)
    *rejected, batch, sealed = partition.close(tasks[1], (), members=empty)
    assert [cause for _, cause in causes(rejected)] == ["no_token_ids"]
    assert groups_in(batch) == [0]
    assert (sealed.num_trained_groups, sealed.zero_variance_groups) == (1, 2)


@pytest.mark.parametrize(
    ("plan", "asked"),
    [
        ({"has_recorded_sizes": True}, [(1, 1, 0), (3, 2, 0), (4, 2, 0), (4, 2, 0)]),
        ({"has_recorded_sizes": True, "oversampling": 2}, [(1, 1, 0), (3, 2, 0), (5, 2, 4), (6, 2, 4)]),
        ({}, [(4, 2, 0)] * 4),
    ],
)
def test_a_task_asks_for_as_many_rollouts_as_its_example_has_recorded(partition, plan, asked):
    recorded = {size: [{"rollout": {"steps": []}}] * size for size in (1, 3, 5, 0)}
    partition.dataset = {f"x{size}": {"recorded": members} for size, members in recorded.items()}
    tasks = partition.start(tasks_per_epoch=4, num_generations=4, **plan)
    assert sorted((task.num_rollouts, task.minimum, task.enough) for task in tasks) == asked


@pytest.mark.parametrize(("revision", "num_trained"), [(2, 6), (1, 0)])
def test_a_group_smaller_than_the_minimum_is_trained_on_if_all_of_it_is_complete(
    partition, pick, revision, num_trained
):
    partition.dataset = {name: {"recorded": [{"rollout": {}}] * 3} for name in ("x0", "x1", "x2")}
    plan = {"num_generations": 8, "min_generations": 4, "has_recorded_sizes": True, "revision": revision}
    tasks = partition.start(tasks_per_epoch=3, **plan)
    outputs = [event for task in tasks[:2] for event in partition.close(task, [0.0, 0.5, 1.0])]
    outputs += partition.close(tasks[2], [0.0, 1.0])
    assert ("t00002", "not_viable") in causes(outputs)
    assert sum(len(batch.members) for batch in pick(BatchPlanned, outputs)) == num_trained
