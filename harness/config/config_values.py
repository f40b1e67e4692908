"""What the values of a configuration must be, since they are stored as written: JSON, and no secrets in plain text."""

import math
import re
from typing import Any

from rollstream.schemas.errors import ConfigError

MAX_DEPTH = 50
_SECRET_KEY = re.compile(
    r"(api_?key|password|passwd|secret|(access|secret|private)_key|(access|api|auth|bearer|hf)_token)$", re.IGNORECASE
)
_PLACEHOLDERS = frozenset({"default", "dummy", "empty", "none", "null", "not-needed", "unused"})
"""What is written for a key that a server does not ask for."""
_REFERENCE = re.compile(r"\$\{[^}]+\}")


def check_values(value: Any, path: str = "") -> None:
    """Raises ConfigError naming a key that is no text, a value that JSON has not, or a secret that stands there."""
    if path.count(".") > MAX_DEPTH:
        raise ConfigError(f"{path[:60]}...: nested too deep; does an alias (*) stand for itself?")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ConfigError(f"{_join(path, key)}: the key {key!r} is no text; write it in quotes")
            if _SECRET_KEY.search(key) and isinstance(item, str) and _is_secret(item):
                raise ConfigError(
                    f"{_join(path, key)}: a secret must not stand in the file, which is stored with the run; "
                    f"write ${{{key.upper()}}} and set that environment variable"
                )
            check_values(item, _join(path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            check_values(item, _join(path, index))
    else:
        _check_scalar(value, path)


def _check_scalar(value: Any, path: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{path}: is {value}; give a finite number, a very large one for no limit")
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ConfigError(f"{path}: is {value}; give a number of at most 64 bits")
    if value is not None and not isinstance(value, (str, bool, int, float)):
        raise ConfigError(f"{path}: is a {type(value).__name__}; give text, a number, true, false, a list or a mapping")


def _is_secret(text: str) -> bool:
    return bool(text) and not _REFERENCE.search(text) and text.lower() not in _PLACEHOLDERS


def _join(path: str, part: Any) -> str:
    return f"{path}.{part}" if path else str(part)
