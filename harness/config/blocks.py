"""The pydantic model of a whole file; component blocks are discriminated by `_type` among the registered ones."""

from collections.abc import Mapping, Sequence
from functools import lru_cache, reduce
from operator import or_
from typing import Annotated, Any

from pydantic import Discriminator, Tag, create_model

from rollstream.harness.config import registry
from rollstream.schemas.config import COMPONENT_SECTIONS, OURS, ConfigFile
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.finetuning import ComponentConfig
from rollstream.schemas.permissions import CODE
from rollstream.schemas.users_code import import_module, import_named

Choice = tuple[str, tuple[tuple[str, type[ComponentConfig]], ...]]
"""A section, and by `_type` what its blocks may be."""


def model_of(written: Mapping[str, Any]) -> type[ConfigFile]:
    """The model that validates a file.

    Raises ConfigError if a module named in it cannot be imported. A `_type` is a registered name, or
    `python:module.ConfigClass` of a module that registers it.
    """
    _import_what_is_needed(written)
    choices: list[Choice] = []
    for section in COMPONENT_SECTIONS:
        named = {
            name: _imported(section, name, location) for location, name in _types(written, section) if _is_path(name)
        }
        choices.append((section, tuple(sorted({**registry.config_types(section), **named}.items()))))
    return _model(tuple(choices))


@lru_cache(maxsize=8)
def _model(choices: tuple[Choice, ...]) -> type[ConfigFile]:
    """The model for these choices; cached, because pydantic takes milliseconds to create one."""
    fields: dict[str, Any] = {section: (dict[str, _union(types)], ...) for section, types in choices}
    return create_model("ConfigFile", __base__=ConfigFile, **fields)


def _union(types: Sequence[tuple[str, type[ComponentConfig]]]) -> Any:
    tagged = [Annotated[config_type, Tag(name)] for name, config_type in types]
    return Annotated[reduce(or_, tagged), Discriminator(_tag)]


def _tag(block: Any) -> str | None:
    """Tag of a component's block: its `_type`, or ours if it has none or is not a mapping."""
    if isinstance(block, ComponentConfig):
        return block.type
    found: Any = block.get("_type", OURS) if isinstance(block, Mapping) else OURS
    return found if isinstance(found, str) else str(found)


def _types(written: Mapping[str, Any], section: str) -> list[tuple[str, str]]:
    """Path and `_type` of every block of a section that names one."""
    blocks = written.get(section)
    found = blocks.items() if isinstance(blocks, Mapping) else ()
    typed = [(f"{section}.{name}._type", block.get("_type")) for name, block in found if isinstance(block, Mapping)]
    return [(location, kind) for location, kind in typed if isinstance(kind, str)]


def _is_path(name: str) -> bool:
    return name.startswith(CODE)


def _imported(section: str, name: str, location: str) -> type[ComponentConfig]:
    found = import_named(name, location, "ConfigClass")
    if found not in registry.registered(section):
        raise ConfigError(
            f"{location}: {name} is not registered for {section}; register it there with register_{section[:-1]}"
        )
    return found


def _import_what_is_needed(written: Mapping[str, Any]) -> None:
    """Import the user's modules if a `_type` is not known without them; importing is slow, and services do it
    themselves."""
    is_known = all(
        name in registry.config_types(section) or _is_path(name)
        for section in COMPONENT_SECTIONS
        for _, name in _types(written, section)
    )
    if not is_known:
        import_modules(written)


def import_modules(written: Mapping[str, Any]) -> None:
    """Import the `modules` that the builders' blocks name. Raises ConfigError naming the path and the module."""
    builders = written.get("trajectory_builders")
    for name, block in builders.items() if isinstance(builders, Mapping) else ():
        modules = block.get("modules") if isinstance(block, Mapping) else None
        for module in modules if isinstance(modules, (list, tuple)) else ():
            import_module(str(module), f"trajectory_builders.{name}.modules")
