"""Algorithms by name: built-in ones, those of installed packages, and `python:module.Name`. Imported when asked for.

Packages bring theirs by the entry point group `rollstream.algorithms` (`name = "package.module:Class"`). What is
installed is trusted by being installed; `python:` names only where the process's settings allow them.
"""

import importlib
import logging
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args

import numpy as np
from pydantic import ValidationError

from rollstream.learner.algorithms.base import Algorithm, BatchView, Counts, Divisor, Normaliser, Prepared
from rollstream.schemas.algorithm_settings import ENTRY_POINTS, AlgorithmSettings, teacher_of
from rollstream.schemas.algorithms import BUILT_IN, CustomSettings
from rollstream.schemas.errors import (
    ConfigError,
    RollstreamError,
    RunFailedError,
    describe,
    first_invalid,
    is_of_device,
    is_out_of_memory,
    nearest,
)
from rollstream.schemas.permissions import CODE, Permissions
from rollstream.schemas.users_code import import_named, installed_entry, load_installed
from rollstream.schemas.variables import encodable, traceback_of

if TYPE_CHECKING:
    from rollstream.learner.algorithms.tokens import Losses

logger = logging.getLogger(__name__)
DIVISORS: tuple[str, ...] = get_args(Divisor)
_BY_SETTINGS = {
    "dr_grpo": "grpo with advantage: group_mean and aggregation: constant",
    "dapo": "grpo with overlong, mask_truncated and max_refills",
    "bnpo": "grpo with aggregation: tokens",
    "rloo": "grpo with advantage: leave_one_out",
    "ipo": "dpo with loss_type: ipo",
    "reinforce++": "reinforce_pp",
}
"""Names of algorithms that are settings of another one here."""
MAX_NAME_CHARS = 200
"""Characters of a name of an algorithm's metrics, sums, statistics or components."""
T = TypeVar("T")


def names() -> list[str]:
    """Names of the built-in algorithms and those of installed packages."""
    return sorted({*BUILT_IN, *metadata.entry_points(group=ENTRY_POINTS).names})


def algorithm(name: str, permissions: Permissions, location: str = "algorithm") -> Algorithm:
    """The algorithm called `name`. `location`: where it is named, for errors.

    Raises NotAllowedError before anything is imported, ConfigError for an unknown name, one that is brought twice, or a
    class that is not an algorithm.
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
        logger.warning("%s.name: %s cannot be used%s", location, name, traceback_of(error))
        raise ConfigError(
            f"{location}.name: {name} cannot be used: {describe(error)}; correct the algorithm"
        ) from error


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
        raise ConfigError(f"{location}.name: {name} does not define {left}; every algorithm must")
    return found


def _installed(name: str, location: str) -> Any:
    entry_point = installed_entry(ENTRY_POINTS, name, f"{location}.name", is_built_in=False)
    if entry_point is not None:
        return load_installed(entry_point, f"{location}.name: {name} ({entry_point.value})")
    near = _BY_SETTINGS.get(name.lower()) or nearest(name, names())
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
        self._check_normaliser(found.normaliser)
        self._check_named("prepare", "components", found.components)
        lists: dict[str, Any] = {name: self._by_row(name, getattr(found, name)) for name in ("advantages", "weights")}
        lists["keep"] = self._by_row("keep", found.keep, kinds="b", expected="bool; return a mask a row")
        lists["components"] = {
            name: self._by_row(f"components of {name}", one) for name, one in found.components.items()
        }
        numbers = {name: self._numbers("prepare", name, getattr(found, name)) for name in ("metrics", "statistics")}
        return replace(found, **lists, **numbers)

    def _check_normaliser(self, found: Any) -> None:
        by, value = found if isinstance(found, Normaliser) else (None, None)
        if not (isinstance(by, str) and by in DIVISORS and isinstance(value, Real) and 0 < value < math.inf):
            shown = found if isinstance(found, Normaliser) else f"a {type(found).__name__} as normaliser"
            raise RunFailedError(
                f"algorithm {self._name}: prepare returned {shown}; expected a Normaliser: by must be one of "
                f"{', '.join(DIVISORS)}, value a number above 0"
            )

    def _by_row(
        self, what: str, found: Any, kinds: str = "biuf", expected: str = "a number; return one a row or a token"
    ) -> list[Any]:
        """The values of the rows, from a list or an array of them. `kinds`: of their numpy types."""
        kind = type(found).__name__
        is_list = isinstance(found, Sequence) and not isinstance(found, (str, bytes))
        if not (is_list or (isinstance(found, np.ndarray) and found.ndim > 0)):
            raise RunFailedError(
                f"algorithm {self._name}: prepare returned {what} as a {kind}; expected a list or an "
                "array with one value a row"
            )
        values: list[Any] = list(cast("Sequence[Any]", found))
        if any(_numpy_kind(value) not in kinds for value in values):
            raise RunFailedError(f"algorithm {self._name}: prepare returned {what} that is not {expected}")
        return values

    def loss(self, tokens: Any, settings: Any) -> Any:
        from rollstream.learner.algorithms.tokens import Losses

        found = self._checked("loss", Losses, lambda: self._own.loss(tokens, settings))
        self._check_tensors(found)
        sizes = {"token": len(tokens.logprobs_N), "row": len(tokens.lengths_B), "pair": len(tokens.chosen_K)}
        self._check_losses("values", found.values, sizes.get(found.per), f"as they are per {found.per}")
        for name, losses in found.parts.items():
            if name not in tokens.components:
                known = ", ".join(sorted(tokens.components)) or "none"
                raise RunFailedError(
                    f"algorithm {self._name}: loss returned part {name!r}, but prepare has no such component (it has "
                    f"{known}); give each part the name of a component"
                )
            self._check_losses(f"part {name!r}", losses, sizes["token"], "a loss for each token")
        return found

    def _check_tensors(self, found: "Losses") -> None:
        """Raises RunFailedError unless the losses, sums and parts are tensors; sums without dimensions."""
        from torch import Tensor

        self._check_named("loss", "sums", found.sums)
        self._check_named("loss", "parts", found.parts)
        returned: list[tuple[str, Any, bool]] = [("values", found.values, False)]
        returned += [(f"part {name!r}", value, False) for name, value in found.parts.items()]
        returned += [(name, value, True) for name, value in found.sums.items()]
        for what, value, is_sum in returned:
            if not isinstance(value, Tensor) or (is_sum and value.dim()):
                shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
                raise RunFailedError(
                    f"algorithm {self._name}: loss returned {what} as a {type(value).__name__}{shape}; expected a "
                    f"tensor{' without dimensions, as of sum()' if is_sum else ''}"
                )

    def _check_losses(self, what: str, losses: Any, size: int | None, reason: str) -> None:
        """Raises RunFailedError unless the tensor `losses` has shape (size,) and a gradient."""
        shape, wanted = tuple(losses.shape), (size,)
        if shape != wanted or not losses.requires_grad:
            raise RunFailedError(
                f"algorithm {self._name}: loss returned {what} of shape {shape}, "
                f"{'with' if losses.requires_grad else 'without'} a gradient; expected {wanted} with one, {reason}"
            )

    def metrics(self, sums: Mapping[str, float], counts: Counts) -> dict[str, float]:
        kind = cast("type[dict[str, float]]", dict)
        return self._numbers(
            "metrics", "metrics", self._checked("metrics", kind, lambda: self._own.metrics(sums, counts))
        )

    def _check_named(self, method: str, what: str, found: Any) -> None:
        """Raises RunFailedError unless `found` is a dict whose keys are names that an event can hold."""
        if not isinstance(found, Mapping):
            raise RunFailedError(
                f"algorithm {self._name}: {method} returned {what} as a {type(found).__name__}; expected a dict"
            )
        for name in cast("Mapping[Any, Any]", found):
            if not isinstance(name, str) or len(name) > MAX_NAME_CHARS or encodable(name) != name:
                shown = repr(name[:MAX_NAME_CHARS]) if isinstance(name, str) else f"of type {type(name).__name__}"
                raise RunFailedError(
                    f"algorithm {self._name}: {method} returned {what} with the name {shown}; expected a text of at "
                    f"most {MAX_NAME_CHARS} characters that can be encoded"
                )

    def _numbers(self, method: str, what: str, found: Any) -> dict[str, float]:
        self._check_named(method, what, found)
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
        except (Exception, SystemExit) as error:
            if is_out_of_memory(error) or is_of_device(error):
                raise  # smaller micro-batches may fit; a device that failed is of no use to other jobs either
            logger.error("algorithm %s: %s raised%s", self._name, method, traceback_of(error))
            raise RunFailedError(f"algorithm {self._name}: {method} raised {describe(error)}") from error
        if not isinstance(found, kind):
            raise RunFailedError(
                f"algorithm {self._name}: {method} returned a {type(found).__name__}; expected {kind.__name__}"
            )
        return found


def _numpy_kind(value: Any) -> str:
    """The kind of numpy type that a value, or what is in it, has; empty if an array cannot hold it."""
    try:
        return np.asarray(value).dtype.kind
    except Exception:  # noqa: BLE001 -- ragged lists, tensors with a gradient or on a GPU, and others' classes
        return "-"
