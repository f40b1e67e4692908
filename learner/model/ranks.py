"""The processes that train one model together. Here: a process alone; several are in `learner.parallel`."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import numpy as np
import orjson
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rollstream.learner.model.micro_batch import MicroBatch, Unit
from rollstream.schemas import tokens
from rollstream.schemas.errors import (
    RollstreamError,
    RunFailedError,
    describe,
    is_of_device,
    is_out_of_memory,
    is_passing,
)
from rollstream.schemas.variables import traceback_of

logger = logging.getLogger(__name__)
T = TypeVar("T")
Divide = Callable[[Sequence[Unit], int], list[MicroBatch]]
"""Units to micro-batches of so many tokens."""


class Ranks:
    """One process, which has everything."""

    num = 1
    index = 0

    @property
    def is_stuck(self) -> bool:
        """Whether this process failed where the others wait for it: it cannot report that to them, and has to end."""
        return False

    def of_job(self, job_id: str) -> "Ranks":
        """The same processes, for the work on one job: several may be in work in turn."""
        return self

    def divide(self, plain: Divide, lengths: Sequence[int], units: Sequence[Unit], max_tokens: int) -> list[MicroBatch]:
        """The micro-batches of this process, as `plain` makes them. `lengths`: tokens of each row.

        Every process has equally many, because all of them compute each one together: where it has none left, there
        are fillers.
        """
        return plain(units, max_tokens)

    def summed(self, values: dict[str, float]) -> dict[str, float]:
        """Sums over all processes by name, in the order of their ranks."""
        return values

    def gathered(self, data: bytes) -> list[bytes]:
        """The bytes that every process gave, by rank. Here all learn that one of them has failed."""
        return [data]

    def tried(self, work: Callable[[], T], otherwise: Callable[[], T]) -> T:
        """The result of work that a process does by itself between two things that all do together.

        If it fails in one of several processes, that one goes on beside the others with the result of `otherwise`, and
        raises the error where they meet next, in `gathered` or `summed`.
        """
        return work()

    def collective(self) -> AbstractContextManager[None]:
        """A context in which processes wait for each other, so that one that fails in it is stuck."""
        return nullcontext()

    def together(self, command: str, data: bytes = b"") -> AbstractContextManager[None]:
        """A context whose body all processes run: rank 0 broadcasts the command, which the others follow."""
        return nullcontext()

    def seed(self, seed: int) -> int:
        """Seed of the random numbers in this process's forwards."""
        return seed


@contextmanager
def failing_the_job(what: str, ranks: Ranks = Ranks()) -> Iterator[None]:  # noqa: B008 -- it has no state
    """Raises RunFailedError, with file and line, for any exception of computing within: a restart would raise it again.

    `what`: what was being done. Errors of rollstream fly as they are; so does what passes, what is for others to handle
    (`is_out_of_memory`), and what this process cannot go on after (`is_of_device`, `Ranks.is_stuck`).
    """
    try:
        yield
    except RollstreamError:
        raise
    except (Exception, SystemExit) as error:
        if ranks.is_stuck or is_passing(error) or is_out_of_memory(error) or is_of_device(error):
            raise
        logger.error("%s failed%s", what, traceback_of(error))
        raise RunFailedError(f"{what} raised {describe(error)}; the learner's log has the traceback") from error


def whole(value: Tensor) -> Tensor:
    """A tensor without its shards. All processes must ask for it, because each gives its own."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def of_all(found: dict[int, Tensor], ranks: Ranks, device: torch.device) -> dict[int, Tensor]:
    """Float32 values that this process and the others have computed, by row. All processes must call it."""
    if ranks.num == 1:
        return found
    own = {str(row): tokens.encode_floats(values_N.float().cpu().tolist()) for row, values_N in found.items()}
    return {
        int(row): torch.from_numpy(np.frombuffer(tokens.decode_floats(text), np.float32).copy()).to(device)
        for part in ranks.gathered(orjson.dumps(own))
        for row, text in orjson.loads(part).items()
    }
