"""All about each attempt in one row (`log.attempt`), from the rows that a transaction really added. Pure.

Every value is a sum, a first, a least or a greatest, or a flag that is only ever set; so the rows are the same in
whatever order topics are read and however they are cut into transactions. The view `outcomes` judges from them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rollstream.schemas import ids

Row = dict[str, Any]
Inserted = Mapping[str, Sequence[Mapping[str, Any]]]

TRAINED_BATCHES = """
WITH asked AS (
    SELECT DISTINCT model_group, version FROM log.step_trained WHERE batch_id IN (SELECT unnest($1::VARCHAR[]))
)
SELECT batch_id FROM (
    SELECT t.batch_id FROM log.step_trained t JOIN asked a ON a.model_group = t.model_group AND a.version = t.version
    WHERE NOT log.is_void(t.model_group, t.term, t.log_offset)
    QUALIFY row_number() OVER (PARTITION BY t.model_group, t.version, t.job_id ORDER BY t.log_offset) = 1
) WHERE batch_id IN (SELECT unnest($1::VARCHAR[]))
"""
"""Batches with a step in `log.steps_of_jobs`: the first of each version in its job that no later claim made void.

A batch whose job was closed before it published the version is among them: that it was trained must not depend on what
comes later.
"""
PLANNED_AT = "SELECT batch_id, log_offset FROM log.batch_planned WHERE batch_id IN (SELECT unnest($1::VARCHAR[]))"
MEMBERS = """
SELECT m.rollout_id, m.run_id FROM log.batch_member m
JOIN log.batch_planned b ON b.batch_id = m.batch_id AND b.log_offset = m.log_offset
WHERE m.log_offset BETWEEN $1 AND $2 AND m.batch_id IN (SELECT unnest($3::VARCHAR[]))
"""
MAX_BIGINT = 2**63 - 1
_SUM = (
    f"coalesce(CASE WHEN {{0}}::HUGEINT + excluded.{{0}} > {MAX_BIGINT} THEN {MAX_BIGINT} "
    "ELSE {0} + excluded.{0} END, {0}, excluded.{0})"
)
"""Sum of numbers that are not negative, so that their order does not matter where the sum is too large."""
_ATTEMPT = ("rollout_id", "run_id", "group_id")
READ: dict[str, tuple[str, ...]] = {
    "rollout_started": _ATTEMPT,
    "step_recorded": (*_ATTEMPT, "log_offset", "num_new_prompt_tokens", "num_completion_tokens"),
    "reward_recorded": (*_ATTEMPT, "log_offset"),
    "rollout_finished": (*_ATTEMPT, "log_offset", "state", "cause"),
    "group_closed": ("group_id", "log_offset"),
    "attempt_settled": (*_ATTEMPT, "log_offset", "outcome", "cause", "num_tokens"),
    "group_member": (*_ATTEMPT, "log_offset", "num_tokens"),
    "trajectory_rejected": ("rollout_id", "cause", "num_tokens"),
    "batch_planned": ("batch_id", "log_offset"),
    "batch_member": (*_ATTEMPT, "batch_id", "log_offset"),
    "step_trained": ("batch_id",),
}
"""Tables whose new rows count here, and the columns that are read of them."""
COMBINE = {
    "run_id": "least({0}, excluded.{0})",
    "group_id": "least({0}, excluded.{0})",
    "is_known": "{0} OR excluded.{0}",
    "state": "coalesce({0}, excluded.{0})",
    "cause": "coalesce({0}, excluded.{0})",
    "end_offset": "coalesce({0}, excluded.{0})",
    "last_offset": "greatest({0}, excluded.{0})",
    "step_tokens": _SUM,
    "settled": "coalesce({0}, excluded.{0})",
    "settled_cause": "coalesce({0}, excluded.{0})",
    "settled_tokens": "coalesce({0}, excluded.{0})",
    "member_tokens": _SUM,
    "is_rejected": "{0} OR excluded.{0}",
    "rejected_cause": "least({0}, excluded.{0})",
    "rejected_tokens": _SUM,
    "is_planned": "{0} OR excluded.{0}",
    "is_trained": "{0} OR excluded.{0}",
}
"""SQL that combines a column of an existing row with a new value."""
_FLAGS = ("is_known", "is_rejected", "is_planned", "is_trained")
_NOTHING = dict.fromkeys(COMBINE) | dict.fromkeys(_FLAGS, False)


def attempts_of(inserted: Inserted, trained: Iterable[Mapping[str, Any]]) -> list[Row]:
    """One row for each attempt that the new rows concern. `trained`: members of batches that are trained now."""
    found: dict[str, Row] = {}
    for row in inserted.get("rollout_started", ()):
        _known(found, row)
    for row in inserted.get("step_recorded", ()):
        attempt = _known(found, row)
        _reach(attempt, row["log_offset"])
        if row["num_new_prompt_tokens"] is not None and row["num_completion_tokens"] is not None:
            _add(attempt, "step_tokens", row["num_new_prompt_tokens"] + row["num_completion_tokens"])
    for row in inserted.get("reward_recorded", ()):
        _reach(_known(found, row), row["log_offset"])
    for row in inserted.get("rollout_finished", ()):
        _known(found, row).update(state=row["state"], cause=row["cause"], end_offset=row["log_offset"])
    _take_closings(found, inserted)
    for row in inserted.get("trajectory_rejected", ()):
        attempt = _of(found, row["rollout_id"])
        causes = [cause for cause in (attempt["rejected_cause"], row["cause"]) if cause is not None]
        attempt.update(is_rejected=True, rejected_cause=min(causes, default=None))
        _add(attempt, "rejected_tokens", row["num_tokens"])
    _take_batches(found, inserted, trained)
    return list(found.values())


def _take_closings(found: dict[str, Row], inserted: Inserted) -> None:
    """Only the first closing of a group settles; its rows and those of its members come from one record."""
    closings = {(row["group_id"], row["log_offset"]) for row in inserted.get("group_closed", ())}
    for row in inserted.get("attempt_settled", ()):
        attempt = _known(found, row)
        if (row["group_id"], row["log_offset"]) in closings:
            attempt.update(settled=row["outcome"], settled_cause=row["cause"] or None, settled_tokens=row["num_tokens"])
    for row in inserted.get("group_member", ()):
        if (row["group_id"], row["log_offset"]) in closings:
            _add(_known(found, row), "member_tokens", row["num_tokens"])


def _take_batches(found: dict[str, Row], inserted: Inserted, trained: Iterable[Mapping[str, Any]]) -> None:
    """Only batches of an attempt's own run decide it: a what-if's decide nothing of its parent's rollouts."""
    plans = {(row["batch_id"], row["log_offset"]) for row in inserted.get("batch_planned", ())}
    for row in inserted.get("batch_member", ()):
        if (row["batch_id"], row["log_offset"]) in plans and _is_own(row):
            _of(found, row["rollout_id"])["is_planned"] = True
    for row in trained:
        if _is_own(row):
            _of(found, row["rollout_id"]).update(is_planned=True, is_trained=True)


def _is_own(row: Mapping[str, Any]) -> bool:
    return ids.run_of(row["rollout_id"]) == row["run_id"]


def _of(found: dict[str, Row], rollout_id: str) -> Row:
    if rollout_id not in found:
        found[rollout_id] = {"rollout_id": rollout_id, **_NOTHING}
    return found[rollout_id]


def _known(found: dict[str, Row], row: Mapping[str, Any]) -> Row:
    attempt = _of(found, row["rollout_id"])
    if not attempt["is_known"]:
        attempt.update(run_id=row["run_id"], group_id=row["group_id"], is_known=True)
    elif attempt["run_id"] != row["run_id"] or attempt["group_id"] != row["group_id"]:  # of a writer that is wrong
        attempt.update({name: min(attempt[name], row[name]) for name in ("run_id", "group_id")})
    return attempt


def _reach(attempt: Row, offset: int) -> None:
    attempt["last_offset"] = max(attempt["last_offset"] or 0, offset)


def _add(attempt: Row, name: str, number: int | None) -> None:
    if number is not None:
        attempt[name] = min((attempt[name] or 0) + number, MAX_BIGINT)
