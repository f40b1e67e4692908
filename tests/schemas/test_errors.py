"""Reported origin of an exception in users' code."""

import importlib
import json
import sys

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from rollstream.producers.rollout import registry
from rollstream.schemas import errors
from rollstream.schemas.errors import ConfigError, ModelError, describe, first_invalid, nearest, raised_at
from rollstream.schemas.permissions import Permissions
from rollstream.schemas.variables import one_line


def raised(call, *args):
    try:
        call(*args)
    except (LookupError, ValueError) as error:
        return error
    raise AssertionError("nothing was raised")


def looks_up(table):
    return deeper(table)


def deeper(table):
    return table["no such key"]


def parses(text):
    return json.loads(text)


def test_the_innermost_frame_of_users_code_is_named():
    at = f"{looks_up.__code__.co_filename.rsplit('/', 1)[-1]} line {deeper.__code__.co_firstlineno + 1}"
    assert describe(raised(looks_up, {})) == f"KeyError ({at}, in deeper): 'no such key'"


def test_the_standard_library_that_raised_is_not_to_blame():
    assert raised_at(raised(parses, "{")).endswith("in parses")


def test_of_a_group_of_errors_the_first_one_is_named():
    at = f"test_errors.py line {deeper.__code__.co_firstlineno + 1}, in deeper"
    inner = ExceptionGroup("tasks", [raised(looks_up, {}), ValueError("later")])
    assert describe(ExceptionGroup("tasks", [inner])) == f"KeyError ({at}): 'no such key'"


def test_our_own_errors_name_their_place_themselves():
    assert describe(ModelError("out of memory")) == "ModelError: out of memory"


def test_an_exception_that_was_not_raised_has_no_file_and_line():
    assert describe(KeyError("x")) == "KeyError: 'x'"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import nothing_of_this_name\n", r"ModuleNotFoundError \(broken_\w+\.py line 1, in <module>\): No module"),
        ("def play(:\n", r"SyntaxError: "),
        ("\n{}['x']\n", r"KeyError \(broken_\w+\.py line 2, in <module>\): 'x'"),
    ],
)
def test_the_error_of_a_module_that_cannot_be_imported_names_the_line(tmp_path, monkeypatch, source, message):
    name = f"broken_{len(source)}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match=rf"module {name} cannot be imported: {message}"):
        registry.environment(f"python:{name}.play", Permissions(allow=frozenset({f"python:{name}.play"})))
    assert name not in sys.modules
    with pytest.raises(ConfigError, match=r"cannot be imported: ModuleNotFoundError: No module named 'not_there'"):
        registry.environment("python:not_there.play", Permissions(allow=frozenset({"python:not_there.play"})))


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    number: int = 0

    @field_validator("number")
    @classmethod
    def _is_small(cls, number: int) -> int:
        if number > 9:
            raise ValueError("give at most 9")
        return number


class Outer(BaseModel):
    inner: list[Inner]


def invalid(model: type[BaseModel], value: object) -> ValidationError:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(value)
    return caught.value


def test_the_first_invalid_value_is_named_by_its_path_and_never_shown():
    error = invalid(Outer, {"inner": [{}, {"number": "hunter2"}]})
    assert str(first_invalid(error)).startswith("inner.1.number: Input should be a valid integer")
    assert "hunter2" not in str(first_invalid(error))
    assert (
        str(first_invalid(invalid(Outer, {"inner": [{"number": 10}]}), "block"))
        == "block.inner.0.number: give at most 9"
    )
    assert str(first_invalid(invalid(Outer, 3))).startswith("Input should be")
    assert first_invalid(invalid(Outer, 3), "block").path == "block"


def test_an_unknown_key_comes_first_where_the_known_ones_are_given():
    error = invalid(Inner, {"number": "x", "nmber": 1})
    assert first_invalid(error).path == "number"
    assert str(first_invalid(error, model=Inner)) == "nmber: unknown key; did you mean number?"
    assert first_invalid(invalid(Inner, {"zzz": 1}), model=Inner).message == "unknown key; known keys: number"


def test_the_tree_at_the_top_names_every_error_of_the_file():
    classes = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, Exception)]
    ours = {one.__name__ for one in classes if one.__module__ == errors.__name__}
    assert {name for name in ours if f"{name} " not in f"{errors.__doc__} " and name != "RollstreamError"} == set()


def test_an_error_on_one_line_is_cut_where_it_is_long():
    assert one_line(ValueError("a\n  b\tc")) == "a b c"
    assert one_line("x" * 301) == "x" * 297 + "..."
    assert one_line("x" * 301, None) == "x" * 301


def test_two_letters_in_the_wrong_order_are_nearer_than_another_letter():
    assert nearest("gpro", ["dapo", "gspo", "grpo"]) == "grpo"
    assert nearest("gsp", ["grpo", "gspo"]) == "gspo"
    assert nearest("sft", ["grpo", "gspo"]) is None


def test_an_error_is_cut_after_its_secrets_are_concealed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "hunter2-and-more")
    for before in range(280, 301):
        line = one_line(ModelError(f"{'x' * before}hunter2-and-more was refused"))
        assert "hunter2"[:2] not in line, "no part of it"
        assert len(line) <= 300
