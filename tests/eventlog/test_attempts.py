"""All readers of attempts agree on them, in any order of records: takeover, assembly and the scoring of what-ifs."""

import asyncio
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.eventlog import codec
from rollstream.eventlog.attempts import Recorded
from rollstream.eventlog.log import Position, Received
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.processors.assemble import fold as assembly
from rollstream.processors.assemble.state import Attempt
from rollstream.producers import takeover
from rollstream.replay.assembly import Range
from rollstream.replay.what_if.rewards import Grading, grade
from rollstream.schemas import ids
from rollstream.schemas.base import Event
from rollstream.schemas.events.training import AttemptOutcome
from rollstream.schemas.settings import RolloutSettings
from tests.rigs.steps_rig import RUN, attempt, failed, group, started

SIZE = 3
"""Members of a group. The last one has no attempt, so the group stays open and every attempt can be compared."""
SETTINGS = RolloutSettings(environment="recorded", agents={"agent": f"{RUN}/policy"})
ENDS = st.sampled_from(["complete", "no score", "wrong digest", "failed", "final", "open", "spliced", "no member"])


def records_of(index: int, member: int, number: int, end: str) -> list[Event]:
    """Records of one attempt, its RolloutStarted first."""
    reward = float(10 * member + number)
    if end == "no member":
        return attempt(index, SIZE + member, number, reward=reward)
    ended: dict[str, Any] = {"missing_scores": {"judge": "no answer"}} if end == "no score" else {}
    ended |= {"digest": "0" * 64} if end == "wrong digest" else {}
    whole = attempt(index, member, number, reward=reward, **ended)
    if end in ("failed", "final"):
        return [*whole[:-1], failed(index, member, number, is_final=end == "final")]
    if end == "spliced":
        return [*whole, *attempt(index, member, number, reward=reward + 0.5, num_steps=3)[1:]]
    return whole[:-1] if end == "open" else whole


@st.composite
def partitions(draw: st.DrawFn, enough: int = 0) -> list[tuple[Event, bool]]:
    """Records of two groups in any order, repeats among them, and which of them can be decoded."""
    ends = st.lists(ENDS, max_size=3)
    events = [
        event
        for index in range(2)
        for member in range(SIZE - 1)
        for number, end in enumerate(draw(ends))
        for event in records_of(index, member, number, end)
    ]
    events += draw(st.lists(st.sampled_from(events), max_size=4)) if events else []
    opened = [started(index, size=SIZE, enough=enough, timeout_ms=1_000_000) for index in range(2)]
    events = draw(st.permutations(opened + events))
    readable = draw(st.lists(st.integers(0, 9).map(bool), min_size=len(events), max_size=len(events)))
    return list(zip(events, readable, strict=True))


async def graded(records: Sequence[tuple[Event, bool]]) -> dict[str, float | None]:
    """Scores of a what-if that changes nothing."""
    log = MemoryLog(num_partitions=1)
    for event, is_readable in records:
        encoded = codec.encode(event)
        value = encoded.value if is_readable else b"{"
        await log.send_raw("steps", key=encoded.key, value=value, headers=encoded.headers)
    found = Range(RUN, 0, 0, len(records), frozenset())
    return await grade(log, [found], Grading(SETTINGS, SETTINGS, {group(index): {} for index in range(2)}))


def received_of(records: Sequence[tuple[Event, bool]]) -> list[Received]:
    """Those that can be decoded."""
    return [
        Received(event, codec.content_digest(event), Position("steps", 0, offset), 0)
        for offset, (event, is_readable) in enumerate(records)
        if is_readable
    ]


@settings(max_examples=150)
@given(partitions(enough=2))
def test_takeover_and_assembly_close_an_oversampled_group_at_the_same_record(records: list[tuple[Event, bool]]) -> None:
    received = received_of(records)
    partition, state = takeover.PartitionState(), assembly.initial()
    for one in received:
        takeover.evolve(partition, one)
        assembly.evolve(state, one)
        assert list(partition.groups) == list(state.groups)
    assert all(sum(member.is_complete for member in one.members.values()) < 2 for one in partition.groups.values())


@settings(max_examples=150)
@given(partitions())
def test_takeover_assembly_and_what_ifs_agree_on_every_attempt(records: list[tuple[Event, bool]]) -> None:
    received = received_of(records)
    partition, state = takeover.fold(received), assembly.initial()
    assert [closing for one in received for closing in assembly.evolve(state, one)] == []
    scored: dict[str, float] = {}
    assert set(partition.groups) == set(state.groups)
    for group_id, opened in state.groups.items():
        ours, theirs = partition.attempts[group_id], opened.attempts
        assert set(ours) == set(theirs)
        for rollout_id, theirs_one in theirs.items():
            assert view(ours[rollout_id]) == (view(theirs_one) if isinstance(theirs_one, Attempt) else None)
        members = partition.groups[group_id].members
        assert {number for number, member in members.items() if member.is_settled} == opened.settled
        scored |= scores_of(opened)
    found = asyncio.run(graded(records))
    assert {name: found[name] for name in scored} == scored
    assert set(found) == {ids.trajectory_id(name, "agent") for name in ended(state)}


def view(recorded: Recorded | None) -> Any:
    """Records that count, of an attempt that is not decided."""
    return recorded and (recorded.member, recorded.number, recorded.steps, recorded.rewards, recorded.is_spliced)


def scores_of(opened: Any) -> dict[str, float]:
    """Reward by trajectory id of the members that assembly has complete."""
    made = (one for assembled in opened.complete.values() for one in assembled.trajectories)
    return {one["trajectory_id"]: one["reward"] for one in made}


def ended(state: assembly.AssemblyState) -> set[str]:
    """Attempts that came to their end whole by the decisions of assembly, the ones without a score too."""
    return {
        rollout_id
        for opened in state.groups.values()
        for rollout_id, one in opened.attempts.items()
        if isinstance(one, AttemptOutcome)
        and (one.outcome in ("complete", "superseded") or (one.outcome, one.cause) == ("rejected", "no_score"))
    }
