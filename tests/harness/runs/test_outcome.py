"""The summary at the end of a run."""

from rollstream.harness.runs.outcome import MAX_REPEATED, Outcome

REASON = "step 3 of trajectory run-1/rl/e00000/t00001/m0/a0/agent " + "has no token " * 12
LOGGED = (f"learner-1: job=run-1/rl failed: {REASON}",)


def test_a_long_reason_that_a_services_error_has_shown_is_not_repeated() -> None:
    outcome = Outcome("run-1", "failed", 2, message=f"job run-1/rl failed: {REASON}", logged=LOGGED)
    assert outcome.summary() == (
        "run run-1 failed at version 2 after 0 s: job run-1/rl failed: see the error of learner-1 above"
    )
    assert REASON in outcome.as_json()["message"], "the file of the result has all of it"
    assert "logged" not in outcome.as_json()


def test_a_short_reason_or_one_that_was_not_shown_is_whole() -> None:
    assert len(REASON) > MAX_REPEATED
    assert Outcome("run-1", "failed", 2, message=REASON).summary().endswith(REASON)
    short = Outcome("run-1", "failed", 2, message="job x failed: too few", logged=("learner-1: job=x failed: too few",))
    assert short.summary().endswith("job x failed: too few")
