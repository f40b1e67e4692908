"""How many tokens a micro-batch computes: fewer once the device's memory was too small for them."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from rollstream.schemas.errors import RunFailedError

logger = logging.getLogger(__name__)
T = TypeVar("T")
CPU_REFUSAL = "DefaultCPUAllocator: can't allocate memory"
"""What torch's allocator says on a CPU, where it has no exception of its own."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that the device, or the machine, has no memory left."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or CPU_REFUSAL in str(error)


@contextmanager
def in_optimizer_step(*, alone: bool) -> Iterator[None]:
    """Raises RunFailedError with the remedy if memory runs out within: smaller micro-batches would not help.

    Not `alone`, it flies, as `MicroBatchBudget` says.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not alone or not is_out_of_memory(error):
            raise
        raise RunFailedError(
            f"out of memory in the optimizer step ({_refused(error)}), which needs its state beside weights and "
            "gradients; train an adapter (model.lora), set optimizer.kind to adamw_8bit, or take a device with more "
            "memory"
        ) from error


class MicroBatchBudget:
    """Tokens of a micro-batch over the passes of a job's batches. A budget that was halved stays so."""

    def __init__(self, tokens: int, *, halves: bool = True) -> None:
        """`tokens`: as the job says. Without `halves` running out of memory is an error that flies: where several
        processes compute in step, one of them cannot begin a pass again.
        """
        self._halves = halves
        self._given = tokens
        self._tokens = tokens
        self._recorded: Sequence[int] = ()
        self._passes: list[int] = []

    def begin(self, recorded: Sequence[int] = ()) -> None:
        """Begin a batch. `recorded`: what each of its passes was given when it was trained before."""
        self._recorded, self._passes = recorded, []

    def run(self, work: Callable[[int], T], num_units: int) -> T:
        """Do one pass with as many tokens as fit; half as many after each time that memory ran out.

        `num_units`: rows or pairs of the pass; no budget divides it further than into these. A pass that was recorded
        is given what it was given then, because the division decides the order of sums, so bits. Raises
        RunFailedError if that is too much.
        """
        at = len(self._passes)
        fixed = self._recorded[at] if at < len(self._recorded) else None
        while True:
            tokens = fixed or self._tokens
            try:
                found = work(tokens)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or not self._halves:
                    raise
                refused = _refused(error)
                if fixed is not None or num_units <= 1 or tokens <= 1:
                    raise RunFailedError(_remedy(tokens, num_units, refused, is_recorded=fixed is not None)) from error
                self._tokens = tokens // 2
            else:
                self._passes.append(tokens)
                return found
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            logger.warning("out of memory (%s): micro-batches of %s tokens from here on", refused, self._tokens)

    def of_batch(self) -> tuple[int, ...]:
        """What each pass was given; empty if all were given what the job says."""
        return tuple(self._passes) if set(self._passes) - {self._given} else ()


def _refused(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _remedy(tokens: int, num_units: int, refused: str, *, is_recorded: bool) -> str:
    if is_recorded:
        return (
            f"out of memory with micro-batches of {tokens} tokens, with which the version was trained ({refused}); "
            "replay it on a device with as much memory"
        )
    what = "one row or pair" if num_units <= 1 else f"micro-batches of {tokens} tokens"
    return (
        f"out of memory with {what} ({refused}); train an adapter, shorten the completions, or take a device with "
        "more memory"
    )
