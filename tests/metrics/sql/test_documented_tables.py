"""docs/sql.md describes the tables and columns that there are."""

import re
from pathlib import Path

from rollstream.metrics.projection.database import connect
from tests.metrics.conftest import empty_file

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "sql.md").read_text(encoding="utf-8")
NAMED = set(re.findall(r"`(\w+)`", PAGE))
SUFFIXES = tuple(re.findall(r"`\.\.\.(_\w+)`", PAGE))


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
