"""Permissions for names in records: code, `${VARIABLES}`, URLs, files and models that a process's own settings allow.

A record is data. Names from a topic, a dataset or a stored configuration are checked here before anything is imported,
expanded, opened or requested. Registered environments and reward functions need no permission. A variable that a
trusted configuration uses is allowed only in the same text at the same path: if a record could put it into any text,
such as the pattern of a reward, the result would reveal its value. A variable that is listed by its name may be used
anywhere.
"""

import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import SplitResult, quote, unquote, urlsplit

from pydantic import JsonValue

from rollstream.schemas.algorithm_settings import AlgorithmSettings, teacher_of
from rollstream.schemas.errors import ConfigError, NotAllowedError
from rollstream.schemas.settings import RolloutSettings
from rollstream.schemas.variables import VARIABLE, conceal, expand, variables_in

CODE = "python:"
COMMAND = "command:"
GATEWAY = "gateway"
"""The environment that an agent outside plays."""
FILE = "file:"
MODEL = "model:"
PLACE = "place:"
_MODEL_PATH = "model.path"
URL = re.compile(r"https?://", re.IGNORECASE)
ALLOW_VARIABLE = "ROLLSTREAM_ALLOW"
REMEDY = (
    f"if you trust it, start the service with --allow NAME (or {ALLOW_VARIABLE}), spelt as here; services that "
    "finetune starts itself allow what the run's own file names"
)
_MAX_SHOWN = 120
_PORTS = {"http": 80, "https": 443}


class Permissions(NamedTuple):
    """Entries that a process allows, and the environment variables that its `${VARIABLES}` refer to."""

    allow: frozenset[str] = frozenset()
    """`python:module.attribute`, `command:PROGRAM ARGUMENTS`, `${NAME}`, `http://host:port/path` and `model:PATH` (and
    everything below them), `file:PATH`, `place:PATH=TEXT` (a text with variables, where it may stand).
    """
    env: Mapping[str, str] = {}

    @classmethod
    def of(cls, entries: Iterable[str], env: Mapping[str, str]) -> "Permissions":
        """Build from settings, whose entries may contain `${NAME}`. Raises ConfigError for an unknown entry."""
        given = frozenset(entries)
        for entry in given:
            check_entry(entry)
        expanded = {_expanded(entry, env) for entry in given}
        return cls(given | expanded, env)

    def check_code(self, name: str, location: str) -> None:
        """Raises NotAllowedError for a `python:` or `command:` name that is not listed; others are registered ones."""
        if name.startswith((CODE, COMMAND)) and name not in self.allow:
            raise _refused(location, name)

    def check_url(self, url: str, location: str) -> None:
        """Raises NotAllowedError for a URL that is neither listed nor below one that is, ConfigError for no URL."""
        if not URL.match(url):
            raise ConfigError(f"{location}: {quoted(self.conceal(url))} must be a URL like http://host:8000")
        asked = _split(url)
        listed = (_split(entry) for entry in self.allow if URL.match(entry))
        if asked is None or not any(base is not None and _is_below(asked, base) for base in listed):
            raise _refused(location, self.conceal(url))

    def check_file(self, path: str, location: str) -> None:
        """Raises NotAllowedError for a local file that is not listed."""
        if f"{FILE}{path}" not in self.allow:
            raise _refused(location, self.conceal(f"{FILE}{path}"))

    def model_path(self, written: str, location: str) -> str:
        """A base model's folder or hub name with its `${NAME}`, and a `~` at its beginning, replaced.

        Raises NotAllowedError for one that is neither listed nor below one that is, ConfigError as `expand` does.
        """
        for reference in sorted(names_of(written)):
            self._check_variables(reference, location, f"{PLACE}{_MODEL_PATH}={reference}")
        path = str(expand(written, self.env, location))
        listed = (entry.removeprefix(MODEL) for entry in self.allow if entry.startswith(MODEL))
        if not any(one in (path, written) or _is_in_folder(path, one) for one in listed):
            raise _refused(location, f"{MODEL}{written}")
        return os.path.expanduser(path)

    def expand(self, value: JsonValue, location: str, path: str) -> JsonValue:
        """`value` with its `${NAME}` replaced. `path`: its place, as `environment_path` or `evaluator_path` says.

        Raises NotAllowedError for one that is not listed, else ConfigError.
        """
        for where, text in _texts(value, path):
            self._check_variables(text, f"{location}{where.removeprefix(path)[:_MAX_SHOWN]}", f"{PLACE}{where}={text}")
        return expand(value, self.env, location)

    def _check_variables(self, text: str, location: str, entry: str) -> None:
        """Raises NotAllowedError for a variable of a text, unless it is listed by its name or `entry` is."""
        for name in () if entry in self.allow else sorted(variables_in(text)):
            if f"${{{name}}}" not in self.allow:
                raise _refused(location, f"${{{name}}}")

    def conceal(self, message: str) -> str:
        """`message` with the value of every listed variable, and of all others that `conceal` knows, as `${NAME}`."""
        return conceal(message, [*sorted(self.allow)], self.env)


NOTHING = Permissions()
"""Registered names only."""


def entries_in(text: str) -> tuple[str, ...]:
    """The entries of a text with several: spaces and commas part them, except in quotes. Raises ConfigError."""
    words = shlex.shlex(text, posix=True)
    words.whitespace, words.whitespace_split, words.commenters = " ,\t\r\n", True, ""
    try:
        return tuple(words)
    except ValueError as error:
        raise ConfigError(
            f"a quote or backslash in {quoted(text)} has no end; quote whole entries of {ALLOW_VARIABLE}, as in "
            "'command:PROGRAM ARGUMENTS'"
        ) from error


def check_entry(entry: str) -> None:
    """Raises ConfigError for an entry that is not of the six kinds that can be allowed."""
    if (
        entry.startswith((CODE, COMMAND, FILE, PLACE))
        or entry.removeprefix(MODEL) not in ("", entry)
        or VARIABLE.search(entry)
        or _split(entry) is not None
    ):
        return
    raise ConfigError(
        f"{quoted(entry)} cannot be allowed; give python:module.attribute, 'command:PROGRAM ARGUMENTS', ${{VARIABLE}}, "
        "http://host:port/path, model:PATH or file:PATH"
    )


def named_by(*settings: RolloutSettings) -> tuple[str, ...]:
    """All that trusted settings name, in the form of `Permissions.allow`: what their own producers are to allow."""
    return tuple(sorted({entry for one in settings for entry in _named(one)}))


def environment_path(environment: str) -> str:
    """Path of an environment's configuration, the same for every run."""
    return f"environment_config({_quoted(environment)})"


def evaluator_path(name: str, block: Mapping[str, JsonValue]) -> str:
    """Path of an evaluator's block, the same for every run."""
    return f"evaluators({_quoted(name)}:{_quoted(str(block.get('_type')))})"


def below(path: str, key: str) -> str:
    """Path of the value of a key below `path`."""
    return f"{path}.{_quoted(key)}"


def names_of(value: JsonValue) -> frozenset[str]:
    """Every `${NAME}` in a value, written so."""
    return frozenset(f"${{{name}}}" for name in variables_in(value))


def named_by_model(path: str) -> frozenset[str]:
    """All that a trusted `model.path` names, in the form of `Permissions.allow`."""
    return frozenset({f"{PLACE}{_MODEL_PATH}={name}" for name in names_of(path)} | {f"{MODEL}{path}"})


def named_by_algorithm(name: str) -> frozenset[str]:
    """All that a trusted `algorithm.name` names, in the form of `Permissions.allow`."""
    return frozenset({name} if name.startswith(CODE) else ())


def named_by_teacher(algorithm: AlgorithmSettings) -> frozenset[str]:
    """All that a trusted `algorithm.teacher` names, in the form of `Permissions.allow`."""
    teacher = teacher_of(algorithm)
    if teacher is None or not teacher.path:
        return frozenset()
    return named_by_model(teacher.path) | frozenset(filter(None, (teacher.url,)))


def quoted(text: str) -> str:
    """A text that somebody else chose, for an error: quoted, without control characters, and cut."""
    literal = json.dumps(text, ensure_ascii=True)
    return literal if len(literal) <= _MAX_SHOWN else f"{literal[: _MAX_SHOWN - 4]}..."


def _named(settings: RolloutSettings) -> Iterator[str]:
    placed = [(environment_path(settings.environment), settings.environment_config)]
    placed += [(evaluator_path(name, block), dict(block)) for name, block in settings.evaluators.items()]
    for path, value in placed:
        yield from (f"{PLACE}{where}={text}" for where, text in _texts(value, path) if variables_in(text))
    yield from (name for name in (settings.environment, *settings.rewards) if name.startswith((CODE, COMMAND)))
    yield from (text for _, text in _texts(settings.environment_config) if _is_url(text) or text.startswith(CODE))
    for block in settings.evaluators.values():
        for key, prefix in (("base_url", ""), ("file", FILE)):
            value = block.get(key)
            if isinstance(value, str) and (prefix or _is_url(value)):
                yield prefix + value
        if isinstance(function := block.get("function"), str):
            yield code_of(function)


def code_of(written: str) -> str:
    """`python:module.function` of a key that also takes the path alone."""
    return written if written.startswith(CODE) else f"{CODE}{written}"


def _texts(value: JsonValue, path: str = "") -> Iterator[tuple[str, str]]:
    """Every text in a value, with its path."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _texts(item, below(path, str(index)))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(item, below(path, key))


def _quoted(name: str) -> str:
    """A name without the characters that a path is made of."""
    return quote(name, safe="", errors="backslashreplace").replace(".", "%2E")


def _is_in_folder(path: str, folder: str) -> bool:
    return path.startswith(f"{folder.rstrip('/')}/") and ".." not in path.split("/")


def _expanded(entry: str, env: Mapping[str, str]) -> str:
    if entry.startswith(PLACE):
        entry = entry.partition("=")[2]  # it may be a URL
    try:
        return str(expand(entry, env))
    except ConfigError:  # a variable that is not set is reported where it is used
        return entry


def _refused(location: str, name: str) -> NotAllowedError:
    return NotAllowedError(f"{location}: {quoted(name)} is not allowed by this process's settings; {REMEDY}")


def _is_url(text: str) -> bool:
    return URL.match(text) is not None and (VARIABLE.search(text) is not None or _split(text) is not None)


def _split(url: str) -> SplitResult | None:
    """A URL's parts; None if it is not an absolute http(s) URL, or is one that servers may read in another way."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return None
    segments = re.split(r"[/\\]", unquote(parts.path))
    is_odd = "\\" in url or not url.isprintable() or {".", ".."} & set(segments)
    return parts if parts.scheme in _PORTS and parts.hostname and not is_odd else None


def _is_below(asked: SplitResult, base: SplitResult) -> bool:
    origins: list[Any] = [
        (one.scheme, one.hostname, one.port or _PORTS[one.scheme], one.username, one.password) for one in (asked, base)
    ]
    path = base.path.rstrip("/")
    return origins[0] == origins[1] and (asked.path == path or asked.path.startswith(f"{path}/") or not path)
