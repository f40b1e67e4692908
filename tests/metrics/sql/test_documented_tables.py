"""docs/sql.md describes the tables and columns that there are."""

import re
from pathlib import Path
from typing import Any

import duckdb

from rollstream.metrics.projection.connection import connect
from tests.metrics.conftest import empty_file

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "sql.md").read_text(encoding="utf-8")
NAMED = set(re.findall(r"`(\w+)`", PAGE))
SUFFIXES = tuple(re.findall(r"`\.\.\.(_\w+)`", PAGE))


QUERY = re.compile(r"^SELECT .*?(?:;|(?=\n```))", re.MULTILINE | re.DOTALL)


def test_documented_queries_give_the_same_rows_each_time() -> None:
    """With LIMIT they name an order, and its last column makes it one."""
    pages = [PAGE, (ROOT / "README.md").read_text(encoding="utf-8")]
    limited = [query for page in pages for query in QUERY.findall(page) if " LIMIT " in query]
    assert len(limited) >= 2
    assert [query for query in limited if not re.search(r"ORDER BY .*\w+_id LIMIT", query)] == []


def columns(tmp_path: Path) -> dict[str, set[str]]:
    """Columns by public table."""
    found: dict[str, set[str]] = {}
    with connect(empty_file(tmp_path), read_only=True) as connection:
        query = "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = 'main'"
        for table, column in connection.execute(query).fetchall():
            found.setdefault(table, set()).add(column)
    return found


def test_every_table_is_described_and_every_description_is_of_a_table(tmp_path: Path) -> None:
    assert set(re.findall(r"\*\*`(\w+)`\*\*", PAGE)) == set(columns(tmp_path))


def test_every_column_is_named(tmp_path: Path) -> None:
    assert len(SUFFIXES) == 3
    missing = {
        table: unnamed
        for table, names in columns(tmp_path).items()
        if (unnamed := {name for name in names if name not in NAMED and not name.endswith(SUFFIXES)})
    }
    assert missing == {}


def in_both_orders(tmp_path: Path, inserts: list[str], query: str) -> list[list[Any]]:
    """Rows of a query after these inserts, and after the same ones from last to first."""
    found: list[list[Any]] = []
    for statements in (inserts, inserts[::-1]):
        with duckdb.connect(str(empty_file(tmp_path))) as connection:
            for statement in statements:
                connection.execute(statement)
            found.append(connection.execute(query).fetchall())
    return found


def test_causes_of_as_many_wasted_tokens_are_in_the_order_of_their_outcomes(tmp_path: Path) -> None:
    columns = "rollout_id, run_id, group_id, is_known, is_trained, settled, settled_cause, settled_tokens"
    inserts = [
        f"INSERT INTO log.attempt ({columns}) VALUES ('r/{outcome}', 'r', 'r/g', true, false, '{outcome}', 'c', 5)"
        for outcome in ("failed", "superseded", "rejected")
    ]
    one, other = in_both_orders(tmp_path, inserts, "SELECT outcome FROM wasted_tokens")
    assert one == other == [("failed",), ("rejected",), ("superseded",)]


def test_scores_of_several_teachers_are_in_the_order_of_their_models(tmp_path: Path) -> None:
    columns = (
        "model_group, version, term, trajectory_sha256, scorer_sha256, part, num_parts, trajectory_id, role, model"
    )
    inserts = [
        f"INSERT INTO log.reference_scored ({columns}) VALUES ('r/p', 1, 1, 's', '{model}', 0, 1, 't', 'teacher', "
        f"'{model}')"
        for model in "bcda"
    ]
    one, other = in_both_orders(tmp_path, inserts, "SELECT model FROM reference_scores")
    assert one == other == [("a",), ("b",), ("c",), ("d",)]
