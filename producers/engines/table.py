"""Rollout engines by `engine.kind`: those of `schemas.engine_settings.ENGINES`, and those that installed packages add.

A built-in kind is a row of that table and a module of this folder with the kind's name and a function `build`.
A package names an `EngineKind` by an entry point of the group `rollstream.engines`. It is imported only in a process
whose own settings name its kind: no record leads here.
"""

import importlib
import inspect
import logging
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from pydantic import ValidationError

from rollstream.producers.engines.base import Engine, EngineKind
from rollstream.schemas.config import RunConfig
from rollstream.schemas.engine_settings import ENGINES, EngineSettings
from rollstream.schemas.errors import ConfigError, RollstreamError, describe, first_invalid, nearest
from rollstream.schemas.users_code import installed_entry, load_installed, origin_of
from rollstream.schemas.variables import conceal, expand

GROUP = "rollstream.engines"
MEMBERS = tuple(name for name in vars(Engine) if not name.startswith("_"))
"""Methods and properties that an engine must have."""

_RUN_CHECKS = {"vllm": "rollstream.producers.engines.vllm.run_checks"}
"""Modules with the `check` of built-in kinds, apart from `build`, which may need libraries that are not there yet."""

logger = logging.getLogger(__name__)


def new_engine(written: EngineSettings, env: Mapping[str, str], location: str = "engine") -> Engine:
    """An engine that is not started yet. `location`: where its settings stand, for errors.

    Raises ConfigError for an unknown kind, settings that do not fit it, or a class that is not an engine.
    """
    kind, settings = _resolved(written, env, location)
    try:
        engine = kind.build(settings)
    except RollstreamError:
        raise
    except (Exception, SystemExit) as error:
        if written.kind in ENGINES:  # a missing library has its own message
            raise
        logger.info("engine %s cannot be built", written.kind, exc_info=error)
        raise ConfigError(
            f"{location}: kind {written.kind!r} cannot be built: {describe(error)}; correct its settings or the package"
        ) from error
    _check_engine(engine, f"{location}: kind {written.kind!r}")
    return engine


def settings_of(written: EngineSettings, env: Mapping[str, str], location: str = "engine") -> EngineSettings:
    """Settings as the class of their kind, `${NAME}` expanded. Raises ConfigError as `new_engine` does."""
    return _resolved(written, env, location)[1]


def check_run(config: RunConfig, env: Mapping[str, str], location: str) -> EngineSettings:
    """Check the settings of a run's engine, and the run by the requirements of their kind. Gives the settings as
    `settings_of` does. Raises ConfigError.
    """
    kind, settings = _resolved(config.builder.engine, env, location)
    if kind.check is not None:
        kind.check(settings, config)
    return settings


def _resolved(written: EngineSettings, env: Mapping[str, str], location: str) -> tuple[EngineKind, EngineSettings]:
    kind = _kind_of(written.kind, f"{location}.kind")
    if type(written) is kind.settings:
        return kind, written
    values = written.model_dump(exclude_unset=True) | {"kind": written.kind}
    try:
        return kind, kind.settings.model_validate(expand(values, env, location))
    except ConfigError:
        raise
    except ValidationError as error:
        raise ConfigError(conceal(_line(error, kind.settings, location), values, env)) from error
    except (Exception, SystemExit) as error:  # validators are others' code
        logger.info("settings of engine %s cannot be checked", written.kind, exc_info=error)
        raise ConfigError(conceal(f"{location}: {describe(error)}; correct it", values, env)) from error


def _kind_of(name: str, location: str) -> EngineKind:
    """The kind called `name`. Raises ConfigError if there is none, more than one, or it names no kind."""
    entry = installed_entry(GROUP, name, location, is_built_in=name in ENGINES)
    if name in ENGINES:
        return _built_in(name)
    if entry is None:
        known = sorted({*ENGINES, *metadata.entry_points(group=GROUP).names})
        near = nearest(name, known)
        hint = f"did you mean {near}? " if near is not None else ""
        raise ConfigError(f"{location}: {name!r} is unknown; {hint}known kinds: {', '.join(known)}")
    return _imported(entry, location)


def _built_in(name: str) -> EngineKind:
    """A built-in kind. Its module is imported when an engine is built: transformers takes seconds and memory."""

    def build(settings: EngineSettings) -> Engine:
        module: Any = importlib.import_module(f"rollstream.producers.engines.{name}")
        engine: Engine = module.build(settings)
        return engine

    checks: Any = importlib.import_module(_RUN_CHECKS[name]) if name in _RUN_CHECKS else None
    return EngineKind(ENGINES[name], build, None if checks is None else checks.check)


def _imported(entry: metadata.EntryPoint, location: str) -> EngineKind:
    where = f"{location}: {entry.name!r} ({origin_of(entry)})"
    kind = load_installed(entry, where)
    if not isinstance(kind, EngineKind):
        raise ConfigError(f"{where} is a {type(kind).__name__}; an EngineKind is expected, correct it")
    if not (inspect.isclass(kind.settings) and issubclass(kind.settings, EngineSettings)):
        raise ConfigError(
            f"{where}: settings is {kind.settings!r}; a subclass of EngineSettings is expected, correct it"
        )
    if not callable(kind.build) or inspect.iscoroutinefunction(kind.build):
        raise ConfigError(f"{where}: build is {kind.build!r}; a plain function or a class is expected, correct it")
    return kind


def _check_engine(engine: object, where: str) -> None:
    """Raises ConfigError if a method is missing, or is `async` where the protocol's is not, before any is called."""
    missing = [name for name in MEMBERS if inspect.getattr_static(engine, name, None) is None]
    if missing:
        raise ConfigError(f"{where} built a {type(engine).__name__}, which lacks {', '.join(missing)}; define them")
    for name in MEMBERS:
        is_async, must_be = (_is_async(owner, name) for owner in (engine, Engine))
        if is_async != must_be:
            wanted = "async def" if must_be else "def"
            raise ConfigError(f"{where} built a {type(engine).__name__}, whose {name} must be written with {wanted}")


def _is_async(owner: object, name: str) -> bool:
    return inspect.iscoroutinefunction(inspect.getattr_static(owner, name))


def _line(error: ValidationError, settings: type[EngineSettings], location: str) -> str:
    """The first error in one line."""
    return str(first_invalid(error, location, model=settings))
