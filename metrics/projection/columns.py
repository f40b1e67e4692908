"""Rows by column name: what a table of schema `log` has a column for is copied from an event or from a value in it."""

from functools import cache
from importlib import resources
from typing import Any

from pydantic import BaseModel

from rollstream.metrics.projection.inserts import inserts_into
from rollstream.schemas import ids

Row = dict[str, Any]

VIEWS_HEADING = "\n-- views\n"
OF_ALL = frozenset({"run_id", "time_ms"})
"""Columns of every table, which `rows_of` fills."""


def quoted(text: str) -> str:
    """A text as a literal of SQL."""
    return "'" + text.replace("'", "''") + "'"


@cache
def read_sql() -> tuple[str, str]:
    """The statements that make the tables, and those that make the views."""
    whole = resources.files("rollstream.metrics.projection").joinpath("tables.sql").read_text()
    tables, _, views = whole.partition(VIEWS_HEADING)
    return tables, views.replace("{PLAYER}", ids.PLAYER).replace("{INDEXED}", ids.INDEXED)


def copied(table: str, source: BaseModel) -> Row:
    """The fields of `source` that the table has columns for."""
    values = source.__dict__
    return {name: values[name] for name in _names(table, type(source))}


@cache
def _names(table: str, model: type[BaseModel]) -> tuple[str, ...]:
    columns = inserts_into(read_sql()[0])[table].columns
    return tuple(name for name in columns if name in model.model_fields and name not in OF_ALL)
