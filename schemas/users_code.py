"""Code of users by name: `python:module.Name`, modules, and entry points. The one place that imports them.

Whoever calls has checked that the name is allowed (`permissions`). What a module raises while it is imported becomes a
ConfigError of one line, and its traceback goes to the log.
"""

import functools
import importlib
import logging
import os
from collections.abc import Generator
from contextlib import contextmanager
from importlib import metadata
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any, TypeVar, cast

from rollstream.schemas.errors import ConfigError, RollstreamError, called_at, describe, nearest
from rollstream.schemas.permissions import CODE

V = TypeVar("V")

logger = logging.getLogger(__name__)


def import_named(name: str, location: str, kind: str = "Name") -> Any:
    """Import the object that `python:module.Name` refers to. `location` and `kind` (the kind of object expected) are
    for errors.

    Raises ConfigError for a name of another form, a module that cannot be imported, and one that lacks the name.
    """
    module_name, _, attribute = name.removeprefix(CODE).rpartition(".")
    if not module_name or not name.startswith(CODE):
        raise ConfigError(f"{location}: {name!r} is not a valid path; write {CODE}module.{kind}")
    module = import_module(module_name, f"{location}: {name}")
    if not hasattr(module, attribute):
        near = nearest(attribute, vars(module))
        hint = f"did you mean {near}?" if near is not None else "define it there, or correct the name"
        raise ConfigError(f"{location}: {name}: module {module_name} has no {attribute!r}; {hint}")
    return getattr(module, attribute)


def import_module(name: str, location: str) -> ModuleType:
    """A module of users. Raises ConfigError if it cannot be imported."""
    with _importing(f"{location}: module {name}", name):
        return importlib.import_module(name)


def path_of(value: Any) -> str:
    """The path of a class or function: `module.Name`; of a `functools.partial` its function's, of another object its
    class's.
    """
    while isinstance(value, functools.partial):
        value = value.func
    is_named = hasattr(value, "__qualname__") and hasattr(value, "__module__")
    named: Any = value if is_named else cast("Any", type(value))
    return f"{named.__module__}.{named.__qualname__}"


def check_name(decorator: str, name: object) -> None:
    """Raises ConfigError for a decorator without parentheses, whose `name` is the class or function itself."""
    if not isinstance(name, str):
        shown = getattr(name, "__name__", "NAME")
        raise ConfigError(f'@{decorator} needs a name; write @{decorator}("{shown}")')


def register(known: dict[str, Any], what: str, name: str, value: V) -> V:
    """Put a class or function into a table by its name; the module that defines it may be imported again.

    Raises ConfigError if another one has the name. `what`: the kind of object, for the error.
    """
    before = known.get(name)
    if before is not None and path_of(before) != path_of(value):
        raise registered_twice(what, name, before, value)
    known[name] = value
    return value


def registered_twice(what: str, name: str, one: Any, other: Any) -> ConfigError:
    """Error about a name of two classes or functions, with the packages that bring them."""
    packages = metadata.packages_distributions()

    def origin(value: Any) -> str:
        return " of ".join([path_of(value), *packages.get(value.__module__.partition(".")[0], ())[:1]])

    return ConfigError(
        f"{what} {name!r} is registered twice: by {origin(one)} and by {origin(other)}; rename one of them, or "
        "uninstall the package of one"
    )


def installed_entry(group: str, name: str, location: str, *, is_built_in: bool) -> EntryPoint | None:
    """The entry point of a group with a name; None if no package has one.

    Raises ConfigError if several packages bring the name, or one brings that of a built-in object.
    """
    found = {entry.value: entry for entry in metadata.entry_points(group=group, name=name)}
    if len(found) + is_built_in > 1:
        bringers = [*(["rollstream"] if is_built_in else []), *map(origin_of, found.values())]
        raise ConfigError(f"{location}: {name!r} is brought by {' and by '.join(bringers)}; uninstall all but one")
    return next(iter(found.values()), None)


def origin_of(entry: EntryPoint) -> str:
    """The object and the package of an entry point, for errors."""
    package = entry.dist.name if entry.dist is not None else "a package without metadata"
    return f"{entry.value} of {package}"


def load_installed(entry_point: EntryPoint, what: str) -> Any:
    """Load the object of an entry point. `what`: its description for errors. Raises ConfigError if it cannot be
    imported.
    """
    with _importing(what, entry_point.module):
        return entry_point.load()


@contextmanager
def _importing(what: str, module: str) -> Generator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:
        logger.info("%s cannot be imported", what, exc_info=error)
        source_line = called_at(error) if isinstance(error, RollstreamError) else ""
        reason = f"{source_line}: {error}" if source_line else describe(error)
        raise ConfigError(f"{what} cannot be imported: {reason}; {_remedy(error, module)}") from error


def _remedy(error: BaseException, module: str) -> str:
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return f"correct the module, {_log()} has the traceback"
    if module == error.name or module.startswith(f"{error.name}."):
        return "correct its name, install its package, or start the command in its folder"
    return f"install {error.name.split('.')[0]}, or remove its import"


def _log() -> str:
    """The file that this process logs to; that of a service is its standard error."""
    files = [one.baseFilename for one in logging.root.handlers if isinstance(one, logging.FileHandler)]
    return next((name for name in files if name != os.devnull), "the log of this process")
