"""Properties of any run: each trajectory ends in one place, manifests chain, replay and restart answer the same."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.eventlog import codec
from rollstream.processors.curate import fold as curate
from rollstream.schemas.events import (
    BatchPlanned,
    EpochSealed,
    EpochStarted,
    GroupClosed,
    RunEnded,
    SubmissionReceived,
    TaskRequested,
    TrajectoryRejected,
)
from tests.processors.curate.any_run import PLANS, RANDOMS, simulate


def folded(partition, state, records):
    """Events that curate sends for each record."""
    return [
        [codec.encode(event).value for event in curate.evolve(state, received, partition.datasets)]
        for received in records
    ]


@settings(max_examples=150)
@given(plans=st.lists(PLANS, min_size=1, max_size=2), random=RANDOMS)
def test_every_complete_trajectory_is_planned_or_rejected_once(
    plans, random, new_partition, make_closed, make_member, pick
):
    partition = simulate(new_partition, plans, random, make_closed, make_member)
    closed = {e.group_id: e for e in pick(GroupClosed, [received.event for received in partition.records])}
    complete = [member.trajectory_id for event in closed.values() for member in event.members]
    planned = [member.trajectory_id for batch in pick(BatchPlanned, partition.sent) for member in batch.members]
    rejected = [event.trajectory_id for event in pick(TrajectoryRejected, partition.sent)]
    assert Counter(planned + rejected) == Counter(complete)
    assert partition.state.runs == {}
    assert not any(run.groups.open for run in partition.state.ended.values())
    assert partition.state.low_water is None or any(plan["planning"] == "submitted" for plan in plans)


@settings(max_examples=100)
@given(plans=st.lists(PLANS, min_size=1, max_size=2), random=RANDOMS)
def test_manifests_chain_and_keep_the_staleness_bound(plans, random, new_partition, make_closed, make_member, pick):
    partition = simulate(new_partition, plans, random, make_closed, make_member)
    at = {
        member.trajectory_id: locator
        for event in pick(GroupClosed, [received.event for received in partition.records])
        for member, locator in zip(event.members, event.locators, strict=True)
    }
    sampled_at = {
        member.trajectory_id: member.min_version
        for event in pick(GroupClosed, [received.event for received in partition.records])
        for member in event.members
    }
    for number, plan in enumerate(plans):
        batches = [batch for batch in pick(BatchPlanned, partition.sent) if batch.run_id == f"run-{number}"]
        previous, adopted_at = codec.EMPTY_SHA256, 0
        for index, batch in enumerate(batches):
            assert (batch.index, batch.trains_at_version, batch.yields_version) == (index, index, index + 1)
            assert batch.previous_sha256 == previous
            assert all(member.staleness <= plan["max_staleness"] for member in batch.members)
            assert [at[member.trajectory_id] for member in batch.members] == list(batch.locators)
            if plan["policy"] == "model":
                assert all(sampled_at[member.trajectory_id] >= adopted_at for member in batch.members)
            if batch.adopts is not None:
                assert batch.members == ()
                assert batch.adopts < batch.trains_at_version
                adopted_at = batch.yields_version
            previous = codec.content_digest(batch)


@settings(max_examples=100)
@given(plans=st.lists(PLANS, min_size=1, max_size=2), random=RANDOMS)
def test_an_epoch_whose_groups_are_all_closed_is_sealed_once(
    plans, random, new_partition, make_closed, make_member, pick
):
    partition = simulate(new_partition, plans, random, make_closed, make_member)
    ended, tasks, submitted = (
        set(),
        Counter(),
        {f"run-{n}" for n, p in enumerate(plans) if p["planning"] == "submitted"},
    )
    started, counted, sent_in = set(), set(), set()
    for event in pick(TaskRequested, partition.sent):
        tasks[event.run_id, event.epoch] += 1
    for received in partition.records:
        event = received.event
        if isinstance(event, RunEnded):
            ended.add(event.run_id)
        elif isinstance(event, EpochStarted) and event.run_id not in ended:
            started.add((event.run_id, event.epoch))
        elif isinstance(event, SubmissionReceived) and event.run_id not in ended:
            sent_in.add((event.run_id, event.epoch))
        elif isinstance(event, GroupClosed) and event.run_id not in ended and event.group_id not in counted:
            counted.add(event.group_id)
            tasks[event.run_id, event.epoch] -= 1
    sealed = Counter((event.run_id, event.epoch) for event in pick(EpochSealed, partition.sent))
    for where in started:
        assert sealed[where] == (where in sent_in if where[0] in submitted else tasks[where] == 0), where
    assert all(count == 1 for count in sealed.values())


@settings(max_examples=100)
@given(plans=st.lists(PLANS, min_size=1, max_size=2), random=RANDOMS, where=st.floats(0, 1))
def test_folding_again_or_from_the_low_water_mark_gives_the_same_bytes(
    plans, random, where, new_partition, make_closed, make_member
):
    partition = simulate(new_partition, plans, random, make_closed, make_member)
    whole = folded(partition, curate.initial(), partition.records)
    assert [value for outputs in whole for value in outputs] == [codec.encode(event).value for event in partition.sent]
    split = int(where * len(partition.records))
    before = curate.initial()
    assert folded(partition, before, partition.records[:split]) == whole[:split]
    low_water = split if before.low_water is None else before.low_water
    restarted = curate.initial()
    folded(partition, restarted, partition.records[low_water:split])
    assert folded(partition, restarted, partition.records[split:]) == whole[split:]


@settings(max_examples=60)
@given(plan=PLANS, rewards=RANDOMS, order=RANDOMS)
def test_at_one_batch_an_epoch_the_order_of_closing_changes_no_manifest(plan, rewards, order, new_partition, pick):
    plan = plan | {"planning": "stream", "batches_per_epoch": 1}
    seed = rewards.randrange(10**6)
    digests = set()
    for is_shuffled in (False, True):
        partition = new_partition(num_examples=5)
        partition.start_run()
        partition.start_job(**plan)
        for epoch in range(plan["num_epochs"]):
            tasks = pick(TaskRequested, partition.start_epoch(epoch))
            if is_shuffled:
                order.shuffle(tasks)
            for task in tasks:
                drawn = [((seed + task.seed // 7**number) % 3) / 2 for number in range(task.num_rollouts)]
                partition.close(task, drawn)
        sent = [*pick(BatchPlanned, partition.sent), *pick(EpochSealed, partition.sent)]
        digests.add(tuple(codec.content_digest(event) for event in sent))
    assert len(digests) == 1
