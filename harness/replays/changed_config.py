"""The file of a what-if: its keys, and the recorded configuration with their values.

Blocks of one type are merged key by key. A block that becomes one of another type keeps no key of the recorded one,
because the same key has another meaning and default there.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

from pydantic import JsonValue

from rollstream.harness.config.checks import check_values
from rollstream.harness.config.file import block_at
from rollstream.harness.config.yaml import merged, read_yaml
from rollstream.schemas.algorithm_settings import DEFAULT, AlgorithmSettings
from rollstream.schemas.config import COMPONENT_SECTIONS, OURS, OWN_OF_GROUPS
from rollstream.schemas.engine_settings import TransformersSettings
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.evaluators import SECTION, kind_of
from rollstream.schemas.variables import expand

ANY = "*"


class _Tag(NamedTuple):
    """The key that says the type of the blocks at a path."""

    path: tuple[str, ...]
    key: str
    default: str = ""
    shared: tuple[str, ...] = ()
    """Keys with the same meaning in all types."""


_OF_ALGORITHM = ("name", DEFAULT, tuple(AlgorithmSettings.model_fields.keys() - {"name"}))
_ENGINE = ("kind", TransformersSettings().kind)
_TAGS = (
    _Tag(("trainer_adapters", ANY, "algorithm"), *_OF_ALGORITHM),
    _Tag(("trainer_adapters", ANY, "model_groups", ANY, "algorithm"), *_OF_ALGORITHM),
    _Tag((*SECTION.split("."), ANY), "_type"),
    *(_Tag((section, ANY), "_type", OURS) for section in COMPONENT_SECTIONS),
    *(
        _Tag((section, ANY, *path, "engine"), *_ENGINE)
        for section in COMPONENT_SECTIONS
        for path in ((), ("endpoint",))
    ),
    _Tag(("workflow",), "_type", OURS),
)


def read_changes(file: Path) -> dict[str, JsonValue]:
    """The file's keys. Raises ConfigError for values that must not be stored, as in every configuration."""
    changes = read_yaml(file)
    try:
        check_values(changes)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    return changes


def changed(config: Mapping[str, JsonValue], changes: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """`config` with the values of `changes`, mapping by mapping.

    A block to which `changes` give another type is as they write it; an algorithm's keeps what all algorithms share.
    A model group's block changes the one that it has of its adapter. Raises ConfigError for a variable that is not set.
    """
    return _changed(_with_inherited(config, changes), changes, ())


def _changed(
    block: Mapping[str, JsonValue], changes: Mapping[str, JsonValue], path: tuple[str, ...]
) -> dict[str, JsonValue]:
    result = _kept(block, changes, path)
    for key, value in changes.items():
        mine = result.get(key)
        if isinstance(mine, dict) and isinstance(value, dict):
            result[key] = _changed(mine, value, (*path, key))
        else:
            result[key] = value
    return result


def _kept(
    block: Mapping[str, JsonValue], changes: Mapping[str, JsonValue], path: Sequence[str]
) -> dict[str, JsonValue]:
    """The keys of a recorded block that stay where `changes` do not give them."""
    for tag in _TAGS:
        is_tagged = tag.key in changes and _matches(path, tag.path)
        if is_tagged and _type_of(block, tag, path) != _type_of(changes, tag, path):
            return {name: value for name, value in block.items() if name in tag.shared}
    return dict(block)


def _matches(path: Sequence[str], pattern: Sequence[str]) -> bool:
    return len(path) == len(pattern) and all(want in (ANY, key) for key, want in zip(path, pattern, strict=True))


def _type_of(block: Mapping[str, JsonValue], tag: _Tag, path: Sequence[str]) -> JsonValue:
    found = expand(block.get(tag.key, tag.default), os.environ, ".".join((*path, tag.key)))
    return kind_of(found) or found


def _with_inherited(config: Mapping[str, JsonValue], changes: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
    """`config` with the adapter's blocks in the model groups to which `changes` give their first own ones."""
    adapters = block_at(changes, "trainer_adapters")
    groups = [(name, group) for name in adapters for group in block_at(adapters, name, "model_groups")]
    for (name, group), key in product(groups, OWN_OF_GROUPS):
        path = ("trainer_adapters", name, "model_groups", group)
        if isinstance(block_at(changes, *path).get(key), dict) and block_at(config, *path).get(key) is None:
            own: JsonValue = {group: {key: block_at(config, "trainer_adapters", name, key)}}
            config = merged(config, {"trainer_adapters": {name: {"model_groups": own}}})
    return config


def leaves(written: JsonValue, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of all values of a configuration that are not mappings."""
    if not isinstance(written, dict):
        yield path
        return
    for name, value in written.items():
        yield from leaves(value, (*path, name))


def without(written: dict[str, JsonValue], path: Sequence[str]) -> dict[str, JsonValue]:
    """The configuration without the value at a path."""
    value = written[path[0]]
    if len(path) > 1 and isinstance(value, dict):
        return {**written, path[0]: without(value, path[1:])}
    return {name: other for name, other in written.items() if name != path[0]}
