"""An attempt whose score is missing: rejected with its tokens, not made again, and in no mean."""

from typing import Any

from rollstream.eventlog import codec
from rollstream.metrics.projection.rows_rollouts import rollout_ended
from rollstream.processors.curate import fold as curate
from rollstream.schemas.events import RolloutEnded
from tests.rigs.steps_rig import attempt, closings_of, received_of, started

MISSING: dict[str, Any] = {"missing_scores": {"judge": "eval.evaluators.judge: answered 500"}}


def test_a_rollout_without_a_score_is_rejected_and_its_group_closes_without_it():
    ((closing),) = closings_of(started(size=2), *attempt(member=0, **MISSING), *attempt(member=1, reward=0.5))
    closed = closing.closed
    assert (closed.reason, closed.is_viable) == ("partial", True)
    assert [(one.outcome, one.cause, one.num_tokens) for one in closed.attempts] == [
        ("rejected", "no_score", 8),
        ("complete", "", 8),
    ]
    assert [member.reward for member in closed.members] == [0.5]
    assert len(closing.trajectories) == 1


def test_a_group_of_missing_scores_is_failed_and_not_worth_zero():
    ((closing),) = closings_of(started(size=1), *attempt(**MISSING))
    assert (closing.closed.reason, closing.closed.members) == ("failed", ())
    (received,) = received_of([closing.closed])
    assert curate.evolve(curate.initial(), received, {}) == []


def test_a_broken_attempt_is_broken_first():
    ((closing),) = closings_of(started(size=1), *attempt(digest="0" * 64, **MISSING))
    assert closing.closed.attempts[0].cause == "digest"


def test_ends_without_the_field_stay_what_they_were():
    ended = attempt()[-1]
    assert isinstance(ended, RolloutEnded)
    assert b"missing_scores" not in codec.encode(ended).value
    assert b"missing_scores" in codec.encode(attempt(**MISSING)[-1]).value


def test_the_reason_is_in_the_metrics():
    (received,) = received_of([attempt()[-1]])
    ((_, row),) = rollout_ended(attempt(**MISSING)[-1], received)
    assert row["message"] == "eval.evaluators.judge: answered 500"
    ((_, row),) = rollout_ended(attempt()[-1], received)
    assert row["message"] is None
