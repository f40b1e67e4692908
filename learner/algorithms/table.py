"""Algorithms by name: built-in ones, those of installed packages, and `python:module.Name`. Imported when asked for.

Packages bring theirs by the entry point group `rollstream.algorithms` (`name = "package.module:Class"`). What is
installed is trusted by being installed; `python:` names only where the process's settings allow them.
"""

import importlib
import logging
import math
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from numbers import Real
from typing import Any, TypeVar, cast, get_args

import numpy as np
from pydantic import ValidationError

from rollstream.learner.algorithms.base import Algorithm, BatchView, Counts, Divisor, Prepared
from rollstream.schemas.algorithm_settings import AlgorithmSettings, teacher_of
from rollstream.schemas.algorithms import BUILT_IN, CustomSettings
from rollstream.schemas.errors import ConfigError, RollstreamError, RunFailedError, describe, first_invalid, nearest
from rollstream.schemas.permissions import CODE, Permissions
from rollstream.schemas.users_code import import_named, load_installed

logger = logging.getLogger(__name__)
GROUP = "rollstream.algorithms"
DIVISORS: tuple[str, ...] = get_args(Divisor)
T = TypeVar("T")


def names() -> list[str]:
    """Names of the built-in algorithms and those of installed packages."""
    return sorted({*BUILT_IN, *metadata.entry_points(group=GROUP).names})


def algorithm(name: str, permissions: Permissions, location: str = "algorithm") -> Algorithm:
    """The algorithm called `name`. `location`: where it is named, for errors.

    Raises NotAllowedError before anything is imported, ConfigError for an unknown name or a class that is not an
    algorithm.
    """
    if name in BUILT_IN:
        module = importlib.import_module(f"rollstream.learner.algorithms.builtin.{name}")
        found = [one for one in vars(module).values() if getattr(one, "Settings", None) is BUILT_IN[name]]
        built_in: Algorithm = found[0]()
        return built_in
    with _users_code(name, location):
        return _Users(name, _class(name, permissions, location)())


def settings_of(written: AlgorithmSettings, permissions: Permissions, location: str = "algorithm") -> AlgorithmSettings:
    """The algorithm's own settings from those that a file or a record holds. Those of built-in ones are that already.

    Raises as `algorithm` does, and ConfigError for a key or a value that the algorithm does not take.
    """
    if not isinstance(written, CustomSettings):
        return written
    kind = _class(written.name, permissions, location).Settings
    common = {
        name: getattr(written, name) for name in AlgorithmSettings.model_fields if name in written.model_fields_set
    }
    try:
        with _users_code(written.name, location):
            settings = kind.model_validate({**common, **written.options, "name": written.name})
            _ = settings.needs, settings.kind  # they are others' properties, which may raise
            return settings
    except ValidationError as error:
        raise ConfigError(str(first_invalid(error, location, model=kind))) from error


def check_fits(algorithm: AlgorithmSettings, kind: str, where: str) -> None:
    """Raises ConfigError naming `where` if a job's kind, or what is at hand for it, does not fit its algorithm."""
    needs = algorithm.needs
    if not algorithm.trains(kind):
        raise ConfigError(
            f"{where}: algorithm {algorithm.name} is for {algorithm.kind} jobs, not for {kind}; choose another"
        )
    if needs.pairs and algorithm.pair_settings is None:
        raise ConfigError(
            f"{where}: algorithm {algorithm.name} needs pairs, so its Settings must derive from PairSettings"
        )
    if needs.teacher and teacher_of(algorithm) is None:
        raise ConfigError(
            f"{where}: algorithm {algorithm.name} needs a teacher, so its Settings must name one; derive them "
            "from DistillationSettings"
        )


@contextmanager
def _users_code(name: str, location: str) -> Generator[None]:
    """Turns what the code of an algorithm of somebody else's raises while it is made into a ConfigError."""
    try:
        yield
    except (RollstreamError, ValidationError):
        raise
    except (Exception, SystemExit) as error:
        logger.warning("%s.name: %s cannot be used", location, name, exc_info=error)
        raise ConfigError(f"{location}.name: {name} cannot be used: {describe(error)}") from error


def _class(name: str, permissions: Permissions, location: str) -> type[Algorithm]:
    permissions.check_code(name, f"{location}.name")
    found = import_named(name, f"{location}.name") if name.startswith(CODE) else _installed(name, location)
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise ConfigError(
            f"{location}.name: {name} must be a subclass of {Algorithm.__module__}.Algorithm, not {found!r}"
        )
    settings = getattr(found, "Settings", None)
    if not (isinstance(settings, type) and issubclass(settings, AlgorithmSettings)):
        raise ConfigError(f"{location}.name: {name} must have a class Settings that derives from AlgorithmSettings")
    left = ", ".join(sorted(found.__abstractmethods__))
    if left:
        raise ConfigError(f"{location}.name: {name} does not define {left}")
    return found


def _installed(name: str, location: str) -> Any:
    for entry_point in metadata.entry_points(group=GROUP, name=name):
        return load_installed(entry_point, f"{location}.name: {name} ({entry_point.value})")
    near = nearest(name, names())
    hint = (
        f"did you mean {near}?"
        if near is not None
        else f"known algorithms: {', '.join(names())}; or give python:module.Name"
    )
    raise ConfigError(f"{location}.name: {name!r} is unknown; {hint}")


class _Users(Algorithm):
    """An algorithm of somebody else's: what it raises fails its job, with file and line, and not the learner."""

    def __init__(self, name: str, own: Algorithm) -> None:
        self._name = name
        self._own = own

    def prepare(self, batch: BatchView, settings: Any) -> Prepared:
        found = self._checked("prepare", Prepared, lambda: self._own.prepare(batch, settings))
        by, value = found.normaliser
        if by not in DIVISORS or not (isinstance(value, Real) and math.isfinite(value) and value > 0):
            raise RunFailedError(
                f"algorithm {self._name}: prepare returned {found.normaliser}; by must be one of "
                f"{', '.join(DIVISORS)}, value a number above 0"
            )
        if any(keep.dtype != bool for keep in map(np.asarray, found.keep)):
            raise RunFailedError(f"algorithm {self._name}: prepare returned keep that is not bool; return a mask a row")
        return replace(found, metrics=self._numbers("prepare", found.metrics))

    def loss(self, tokens: Any, settings: Any) -> Any:
        from torch import Tensor

        from rollstream.learner.algorithms.tokens import Losses

        found = self._checked("loss", Losses, lambda: self._own.loss(tokens, settings))
        sizes = {"token": len(tokens.logprobs_N), "row": len(tokens.lengths_B), "pair": len(tokens.chosen_K)}
        wanted = (sizes.get(found.per),)
        returned: list[tuple[str, Any]] = [("values", found.values), *found.sums.items()]
        for what, value in returned:
            if not isinstance(value, Tensor) or (what in found.sums and value.dim()):
                shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
                raise RunFailedError(
                    f"algorithm {self._name}: loss returned {what} as a {type(value).__name__}{shape}; expected a "
                    f"tensor{' without dimensions, as of sum()' if what in found.sums else ''}"
                )
        if tuple(found.values.shape) != wanted or not found.values.requires_grad:
            shape = tuple(found.values.shape)
            raise RunFailedError(
                f"algorithm {self._name}: loss returned values of shape {shape}, "
                f"{'with' if found.values.requires_grad else 'without'} a gradient; expected {wanted} with one, as "
                f"they are per {found.per}"
            )
        return found

    def metrics(self, sums: Mapping[str, float], counts: Counts) -> dict[str, float]:
        kind = cast("type[dict[str, float]]", dict)
        return self._numbers("metrics", self._checked("metrics", kind, lambda: self._own.metrics(sums, counts)))

    def _numbers(self, method: str, found: Mapping[str, Any]) -> dict[str, float]:
        for name, value in found.items():
            if not isinstance(value, Real):
                raise RunFailedError(
                    f"algorithm {self._name}: {method} returned {name} as a {type(value).__name__}; expected a number"
                )
        return {name: float(value) for name, value in found.items()}

    def _checked(self, method: str, kind: type[T], call: Callable[[], Any]) -> T:
        try:
            found = call()
        except RollstreamError:
            raise
        except Exception as error:
            logger.exception("algorithm %s: %s raised", self._name, method)
            raise RunFailedError(f"algorithm {self._name}: {method} raised {describe(error)}") from error
        if not isinstance(found, kind):
            raise RunFailedError(
                f"algorithm {self._name}: {method} returned a {type(found).__name__}; expected {kind.__name__}"
            )
        return found
