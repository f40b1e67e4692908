"""Checks the stored configuration of a recorded run before it is read.

Reading a configuration imports the modules and expands the `${VARIABLES}` that it names. A configuration from a log or
an export is untrusted data, so names that the user's own file does not contain are refused. Also names the keys whose
values a resumed run was not started with.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

from pydantic import BaseModel, JsonValue, TypeAdapter, ValidationError

from rollstream.harness.runs.progress import Progress
from rollstream.learner.shared_model_group.job_queue import GROUP_KEY
from rollstream.schemas import ids
from rollstream.schemas.errors import ConfigError, NotAllowedError
from rollstream.schemas.permissions import CODE, COMMAND, FILE, quoted
from rollstream.schemas.settings import JobSpec
from rollstream.schemas.variables import conceal, expand, is_secret_name, one_line, references, variables_in

TRUST = "--trust"
_MAX_TOLD = 4
_MAX_VALUE = 60
"""Characters of a value that a message repeats."""


def check_stored(stored: Mapping[str, Any], local: Mapping[str, Any], *, run_id: str, trust: bool) -> None:
    """Raises NotAllowedError listing the code, files and variables that only the run's stored configuration names;
    ConfigError for a run of a shared model group, which has no configuration.

    `local`: the user's configuration as written; `trust`: `--trust` was given.
    """
    if GROUP_KEY in stored:
        raise ConfigError(
            f"run {run_id} was begun by a shared model group and has no configuration file, so it cannot be resumed, "
            "played again or changed by a what-if; open its group again to train it further, or start a new run from "
            "one of its versions with --fork"
        )
    known = {name for name, _ in names_in(local)}
    found = {name: path for name, path in reversed(list(names_in(stored))) if name not in known}
    if trust or not found:
        return
    lines = [f"{quoted(name)} at {quoted(path)}" for name, path in sorted(found.items())]
    more = f" and {len(lines) - _MAX_TOLD} more" if len(lines) > _MAX_TOLD else ""
    raise NotAllowedError(
        f"the stored configuration of run {run_id} names {', '.join(lines[:_MAX_TOLD])}{more}, which would be "
        f"imported, read or expanded here; name it in your own file too, or give {TRUST} if you trust the author of "
        f"the run"
    )


def names_in(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Everything that reading a configuration would import, open or expand, each with its path."""
    if isinstance(value, Mapping):
        yield from _names_of_block(value, path)
        for key, item in value.items():
            yield from names_in(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from names_in(item, f"{path}.{index}")
    elif isinstance(value, str):
        if value.startswith((CODE, COMMAND)):
            yield value, path
        yield from ((f"${{{name}}}", path) for name in sorted(variables_in(value)))


def _names_of_block(block: Mapping[str, Any], path: str) -> Iterator[tuple[str, str]]:
    """Names that are code or files because of their position: `modules` of a builder, an engine's program, and keys of
    evaluators.
    """
    modules = block.get("modules") if path.startswith("trajectory_builders.") else None
    for module in modules if isinstance(modules, (list, tuple)) else ():
        yield f"module {module}", f"{path}.modules"
    if path.endswith(".engine") and block.get("kind") == "vllm":
        for key in ("executable", "arguments", "base_urls", "folder"):
            given = block.get(key)
            for value in given if isinstance(given, (list, tuple)) else () if given is None else (given,):
                yield f"vllm {key} {value}", f"{path}.{key}"
    if path.startswith("eval.evaluators."):
        for key, prefix in (("function", CODE), ("file", FILE)):
            if isinstance(block.get(key), str):
                yield f"{prefix}{block[key]}", f"{path}.{key}"


class Change(NamedTuple):
    """A key whose value is not the recorded one; None for a value that is not set."""

    path: tuple[str, ...]
    recorded: Any
    given: Any

    def applied(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        """The stored configuration with this change alone."""
        return _with(stored, self.path, self.given)

    def __str__(self) -> str:
        name = ".".join(self.path)
        if any(is_secret_name(part) for part in self.path):
            return name
        return f"{name} (recorded: {_text(self.recorded)}, given: {_text(self.given)})"


def changes(stored: Any, given: Any, path: tuple[str, ...] = ()) -> Iterator[Change]:
    """The keys with different values, in the order of the stored configuration. A list is one value."""
    if isinstance(stored, Mapping) or isinstance(given, Mapping):
        before, now = (one if isinstance(one, Mapping) else {} for one in (stored, given))
        for key in {**before, **now}:
            yield from changes(before.get(key), now.get(key), (*path, key))
    elif stored != given:
        yield Change(path, stored, given)


def name_changes(
    stored: Mapping[str, Any], given: Mapping[str, Any], is_different: Callable[[dict[str, Any]], bool]
) -> str:
    """The changed keys that alone make a run another one (`is_different`), with both values; empty if none does.

    A key that is refused alone counts, because it may belong to others that were changed.
    """

    def matters(change: Change) -> bool:
        try:
            return is_different(change.applied(stored))
        except ConfigError:
            return True

    return _listed([change for change in changes(stored, given) if matters(change)])


def check_variables(progress: Progress, jobs: Iterable[JobSpec], idle_timeout_s: float) -> None:
    """Raises ConfigError if a variable of the stored configuration gives a job another value than was recorded.

    Compares what the beginning of the run and its jobs recorded; earlier releases recorded a text as another key's
    `${NAME}` that had its value. `jobs`, `idle_timeout_s`: as the configuration gives them now.
    """
    run = progress.run
    assert run is not None
    recorded: dict[str, Any] = {**run.from_variables, "run_idle_timeout_s": run.idle_timeout_s}
    for job_id, job in progress.jobs.items():
        recorded |= {} if job.submitted is None else _values(job.submitted.settings, f"{job_id}.job")
        if job.started is not None:
            recorded |= _values(job.started.plan, f"{job_id}.plan") | _values(job.started.rollout, f"{job_id}.rollout")
    now = {**values_of(jobs), "run_idle_timeout_s": idle_timeout_s}
    given = {text: expand(text, os.environ) for _, text in _texts_with_variables(run.config)}
    changed = {
        Change(key, recorded[path], now[path]): None
        for path, key in _keys_with_variables(now, run.config).items()
        if path in recorded and now[path] not in (recorded[path], given.get(recorded[path]))
        if not path.endswith(".revision")
    }
    if changed:
        raise ConfigError(
            f"variables of the configuration gave run {run.run_id} other values when it began: "
            f"{', '.join(str(change) for change in list(changed)[:_MAX_TOLD])}; set them as they were, or start a new "
            "run"
        )


def from_variables(jobs: Iterable[JobSpec], written: Mapping[str, Any]) -> dict[str, JsonValue]:
    """The settings of jobs, by path, that variables of their configuration give. Of these alone a run's log does not
    know the values by its configuration.
    """
    values = values_of(jobs)
    return {path: values[path] for path in _keys_with_variables(values, written)}


def values_of(jobs: Iterable[JobSpec]) -> dict[str, Any]:
    """Texts and numbers in the settings of jobs, by path."""
    found: dict[str, Any] = {}
    for spec in jobs:
        for part in ("job", "plan", "rollout"):
            found |= _values(getattr(spec, part), f"{spec.job_id}.{part}")
        if spec.fork is not None:
            name = ids.version_name(spec.fork.run_id, spec.fork.version, spec.fork.model_group)
            found[f"{spec.job_id}.fork.version"] = name
    return found


def _values(value: Any, path: str) -> dict[str, Any]:
    if isinstance(value, (BaseModel, Mapping)):
        items: Iterable[tuple[Any, Any]] = dict(value).items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        return {path: value}
    return {inner: one for key, item in items for inner, one in _values(item, f"{path}.{key}").items()}


def _keys_with_variables(values: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """The configuration's key with a variable that gives a value, by the value's path; of other values nothing.

    A number or a truth value is that of a key with the same name; a text may have another name in a job. Of several
    keys with the same value it is the one that ends most like the path: with the same index in a list, then the first.
    """
    texts = [(key, str(expand(text, os.environ))) for key, text in _texts_with_variables(written)]
    found = {path: [key for key, text in texts if _gives(key, text, path, value)] for path, value in values.items()}
    return {path: max(keys, key=partial(_common_ending, path.split("."))) for path, keys in found.items() if keys}


def _common_ending(path: Sequence[str], key: Sequence[str]) -> int:
    """The number of last parts that are equal."""
    pairs = zip(reversed(path), reversed(key), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _gives(key: tuple[str, ...], text: str, path: str, value: Any) -> bool:
    if isinstance(value, str):
        return value == text or value.endswith(f"/{text}")
    if value is None or _name_of(key) != _name_of(path.split(".")):
        return False
    try:
        return bool(TypeAdapter[Any](type(value)).validate_python(text) == value)
    except ValidationError:
        return False


def _name_of(path: Iterable[str]) -> str:
    """The last part of a path that is not a position in a list."""
    return [part for part in path if not part.isdigit()][-1]


def _texts_with_variables(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(value, (Mapping, list)):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _texts_with_variables(item, (*path, str(key)))
    elif isinstance(value, str) and next(references(value), None) is not None:
        yield path, value


def _listed(found: Iterable[Change]) -> str:
    texts = [str(change) for change in found]
    more = f" and {len(texts) - _MAX_TOLD} more" if len(texts) > _MAX_TOLD else ""
    return conceal(", ".join(texts[:_MAX_TOLD])) + more


def _with(block: Any, path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A block with one value set, or removed if it is None."""
    found = dict(block) if isinstance(block, Mapping) else {}
    key, *rest = path
    if rest:
        found[key] = _with(found.get(key), tuple(rest), value)
    elif value is None:
        found.pop(key, None)
    else:
        found[key] = value
    return found


def _text(value: Any) -> str:
    return "not set" if value is None else one_line(json.dumps(value, ensure_ascii=False), _MAX_VALUE)
