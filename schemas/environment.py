"""Expansion of `${NAME}` and `${NAME:-default}` in configuration values, at the place where a value is used.

What is stored or sent keeps the unexpanded text, so that a secret never enters the log.
"""

import json
import re
from collections.abc import Mapping

from pydantic import JsonValue

from rollstream.schemas.errors import ConfigError

_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


def expand(value: JsonValue, environ: Mapping[str, str], path: str = "") -> JsonValue:
    """`value` with every reference in its strings replaced. Keys are left alone.

    Raises ConfigError naming the path and the variable that is not set and has no default.
    """
    if isinstance(value, str):
        return _expand_text(value, environ, path)
    if isinstance(value, list):
        return [expand(item, environ, f"{path}.{index}") for index, item in enumerate(value)]
    if isinstance(value, dict):
        return {key: expand(item, environ, f"{path}.{key}" if path else key) for key, item in value.items()}
    return value


def conceal(message: str, value: JsonValue, environ: Mapping[str, str]) -> str:
    """`message` with what the `${NAME}` in `value` stand for written as `${NAME}`, for logs, errors and events."""
    for name, _ in _REFERENCE.findall(json.dumps(value)):
        if environ.get(name):
            message = message.replace(environ[name], f"${{{name}}}")
    return message


def _expand_text(text: str, environ: Mapping[str, str], path: str) -> str:
    def replacement(match: re.Match[str]) -> str:
        name, default = match.group(1), match.group(2)
        found = environ.get(name) or default
        if found is None:
            raise ConfigError(f"{path}: environment variable {name} is not set; set it or write ${{{name}:-default}}")
        return found

    return _REFERENCE.sub(replacement, text)
