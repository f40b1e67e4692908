"""The recorded log-probabilities of a batch: read from the log, and laid on its sequences."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollstream.eventlog import codec
from rollstream.eventlog.log import Position, ReadableLog, Received
from rollstream.learner.algorithms.base import Row
from rollstream.learner.reading.members import FORK
from rollstream.learner.scoring.index import ScoreAsked, ScoreIndex
from rollstream.schemas import tokens
from rollstream.schemas.errors import DecodeError
from rollstream.schemas.events import BatchPlanned, ReferenceScored, TrajectoryAssembled

MAX_TOKENS = 150_000
"""Maximum tokens of one event: 800 kB of text, which a record of `weights` holds."""
Logprobs = NDArray[np.float32]
Answer = tuple[bytes, bytes]
"""Token ids of a prompt and of a completion."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities (N,) of members' completion tokens, by role of the scorer and index of the member."""

    by_role: Mapping[str, Mapping[int, Logprobs]] = field(default_factory=dict[str, Mapping[int, Logprobs]])
    sha256: str = ""
    """Digest as in `StepTrained.scores_sha256`."""

    def as_json(self) -> dict[str, Any]:
        """JSON values, the inverse of `of_json`."""
        by_role = {
            role: {str(member): tokens.encode_floats(values.tolist()) for member, values in by_member.items()}
            for role, by_member in self.by_role.items()
        }
        return {"by_role": by_role, "scores_sha256": self.sha256}

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> "Scores":
        """Build from the JSON values of `as_json`."""
        by_role = {
            role: {int(member): np.frombuffer(tokens.decode_floats(text), np.float32) for member, text in texts.items()}
            for role, texts in found["by_role"].items()
        }
        return cls(by_role, found["scores_sha256"])


NONE = Scores()


def missing(index: ScoreIndex, planned: BatchPlanned, asked: Sequence[ScoreAsked]) -> list[ScoreAsked]:
    """Those that no event has."""
    return [one for one in asked if not index.offsets(one.wanted(planned))]


async def recorded_scores(
    log: ReadableLog, index: ScoreIndex, planned: BatchPlanned, asked: Sequence[ScoreAsked]
) -> Scores:
    """Read the recorded scores.

    Raises DecodeError if a requested event is missing or one is not as the index describes it, TruncatedError if one is
    no longer in the log.
    """
    positions: list[tuple[ScoreAsked, tuple[int, ...]]] = []
    for one in asked:
        offsets = index.offsets(one.wanted(planned))
        if not offsets:
            trajectory = planned.members[one.member].trajectory_id
            raise DecodeError(
                f"manifest {planned.batch_id}: topic weights has no ReferenceScored of trajectory {trajectory} by its "
                f"{one.scorer.role}; {FORK}"
            )
        positions.append((one, offsets))
    if not positions:
        return NONE
    wanted = [Position("weights", 0, offset) for _, offsets in positions for offset in offsets]
    received = iter([codec.decode(record) for record in await log.fetch(wanted)])
    by_role: dict[str, dict[int, Logprobs]] = {}
    digest = hashlib.sha256()
    for one, offsets in positions:
        parts = [_part(next(received), one, planned, digest) for _ in offsets]
        by_role.setdefault(one.scorer.role, {})[one.member] = np.concatenate(parts)
    return Scores(by_role, digest.hexdigest())


def _part(received: Received, asked: ScoreAsked, planned: BatchPlanned, digest: "hashlib._Hash") -> Logprobs:
    event = received.event
    wanted = asked.wanted(planned)
    if not isinstance(event, ReferenceScored) or (event.trajectory_sha256, event.scorer.sha256) != wanted[:2]:
        raise DecodeError(
            f"manifest {planned.batch_id}: weights {received.position.offset} holds {event.event_id}; {FORK}"
        )
    digest.update(bytes.fromhex(received.digest))
    found = np.frombuffer(tokens.decode_floats(event.logprobs), np.float32)
    if not np.isfinite(found).all():
        raise DecodeError(
            f"{event.event_id} at weights {received.position.offset}: a log-probability is not finite; {FORK}"
        )
    return found


def by_sequence(trajectory: TrajectoryAssembled, logprobs: Logprobs) -> list[Logprobs]:
    """(T,) by sequence of a trajectory: each completion token's value, 0 on prompts. Raises DecodeError."""
    found: list[Logprobs] = []
    taken = 0
    for sequence in trajectory.sequences:
        values = np.zeros(tokens.count(sequence.token_ids), np.float32)
        for part in sequence.completions:
            values[part.start : part.start + part.length] = logprobs[taken : taken + part.length]
            taken += part.length
        found.append(values)
    if taken != len(logprobs):
        raise DecodeError(f"trajectory {trajectory.trajectory_id}: {len(logprobs)} scores for {taken} tokens; {FORK}")
    return found


def flat(trajectory: TrajectoryAssembled, by_sequence: Sequence[Logprobs]) -> Logprobs:
    """The reverse of `by_sequence`: the values of completion tokens one after another."""
    found = [
        values[part.start : part.start + part.length]
        for sequence, values in zip(trajectory.sequences, by_sequence, strict=True)
        for part in sequence.completions
    ]
    return np.concatenate(found) if found else np.zeros(0, np.float32)


def events_of(
    planned: BatchPlanned, one: ScoreAsked, logprobs: Logprobs, *, run_id: str, term: int
) -> Iterator[ReferenceScored]:
    """Events that record one member's log-probabilities."""
    num_parts = max(1, -(-len(logprobs) // MAX_TOKENS))
    member = planned.members[one.member]
    for part in range(num_parts):
        yield ReferenceScored(
            run_id=run_id,
            time_ms=planned.time_ms,
            model_group=planned.model_group,
            job_id=planned.job_id,
            batch_id=planned.batch_id,
            version=planned.yields_version,
            term=term,
            trajectory_id=member.trajectory_id,
            trajectory_sha256=member.digest,
            scorer=one.scorer,
            part=part,
            num_parts=num_parts,
            logprobs=tokens.encode_floats(logprobs[part * MAX_TOKENS : (part + 1) * MAX_TOKENS]),
        )


class CompletionSpan(NamedTuple):
    """A completion by its member of the batch and its position there."""

    member: int
    sequence: int
    start: int
    length: int


def spans_of(rows: Sequence[Row], trajectories: Sequence[TrajectoryAssembled]) -> list[CompletionSpan]:
    """The first equal completion in the batch, for each row, which is an answer to a prompt."""
    wanted = {_answer(row): index for index, row in enumerate(rows)}
    ends = {(int(row.mask.argmax()), len(row.token_ids)) for row in rows}
    found: dict[int, CompletionSpan] = {}
    for member, trajectory in enumerate(trajectories):
        for number, sequence in enumerate(trajectory.sequences):
            token_ids = tokens.decode_ids(sequence.token_ids)
            for part in sequence.completions:
                end = part.start + part.length
                if (part.start, end) not in ends:
                    continue
                answer = token_ids[: part.start].tobytes(), token_ids[part.start : end].tobytes()
                if answer in wanted:
                    found.setdefault(wanted[answer], CompletionSpan(member, number, part.start, part.length))
    return [found[index] for index in range(len(rows))]


def scored_rows(
    rows: Sequence[Row], spans: Sequence[CompletionSpan], scores: Mapping[str, Mapping[int, Sequence[Logprobs]]]
) -> list[Row]:
    """The rows with their scores. `scores`: by role and member, one array (T,) a sequence."""
    found: list[Row] = []
    for row, span in zip(rows, spans, strict=True):
        of_row: dict[str, Logprobs] = {}
        for role, by_member in scores.items():
            of_row[role] = np.zeros(len(row.token_ids), np.float32)
            of_row[role][-span.length :] = by_member[span.member][span.sequence][span.start :][: span.length]
        found.append(replace(row, scores=of_row))
    return found


def _answer(row: Row) -> Answer:
    start = int(row.mask.argmax())
    return row.token_ids[:start].tobytes(), row.token_ids[start:].tobytes()
