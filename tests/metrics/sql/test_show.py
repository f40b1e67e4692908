"""Results as text, as Parquet, and a run as a picture."""

import csv
import io
import json
import re
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pytest
from click.testing import CliRunner

from rollstream.eventlog.codec import encode
from rollstream.eventlog.log import Record
from rollstream.harness.cli.main import error_line, rollstream
from rollstream.learner.untrained import OUTCOMES
from rollstream.metrics.plot import epochs_with_reward, moving_mean, plot_run, reward_figure
from rollstream.metrics.projection.database import Database
from rollstream.metrics.projection.projector import project
from rollstream.metrics.sql.client import query
from rollstream.metrics.sql.formats import FORMATS, to_csv, to_json, to_parquet, to_table
from rollstream.metrics.sql.result import Result
from rollstream.metrics.sql.select_only import run_select
from rollstream.schemas.base import Event
from rollstream.schemas.errors import QueryError
from rollstream.schemas.events import EpochSealed, GroupClosed
from tests.metrics.conftest import empty_file

RESULT = Result(
    columns=("epoch", "avg_reward", "cause"),
    types=("BIGINT", "DOUBLE", "VARCHAR"),
    rows=((0, 0.25, None), (10, 1 / 3, 'a "b",\nc')),
)


def test_the_query_that_a_failure_suggests_shows_whole_messages(tmp_path: Path) -> None:
    match = re.fullmatch(r'rollstream sql --format (\w+) "(.+)"', OUTCOMES.format("run-1"))
    assert match is not None
    database = Database(empty_file(tmp_path))
    assert run_select(database.cursor(), match[2], limit=10).columns[2] == "message"
    database.close()
    message = "endpoint http://127.0.0.1:8000: HTTP 404: " + "there is nothing here " * 40
    assert message in str(FORMATS[match[1]](Result(("message",), ("VARCHAR",), ((message,),))))


def test_a_table_is_aligned_and_counts_its_rows() -> None:
    assert to_table(RESULT) == (
        "epoch  avg_reward  cause\n"
        "-----  ----------  ---------\n"
        "    0        0.25\n"
        '   10    0.333333  a "b",\\nc\n'
        "(2 rows)\n"
    )


def test_a_cut_result_has_a_note_below_the_table() -> None:
    assert to_table(Result(("a",), ("BIGINT",), ((1,),), is_cut=True)).endswith("(1 row, more were cut by the limit)\n")


def test_an_empty_result_keeps_its_heading(tmp_path: Path) -> None:
    empty = Result(("a", "b"), ("BIGINT", "VARCHAR"), ())
    assert to_table(empty) == "a  b\n-  -\n(0 rows)\n"
    assert (to_json(empty), to_csv(empty)) == ("[]\n", "a,b\n")
    with duckdb.connect() as connection:
        assert _read(connection, tmp_path / "a.parquet", to_parquet(empty)).fetchall() == []


def test_json_and_csv_give_the_values_back() -> None:
    assert json.loads(to_json(RESULT))[1] == {"epoch": 10, "avg_reward": 1 / 3, "cause": 'a "b",\nc'}
    assert list(csv.reader(io.StringIO(to_csv(RESULT))))[2] == ["10", str(1 / 3), 'a "b",\nc']


OBEYED = "\x1b[2J\x9b1m\u202e\r"


def test_terminal_control_characters_are_escaped_and_json_keeps_them() -> None:
    result = Result((f"a{OBEYED}",), ("VARCHAR",), ((f"b{OBEYED}",), ([OBEYED],)))
    for reported in (to_table(result), to_csv(result), to_json(result)):
        assert reported.replace("\n", "").isprintable()
    assert json.loads(to_json(result))[0] == {f"a{OBEYED}": f"b{OBEYED}"}


def test_a_spreadsheet_evaluates_no_text_and_numbers_stay_numbers() -> None:
    texts = ["=1+1", "+cmd|x", "-2+3", "@SUM(1)", "\t=1", "\r=1", "\n=1", "\uff1d1", '=HYPERLINK("http://a")']
    result = Result(("=a", "n"), ("VARCHAR", "DOUBLE"), tuple((text, -1.5) for text in texts))
    rows = list(csv.reader(io.StringIO(to_csv(result))))
    assert [row[0] for row in rows] == ["'=a", *(f"'{text}".replace("\r", "\\x0d") for text in texts)]
    assert [row[1] for row in rows[1:]] == ["-1.5"] * len(texts)
    plain = Result(("v",), ("VARCHAR",), (("-5",), ("+1.5e-3",), ("a=1",), ("",)))
    assert to_csv(plain) == 'v\n-5\n+1.5e-3\na=1\n""\n'


def test_a_name_that_stands_twice_loses_no_column() -> None:
    assert json.loads(to_json(Result(("a", "a"), ("BIGINT", "BIGINT"), ((1, 2),)))) == [{"a": 1, "a_2": 2}]


def test_parquet_keeps_types_and_values(tmp_path: Path) -> None:
    sql = (
        "SELECT 1 AS a, TIMESTAMP '2026-01-02 03:04:05.25' AS a, MAP {'x/y': 1.5} AS m, [1, NULL] AS l, true AS b, "
        "1.5::DECIMAL(6, 2) AS d, NULL::VARCHAR AS n, 'nan'::DOUBLE AS f, '{\"k\": 1}'::JSON AS j"
    )
    database = Database(empty_file(tmp_path))
    result = run_select(database.cursor(), sql, limit=10)
    database.close()
    with duckdb.connect() as connection:
        found = _read(connection, tmp_path / "a.parquet", to_parquet(result))
        assert [str(kind) for kind in found.types][:6] == [
            "INTEGER", "TIMESTAMP", "MAP(VARCHAR, DECIMAL(2,1))", "INTEGER[]", "BOOLEAN", "DECIMAL(6,2)",
        ]  # fmt: skip
        assert found.columns[:2] == ["a", "a_2"]
        row = found.fetchall()[0]
    assert (str(row[1]), row[3], row[4], row[6]) == ("2026-01-02 03:04:05.250000", [1, None], True, None)


@pytest.mark.parametrize(
    ("sql", "kind", "value"),
    [
        ("SELECT sum(n) FROM (VALUES (9007199254740992), (1)) AS t(n)", "BIGINT", 9007199254740993),
        ("SELECT -9223372036854775808::HUGEINT - 1", "DECIMAL(38,0)", -9223372036854775809),
        ("SELECT 170141183460469231731687303715884105727::HUGEINT", "VARCHAR", str(2**127 - 1)),
        ("SELECT NULL::HUGEINT", "BIGINT", None),
    ],
)
def test_parquet_has_every_digit_of_a_sum(sql: str, kind: str, value: Any, tmp_path: Path) -> None:
    result = asked(tmp_path, sql)
    with duckdb.connect() as connection:
        found = _read(connection, tmp_path / "a.parquet", to_parquet(result))
        assert ([str(one) for one in found.types], found.fetchall()) == ([kind], [(value,)])


def test_json_and_blobs_inside_other_types_are_those_of_the_query(tmp_path: Path) -> None:
    sql = (
        "SELECT ['{\"a\": 1}'::JSON, NULL] AS l, {'u': '[1]'::JSON, 'b': '\\xAA\\xBB'::BLOB} AS s, "
        "MAP {'k': '\"t\"'::JSON} AS m, {'JSON': 1} AS n"
    )
    result = asked(tmp_path, sql)
    with duckdb.connect() as connection:
        found = _read(connection, tmp_path / "a.parquet", to_parquet(result))
        row = found.project("l[1]->'a', l[2], s.u->>0, s.b, m['k']->>'$', n").fetchall()[0]
    assert row == ("1", None, "1", "aabb", "t", {"JSON": 1})


EXACT = "99999999999999999.123"


def asked(folder: Path, sql: str) -> Result:
    database = Database(empty_file(folder))
    try:
        return run_select(database.cursor(), sql, limit=10)
    finally:
        database.close()


def test_decimals_are_exact_in_every_format(tmp_path: Path) -> None:
    sql = (
        f"SELECT {EXACT}::DECIMAL(38, 3) AS d, -{EXACT}::DECIMAL(38, 3) AS e, [{EXACT}::DECIMAL(38, 3)] AS l, "
        "0.1::DECIMAL(4, 2) AS s, 1e-30::DECIMAL(38, 37) AS t, 99999999999999999999::DECIMAL(38, 2) AS w"
    )
    result = asked(tmp_path, sql)
    assert result.rows == ((EXACT, f"-{EXACT}", [EXACT], 0.1, 1e-30, 99999999999999999999),)
    assert f"{EXACT},-{EXACT}," in to_csv(result)
    with duckdb.connect() as connection:
        row = _read(connection, tmp_path / "a.parquet", to_parquet(result)).fetchall()[0]
    assert row == (
        Decimal(EXACT), -Decimal(EXACT), [Decimal(EXACT)], Decimal("0.1"), Decimal("1e-30"),
        Decimal(99999999999999999999),
    )  # fmt: skip


@pytest.mark.parametrize("value", ["union_value(a := 1)", "MAP {[1]: 'a'}", "row(1, 2)"])
def test_a_column_that_parquet_cannot_store_is_named(value: str, tmp_path: Path) -> None:
    result = asked(tmp_path, f'SELECT 1 AS a, {value} AS "odd one"')
    with pytest.raises(
        QueryError, match=r"^column odd one of type .* cannot be written to Parquet: .*; cast it to "
    ) as e:
        to_parquet(result)
    assert "\n" not in str(e.value)
    assert json.loads(to_json(result))[0]["a"] == 1


def test_the_command_gives_as_many_rows_as_it_is_asked_for(tmp_path: Path, synthetic: Any) -> None:
    fill(tmp_path, synthetic.all_events())
    options = ["SELECT * FROM range(12000)", "--format", "csv", "--workspace", str(tmp_path)]
    for limit, num_rows in (([], 10_000), (["--limit", "11000"], 11_000), (["--limit", "12000"], 12_000)):
        answer = CliRunner().invoke(rollstream, ["sql", *options, *limit])
        assert len(answer.stdout.splitlines()) == 1 + num_rows
        assert ("raise --limit" in answer.stderr) == (num_rows < 12_000)


def test_the_moving_mean_looks_back() -> None:
    assert moving_mean([1.0, 3.0, 5.0], window=2) == [1.0, 2.0, 4.0]


def test_a_run_is_drawn(tmp_path: Path, synthetic: Any) -> None:
    synthetic.num_epochs = 12
    fill(tmp_path, synthetic.all_events())
    path = plot_run(tmp_path, synthetic.run_id, tmp_path / "plots" / "run.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 20_000
    assert plot_run(tmp_path, synthetic.run_id, tmp_path / "run.pdf").read_bytes().startswith(b"%PDF")
    assert plot_run(tmp_path, synthetic.run_id, tmp_path / "run").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(QueryError, match=r"run\.xyz: \.xyz is not a format of images; use one of: .*pdf, .*png"):
        plot_run(tmp_path, synthetic.run_id, tmp_path / "run.xyz")
    assert not (tmp_path / "run.xyz").exists()
    assert len(query(tmp_path, "SELECT * FROM epoch_summary").rows) == 12


def lines_of(axes: Any) -> dict[str, tuple[list[float], list[float]]]:
    return {str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}


def test_jobs_have_lines_of_their_own_at_their_epochs() -> None:
    columns = ("job_id", "epoch", "avg_reward", "reward_std", "curriculum_percentile")
    first = [("r/rl", epoch, 0.0, 0.0, 0.5) for epoch in (0, 1, 3, 4)]
    second = [("r/rl-verifiers", epoch, 1.0, 0.0, None) for epoch in (0, 1)]
    axes, right = reward_figure(Result(columns, ("",) * 5, (*first, *second)), "r").axes
    assert lines_of(axes) == {
        "rl: mean reward": ([0, 1, 3, 4], [0.0] * 4),
        "rl: moving mean of 5 epochs": ([0, 1, 3, 4], [0.0] * 4),
        "rl-verifiers: mean reward": ([0, 1], [1.0, 1.0]),
    }
    assert lines_of(right) == {"rl: curriculum percentile": ([0, 1, 3, 4], [50.0] * 4)}
    (alone, _) = reward_figure(Result(columns, ("",) * 5, tuple(first)), "r").axes
    assert set(lines_of(alone)) == {"mean reward", "moving mean of 5 epochs"}


def test_an_epoch_without_reward_leaves_a_gap_in_a_runs_plot(tmp_path: Path, synthetic: Any) -> None:
    synthetic.num_epochs = 3
    found = [
        event.model_copy(update={"avg_reward": None}) if isinstance(event, EpochSealed) and event.epoch == 1 else event
        for event in synthetic.all_events()
        if not (isinstance(event, GroupClosed) and event.epoch == 1)
    ]
    fill(tmp_path, found)
    axes, _ = reward_figure(epochs_with_reward(tmp_path, synthetic.run_id, fresh=False), synthetic.run_id).axes
    assert lines_of(axes)["mean reward"][0] == [0, 2]


def test_a_full_disk_is_reported_with_the_file_and_the_remedy(tmp_path: Path, synthetic: Any) -> None:
    synthetic.num_epochs = 2
    fill(tmp_path, synthetic.all_events())
    workspace = ["--workspace", str(tmp_path)]
    for arguments in (
        ["sql", "SELECT 1", "--output", "/dev/full"],
        ["plot", synthetic.run_id, "-o", "/dev/full"],
    ):
        error = CliRunner().invoke(rollstream, [*arguments, *workspace]).exception
        assert error is not None
        message = "/dev/full: No space left on device; free some space there, or write to another disk"
        assert error_line(error) == message


def test_a_run_that_is_not_known_is_named_with_those_that_are(tmp_path: Path, synthetic: Any) -> None:
    fill(tmp_path, synthetic.all_events())
    with pytest.raises(QueryError, match=r"run nobody's does not exist; known runs, the newest first: demo-000001"):
        plot_run(tmp_path, "nobody's", tmp_path / "run.png")


def test_of_many_runs_every_one_is_known_and_the_newest_are_named(tmp_path: Path, synthetic: Any) -> None:
    started = next(synthetic.all_events())
    fill(tmp_path, [started.model_copy(update={"run_id": f"r-{n:04}", "time_ms": n}) for n in range(1100)])
    with pytest.raises(QueryError, match=r"run r-1099 has no RL epoch with a reward yet"):
        plot_run(tmp_path, "r-1099", tmp_path / "run.png")
    newest = ", ".join(f"r-{n:04}" for n in range(1099, 1089, -1))
    with pytest.raises(QueryError, match=rf"run r-9999 does not exist; known runs, the newest first: {newest}$"):
        plot_run(tmp_path, "r-9999", tmp_path / "run.png")


def fill(workspace: Path, found: Iterable[Event]) -> None:
    """Write events into a workspace's file."""
    encoded = [encode(event) for event in found]
    records = [Record(e.topic, 0, i, e.key, e.value, e.headers, i) for i, e in enumerate(encoded)]
    database = Database(empty_file(workspace))
    database.write(project(records), {})
    database.close()


def _read(connection: duckdb.DuckDBPyConnection, path: Path, data: bytes) -> duckdb.DuckDBPyRelation:
    path.write_bytes(data)
    return connection.read_parquet(str(path))
