"""Datasets of every type that is read here: rows to examples, filters, and the standard names of columns."""

import csv
import datetime
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import duckdb
import pytest

from rollstream.harness.config import file as config_file
from rollstream.harness.config.dataset import MAX_INPUT_BYTES, Example, read_dataset, section_of
from rollstream.harness.config.dataset import examples_of as made_examples
from rollstream.harness.runs.plan import examples_of
from rollstream.harness.runs.preflight import check_names
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.evaluators import DatasetSection

ROWS = [{"id": 1, "text": "a, b", "value": 2.5, "note": None}, {"id": "x", "text": '"q"', "value": 3, "note": "n"}]


def read(path: Path, **values: Any) -> list[Example]:
    return read_dataset(section_of(path, DatasetSection.model_validate({"file_path": str(path), **values})))


def test_every_type_of_file_yields_the_same_examples(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    (tmp_path / "d.json").write_text(json.dumps(ROWS))
    (tmp_path / "d.csv").write_text('\ufeffid,text,value,note\n1,"a, b",2.5,\nx,"""q""",3,n\n', encoding="utf-8")
    with duckdb.connect() as connection:
        values = "VALUES ('1', 'a, b', 2.5::DOUBLE, NULL), ('x', '\"q\"', 3, 'n')"
        connection.execute(
            f"COPY (SELECT * FROM ({values}) AS t(id, text, value, note)) TO '{tmp_path}/d.parquet' (FORMAT parquet)"
        )
    expected = [Example(str(row["id"]), {key: row[key] for key in ("text", "value", "note")}) for row in ROWS]
    for kind in ("jsonl", "json", "csv", "parquet"):
        assert read(tmp_path / f"d.{kind}") == expected, kind


def test_columns_of_parquet_become_values_of_json(tmp_path: Path) -> None:
    with duckdb.connect() as connection:
        columns = "7 AS id, [1, 2] AS l, {'a': 1.5::DECIMAL(4, 2)} AS s, DATE '2026-01-02' AS d, TRUE AS b"
        connection.execute(f"COPY (SELECT {columns}) TO '{tmp_path}/d.parquet' (FORMAT parquet)")
    (found,) = read(tmp_path / "d.parquet")
    assert found == Example("7", {"l": [1, 2], "s": {"a": 1.5}, "d": "2026-01-02", "b": True})
    json.dumps(found.inputs)


def parquet(folder: Path, columns: str) -> Path:
    with duckdb.connect() as connection:
        connection.execute(f"COPY ({columns}) TO '{folder}/d.parquet' (FORMAT parquet)")
    return folder / "d.parquet"


def test_times_of_parquet_are_those_of_utc_whatever_the_time_zone_of_the_machine(tmp_path: Path) -> None:
    parquet(tmp_path, "SELECT TIMESTAMPTZ '2026-01-01 00:00:00+00' AS at")
    program = f"from rollstream.metrics.parquet import *; print(read_parquet(Path('{tmp_path}/d.parquet')))"
    environment = os.environ | {"TZ": "Asia/Tokyo"}
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[{'at': '2026-01-01T00:00:00+00:00'}]"


def test_a_parquet_file_is_read_alone_and_without_columns_from_its_path(tmp_path: Path) -> None:
    folder = tmp_path / "value=7"
    folder.mkdir()
    for name, value in (("a[1]", "right"), ("a1", "wrong")):
        parquet(folder, f"SELECT 1 AS id, '{value}' AS value").rename(folder / f"{name}.parquet")
    (found,) = read(folder / "a[1].parquet")
    assert found.inputs == {"value": "right"}


def test_bytes_of_parquet_are_text_at_any_depth(tmp_path: Path) -> None:
    """Files have bytes if their writer did not declare its strings as such."""
    blob = "encode('grün')"
    columns = (
        f"SELECT 7 AS id, {blob} AS t, [{blob}] AS l, {{'a': {{'b': [{blob}]}}}} AS s, MAP {{{blob}: {blob}}} AS m"
    )
    (found,) = read(parquet(tmp_path, columns))
    assert found.inputs == {"t": "grün", "l": ["grün"], "s": {"a": {"b": ["grün"]}}, "m": {"grün": "grün"}}


@pytest.mark.parametrize(
    ("column", "path"),
    [
        ("{}", "c"),
        ("[NULL, {}]", "c.1"),
        ("{{'image': {{'path': 'x', 'bytes': {}}}}}", "c.image.bytes"),
        ("[{{'a': [{}]}}]", "c.0.a.0"),
        ("MAP {{'k': {}}}", "c.k"),
        ("MAP {{{}: 'v'}}", "c"),
    ],
)
def test_parquet_bytes_that_are_not_text_are_one_error(tmp_path: Path, column: str, path: str) -> None:
    wrong = column.format(r"'\xFF\xD8'::BLOB")
    file = parquet(tmp_path, f"SELECT 1 AS id, NULL AS c UNION ALL SELECT 2, {wrong}")
    with pytest.raises(ConfigError) as raised:
        read(file)
    reported = (
        f"{file} row 2: column {path} contains bytes that are not UTF-8 text; write them as base64 text, or leave the "
    )
    assert str(raised.value) == f"dataset {reported}column out"


def test_an_identifier_with_leading_zeros_stays_one(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("id,code\n007,00\n")
    assert read(tmp_path / "d.csv") == [Example("007", {"code": "00"})]


def test_a_text_may_contain_any_separator_of_lines(tmp_path: Path) -> None:
    """json.dumps(..., ensure_ascii=False) leaves these as they are."""
    text = "a\u2028b\u2029c\u0085d"
    (tmp_path / "d.jsonl").write_bytes(json.dumps({"id": 1, "q": text}, ensure_ascii=False).encode() + b"\r\n")
    assert read(tmp_path / "d.jsonl") == [Example("1", {"q": text})]


def test_a_file_that_is_not_utf8_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes('{"id": 1}\n{"id": 2, "q": "é"}\n'.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"d\.jsonl line 2: not UTF-8: .*; save the file as UTF-8"):
        read(tmp_path / "d.jsonl")


@pytest.mark.parametrize("value", [str(2**64), '"\\ud800"', "[" * 300 + "]" * 300])
def test_a_value_that_no_record_can_carry_is_one_error(tmp_path: Path, value: str) -> None:
    (tmp_path / "d.jsonl").write_text(f'{{"id": "x", "n": {value}}}')
    with pytest.raises(ConfigError, match="example 'x' cannot be recorded: "):
        read(tmp_path / "d.jsonl")


@pytest.mark.parametrize(("kind", "location"), [("jsonl", r"d\.jsonl line 1"), ("json", r"d\.json")])
def test_json_that_is_nested_too_deeply_is_one_error(tmp_path: Path, kind: str, location: str) -> None:
    (tmp_path / f"d.{kind}").write_text("[" * 5000 + "]" * 5000)
    with pytest.raises(ConfigError, match=f"{location}: not valid JSON: maximum recursion depth"):
        read(tmp_path / f"d.{kind}")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("d.jsonl", '{"id": "x", "n": NaN}'),
        ("d.json", '[{"id": "x", "n": {"deep": [1.5, -Infinity]}}]'),
        ("d.jsonl", '{"id": "x", "n": 1e999}'),
    ],
)
def test_a_number_that_json_lacks_is_refused_in_every_kind_of_file(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=r"example 'x' cannot be recorded: (nan|-?inf) is not a finite number; give"):
        read(tmp_path / name)


def test_a_long_integer_of_csv_stays_text(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text(f"id,a,b,c\n1,{2**64 - 1},{2**64},{'9' * 5000}\n")
    assert read(tmp_path / "d.csv") == [Example("1", {"a": 2**64 - 1, "b": str(2**64), "c": "9" * 5000})]


def test_a_number_of_csv_keeps_its_text(tmp_path: Path) -> None:
    texts = ["3.10", "100.00", "-0", "1.50e3", "1.0e999", "0.10000000000000000000001"]
    numbers = [3.1, 100.0, 0, -7, 1.5e-07]
    head = ",".join(f"c{n}" for n in range(11))
    (tmp_path / "d.csv").write_text(f"id,{head}\n3.1,{','.join(map(str, [*texts, *numbers]))}\n3.10{',' * 11}\n")
    first, second = read(tmp_path / "d.csv")
    assert (first.example_id, second.example_id) == ("3.1", "3.10")
    assert list(first.inputs.values()) == [*texts, *numbers]
    assert [type(value) for value in first.inputs.values()] == [str] * 6 + [float, float, int, int, float]


def test_a_large_value_of_csv_is_limited_as_in_any_other_file(tmp_path: Path) -> None:
    limit = csv.field_size_limit()
    (tmp_path / "d.csv").write_text(f"id,q\n1,{'x' * 2 * limit}\n")
    assert read(tmp_path / "d.csv") == [Example("1", {"q": "x" * 2 * limit})]
    (tmp_path / "d.csv").write_text(f"id,q\n1,{'x' * (MAX_INPUT_BYTES + 1)}\n")
    with pytest.raises(ConfigError, match=f"example '1' has .* bytes of inputs, more than {MAX_INPUT_BYTES}"):
        read(tmp_path / "d.csv")


def test_two_columns_of_csv_with_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("id,a,a\n1,2,3\n")
    with pytest.raises(ConfigError, match=r"d\.csv line 1: duplicate column 'a'; rename one"):
        read(tmp_path / "d.csv")
    (tmp_path / "d.csv").write_text("id,a,,\n1,2,,\n")
    assert [example.inputs for example in read(tmp_path / "d.csv")] == [{"a": 2, "": None}]


def test_columns_of_the_structure_also_have_their_standard_names(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"key": "k", "q": "2+2=", "expected": "4", "more": 1}')
    structure = {"question_key": "q", "answer_key": "expected", "generated_answer_key": "made"}
    (found,) = read(tmp_path / "d.jsonl", id_key="key", structure=structure)
    assert found.example_id == "k"
    assert found.inputs == {"q": "2+2=", "expected": "4", "more": 1, "question": "2+2=", "answer": "4"}


def test_rows_without_ids_are_numbered_by_their_place_in_the_file(tmp_path: Path) -> None:
    rows = [{"question": "1+1=", "level": "easy"}, {"question": "2+2=", "level": "hard"}]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read(tmp_path / "d.jsonl") == [Example(str(n), row) for n, row in enumerate(rows)]
    hard = {"allowlist": {"field": {"level": ["hard"]}}}
    assert read(tmp_path / "d.jsonl", filter=hard) == [Example("1", rows[1])]
    with pytest.raises(ConfigError, match=r"line 1 has no key 'uid'; set eval.general.dataset.id_key"):
        read(tmp_path / "d.jsonl", id_key="uid")


def test_without_a_structure_the_row_is_the_question(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"id": "k", "a": "é"}', encoding="utf-8")
    (found,) = read(tmp_path / "d.jsonl", structure={"disable": True})
    assert found.inputs == {"a": "é", "question": '{"id": "k", "a": "é"}'}


@pytest.mark.parametrize(
    ("chosen", "kept"),
    [
        ({"allowlist": {"field": {"level": ["easy*"]}}}, ["a", "b"]),
        ({"denylist": {"field": {"n": [1, 3]}}}, ["b"]),
        ({"allowlist": {"field": {"level": ["hard", "easy"]}}, "denylist": {"field": {"id": ["a"]}}}, ["c"]),
        ({"allowlist": {"field": {"absent": ["x"]}}}, ["a", "b", "c"]),
    ],
)
def test_a_filter_keeps_what_is_allowed_and_not_denied(tmp_path: Path, chosen: Any, kept: list[str]) -> None:
    rows = [{"id": "a", "level": "easy", "n": 1}, {"id": "b", "level": "easy2", "n": 2}]
    (tmp_path / "d.json").write_text(json.dumps([*rows, {"id": "c", "level": "hard", "n": 3}]))
    assert [example.example_id for example in read(tmp_path / "d.json", filter=chosen)] == kept


def test_a_filter_of_a_column_that_no_row_has_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "d.json").write_text(json.dumps([{"id": "a", "level": 1}, {"id": "b", "share": 2}]))
    read(tmp_path / "d.json", filter={"allowlist": {"field": {"share": [2]}}, "denylist": {"field": {"levle": [1]}}})
    (warning,) = caplog.messages
    assert warning.startswith("eval.general.dataset.filter.denylist.field: levle: accepted, but ignored here (no row ")
    assert warning.endswith("d.json has this column; its columns are: id, level, share)")


@pytest.mark.parametrize(
    ("name", "pattern"),
    [*(("d.jsonl", one) for one in (True, "true", "True", "[Tt]rue")), *(("d.csv", one) for one in (True, "True"))],
)
def test_a_filter_compares_true_and_false(tmp_path: Path, name: str, pattern: Any) -> None:
    rows = [{"id": "a", "held_out": True}, {"id": "b", "held_out": False}, {"id": "c", "held_out": 1}]
    lines = [",".join(map(str, row.values())) for row in rows]
    content = "\n".join(["id,held_out", *lines] if name == "d.csv" else map(json.dumps, rows))
    (tmp_path / name).write_text(content)
    denied = read(tmp_path / name, filter={"denylist": {"field": {"held_out": [pattern]}}})
    assert [example.example_id for example in denied] == ["b", "c"]
    allowed = read(tmp_path / name, filter={"allowlist": {"field": {"held_out": [pattern]}}})
    assert [example.example_id for example in allowed] == ["a"]


def test_a_value_in_one_of_several_columns_of_csv_without_a_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("a,,,\n1,,,\n2,x,,y\n")
    with pytest.raises(
        ConfigError, match=r"d\.csv line 3: column 2 has a value, but 3 columns have no name; name it in"
    ):
        read(tmp_path / "d.csv")
    (tmp_path / "d.csv").write_text("a,,,\n1,, ,\n")
    assert read(tmp_path / "d.csv") == [Example("0", {"a": 1, "": None})]


@pytest.mark.parametrize(
    ("text", "line"), [('id,"a\n1,2\n', 1), ('id,a\n1,2\n\n3,"x\n4,5\n6,7\n', 4), ('id,a\n1,"x\ny"z\n3,4\n', 2)]
)
def test_a_row_of_csv_that_cannot_be_read_is_named_by_its_first_line(tmp_path: Path, text: str, line: int) -> None:
    (tmp_path / "d.csv").write_text(text)
    with pytest.raises(ConfigError, match=rf"d\.csv line {line}: not valid CSV: "):
        read(tmp_path / "d.csv")


@pytest.mark.parametrize("text", ['[{"a": 1}]', '[\n{"a": 1}\n]'])
def test_a_json_list_that_is_read_as_lines_names_its_type(tmp_path: Path, text: str) -> None:
    (tmp_path / "d.txt").write_text(text)
    with pytest.raises(ConfigError, match=r"d\.txt line 1.*for a JSON list, set eval\.general\.dataset\._type: json"):
        read_dataset(DatasetSection(file_path=tmp_path / "d.txt"))


@pytest.mark.parametrize("pattern", [0.5, "0.50", "0.5*"])
def test_a_filter_compares_numbers_of_a_csv_that_are_written_otherwise(tmp_path: Path, pattern: Any) -> None:
    (tmp_path / "d.csv").write_text("id,share\na,0.50\nb,0.75\n")
    assert [
        one.example_id for one in read(tmp_path / "d.csv", filter={"denylist": {"field": {"share": [pattern]}}})
    ] == ["b"]


@pytest.mark.parametrize("pattern", [3, 3.0])
def test_a_filter_compares_numbers_by_their_value(tmp_path: Path, pattern: float) -> None:
    rows = [{"id": "a", "n": 3.0}, {"id": "b", "n": 3}, {"id": "c", "n": 3.5}, {"id": "d", "n": True}]
    (tmp_path / "d.json").write_text(json.dumps(rows))
    parquet(tmp_path, "FROM (VALUES ('a', 3.0::DOUBLE), ('b', 3), ('c', 3.5), ('d', 1)) AS t(id, n)")
    for kind in ("json", "parquet"):
        denied = read(tmp_path / f"d.{kind}", filter={"denylist": {"field": {"n": [pattern]}}})
        assert [example.example_id for example in denied] == ["c", "d"], kind


def test_examples_of_ones_own_environment_that_are_not_mappings_name_its_class(
    written: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    head = "from rollstream.producers import Environment\nclass Mine(Environment):\n"
    head += "    async def run(self, session): ...\n"
    (tmp_path / "own_examples.py").write_text(f"{head}    def examples(self, num, seed): return [1, 2]\n")
    name = "python:own_examples.Mine"
    written["workflow"] = {"environment": name}
    with pytest.raises(ConfigError) as error:
        examples_of(config_file.resolve(written).config)
    assert str(error.value) == (
        f"environment {name}: Mine.examples(), example 0: is 1; return a mapping of inputs for each example"
    )


@pytest.mark.parametrize(
    ("method", "body", "message"),
    [
        ("required_agents", "return None", r"required_agents\(\) returned None; return a list or tuple of texts"),
        ("required_agents", "return 'agent'", r"required_agents\(\) returned 'agent'; return"),
        ("required_agents", "return (1,)", r"required_agents\(\) returned \[1\]; return"),
        ("required_agents", "return {'agent': 1}.keys()", ""),
        ("required_agents", "return (name for name in ('agent',))", ""),
        ("required_agents", "raise KeyError('x')", r"required_agents\(\): KeyError"),
        ("required_inputs", "return None", r"required_inputs\(\) returned None; return"),
        ("required_inputs", "raise KeyError('x')", r"KeyError .*, in required_inputs"),
        ("required_inputs", "return ['q']", "example '0' has no key 'q'"),
        ("required_inputs", "return {'q': 1}", "example '0' has no key 'q'"),
    ],
)
def test_requirements_of_an_environment_that_cannot_be_read_or_met_are_refused(
    written: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, body: str, message: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    module = f"own_{abs(hash((method, body)))}"
    head = "from rollstream.producers import Environment\nclass Mine(Environment):\n"
    head += "    async def run(self, session): ...\n"
    (tmp_path / f"{module}.py").write_text(f"{head}    def {method}(self): {body}\n")
    written["workflow"] = {"environment": f"python:{module}.Mine"}
    config = config_file.resolve(written).config
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        (check_names if method == "required_agents" else examples_of)(config)


@dataclass
class Odds:
    value: float


def test_examples_that_an_environment_makes_hold_what_json_holds() -> None:
    made = made_examples([{"pair": (1, 2), "day": datetime.date(2026, 1, 1)}], "here")
    assert made == [Example("0", {"pair": [1, 2], "day": "2026-01-01"})]
    with pytest.raises(ConfigError, match="example '0' cannot be recorded: nan is not a finite number"):
        made_examples([{"value": (float("nan"),)}], "here")
    for lost in (Odds(float("nan")), Enum("Unknown", {"ODDS": float("nan")})["ODDS"]):
        with pytest.raises(ConfigError, match="example '0' cannot be recorded: "):
            made_examples([{"value": lost}], "here")
