"""Sources of user code beside the names in a file: the folder of the command, and entry points of packages.

Installed packages are trusted: entry points are a fixed list, chosen by whoever set the process up, and no record can
add to it. So their modules are imported before a record is read, and the names that they register need no --allow.
"""

import asyncio
import functools
import logging
import sys
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from rollstream.schemas.errors import ConfigError

GROUP = "rollstream.components"
OURS = "rollstream."
failed_imports: dict[str, str] = {}
"""Reasons why modules of entry points could not be imported, by the entry point's name."""

REFUSAL_PAUSE_S = 0.01
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_logger = logging.getLogger(__name__)
_imported: set[str] = set()


def find_users_modules() -> None:
    """Modules of the folder that a command is started in are found, after all others, as its services find them."""
    if not sys.flags.safe_path and "" not in sys.path:
        sys.path.append("")


def import_installed() -> None:
    """Import what other packages name by entry points of the group `rollstream.components`, each once in a process.

    A package that cannot be imported is logged and passed over: only who asks for its names suffers.
    """
    from importlib import metadata

    from rollstream.schemas.users_code import load_installed  # with all settings, which the command line does not need

    for entry_point in metadata.entry_points(group=GROUP):
        if entry_point.value.startswith(OURS) or entry_point.value in _imported:
            continue
        _imported.add(entry_point.value)
        try:
            load_installed(entry_point, f"components of {entry_point.name} ({entry_point.value})")
        except ConfigError as error:
            failed_imports[entry_point.name] = str(error)
            _logger.warning("%s", error)


def failed_imports_hint() -> str:
    """An addition to an error about an unknown name: the packages that could have provided it."""
    return "".join(f"; {why}" for why in failed_imports.values())


def refused_with_pause(
    call: Callable[Parameters, Coroutine[Any, Any, Result]],
) -> Callable[Parameters, Coroutine[Any, Any, Result]]:
    """Delay errors slightly so that a retry loop in user code cannot starve other tasks."""

    @functools.wraps(call)
    async def paused(*args: Parameters.args, **options: Parameters.kwargs) -> Result:
        try:
            return await call(*args, **options)
        except Exception:
            await asyncio.sleep(REFUSAL_PAUSE_S)
            raise

    return paused
