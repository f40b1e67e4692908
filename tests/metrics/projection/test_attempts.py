"""Each attempt's state is kept in one row; `outcomes` from it equals that from the events' own tables."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollstream.metrics.projection.database import Database
from tests.metrics.conftest import empty_file

RUNS, GROUPS, MEMBERS, ATTEMPTS = 2, 4, 3, 2
OUTCOMES_FROM_EVENTS = """
WITH settled AS (
    SELECT a.rollout_id, a.outcome, nullif(a.cause, '') AS cause, a.num_tokens
    FROM log.attempt_settled a JOIN log.group_closed c ON c.group_id = a.group_id AND c.log_offset = a.log_offset
), member AS (
    SELECT rollout_id, sum(num_tokens)::BIGINT AS num_tokens FROM log.members GROUP BY rollout_id
), planned AS ( -- by run, because a what-if's batches decide nothing of its parent's rollouts
    SELECT m.run_id, m.rollout_id, bool_or(b.is_trained) AS is_trained
    FROM batch_members m JOIN batches b USING (batch_id) GROUP BY m.run_id, m.rollout_id
), rejected AS (
    SELECT rollout_id, min(cause) AS cause, sum(num_tokens)::BIGINT AS num_tokens
    FROM log.trajectory_rejected GROUP BY rollout_id
), stepped AS (
    SELECT rollout_id, min(run_id) AS run_id, min(group_id) AS group_id, max(log_offset) AS last_offset,
        sum(num_new_prompt_tokens + num_completion_tokens)::BIGINT AS num_tokens
    FROM log.step_recorded GROUP BY rollout_id
), rewarded AS (
    SELECT rollout_id, min(run_id) AS run_id, min(group_id) AS group_id, max(log_offset) AS last_offset
    FROM log.reward_recorded GROUP BY rollout_id
), attempt AS (
    SELECT rollout_id, min(run_id) AS run_id, min(group_id) AS group_id FROM (
        SELECT run_id, group_id, rollout_id FROM log.rollout_started
        UNION ALL SELECT run_id, group_id, rollout_id FROM log.rollout_finished
        UNION ALL SELECT run_id, group_id, rollout_id FROM log.attempt_settled
        UNION ALL SELECT run_id, group_id, rollout_id FROM log.members
        UNION ALL SELECT run_id, group_id, rollout_id FROM stepped
        UNION ALL SELECT run_id, group_id, rollout_id FROM rewarded
    ) GROUP BY rollout_id
), judged AS (
    SELECT a.run_id, a.group_id, a.rollout_id,
        CASE
            WHEN p.is_trained THEN ['trained', NULL]
            WHEN r.rollout_id IS NOT NULL AND NOT coalesce(m.num_tokens > r.num_tokens, false)
                THEN ['rejected', r.cause]
            -- its end came after the closing that counted it out, or a part of it after the end that lacked it
            WHEN s.outcome = 'failed' AND f.state = 'ended' THEN ['rejected', 'late']
            WHEN s.outcome = 'rejected' AND s.cause = 'incomplete' AND f.state = 'ended'
                AND greatest(t.last_offset, w.last_offset) > f.log_offset THEN ['rejected', 'late']
            WHEN s.outcome IN ('failed', 'superseded', 'rejected') THEN [s.outcome, coalesce(s.cause, f.cause)]
            WHEN f.state = 'failed' THEN ['failed', f.cause]
            WHEN p.rollout_id IS NOT NULL OR s.outcome = 'complete' OR m.rollout_id IS NOT NULL THEN
                if(e.run_id IS NULL, ['open', if(p.rollout_id IS NULL, 'waiting', 'planned')],
                    ['rejected', 'run_ended'])
            WHEN c.group_id IS NOT NULL THEN if(f.state = 'ended', ['rejected', 'late'], ['dead', 'late'])
            WHEN e.run_id IS NOT NULL THEN if(f.state = 'ended', ['rejected', 'run_ended'], ['dead', 'run_ended'])
            ELSE ['open', if(f.state = 'ended', 'assembling', 'running')]
        END AS judgement,
        coalesce(
            if(judgement[2] = 'late', t.num_tokens, NULL),
            if(judgement[1] IN ('failed', 'superseded'), greatest(s.num_tokens, t.num_tokens), nullif(s.num_tokens, 0)),
            m.num_tokens, r.num_tokens, t.num_tokens, 0
        ) AS tokens
    FROM attempt a
    LEFT JOIN settled s USING (rollout_id) LEFT JOIN member m USING (rollout_id)
    LEFT JOIN rejected r USING (rollout_id) LEFT JOIN stepped t USING (rollout_id)
    LEFT JOIN rewarded w USING (rollout_id) LEFT JOIN log.rollout_finished f USING (rollout_id)
    LEFT JOIN log.group_closed c ON c.group_id = a.group_id
    LEFT JOIN log.run_ended e ON e.run_id = a.run_id
    LEFT JOIN planned p ON p.run_id = a.run_id AND p.rollout_id = a.rollout_id
)
SELECT run_id, rollout_id, judgement[1] AS outcome, judgement[2] AS cause, tokens, group_id FROM judged
"""
"""The view's definition by joins of the events' tables, whose cost grows with all that was ever recorded."""
SETTLED = [("complete", ""), ("failed", "timeout"), ("superseded", ""), ("rejected", "incomplete"), (None, None)]
Rows = dict[str, list[dict[str, Any]]]


class Events:
    """Rows of random events, some of them repeated, in an order that their partitions allow."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._offset = 0

    def transactions(self, num: int) -> Iterator[Rows]:
        for _ in range(num):
            rows: Rows = {}
            for _ in range(self._random.randrange(1, 40)):
                for table, row in self._random.choice(self._kinds)():
                    rows.setdefault(table, []).append({"log_offset": self._offset, **row})
                self._offset += 1
            yield rows

    @property
    def _kinds(self) -> list[Any]:
        often = [self._steps, self._steps, self._steps, self._finished, self._finished, self._started, self._closed]
        return [*often, self._closed, self._rejected, self._batch, self._trained, self._trained, self._rare]

    def _any_attempt(self) -> dict[str, Any]:
        pick = self._random.randrange
        run_id = f"run-{pick(RUNS)}"
        group_id = f"{run_id}/rl/e00000/t{pick(GROUPS):05d}"
        return {
            "run_id": run_id,
            "group_id": group_id,
            "rollout_id": f"{group_id}/m{pick(MEMBERS)}/a{pick(ATTEMPTS)}",
        }

    def _started(self) -> Iterator[tuple[str, Any]]:
        yield "rollout_started", self._any_attempt()

    def _steps(self) -> Iterator[tuple[str, Any]]:
        attempt = self._any_attempt()
        counts = self._random.choice([(1, 2), (3, 4), (None, None)])
        names = ("num_new_prompt_tokens", "num_completion_tokens")
        yield (
            "step_recorded",
            attempt | {"step_index": self._random.randrange(4)} | dict(zip(names, counts, strict=True)),
        )
        if self._random.random() < 0.3:
            yield "reward_recorded", attempt | {"reward_index": self._random.randrange(2)}

    def _finished(self) -> Iterator[tuple[str, Any]]:
        state, cause = self._random.choice([("ended", None), ("ended", None), ("failed", "environment_error")])
        yield "rollout_finished", self._any_attempt() | {"state": state, "cause": cause}

    def _closed(self) -> Iterator[tuple[str, Any]]:
        one = self._any_attempt()
        yield "group_closed", {"group_id": one["group_id"], "run_id": one["run_id"], "purpose": "train"}
        for member in range(MEMBERS):
            for attempt in range(ATTEMPTS):
                rollout = one | {"rollout_id": f"{one['group_id']}/m{member}/a{attempt}"}
                outcome, cause = self._random.choice(
                    [
                        ("complete", ""),
                        ("failed", "timeout"),
                        ("superseded", ""),
                        ("rejected", "incomplete"),
                        (None, None),
                    ]
                )
                if outcome is not None:
                    tokens = self._random.choice([0, 7])
                    yield "attempt_settled", rollout | {"outcome": outcome, "cause": cause, "num_tokens": tokens}
                for agent in range(self._random.randrange(3) if outcome == "complete" else 0):
                    trajectory = f"{rollout['rollout_id']}/agent-{agent}"
                    yield "group_member", rollout | {"trajectory_id": trajectory, "num_tokens": 5 + agent}

    def _rejected(self) -> Iterator[tuple[str, Any]]:
        attempt = self._any_attempt()
        for agent in range(2):
            yield (
                "trajectory_rejected",
                attempt
                | {"trajectory_id": f"{attempt['rollout_id']}/agent-{agent}", "num_tokens": 3}
                | {"cause": self._random.choice(["zero_variance", "stale", "late"])},
            )

    def _batch(self) -> Iterator[tuple[str, Any]]:
        run_id = f"run-{self._random.randrange(RUNS)}"  # not always that of its members: a what-if's
        batch_id = f"{run_id}/rl/b{self._random.randrange(6):06d}"
        yield "batch_planned", {"batch_id": batch_id, "run_id": run_id}
        for position in range(3):
            yield "batch_member", self._any_attempt() | {"batch_id": batch_id, "position": position, "run_id": run_id}

    def _trained(self) -> Iterator[tuple[str, Any]]:
        run_id = f"run-{self._random.randrange(RUNS)}"
        row = {"run_id": run_id, "model_group": f"{run_id}/policy", "term": self._random.randrange(3)}
        batch_id = f"{run_id}/rl/b{self._random.randrange(6):06d}"
        job_id = f"{run_id}/{self._random.choice(('rl', 'next'))}"
        yield "step_trained", row | {"version": self._random.randrange(5), "job_id": job_id, "batch_id": batch_id}

    def _rare(self) -> Iterator[tuple[str, Any]]:
        run_id = f"run-{self._random.randrange(RUNS)}"
        if self._random.random() < 0.3:
            claim = {"model_group": f"{run_id}/policy", "term": self._random.randrange(3), "learner": "learner-1"}
            yield "learner_claimed", claim | {"run_id": run_id}
        elif self._random.random() < 0.2:
            yield "run_ended", {"run_id": run_id, "cause": "completed"}


def written(database: Database, transactions: Iterator[Rows]) -> Database:
    """The file with these rows; columns that are not given are NULL."""
    columns: dict[str, list[str]] = {}
    for table, column in (
        database.cursor()
        .execute("SELECT table_name, column_name FROM duckdb_columns() WHERE schema_name = 'log'")
        .fetchall()
    ):
        columns.setdefault(table, []).append(column)
    for rows in transactions:
        whole = {
            table: [dict.fromkeys(columns[table]) | {"log_partition": 0, "time_ms": 0} | row for row in found]
            for table, found in rows.items()
        }
        database.write(whole, {})
    return database


def found_in(database: Database, sql: str) -> list[Any]:
    return sorted(database.cursor().execute(sql).fetchall(), key=repr)


@pytest.mark.parametrize("seed", range(4))
def test_outcomes_equal_those_that_joins_of_the_events_tables_find(seed: int, tmp_path: Path) -> None:
    database = Database(empty_file(tmp_path))
    events = Events(seed)
    seen: set[Any] = set()
    for _ in range(12):
        written(database, events.transactions(3))
        outcomes = found_in(database, "SELECT * FROM outcomes")
        assert outcomes == found_in(database, OUTCOMES_FROM_EVENTS)
        seen |= {row[2:4] for row in outcomes}
    assert {outcome for outcome, _ in seen} >= {"trained", "rejected", "failed", "superseded"}
    database.close()


def test_the_same_rows_in_one_transaction_in_many_and_repeated_leave_the_same(tmp_path: Path) -> None:
    transactions = list(Events(9).transactions(20))
    merged: Rows = {}
    for rows in transactions:
        for table, found in rows.items():
            merged.setdefault(table, []).extend(found)
    (tmp_path / "one").mkdir()
    many = written(Database(empty_file(tmp_path)), iter(transactions))
    one = written(Database(empty_file(tmp_path / "one")), iter([merged]))
    for sql in ("FROM log.attempt", "FROM outcomes", "FROM wasted_tokens"):
        first = found_in(many, sql)
        assert first
        assert first == found_in(one, sql)
        written(many, iter(transactions[3:9]))
        assert first == found_in(many, sql)
    many.close()
    one.close()


def test_an_attempt_of_records_that_name_two_runs_is_the_same_however_they_are_cut(tmp_path: Path) -> None:
    start = {"rollout_id": "r/m0/a0", "run_id": "r", "group_id": "r", "member": 0, "attempt": 0, "log_offset": 0}
    step = {"rollout_id": "r/m0/a0", "run_id": "q", "group_id": "s", "step_index": 0, "log_offset": 1}
    (tmp_path / "two").mkdir()
    one = written(Database(empty_file(tmp_path)), iter([{"rollout_started": [start], "step_recorded": [step]}]))
    two = written(
        Database(empty_file(tmp_path / "two")), iter([{"rollout_started": [start]}, {"step_recorded": [step]}])
    )
    for database in (one, two):
        assert found_in(database, "SELECT run_id, group_id FROM log.attempt") == [("q", "r")]
        database.close()
