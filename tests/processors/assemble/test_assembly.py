"""The assembly fold: what closes a group, what becomes of attempts; order, repeats and replays change nothing."""

from array import array
from itertools import chain

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from rollstream.eventlog import codec
from rollstream.processors.assemble import fold as assembly
from rollstream.processors.assemble.trajectories import sum_rewards
from rollstream.producers.rollout.conversation import ids_sha256
from rollstream.schemas import ids
from rollstream.schemas.events import (
    GroupStarted,
    RewardRecorded,
    RolloutEnded,
    RolloutStarted,
)
from rollstream.schemas.events.rollouts import Prefix
from tests.rigs.steps_rig import (
    RUN,
    attempt,
    closings_of,
    content,
    extended,
    failed,
    fold,
    group,
    received_of,
    started,
    tick,
)


def outcomes(closing):
    return {(one.member, one.attempt): (one.outcome, one.cause) for one in closing.closed.attempts}


# ---- closing ----


def test_a_group_closes_when_every_member_is_complete():
    (closing,) = closings_of(started(), *attempt(member=1), *attempt(member=0, reward=0.5))
    closed = closing.closed
    assert (closed.reason, closed.is_viable, closed.size) == ("complete", True, 2)
    assert [(one.member, one.reward, one.min_version) for one in closed.members] == [(0, 0.5, 3), (1, 1.0, 3)]
    assert [one.digest for one in closed.members] == [codec.content_digest(one) for one in closing.trajectories]
    assert [one.num_tokens for one in closed.members] == [8, 8]
    assert [one.num_completion_tokens for one in closed.members] == [4, 4]
    assert closed.steps_at is not None
    assert (closed.steps_at.first_offset, closed.steps_at.last_offset) == (0, 10)


def test_a_trajectory_names_finish_reasons_where_its_group_keeps_them():
    def reasons(**more):
        records = attempt(member=0)
        first = records[1]
        cut = first.model_copy(update={"llm": first.llm.model_copy(update={"finish_reason": "length"})})
        steps = [cut, *records[2:4]]
        digest = codec.chain(first.rollout_id, map(codec.content_digest, steps))
        ended = records[-1].model_copy(update={"digest": digest})
        (closing,) = closings_of(started(size=1, **more), records[0], *steps, ended)
        (trajectory,) = closing.trajectories
        return [part.finish_reason for sequence in trajectory.sequences for part in sequence.completions]

    assert reasons(revision=2) == ["length", "stop"]
    assert reasons() == ["stop", "stop"], "trajectories that were recorded without them keep their digests"


def test_a_void_group_closes_at_once():
    (closing,) = closings_of(started(size=0, minimum=0, void_cause="cancelled"))
    closed = closing.closed
    assert (closed.reason, closed.void_cause, closed.is_viable, closed.members) == ("void", "cancelled", False, ())


def test_a_member_that_fails_for_good_leaves_a_partial_group():
    (closing,) = closings_of(started(), *attempt(member=0), failed(member=1, is_final=True))
    assert (closing.closed.reason, closing.closed.is_viable) == ("partial", True)
    assert outcomes(closing) == {(0, 0): ("complete", ""), (1, 0): ("failed", "engine_error")}


def test_a_group_below_its_minimum_has_failed():
    (closing,) = closings_of(started(minimum=2), *attempt(member=0), failed(member=1, is_final=True))
    assert (closing.closed.reason, closing.closed.is_viable) == ("failed", False)
    assert len(closing.closed.members) == 1, "the ledger needs what is not trained"


def test_a_failed_attempt_is_made_good_by_the_next():
    (closing,) = closings_of(started(size=1), failed(number=0), *attempt(number=1))
    assert closing.closed.reason == "complete"
    assert outcomes(closing) == {(0, 0): ("failed", "engine_error"), (0, 1): ("complete", "")}


def test_the_first_terminal_event_of_an_attempt_decides_it():
    zombie = attempt(number=0)
    (closing,) = closings_of(started(size=1), *zombie[:-1], failed(number=0), zombie[-1], *attempt(number=1))
    assert outcomes(closing) == {(0, 0): ("failed", "engine_error"), (0, 1): ("complete", "")}
    (closing,) = closings_of(started(), *attempt(member=0), failed(member=0, is_final=True), *attempt(member=1))
    assert outcomes(closing)[0, 0] == ("complete", "")


def test_a_second_complete_attempt_is_superseded():
    (closing,) = closings_of(started(), *attempt(number=1), *attempt(number=0), *attempt(member=1))
    assert outcomes(closing) == {(0, 0): ("superseded", ""), (0, 1): ("complete", ""), (1, 0): ("complete", "")}
    assert [one.rollout_id[-2:] for one in closing.closed.members] == ["a1", "a0"]


def test_a_group_with_more_members_than_it_needs_closes_once_enough_are_complete():
    opened, slow = started(size=4, enough=2), attempt(member=3)
    (closing,) = closings_of(opened, *slow[:2], *attempt(member=2), *attempt(member=0), *slow[2:], *attempt(member=1))
    assert (closing.closed.reason, closing.closed.is_viable, closing.closed.size) == ("complete", True, 4)
    assert [one.member for one in closing.closed.members] == [0, 2]
    assert outcomes(closing) == {
        (0, 0): ("complete", ""),
        (2, 0): ("complete", ""),
        (3, 0): ("superseded", "oversampled"),
    }
    assert closing.closed.attempts[-1].num_tokens == 4


def test_a_group_that_cannot_have_enough_closes_when_its_members_are_settled():
    lost = [failed(member=member, is_final=True) for member in (1, 2)]
    (closing,) = closings_of(started(size=3, enough=2), *attempt(member=0), *lost)
    assert (closing.closed.reason, [one.member for one in closing.closed.members]) == ("partial", [0])
    (closing,) = closings_of(started(size=3, enough=2), *attempt(member=0), *attempt(member=1)[:2], tick(1000))
    assert (closing.closed.reason, outcomes(closing)[1, 0]) == ("timeout", ("failed", "timeout"))


def test_a_group_that_drops_dead_branches_counts_their_tokens():
    records = attempt(num_steps=3)
    again = Prefix(step_index=0, length=2, sha256=ids_sha256(array("i", [0, 0])))
    records[2] = records[2].model_copy(
        update={"llm": records[2].llm.model_copy(update={"prefix": again, "prompt_ids": ""})}
    )
    digest = codec.chain(records[0].rollout_id, map(codec.content_digest, records[1:-1]))
    records[-1] = records[-1].model_copy(update={"digest": digest})

    def joined(**more):
        (closing,) = closings_of(started(size=1, **more), *records)
        (trajectory,), (member,) = closing.trajectories, closing.closed.members
        steps = [part.step_index for sequence in trajectory.sequences for part in sequence.completions]
        return steps, trajectory.num_dead_tokens, member.num_dead_tokens, member.num_completion_tokens

    assert joined() == ([0, 1, 2], 0, 0, 6)
    assert joined(drop_dead_branches=True) == ([1, 2], 2, 2, 4)


def test_an_attempt_that_lacks_a_step_is_rejected_and_its_member_settled():
    records = attempt(member=0)
    (closing,) = closings_of(started(), records[0], *records[2:], *attempt(member=1))
    assert outcomes(closing)[0, 0] == ("rejected", "incomplete")
    assert (closing.closed.reason, len(closing.closed.members)) == ("partial", 1)


def test_an_attempt_with_another_digest_is_rejected():
    (closing,) = closings_of(started(size=1), *attempt(digest="0" * 64))
    assert outcomes(closing) == {(0, 0): ("rejected", "digest")}
    assert closing.closed.reason == "failed"


def test_an_attempt_that_two_producers_wrote_is_rejected_and_its_member_tried_again():
    ours, theirs = attempt(), attempt(reward=0.5)
    (closing,) = closings_of(started(size=1), *ours[:3], theirs[3], ours[3], ours[4], *attempt(number=1))
    assert outcomes(closing) == {(0, 0): ("rejected", "digest"), (0, 1): ("complete", "")}
    longer = attempt(num_steps=3)
    (closing,) = closings_of(started(size=1), *longer[:4], *ours[3:], *attempt(number=1))
    assert outcomes(closing) == {(0, 0): ("rejected", "incomplete"), (0, 1): ("complete", "")}


def test_broken_tokens_reject_the_attempt_and_crash_nothing():
    records = attempt()
    step = records[1]
    records[1] = step.model_copy(update={"llm": step.llm.model_copy(update={"completion_ids": "not base64!"})})
    digest = codec.chain(step.rollout_id, map(codec.content_digest, records[1:-1]))
    records[-1] = records[-1].model_copy(update={"digest": digest})
    (closing,) = closings_of(started(size=1), *records)
    ((outcome, cause),) = outcomes(closing).values()
    assert outcome == "rejected"
    assert cause.startswith("broken_tokens: step 0 of agent agent")


def test_records_of_no_attempt_at_a_member_change_nothing():
    stray = [record for record in attempt(member=5) if not isinstance(record, RolloutStarted)]
    odd = [record.model_copy(update={"rollout_id": "elsewhere"}) for record in attempt()]
    (closing,) = closings_of(started(size=1), *stray, *odd, *attempt())
    assert outcomes(closing) == {(0, 0): ("complete", "")}


def test_steps_before_their_group_started_open_nothing():
    assert closings_of(*attempt(), tick(5000)) == []


# ---- time ----


def test_a_group_times_out_by_the_events_of_its_partition():
    events = [started(time_ms=100), *attempt(time_ms=100), *attempt(member=1, time_ms=100)[:-1]]
    assert closings_of(*events, tick(1099)) == []
    (closing,) = closings_of(*events, tick(1099), tick(1100))
    assert (closing.closed.reason, closing.closed.is_viable, closing.closed.time_ms) == ("timeout", True, 1100)
    assert outcomes(closing) == {(0, 0): ("complete", ""), (1, 0): ("failed", "timeout")}
    assert [one.num_tokens for one in closing.closed.attempts] == [8, 8]


def test_a_group_below_its_minimum_is_not_viable_when_it_times_out():
    (closing,) = closings_of(started(minimum=2), *attempt(), tick(1000))
    assert (closing.closed.reason, closing.closed.is_viable) == ("timeout", False)
    (closing,) = closings_of(started(minimum=0), tick(1000))
    assert not closing.closed.is_viable


def test_time_passes_before_a_record_counts():
    events = attempt()
    late = events[-1].model_copy(update={"time_ms": 1000})
    (closing,) = closings_of(started(size=1), *events[:-1], late)
    assert closing.closed.reason == "timeout"


def test_groups_time_out_each_at_its_own_deadline():
    events = [started(0, timeout_ms=300), started(1, timeout_ms=100), started(2, timeout_ms=200)]
    closings = closings_of(*events, tick(99), tick(150), tick(250), tick(350))
    assert [(one.closed.index, one.closed.time_ms) for one in closings] == [(1, 150), (2, 250), (0, 350)]


# ---- agents and rewards ----


def test_an_extended_group_closes_at_its_later_deadline():
    state = assembly.initial()
    events = [started(timeout_ms=100), extended(deadline_ms=250, time_ms=90), tick(249)]
    assert fold(received_of(events), state) == []
    assert [closing.closed.reason for closing in fold(received_of([tick(250)]), state)] == ["timeout"]


def test_an_extension_moves_no_deadline_back_and_opens_no_closed_group():
    state = assembly.initial()
    assert fold(received_of([started(timeout_ms=100), extended(deadline_ms=50), tick(99)]), state) == []
    (closing,) = fold(received_of([tick(100), extended(deadline_ms=900), *attempt()]), state)
    assert closing.closed.reason == "timeout"
    assert state.groups == {}


def test_each_agent_gets_a_trajectory_with_its_own_rewards():
    base = {"run_id": RUN, "time_ms": 0, "group_id": group(0), "rollout_id": ids.rollout_id(group(0), 0, 0)}
    records = attempt(num_steps=1, agent="a") + attempt(num_steps=2, agent="b")
    steps = [records[1], records[6]]
    rewards = [
        RewardRecorded(**base, reward_index=0, name="task", value=1.0),
        RewardRecorded(**base, reward_index=1, name="style", value=2.0, agent="b", step_index=1),
    ]
    assert [step.step_index for step in steps] == [0, 1]
    digest = codec.chain(base["rollout_id"], map(codec.content_digest, steps + rewards))
    ended = RolloutEnded(**base, num_steps=2, num_rewards=2, digest=digest)
    agents = {"a": f"{RUN}/left", "b": f"{RUN}/right"}
    first = started(size=1, agents=agents, reward_weights={"style": 0.25})
    (closing,) = closings_of(first, *steps, *rewards, ended)
    left, right = closing.trajectories
    assert (left.agent, left.model_group, left.reward, left.rewards) == ("a", f"{RUN}/left", 1.0, {"task": 1.0})
    assert (right.reward, right.rewards) == (1.5, {"task": 1.0, "style": 2.0})
    assert right.step_rewards == {"1": 0.5}


def test_rewards_that_are_not_named_have_the_weight_of_all_others_and_scores_keep_theirs():
    base = {"run_id": RUN, "time_ms": 1, "group_id": "g", "rollout_id": "r"}
    rewards = [
        RewardRecorded(**base, reward_index=0, name="own", value=8.0, step_index=0),
        RewardRecorded(**base, reward_index=1, name="chosen", value=0.5),
        RewardRecorded(**base, reward_index=2, name="move", value=4.0, step_index=0, is_score=True),
    ]
    sums = sum_rewards(rewards, "agent", {"*": 0.0, "chosen": 1.0})
    assert (sums.total, sums.by_name) == (0.5, {"own": 8.0, "chosen": 0.5})
    assert (sums.by_step, sums.scores) == ({"0": 0.0}, {"0": 4.0})
    assert sum_rewards(rewards, "agent", {}).total == 8.5


def test_a_rollout_without_token_ids_still_has_its_trajectory():
    (closing,) = closings_of(started(size=1), *attempt(num_steps=0))
    (member,) = closing.closed.members
    assert (member.num_tokens, member.num_completion_tokens, member.agent) == (0, 0, "agent")


@pytest.mark.parametrize("weight", [1e300, -1e300, 1e100])
def test_rewards_of_which_no_statistics_could_be_computed_reject_the_attempt(weight: float):
    """Their sum is not finite, or squares of it are not."""
    (closing,) = closings_of(started(size=1, reward_weights={"task": weight}), *attempt(reward=1e100))
    ((outcome, _),) = outcomes(closing).values()
    assert outcome == "rejected"


# ---- order, repeats, replay ----


def test_the_low_water_mark_is_the_group_started_of_the_oldest_open_group():
    events = [started(0, size=1), started(1, size=1), *attempt(1), *attempt(0), tick(1)]
    state = assembly.initial()
    low_waters = []
    for one in received_of(events):
        assembly.evolve(state, one)
        low_waters.append(state.low_water)
    assert low_waters == [0] * 11 + [12, 13]


def test_a_mark_between_a_group_started_and_its_repeat_is_moved_before_both():
    one, two, three = (attempt(member=member) for member in range(3))
    first = started(0, size=3, enough=2)
    received = received_of([first, *one, started(1), first, *two, *three, tick(1)])
    state = assembly.initial()
    (closing,) = fold(received, state)
    assert state.low_water == 1 + len(one)
    assert [state.before_repeats(offset) for offset in (0, 1, state.low_water, state.low_water + 2)] == [0, 0, 0, 8]
    (other,) = fold(received[state.low_water :], assembly.initial(state.low_water))
    assert [one.member for one in closing.closed.members] == [0, 1]
    assert [one.member for one in other.closed.members] == [1, 2]


def test_a_repeated_group_started_does_not_open_a_closed_group_again():
    events = received_of([started(size=1), *attempt(), started(size=1), *attempt(), tick(9999)])
    state = assembly.initial()
    assert len(fold(events, state)) == 1
    assert state.low_water == len(events)


@st.composite
def _members(draw, index, size):
    """Records of each member: failed attempts, then perhaps one that ends."""
    streams = []
    for member in range(size):
        num_failed = draw(st.integers(0, 1))
        stream = [one for number in range(num_failed) for one in (*attempt(index, member, number)[:-2],)]
        stream += [failed(index, member, number) for number in range(num_failed)]
        stream += draw(st.sampled_from([attempt(index, member, num_failed), [failed(index, member, 1, is_final=True)]]))
        streams.append(stream)
    return streams


@st.composite
def _partition(draw):
    """Groups whose members' records are interleaved in any way, with repeats of earlier records, without time."""
    groups = []
    for index in range(draw(st.integers(1, 3))):
        size = draw(st.integers(0, 2))
        groups.append((started(index, size=size, minimum=min(1, size)), draw(_members(index, size))))
    waiting = [[first] for first, _ in groups]
    followers = dict(enumerate(members for _, members in groups))
    events = []
    while waiting:
        position = draw(st.integers(0, len(waiting) - 1))
        event = waiting[position].pop(0)
        events.append(event)
        if isinstance(event, GroupStarted):
            waiting += [list(member) for member in followers[event.index]]
        waiting = [stream for stream in waiting if stream]
        if draw(st.integers(0, 3)) == 0:
            events.append(draw(st.sampled_from(events)))
    return groups, events


@settings(max_examples=60)
@given(_partition())
def test_any_interleaving_and_any_repeats_close_the_same_groups(drawn):
    groups, events = drawn
    alone = [closing for first, members in groups for closing in closings_of(first, *chain.from_iterable(members))]
    closings = closings_of(*events)
    assert len(closings) == len(groups)
    assert content(closings) == content(alone)


@settings(max_examples=60)
@given(_partition(), st.data())
def test_a_fold_from_the_low_water_mark_closes_what_was_open_in_the_same_way(drawn, data):
    _, events = drawn
    times = sorted(data.draw(st.lists(st.integers(0, 1500), min_size=len(events), max_size=len(events))))
    events = [event.model_copy(update={"time_ms": time_ms}) for event, time_ms in zip(events, times, strict=True)]
    for index in data.draw(st.lists(st.integers(0, 2), max_size=3)):
        position = data.draw(st.integers(0, len(events) - 1))
        later = extended(index, deadline_ms=data.draw(st.integers(0, 3000)), time_ms=times[position])
        events.insert(position, later)
        times.insert(position, times[position])
    received = received_of([*events, tick(9_000)])
    cut = data.draw(st.integers(0, len(received)))
    state = assembly.initial()
    before = fold(received[:cut], state)
    again = fold(received[state.low_water :], assembly.initial(state.low_water))
    # What closed before the mark is not known behind it, so a repeated GroupStarted opens its group again; readers of
    # `groups` take the first closing of a group.
    first = {closing.closed.group_id: closing for closing in reversed(before + again)}
    assert content(sorted(first.values(), key=(before + again).index)) == content(fold(received))


def test_a_group_closed_before_the_mark_leaves_nothing_open_behind_it():
    events = received_of([started(0, size=1), started(1, size=1), *attempt(0), *attempt(1), tick(9000)])
    state = assembly.initial(1)
    assert len(fold(events[1:], state)) == 1
    assert state.groups == {}
