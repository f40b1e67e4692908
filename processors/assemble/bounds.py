"""Keeps what assembly writes within the limits of its topics, whatever the records of `steps` contain.

A record above the limit of its topic cannot be sent, so that every start of assembly would end at it. What fits with
locators of any size is never changed: recorded groups close with the same bytes when they are folded again, but for
those of over a thousand members that came within some percent of the limit.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from rollstream.eventlog import codec
from rollstream.eventlog.log import RECORD_OVERHEAD_BYTES, record_size
from rollstream.schemas.base import Event
from rollstream.schemas.errors import DecodeError
from rollstream.schemas.events.rollouts import GroupStarted, TokenSequence, TrajectoryAssembled
from rollstream.schemas.events.training import AttemptOutcome, GroupClosed
from rollstream.schemas.topics import TOPICS

MAX_TEXT = 200
"""Maximum characters of an outcome's `cause` and `stop_reason` in a closing that is too large."""
TOO_LARGE = "group_too_large"
"""Cause of complete attempts whose group has more trajectories than its closing can name."""
_LOCATOR_BYTES = 48
"""Maximum bytes of a locator, which a closing gets once its trajectories are stored."""
_ENTRY_BYTES = 640
"""Maximum bytes of a member, an outcome or a match apart from its texts."""
_PART_BYTES = 200
"""Maximum bytes of a reward, a sequence, a completion or a span apart from its texts and tokens."""
_CHAR_BYTES = 6
"""Maximum bytes of a character in JSON."""
_OTHER_BYTES = 4096
"""Maximum bytes of a record apart from texts and entries, headers included."""
_MAX_BYTES = TOPICS[TrajectoryAssembled.TOPIC].max_record_bytes
_MAX_TOKEN_BYTES = _MAX_BYTES - RECORD_OVERHEAD_BYTES - 64 * 1024
"""Maximum bytes of a trajectory's token arrays, with a generous estimate for the rest of its record."""


def fitting(closed: GroupClosed) -> GroupClosed:
    """The same closing if its record fits into `groups`, else with as little less as the first of these leaves.

    1. The texts of outcomes are cut to MAX_TEXT characters. 2. Of each member, the outcomes before its complete or
    newest attempt are left out. 3. The group fails without members; its complete attempts are rejected as TOO_LARGE.
    4. All outcomes are left out.
    """
    if _fits(closed):
        return closed
    cut = closed.model_copy(update={"attempts": tuple(map(_cut, closed.attempts))})
    if _fits(cut):
        return cut
    newest = {one.member: one for one in cut.attempts}
    newest |= {one.member: one for one in cut.attempts if one.outcome == "complete"}
    short = cut.model_copy(update={"attempts": tuple(one for one in cut.attempts if newest[one.member] is one)})
    if _fits(short):
        return short
    rejected = tuple(map(_reject, short.attempts))
    failed = {"reason": "failed", "is_viable": False, "members": (), "matches": (), "attempts": rejected}
    without = short.model_copy(update=failed)
    return without if _fits(without) else without.model_copy(update={"attempts": ()})


def _cut(one: AttemptOutcome) -> AttemptOutcome:
    return one.model_copy(update={"cause": one.cause[:MAX_TEXT], "stop_reason": one.stop_reason[:MAX_TEXT]})


def _reject(one: AttemptOutcome) -> AttemptOutcome:
    return one.model_copy(update={"outcome": "rejected", "cause": TOO_LARGE}) if one.outcome == "complete" else one


def _fits(closed: GroupClosed) -> bool:
    limit = TOPICS[closed.TOPIC].max_record_bytes - _LOCATOR_BYTES * len(closed.members)
    num_entries = len(closed.members) + len(closed.attempts) + len(closed.matches)
    if _OTHER_BYTES + _ENTRY_BYTES * num_entries + _CHAR_BYTES * sum(map(len, _texts_of(closed))) <= limit:
        return True
    return _size(closed) <= limit


def _texts_of(closed: GroupClosed) -> Iterable[str]:
    # ids are in the value, some in key and headers too
    yield from 2 * (closed.run_id, closed.group_id, closed.example_id, closed.job_id, closed.void_cause or "")
    for member in closed.members:
        yield from (member.trajectory_id, member.rollout_id, member.agent)
    for one in closed.attempts:
        yield from (one.rollout_id, one.cause, one.stop_reason)
    for match in closed.matches:
        for seat, player in match.players.items():
            yield from (2 * seat, player, " " * 20)


def check_opening(started: GroupStarted) -> None:
    """Raises DecodeError for a group that could not even close without members: its ids are too long."""
    num_chars = 2 * (len(started.run_id) + len(started.group_id) + len(started.job_id))
    num_chars += len(started.example_id) + len(started.void_cause or "")
    limit = TOPICS[GroupClosed.TOPIC].max_record_bytes
    if _OTHER_BYTES + _CHAR_BYTES * num_chars <= limit:
        return
    names = ("run_id", "time_ms", "group_id", "example_id", "job_id", "epoch", "index", "purpose", "policy", "size")
    fields = {name: getattr(started, name) for name in (*names, "void_cause")}
    size = _OTHER_BYTES + _size(GroupClosed(**fields, reason="timeout", is_viable=False, members=()))
    if size > limit:
        raise DecodeError(f"its closing would have {size} bytes, more than the {limit} of a record; shorten its ids")


def check_trajectory(fields: Mapping[str, Any]) -> None:
    """Raises DecodeError for fields of a TrajectoryAssembled whose tokens, or the whole of it, would not fit into its
    record. The messages are part of the closing's digest.
    """
    num_token_bytes, num_entries, num_chars = _size_of(fields["sequences"])
    if num_token_bytes > _MAX_TOKEN_BYTES:
        raise DecodeError(f"its trajectory would have {num_token_bytes} bytes of tokens, more than {_MAX_TOKEN_BYTES}")
    for value in fields.values():
        if type(value) is str:
            num_chars += 2 * len(value)  # some are in headers too
    for name in ("rewards", "step_rewards", "step_scores"):
        num_entries += len(fields[name])
        for key in fields[name]:
            num_chars += len(key)
    if _OTHER_BYTES + num_token_bytes + _PART_BYTES * num_entries + _CHAR_BYTES * num_chars <= _MAX_BYTES:
        return
    size = _size(TrajectoryAssembled.model_validate(fields))
    if size > _MAX_BYTES:
        raise DecodeError(f"its trajectory would have {size} bytes, more than the {_MAX_BYTES} of a record")


def _size_of(sequences: Iterable[TokenSequence]) -> tuple[int, int, int]:
    """Bytes of tokens and completions; sequences and spans; characters of their texts."""
    num_bytes = num_entries = num_chars = 0
    for sequence in sequences:
        num_bytes += len(sequence.token_ids) + len(sequence.logprobs or "") + _PART_BYTES * len(sequence.completions)
        num_entries += 1
        for part in sequence.completions:
            num_chars += len(part.finish_reason)
            if part.kept_ids:
                num_bytes += len(part.kept_ids)
            for span in part.spans:
                num_chars += len(span.model_group)
                num_entries += 1
    return num_bytes, num_entries, num_chars


def _size(event: Event) -> int:
    encoded = codec.encode(event)
    return record_size(encoded.key, encoded.value, encoded.headers)
