"""Jobs whose training fails, and their fault files."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollstream.schemas.events import (
    WeightsPublished,
)


def failing(plain: Callable[..., Any], error: BaseException, first: int = 1, last: int = 1000) -> Callable[..., Any]:
    """A method that raises at its calls from number `first` to `last`; the others do what it did."""
    calls = itertools.count(1)

    def call(*given: Any, **options: Any) -> Any:
        if first <= next(calls) <= last:
            raise error
        return plain(*given, **options)

    return call


def fault_files(lab: Any) -> list[Path]:
    return sorted((lab.folder / "checkpoints").glob("*/fault.*"))


async def versions(lab: Any) -> list[int]:
    return [one.version for one in await lab.events("weights", WeightsPublished)]
