"""Protocols by name: built-in ones, registered ones and `python:module.Name`.

A package registers its own in a module that an entry point of the group `rollstream.components` names. Before a
name from a record is given to `protocol`, the caller checks that the process allows `python:` names.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import JsonValue, ValidationError

from rollstream.producers.protocols import builtin
from rollstream.producers.protocols.base import InteractionProtocol, ProtocolSettings
from rollstream.schemas.errors import ConfigError, first_invalid, nearest
from rollstream.schemas.permissions import CODE
from rollstream.schemas.users_code import check_name, import_named, register

T = TypeVar("T", bound=type[InteractionProtocol])
_protocols: dict[str, type[InteractionProtocol]] = {
    "nip": builtin.Nip,
    "adp": builtin.Adp,
    "solo_verifier": builtin.SoloVerifier,
    "debate": builtin.Debate,
    "mnip": builtin.Mnip,
    "merlin_arthur": builtin.MerlinArthur,
}


def register_protocol(name: str) -> Callable[[T], T]:
    """Decorator: a subclass of InteractionProtocol under `name`. Raises ConfigError for a name that is taken."""
    check_name("register_protocol", name)
    return lambda found: register(_protocols, "protocol", name, found)


def names() -> list[str]:
    """Names of built-in and registered protocols."""
    return sorted(_protocols)


def protocol(written: str | Mapping[str, JsonValue], location: str = "protocol") -> InteractionProtocol:
    """A protocol from its name, or from a mapping of `name` and its settings. `location`: its place, for errors.

    Raises ConfigError for an unknown name, a class that is not a protocol, and settings that it does not take.
    """
    options = {"name": written} if isinstance(written, str) else dict(written)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(
            f"{location}: name is missing; write {location}: {{name: nip}}, with one of {', '.join(names())}"
        )
    found = _class(name, location)
    try:
        return found(found.Settings.model_validate(options))
    except ValidationError as error:
        line = first_invalid(error, location, model=found.Settings)
        raise ConfigError(f"{line} (protocol {name})") from error
    except ValueError as error:
        raise ConfigError(f"{location}: {name}: {error}") from error


def _class(name: str, location: str) -> type[InteractionProtocol]:
    found = import_named(name, location) if name.startswith(CODE) else _protocols.get(name)
    if found is None:
        near = nearest(name, names())
        hint = f"did you mean {near}?" if near is not None else f"known protocols: {', '.join(names())}"
        raise ConfigError(f"{location}: {name!r} is unknown; {hint}")
    if not (isinstance(found, type) and issubclass(found, InteractionProtocol)):
        raise ConfigError(
            f"{location}: {name} must be a subclass of {InteractionProtocol.__module__}.InteractionProtocol"
        )
    left = ", ".join(sorted(found.__abstractmethods__))
    if left:
        raise ConfigError(f"{location}: {name} does not define {left}; every protocol must")
    settings: Any = found.Settings
    if not (isinstance(settings, type) and issubclass(settings, ProtocolSettings)):
        raise ConfigError(f"{location}: {name} must have a class Settings that derives from ProtocolSettings")
    return found
