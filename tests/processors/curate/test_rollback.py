"""A rollback in curation: a manifest without members, at which what was sampled before it becomes stale."""

import pytest

from rollstream.eventlog import codec
from rollstream.schemas.events import BatchPlanned, EpochSealed, TaskRequested, TrajectoryRejected

TWO_BATCHES = {"tasks_per_epoch": 4, "batches_per_epoch": 2, "max_staleness": 3, "num_generations": 2}


def trained(partition, pick, epochs, **plan):
    """The tasks of the epoch after `epochs` sealed ones of one batch each."""
    tasks = partition.start(tasks_per_epoch=1, num_generations=2, num_epochs=9, **plan)
    for epoch in range(1, epochs + 1):
        partition.close(tasks[0], [0.0, 1.0], version=tasks[0].min_version)
        tasks = pick(TaskRequested, partition.start_epoch(epoch))
    return tasks


def test_a_rollback_is_the_next_manifest_and_yields_the_next_version(partition, pick):
    trained(partition, pick, 3)
    last = pick(BatchPlanned, partition.sent)[-1]
    (batch,) = partition.roll_back(1)
    assert (batch.index, batch.trains_at_version, batch.yields_version, batch.adopts) == (3, 3, 4, 1)
    assert (batch.members, batch.locators, batch.epoch) == ((), (), 3)
    assert batch.previous_sha256 == codec.content_digest(last)


def test_samples_of_an_abandoned_version_are_stale_whatever_the_bound(partition, pick):
    tasks = partition.start(num_epochs=2, **TWO_BATCHES)
    partition.close(tasks[0], [0.0, 1.0], version=0)
    partition.close(tasks[1], [0.0, 1.0], version=0)
    assert partition.close(tasks[2], [0.0, 1.0], version=1) == []
    (batch,) = partition.roll_back(0)
    assert batch.yields_version == 2
    outputs = partition.close(tasks[3], [0.0, 1.0], version=1)
    assert [event.cause for event in pick(TrajectoryRejected, outputs)] == ["stale"] * 4
    (sealed,) = pick(EpochSealed, outputs)
    assert (sealed.num_batches, sealed.num_trained_groups, sealed.next_batch_index) == (1, 2, 2)
    assert {task.min_version for task in pick(TaskRequested, partition.start_epoch(1))} == {2}


def test_at_staleness_zero_the_epoch_under_way_is_sealed_empty_and_the_next_waits_for_the_rollback(partition, pick):
    (task,) = trained(partition, pick, 2)
    assert task.min_version == 2
    partition.roll_back(1)
    outputs = partition.close(task, [0.0, 1.0], version=2)
    assert [type(event) for event in outputs] == [TrajectoryRejected, TrajectoryRejected, EpochSealed]
    (task,) = pick(TaskRequested, partition.start_epoch(3))
    assert task.min_version == 3
    batch, _ = partition.close(task, [0.0, 1.0], version=3)
    assert (batch.trains_at_version, batch.members[0].staleness) == (3, 0)


def test_a_repeated_request_is_one_rollback_and_a_later_one_another(partition, pick):
    trained(partition, pick, 3)
    assert len(partition.roll_back(1, after=3)) == 1
    assert partition.roll_back(1, after=3) == []
    assert partition.roll_back(0, after=3) == [], "it was requested before the rollback to version 1"
    (batch,) = partition.roll_back(0, after=4)
    assert (batch.yields_version, batch.adopts) == (5, 0)
    (batch,) = partition.roll_back(4, after=5)
    assert (batch.yields_version, batch.adopts) == (6, 4)


@pytest.mark.parametrize(("revision", "counted"), [(3, [0, 0, 0, 0, 1, 2]), (2, [0] * 6)])
def test_a_manifest_counts_the_rollbacks_before_it_unless_its_plan_is_older(partition, pick, revision, counted):
    (task,) = trained(partition, pick, 3, revision=revision)
    partition.roll_back(1)
    partition.roll_back(0)
    partition.close(task, [0.0, 1.0], version=3)
    (task,) = pick(TaskRequested, partition.start_epoch(4))
    partition.close(task, [0.0, 1.0], version=5)
    assert [batch.num_adopted for batch in pick(BatchPlanned, partition.sent)] == counted


@pytest.mark.parametrize("version", [0, 1, 5, 6, 99])
def test_a_version_that_the_job_does_not_have_is_not_adopted(partition, pick, version):
    trained(partition, pick, 3, base_version=2)  # versions 2 to 5; the newest one is not an earlier one
    assert partition.roll_back(version) == []


def test_nothing_is_adopted_before_the_first_batch_after_the_last_epoch_or_after_the_run(partition, pick):
    (task,) = partition.start(tasks_per_epoch=1, num_generations=2, num_epochs=1)
    assert partition.roll_back(0) == []
    partition.close(task, [0.0, 1.0])
    assert partition.roll_back(0) == []
    request = partition.records[-1].event
    partition.end_run()
    assert partition.write(request) == []


def test_demonstrations_outlive_a_rollback(partition, make_member):
    plan = {"tasks_per_epoch": 4, "batches_per_epoch": 2, "max_staleness": 2, "num_generations": 1}
    tasks = partition.start(policy="demonstration", min_generations=1, **plan)
    for task in tasks[:3]:
        partition.close(task, (), members=(make_member(task.group_id, 0, 1.0, has_logprobs=False),))
    partition.roll_back(0)
    batch, _ = partition.close(tasks[3], (), members=(make_member(tasks[3].group_id, 0, 1.0, has_logprobs=False),))
    assert (batch.trains_at_version, len(batch.members)) == (2, 2)
