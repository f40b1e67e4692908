"""YAML as configurations have it: merge keys, duplicate keys, and errors of texts that are not YAML."""

from pathlib import Path
from typing import Any

import pytest

from rollstream.harness.config.yaml import parse, read_yaml
from rollstream.schemas.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}", {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}}),
        ("a: &a {x: 1}\nb: {y: 3, <<: *a}", {"a": {"x": 1}, "b": {"x": 1, "y": 3}}),
        ("a: &a {x: 1}\nb: &b {x: 2, y: 2}\nc: {<<: [*a, *b]}", {"c": {"x": 1, "y": 2}}),
        ("z: &z {k: 0}\nx: {y: &a {<<: *z, k: 1}}\nb: {<<: *a, k: 2}", {"x": {"y": {"k": 1}}, "b": {"k": 2}}),
        ("a: {=: 1}", {"a": {"=": 1}}),
        ("a: &a {<<: *a, x: 1}", {"a": {"x": 1}}),
    ],
)
def test_merge_keys_are_flattened_and_own_keys_win(text: str, value: dict[str, Any]) -> None:
    found = parse(text, "a.yml")
    assert {key: found[key] for key in value} == value


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("a: &a {x: 1}\nb: {<<: *a, y: 1, y: 2}", "a.yml: line 2 not valid YAML: duplicate key 'y'"),
        ("a: &a {x: 1}\nb: {<<: *a, <<: *a}", "a.yml: line 2 not valid YAML: duplicate key '<<'"),
        ("a: &a {x: 1, x: 2}\nb: {<<: *a}", "a.yml: line 1 not valid YAML: duplicate key 'x'"),
        ("b: {<<: 3}", "a.yml: line 1 not valid YAML: expected a mapping or list of mappings for merging"),
    ],
)
def test_keys_that_are_repeated_or_cannot_be_merged_are_refused(text: str, reported: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(text, "a.yml")
    assert str(error.value).startswith(reported)


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("0b_", "-o x: line 1 not valid YAML: '0b_' is not a valid int; correct it, or write text in quotes and"),
        ("a: 1\nb: !!int six", "-o x: line 2 not valid YAML: 'six' is not a valid int; correct it"),
        ("!!int ''", "-o x: line 1 not valid YAML: '' is not a valid int"),
        ("!!bool maybe", "-o x: line 1 not valid YAML: 'maybe' is not a valid bool"),
        ("!!timestamp soon", "-o x: line 1 not valid YAML: 'soon' is not a valid timestamp"),
        ("[" * 1500, "-o x: nested too deeply; close its brackets, or use fewer levels"),
    ],
)
def test_a_value_that_python_cannot_read_is_an_error_of_the_file(text: str, reported: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(text, "-o x")
    assert str(error.value).startswith(reported)


def test_a_circular_link_is_an_error_that_names_it(tmp_path: Path) -> None:
    for name in ("loop.yml", "loop.txt"):
        (tmp_path / name).symlink_to(tmp_path / name)
    (tmp_path / "base.yml").write_text("base: loop.yml")
    (tmp_path / "text.yml").write_text("a: {b: 'file://loop.txt'}")
    with pytest.raises(ConfigError, match=r"base\.yml: base: file .*loop\.yml is a link to no file; correct its path"):
        read_yaml(tmp_path / "base.yml")
    with pytest.raises(ConfigError, match=r"text\.yml: a\.b: file://loop\.txt: cannot be read: .*; correct its path"):
        read_yaml(tmp_path / "text.yml")
    with pytest.raises(ConfigError, match=r"loop\.yml: cannot be read"):
        read_yaml(tmp_path / "loop.yml")
