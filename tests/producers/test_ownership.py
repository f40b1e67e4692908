"""State of a partition of steps for its new owner: open groups, what they lack, and where reading continues."""

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.eventlog import codec
from rollstream.eventlog.log import Position, Received, TopicPartition
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.processors.assemble import fold as assembly
from rollstream.producers import partition_owner
from rollstream.producers.clock import EventClock, start_ms
from rollstream.producers.ended_runs import CommitMetadata
from rollstream.producers.partition_owner import PartitionOwner
from rollstream.producers.takeover import GroupProgress, PartitionState, evolve, fold, recover
from rollstream.schemas import ids
from rollstream.schemas.base import MAX_TIME_MS
from rollstream.schemas.errors import TruncatedError
from rollstream.schemas.events import GroupExtended, GroupStarted, RolloutEnded, RolloutFailed, RolloutStarted, Tick
from rollstream.schemas.events.rollouts import RolloutEvent
from tests.producers import worker_rig as r

AT = Position("steps", 0, 9)


def group(task, *, size=2, void_cause=None, time_ms=1):
    return GroupStarted(
        run_id=task.run_id,
        time_ms=time_ms,
        group_id=task.group_id,
        example_id=task.example_id,
        job_id=task.job_id,
        epoch=task.epoch,
        index=task.index,
        size=size,
        minimum=min(size, 1),
        timeout_ms=1_000,
        seed=task.seed,
        void_cause=void_cause,
    )


def attempt(task, member, number=0, *, end="complete", is_final=False):
    """Events of one attempt: complete, failed, open, ended with a digest of something else, or written by two."""
    contents = [r.step(task, member, number, 0), r.step(task, member, number, 1), r.reward(task, member, number)]
    events = [r.started(task, member, number), *contents]
    if end in ("failed", "final"):
        return [*events, r.failed(task, member, number, is_final=is_final or end == "final")]
    if end == "open":
        return events
    ended = r.ended(task, member, number, contents)
    if end == "spliced":
        return [*events[:2], r.step(task, member, number, 1, text="another"), *events[2:], ended]
    return [*events, ended if end == "complete" else ended.model_copy(update={"digest": "0" * 64})]


def folded(events, first_offset=0):
    return fold(
        Received(event, codec.content_digest(event), Position("steps", 0, first_offset + index), 0)
        for index, event in enumerate(events)
    )


def test_an_empty_partition_has_no_groups_and_no_time():
    assert folded([]) == PartitionState()


def test_a_group_is_open_until_each_member_is_complete():
    task = r.task()
    events = [group(task), *attempt(task, 0), *attempt(task, 1)]
    almost = folded(events[:-1]).groups[task.group_id]
    assert [member.is_settled for member in almost.members.values()] == [True, False]
    assert almost.members[1].open_attempts == {0}
    assert folded(events).settled == {task.group_id}


def test_a_final_failure_settles_a_member_and_another_one_does_not():
    task = r.task()
    events = [group(task, size=1), *attempt(task, 0, end="failed")]
    member = folded(events).groups[task.group_id].members[0]
    assert (member.is_settled, member.open_attempts, member.next_attempt) == (False, set(), 1)
    events += attempt(task, 0, 1, end="failed", is_final=True)
    assert folded(events).settled == {task.group_id}


def test_the_first_terminal_event_decides_an_attempt():
    task = r.task()
    lost = r.failed(task, 0, 0, "producer_lost", is_final=False)
    zombie = attempt(task, 0)
    member = folded([group(task, size=1), *zombie[:-1], lost, zombie[-1]]).groups[task.group_id].members[0]
    assert (member.is_settled, member.open_attempts, member.next_attempt) == (False, set(), 1)


@pytest.mark.parametrize("left_out", [1, 2, 3])
def test_a_member_of_whose_ended_attempt_a_record_is_missing_is_not_tried_again(left_out):
    task = r.task()
    events = attempt(task, 0)
    del events[left_out]
    member = folded([group(task), *events]).groups[task.group_id].members[0]
    assert (member.is_settled, member.is_final, member.num_failed) == (True, True, 0)


def test_an_attempt_whose_digest_names_other_contents_is_not_complete():
    task = r.task()
    state = folded([group(task), *attempt(task, 0, end="wrong digest")])
    assert state.groups[task.group_id].members[0].is_final


def test_a_member_whose_attempt_two_producers_wrote_is_tried_again():
    task = r.task()
    state = folded([group(task), *attempt(task, 0, end="spliced")])
    member = state.groups[task.group_id].members[0]
    assert (member.is_settled, member.is_final, member.next_attempt) == (False, False, 1)


def test_a_final_failure_does_not_settle_a_member_while_another_attempt_is_under_way():
    task = r.task()
    events = [group(task), r.started(task, 0, 1), *attempt(task, 0, end="failed", is_final=True)]
    assert not folded(events).groups[task.group_id].members[0].is_settled
    events.append(r.failed(task, 0, 1, "producer_lost", is_final=False))
    assert folded(events).groups[task.group_id].members[0].is_settled


def test_the_owner_decides_an_attempt_by_its_first_record_as_the_log_does():
    """A group may be stopped while a failure that is not final is on its way: assembly ignores the final one then."""
    progress = GroupProgress("run/rl/e0/t0", 2, 0, 0)
    for member in (0, 1):
        progress.begin(member, 0)
    progress.fail(0, 0, is_final=False, is_counted=True)
    progress.fail(0, 0, is_final=True, is_counted=True)
    progress.complete(0, 0)
    progress.complete(1, 0)
    progress.fail(1, 0, is_final=True, is_counted=True)
    assert [(one.is_settled, one.is_complete, one.num_failed) for one in progress.members.values()] == [
        (False, False, 1),
        (True, True, 0),
    ]


def test_a_void_group_is_settled_at_once_and_stays_so():
    task = r.task()
    state = folded([group(task, size=0, void_cause="cancelled"), group(task), *attempt(task, 0)])
    assert (state.groups, state.settled) == ({}, {task.group_id})


def test_records_of_groups_that_were_not_seen_to_open_are_passed_over():
    task = r.task()
    state = folded(attempt(task, 0))
    assert (state.groups, state.settled, state.last_event_ms) == ({}, set(), 1)


def test_event_time_is_the_newest_of_any_record():
    tick = Tick(run_id="", time_ms=9, partition=0)
    assert folded([tick, group(r.task(), time_ms=5)]).last_event_ms == 9


def test_an_owner_goes_on_behind_a_forged_record_of_the_latest_time():
    latest = MAX_TIME_MS - 1
    forged = group(r.task(), time_ms=latest).model_copy(update={"timeout_ms": latest})
    state = folded([forged])
    now_ms = EventClock(start_ms(state.last_event_ms))()
    (found,) = state.groups.values()
    left_ms = found.deadline_ms - now_ms
    extended = GroupExtended(run_id="r", time_ms=now_ms, group_id="g", deadline_ms=now_ms + left_ms)
    evolve(state, Received(extended.model_copy(update={"group_id": found.group_id, "deadline_ms": latest}), "", AT, 0))
    assert now_ms + left_ms == found.deadline_ms
    year_ms = 366 * 24 * 3600 * 1000
    assert year_ms < left_ms
    assert found.deadline_ms + year_ms < latest


def test_a_record_of_a_time_that_no_clock_can_go_on_from_does_not_count():
    async def main():
        log = MemoryLog(num_partitions=1)
        task = r.task()
        await log.send(group(task, time_ms=7), partition=0)
        forged = codec.encode(group(task).model_copy(update={"time_ms": 2**64 - 1}))
        await log.send_raw("steps", key=forged.key, value=forged.value, headers=forged.headers, partition=0)
        state, _ = (await recover(log, {0: None}))[0]
        assert state.last_event_ms == 7

    asyncio.run(main())


ATTEMPTS = st.lists(
    st.sampled_from(["complete", "failed", "final", "open", "wrong digest", "spliced"]), min_size=0, max_size=3
)


@st.composite
def partitions(draw):
    """Records of some groups whose attempts are interleaved, with repeats: each attempt's own order holds.

    Of some attempts records are missing, as those that cannot be decoded, RolloutStarted among them.
    """
    queues = []
    for index in range(draw(st.integers(1, 3))):
        task, size = r.task(index), draw(st.integers(1, 2))
        streams = [
            [e for n, end in enumerate(draw(ATTEMPTS)) for e in attempt(task, m, n, end=end)] for m in range(size)
        ]
        queues.append([group(task, size=size), streams])
    events = []
    for started, streams in queues:
        events.append(started)
        while any(streams):
            stream = draw(st.sampled_from([stream for stream in streams if stream]))
            events.append(stream.pop(0))
            if draw(st.integers(0, 9)) == 0:
                events.pop()
            if draw(st.booleans()):
                events.append(draw(st.sampled_from(events)))
    return events


@settings(max_examples=60)
@given(partitions(), st.data())
def test_missing_members_follow_from_any_prefix(events, data):
    prefix = events[: data.draw(st.integers(0, len(events)))]
    state = folded(prefix)
    firsts = list({event.event_id: event for event in reversed(prefix)}.values())
    started = {e.group_id for e in prefix if isinstance(e, GroupStarted)}
    assert set(state.groups) | state.settled == started
    assert not set(state.groups) & state.settled
    for group_id, found in state.groups.items():
        assert isinstance(prefix[found.first_offset], GroupStarted)
        named = {
            ids.attempt_of(group_id, e.rollout_id)
            for e in prefix[found.first_offset :]
            if isinstance(e, RolloutEvent) and e.group_id == group_id
        }
        begun = {one for one in named if one is not None}
        ends = {e.rollout_id for e in firsts if isinstance(e, RolloutEnded | RolloutFailed)}
        for index, member in found.members.items():
            mine = {number for m, number in begun if m == index}
            assert member.next_attempt == max(mine, default=-1) + 1
            assert member.open_attempts == {n for n in mine if f"{group_id}/m{index}/a{n}" not in ends}


@settings(max_examples=100)
@given(partitions())
def test_a_group_is_settled_just_when_assembly_closes_it(events):
    closing = assembly.initial()
    closed: set[str] = set()
    for offset, event in enumerate(events):
        received = Received(event, codec.content_digest(event), Position("steps", 0, offset), 0)
        closed |= {one.closed.group_id for one in assembly.evolve(closing, received)}
        assert folded(events[: offset + 1]).settled == closed


@settings(max_examples=40)
@given(partitions(), st.data())
def test_reading_from_the_oldest_open_group_finds_the_same_open_groups(events, data):
    prefix = events[: data.draw(st.integers(0, len(events)))]
    whole = folded(prefix)
    low = min((found.first_offset for found in whole.groups.values()), default=len(prefix))
    later = folded(prefix[low:], low)
    assert {group_id: later.groups[group_id] for group_id in whole.groups} == whole.groups
    assert set(later.groups) - set(whole.groups) <= whole.settled  # a repeated start; no task asks for it any more


@settings(max_examples=40)
@given(partitions())
def test_repeating_a_whole_partition_changes_nothing_but_time(events):
    once = folded(events)
    twice = folded(events)
    for index, event in enumerate(events):
        evolve(twice, Received(event, codec.content_digest(event), Position("steps", 0, len(events) + index), 0))
    assert (twice.groups, twice.settled) == (once.groups, once.settled)


def test_a_partition_is_read_from_its_note_and_without_one_from_its_beginning():
    async def main():
        log = MemoryLog(num_partitions=3)
        tasks = [r.task(index) for index in range(2)]
        for task in tasks:
            await log.send(group(task, time_ms=1 + task.index), partition=1)
        found = await recover(log, {0: None, 1: None, 2: CommitMetadata(0)})
        assert {p: end for p, (_, end) in found.items()} == {0: 0, 1: 2, 2: 0}
        assert list(found[1][0].groups) == [task.group_id for task in tasks]
        assert found[0][0] == PartitionState()
        later = await recover(log, {1: CommitMetadata(1)})
        assert list(later[1][0].groups) == [tasks[1].group_id]
        end = await recover(log, {1: CommitMetadata(2)})
        assert end[1][0].last_event_ms == 2

    asyncio.run(main())


def test_steps_that_retention_has_removed_are_an_error():
    async def main():
        log = MemoryLog(num_partitions=1)
        for index in range(3):
            await log.send(group(r.task(index)), partition=0)
        log.truncate(TopicPartition("steps", 0), 2)
        with pytest.raises(TruncatedError):
            await recover(log, {0: CommitMetadata(1)})

    asyncio.run(main())


def test_an_owner_knows_which_rollouts_have_begun_and_which_are_over_also_after_it_took_over():
    task = r.task()
    done, lost, again, never = (ids.rollout_id(task.group_id, *one) for one in ((0, 0), (1, 0), (1, 1), (2, 0)))

    def known(process, rollout_id):
        return process.worker.may_have_begun(rollout_id), process.worker.is_over(rollout_id)

    async def main():
        log, rollouts = MemoryLog(num_partitions=1), [r.Rollouts(), r.Rollouts()]
        rollouts[0].hangs, rollouts[1].hangs = {(1, 0)}, {(1, 1)}
        first = r.Process(log, rollouts=rollouts[0])
        assert known(first, never) == (True, False)  # its partition is not assigned yet
        await log.send(task)
        await r.wait_until(lambda: [known(first, one) for one in (done, lost)] == [(True, True), (True, False)])
        assert [known(first, one)[0] for one in (again, never, "nothing/m0/a0", "")] == [False] * 4
        await first.kill()
        async with r.Process(log, rollouts=rollouts[1], name="producer-2") as heir:
            await r.wait_until(lambda: [known(heir, one) for one in (done, lost)] == [(True, True)] * 2)
            await r.wait_until(lambda: known(heir, again) == (True, False))
            assert not heir.worker.may_have_begun(never)
            rollouts[1].go_on.set()
            await r.wait_until(lambda: known(heir, again) == (True, True))
            assert not heir.worker.may_have_begun(ids.rollout_id(r.task(9).group_id, 0, 0))

    asyncio.run(main())


def test_a_settled_task_that_is_sent_again_behind_an_open_one_is_not_run_by_the_next_owner():
    async def seen(log, kind, count):
        return len(await r.steps(log, kind)) >= count

    async def main():
        log, settled, open_task = MemoryLog(num_partitions=1), r.task(0), r.task(1)
        first = r.Process(log)
        await log.send(settled)
        await r.wait_until(lambda: seen(log, RolloutEnded, 2))
        await asyncio.sleep(0.1)  # it is committed
        first.rollouts.hangs = {(0, 0), (1, 0)}
        await log.send(open_task)
        await r.wait_until(lambda: seen(log, RolloutStarted, 4))
        await log.send(settled)
        await asyncio.sleep(0.1)
        await first.kill()
        async with r.Process(log, rollouts=(rollouts := r.Rollouts()), name="producer-2"):
            await r.wait_until(lambda: seen(log, RolloutEnded, 4))
            await asyncio.sleep(0.1)
        assert {call[0] for call in rollouts.calls} == {open_task.group_id}

    asyncio.run(main())


@pytest.mark.parametrize("is_settled", [False, True])
def test_steps_of_a_repeated_task_are_not_passed_before_the_task_ahead_ends(monkeypatch, is_settled):
    runs: dict[str, Any] = {}
    producer: Any = SimpleNamespace(log=None, runs=None, name="p")
    writer: Any = SimpleNamespace(partition=0, floor=lambda: 200, clock=lambda: 0, close=partial(asyncio.sleep, 0))

    class Run:
        """Runs until it is told to end; its group begins at the task's number."""

        def __init__(self, producer, writer, foreign, task, state):
            self.task, self.state, self.end = task, state, asyncio.Event()
            runs[task.group_id] = self

        async def run(self):
            self.state = SimpleNamespace(first_offset=100 + self.task.index)
            await self.end.wait()

    async def main():
        monkeypatch.setattr(partition_owner, "GroupExecution", Run)
        owner = PartitionOwner(
            producer,
            writer,
            PartitionState(),
            tasks=range(0),
            num_partitions=1,
            spawn=asyncio.ensure_future,
            ended_runs=(),
            on_progress=lambda: None,
        )
        settled, ahead = r.task(0), r.task(1)
        owner._request(0, settled)
        owner._request(1, ahead)
        if not is_settled:
            owner._request(2, settled)
        await asyncio.sleep(0)
        runs[settled.group_id].end.set()
        await asyncio.sleep(0.01)
        if is_settled:
            owner._request(2, settled)
        assert owner.commit_point() == (1, 100)
        await owner.release()

    asyncio.run(main())
