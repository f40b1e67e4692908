"""Reads YAML files: numbers of YAML 1.2, no doubled keys, `base: other.yml` under a file, texts by `file://`.

What stands in the text stays as it is: `${ENV}` is expanded elsewhere, where a value is used.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import JsonValue

from rollstream.schemas.errors import ConfigError

FILE = "file://"
TEXT_SUFFIXES = frozenset({".txt", ".md", ".j2", ".jinja2", ".jinja", ".prompt", ".tpl", ".template"})
"""Of files whose text may stand for a value; a program's text may not."""


class _Loader(yaml.SafeLoader):
    """Safe YAML with the scalars of YAML 1.2 (`1e-5` is a number, `2024-02-01` is text) and without doubled keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, (list, dict)):
                problem = "a key must be text (is a value missing its quotes?)"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}


def read_yaml(path: Path) -> dict[str, JsonValue]:
    """The mapping in a file, merged into that of its `base`. Raises ConfigError naming the file and the line or key."""
    return _read(path, ())


def parse(text: str, place: str) -> Any:
    """The value that a text of YAML stands for. Raises ConfigError naming `place` and the line."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{place}:{line} not valid YAML: {getattr(error, 'problem', error)}") from error


def merged(config: Mapping[str, JsonValue], changes: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """`config` with the values of `changes`, mapping by mapping."""
    result = dict(config)
    for key, value in changes.items():
        mine = result.get(key)
        result[key] = merged(mine, value) if isinstance(mine, dict) and isinstance(value, dict) else value
    return result


def _read(path: Path, above: tuple[Path, ...]) -> dict[str, JsonValue]:
    """`above`: the files that lead here by their `base`."""
    content = parse(_text(path, str(path)), str(path))
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: the file must be a mapping of sections (llms, workflow, finetuning, ...)")
    content = _with_texts(content, path, "")
    if "base" not in content:
        return content
    base = content.pop("base")
    if not isinstance(base, str):
        raise ConfigError(f"{path}: base: is {base!r}; it must be the path of a YAML file")
    chain = (*above, path.resolve())
    below = path.parent / base
    if below.resolve() in chain:
        raise ConfigError(f"{path}: base: {base} leads back to itself: {' -> '.join(map(str, chain))}")
    if not below.is_file():
        raise ConfigError(f"{path}: base: there is no file {below}")
    return merged(_read(below, chain), content)


def _with_texts(value: Any, path: Path, place: str) -> Any:
    """`value` with every `file://NAME` in it replaced by that file's text, NAME being relative to the YAML file."""
    if isinstance(value, dict) and place.count(".") < _MAX_DEPTH:
        return {key: _with_texts(item, path, f"{place}.{key}" if place else str(key)) for key, item in value.items()}
    if isinstance(value, list) and place.count(".") < _MAX_DEPTH:
        return [_with_texts(item, path, f"{place}.{index}") for index, item in enumerate(value)]
    if not (isinstance(value, str) and value.startswith(FILE)):
        return value
    named = (path.parent / value.removeprefix(FILE)).resolve()
    if named.suffix.lower() not in TEXT_SUFFIXES:
        raise ConfigError(f"{path}: {place}: {value}: a text file is needed ({', '.join(sorted(TEXT_SUFFIXES))})")
    return _text(named, f"{path}: {place}: {value}")


_MAX_DEPTH = 50
"""Deeper lies only what an alias leads into itself, which is refused where values are checked."""


def _text(path: Path, place: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{place}: cannot be read: {error}") from error
