"""Closings and trajectories that no record could hold: they are bounded, and assembly goes on."""

import asyncio
import re

import pytest

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import check_record_size
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.processors.assemble.bounds import MAX_TEXT, TOO_LARGE, fitting
from rollstream.processors.assemble.shell import AssembleShell
from rollstream.processors.host.app import Batch
from rollstream.schemas import ids
from rollstream.schemas.base import Locator
from rollstream.schemas.events import GroupClosed, RewardRecorded, RolloutEnded
from rollstream.schemas.topics import MIB
from tests.rigs.steps_rig import attempt, closings_of, events_of, failed, group, records_of, started


def assert_has_a_record(closed):
    where = tuple(Locator(partition=99_999, offset=10**15) for _ in closed.members)
    encoded = codec.encode(closed.model_copy(update={"locators": where}))
    check_record_size("groups", encoded.key, encoded.value, encoded.headers)


def assembled(log, folder):
    """Commit offset after the shell has assembled all that the log holds."""

    async def go():
        shell = AssembleShell(log, ArtifactStore(str(folder)), service="p")
        await shell.prepare(0, 0)
        await shell.take(Batch(0, 1, await records_of(log, "steps")))
        await shell.drain()
        return shell.commit_offset(0)

    return asyncio.run(go())


def log_with(*events):
    async def go():
        log = MemoryLog(num_partitions=1)
        for event in events:
            await log.send(event, partition=0)
        return log

    return asyncio.run(go())


def test_texts_of_outcomes_are_cut_where_a_closing_would_be_too_large(tmp_path):
    cause = "x" * 1_100_000
    log = log_with(started(size=1), failed(member=0, is_final=True, cause=cause))
    assert assembled(log, tmp_path) == 2
    (closed,) = asyncio.run(events_of(log, "groups", GroupClosed))
    assert [one.cause for one in closed.attempts] == [cause[:MAX_TEXT]]
    assert asyncio.run(records_of(log, "dlq")) == []


def test_texts_of_a_closing_that_fits_are_kept_whole():
    cause, reason = "x" * 400_000, "y" * 400_000
    ended = attempt(member=1, stop_reason=reason)
    (closing,) = closings_of(started(revision=2), failed(member=0, is_final=True, cause=cause), *ended)
    assert [(one.cause, one.stop_reason) for one in closing.closed.attempts] == [(cause, ""), ("", reason)]
    assert_has_a_record(closing.closed)


def test_of_very_many_attempts_a_closing_keeps_the_outcome_that_decided_each_member():
    number = 12_000
    failures = [failed(member=0, number=n, is_final=n == number - 1) for n in range(number)]
    done = attempt(member=1, number=7)
    late = [failed(member=1, number=n) for n in range(9)]
    (closing,) = closings_of(started(), *late[:7], *done, late[8], *failures)
    kept = [(one.member, one.attempt, one.outcome) for one in closing.closed.attempts]
    assert kept == [(0, number - 1, "failed"), (1, 7, "complete")]
    assert [one.rollout_id for one in closing.closed.members] == [done[0].rollout_id]
    assert_has_a_record(closing.closed)


def test_a_group_with_too_many_trajectories_for_a_closing_fails_with_the_cause():
    agents = {f"agent-{number:05d}-{'x' * 100}": "run/policy" for number in range(2_000)}
    (closing,) = closings_of(started(size=1, agents=agents), *attempt(num_steps=0))
    closed = closing.closed
    assert closing.trajectories == ()
    assert (closed.reason, closed.is_viable, closed.members) == ("failed", False, ())
    assert [(one.outcome, one.cause) for one in closed.attempts] == [("rejected", TOO_LARGE)]
    assert_has_a_record(closed)


def test_outcomes_that_no_record_could_name_are_left_out():
    name = "g" * 100_000
    (closing,) = closings_of(started(size=1), *attempt())
    outcome = closing.closed.attempts[0]
    named = tuple(
        outcome.model_copy(update={"rollout_id": ids.rollout_id(name, number, 0), "member": number})
        for number in range(20)
    )
    closed = fitting(closing.closed.model_copy(update={"group_id": name, "attempts": named}))
    assert (closed.attempts, closed.members, closed.is_viable) == ((), (), False)
    assert_has_a_record(closed)


def test_a_group_whose_ids_no_closing_could_hold_becomes_a_dead_letter(tmp_path):
    begun = started(size=1, example_id="x" * (MIB + 1))
    log = log_with(begun, *attempt(), started(1, size=1), *attempt(1))
    assert assembled(log, tmp_path) == 12
    (closed,) = asyncio.run(events_of(log, "groups", GroupClosed))
    assert closed.group_id == group(1)
    (letter,) = asyncio.run(records_of(log, "dlq"))
    assert any(b"its closing would have" in (content or b"") for _, content in letter.headers)


@pytest.mark.parametrize("is_too_large", [True, False])
def test_a_trajectory_whose_reward_names_fit_into_no_record_is_rejected(is_too_large, tmp_path):
    begin, *steps, reward, ended = attempt()
    assert isinstance(ended, RolloutEnded)
    assert isinstance(reward, RewardRecorded)
    names = [str(number) * 1_500_000 for number in range(6 if is_too_large else 5)]
    rewards = [reward.model_copy(update={"reward_index": n, "name": name}) for n, name in enumerate(names)]
    digest = codec.chain(ended.rollout_id, map(codec.content_digest, [*steps, *rewards]))
    ended = ended.model_copy(update={"num_rewards": len(rewards), "digest": digest})
    log = log_with(started(size=1), begin, *steps, *rewards, ended)
    assert assembled(log, tmp_path) == 5 + len(rewards)
    (closed,) = asyncio.run(events_of(log, "groups", GroupClosed))
    (outcome,) = closed.attempts
    expected = r"broken_tokens: its trajectory would have 9\d+ bytes" if is_too_large else ""
    assert outcome.outcome == ("rejected" if is_too_large else "complete")
    assert len(closed.members) == (not is_too_large)
    assert re.match(expected, outcome.cause)
