"""Reads YAML files: PyYAML's scalars, but `1e-5` is a number and dates are text; merge keys, no duplicate keys,
`base: other.yml` as defaults of a file, texts by `file://`. `${ENV}` is not expanded here but where a value is used.
Also applies command-line changes to a configuration as written: `--override a.b.c value` and the run options.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import JsonValue

from rollstream.schemas.config import COMPONENT_SECTIONS, NAMED_SECTIONS
from rollstream.schemas.errors import ConfigError, nearest

FILE = "file://"
TEXT_SUFFIXES = frozenset({".txt", ".md", ".j2", ".jinja2", ".jinja", ".prompt", ".tpl", ".template"})
"""Suffixes of files whose text may replace a value; the text of a program may not."""

NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_MERGE, _EQUALS = "tag:yaml.org,2002:merge", "tag:yaml.org,2002:value"


class _Loader(yaml.SafeLoader):
    """Safe YAML as PyYAML reads it (YAML 1.1: `012` is 10 and `no` is false), except that `1e-5` is a number,
    `2024-02-01` is text and a key may not occur twice."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._checked: set[yaml.MappingNode] = set()

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """As PyYAML's, which lets through what Python raises for a scalar, such as `!!int six` or `0b_`."""
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, LookupError, AttributeError, OverflowError) as error:
            kind = node.tag.rpartition(":")[2]
            problem = f"{node.value!r} is not a valid {kind}; correct it, or write text in quotes and without a tag"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Replace `<<: *anchor` by the keys of that mapping, which those of the mapping itself override."""
        if node not in self._checked:  # merged keys, which may be repeated, are among those of a flattened mapping
            self._checked.add(node)
            self._check_keys(node)
        super().flatten_mapping(node)

    def _check_keys(self, node: yaml.MappingNode) -> None:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            is_special = key_node.tag in (_MERGE, _EQUALS)
            key = key_node.value if is_special else self.construct_object(key_node, deep=True)
            if isinstance(key, (list, dict)):
                problem = "a key must be a string; check for a missing quote"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"duplicate key {key!r}; remove one", key_node.start_mark
                )
            seen.add(key)


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


def parse(text: str, location: str) -> Any:
    """Parse a text of YAML. Raises ConfigError naming `location` and the line."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        remedy = "" if isinstance(error, yaml.constructor.ConstructorError) else "; correct it there"
        raise ConfigError(f"{location}:{line} not valid YAML: {getattr(error, 'problem', error)}{remedy}") from error
    except RecursionError as error:
        raise ConfigError(f"{location}: nested too deeply; close its brackets, or use fewer levels") from error


def merged(config: Mapping[str, JsonValue], changes: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """`config` with the values of `changes`, mapping by mapping."""
    result = dict(config)
    for key, value in changes.items():
        mine = result.get(key)
        result[key] = merged(mine, value) if isinstance(mine, dict) and isinstance(value, dict) else value
    return result


def _read(path: Path, above: tuple[Path, ...]) -> dict[str, JsonValue]:
    """`above`: the files whose `base` chain led here."""
    content = parse(_text(path, str(path)), str(path))
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: the file must be a mapping of sections (llms, workflow, finetuning, ...)")
    content = _with_texts(content, path, "")
    if "base" not in content:
        return content
    base = content.pop("base")
    if not isinstance(base, str):
        raise ConfigError(f"{path}: base: is {base!r}; give the path of a YAML file")
    chain = (*above, path.resolve())
    below = path.parent / base
    if not below.is_file():
        what = "is a link to no file" if below.is_symlink() else "does not exist"
        raise ConfigError(f"{path}: base: file {below} {what}; correct its path")
    if below.resolve() in chain:
        raise ConfigError(f"{path}: base: {base} is circular: {' -> '.join(map(str, chain))}; remove it")
    return merged(_read(below, chain), content)


def _with_texts(value: Any, path: Path, location: str, *, is_override: bool = False) -> Any:
    """`value` with every `file://NAME` in it replaced by that file's text, NAME being relative to the YAML file.

    The one of an `artifact_uri` is a folder's URI and stays, and so do URIs of other than text files in an override.
    """
    if isinstance(value, dict) and location.count(".") < _MAX_DEPTH:
        return {
            key: _with_texts(item, path, f"{location}.{key}" if location else str(key), is_override=is_override)
            for key, item in value.items()
        }
    if isinstance(value, list) and location.count(".") < _MAX_DEPTH:
        return [
            _with_texts(item, path, f"{location}.{index}", is_override=is_override) for index, item in enumerate(value)
        ]
    if not (isinstance(value, str) and value.startswith(FILE)) or location.endswith(".artifact_uri"):
        return value
    if is_override and Path(value).suffix.lower() not in TEXT_SUFFIXES:
        return value
    try:
        named = (path.parent / value.removeprefix(FILE)).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a circular link, or an invalid name
        raise ConfigError(f"{path}: {location}: {value}: cannot be read: {error}; correct its path") from error
    if named.suffix.lower() not in TEXT_SUFFIXES:
        raise ConfigError(
            f"{path}: {location}: {value}: only text files can be included ({', '.join(sorted(TEXT_SUFFIXES))})"
        )
    return _text(named, f"{path}: {location}: {value}")


_MAX_DEPTH = 50
"""Only an alias to itself nests deeper, and that is refused where values are checked."""


def _text(path: Path, location: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{location}: cannot be read: {error}; correct its path, permissions or encoding") from error


def apply_overrides(written: dict[str, Any], overrides: Sequence[tuple[str, str]]) -> None:
    """Set every key by its dotted path.

    Raises ConfigError naming the option and the wrong part of the path. Missing sections are created, but not named
    blocks (`trainers.X`), which nothing would use. Values are parsed as YAML; lists may also be separated by commas,
    and text stays text: in the place of one, only quotes, brackets, braces and null are YAML. A `file://NAME` is
    relative to the current folder.
    """
    for key, value in overrides:
        _apply_one(written, key, value)


def with_run_options(written: dict[str, Any], options: Mapping[str, JsonValue]) -> None:
    """Set the given options in `finetuning.run_configuration`, overriding the file."""
    given = {key: value for key, value in options.items() if value is not None}
    finetuning = written.get("finetuning")
    if given and isinstance(finetuning, dict):
        before = finetuning.get("run_configuration")
        finetuning["run_configuration"] = {**(before if isinstance(before, dict) else {}), **given}


def _apply_one(written: dict[str, Any], key: str, value: str) -> None:
    parts = key.split(".")
    if not all(parts):
        raise ConfigError(f"--override {key}: give a dotted path such as finetuning.num_epochs")
    block: Any = written
    for depth, part in enumerate(parts[:-1], 1):
        block = block.setdefault(part, {})
        if not isinstance(block, dict):
            raise ConfigError(
                f"--override {key}: {'.'.join(parts[:depth])} is a value, not a section; give the path of a key"
            )
        if depth == 1:
            _check_named(block, parts, key)
    block[parts[-1]] = _value(block.get(parts[-1]), value, key)


def _check_named(section: Mapping[str, Any], parts: Sequence[str], key: str) -> None:
    name = parts[1]
    if parts[0] not in (*COMPONENT_SECTIONS, *NAMED_SECTIONS) or name in section:
        return
    near = nearest(name, section)
    known = ", ".join(sorted(section)) or "none"
    hint = f"did you mean {parts[0]}.{near}?" if near is not None else f"defined: {known}"
    raise ConfigError(f"--override {key}: {parts[0]}.{name} is not defined in the file; {hint}")


def _value(before: Any, text: str, key: str) -> Any:
    if isinstance(before, str) and not text.startswith(("[", "{", '"', "'")) and text not in NULLS:
        return _with_texts(text, Path("--override"), key, is_override=True)
    try:
        value = _with_texts(parse(text, f"--override {key}"), Path("--override"), key, is_override=True)
    except ConfigError as error:
        if not text.startswith(("[", "{")) or FILE in text:
            raise
        raise ConfigError(
            f"{error}; a text that begins so needs quotes within those of the shell: \"'TEXT'\""
        ) from error
    if isinstance(before, list) and isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    return value
