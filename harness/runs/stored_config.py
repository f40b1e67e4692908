"""Checks the stored configuration of a recorded run before it is read.

Reading a configuration imports the modules and expands the `${VARIABLES}` that it names. A configuration from a log or
an export is untrusted data, so names that the user's own file does not contain are refused.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rollstream.schemas.errors import NotAllowedError
from rollstream.schemas.permissions import CODE, COMMAND, FILE, shown
from rollstream.schemas.variables import variables_in

TRUST = "--trust"
_MAX_TOLD = 4


def check_stored(stored: Mapping[str, Any], local: Mapping[str, Any], *, run_id: str, trust: bool) -> None:
    """Raises NotAllowedError listing the code, files and variables that only the run's stored configuration names.

    `local`: the user's configuration as written; `trust`: `--trust` was given.
    """
    known = {name for name, _ in names_in(local)}
    found = {name: path for name, path in reversed(list(names_in(stored))) if name not in known}
    if trust or not found:
        return
    lines = [f"{shown(name)} at {shown(path)}" for name, path in sorted(found.items())]
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
