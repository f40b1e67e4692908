"""Number of tokens that a micro-batch computes: fewer once the device's memory was too small for them. Memory of
gradients.
"""

import json
import logging
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from rollstream.eventlog.files import read_json, sync_folder, write_whole
from rollstream.schemas.errors import ModelError, RunFailedError, is_out_of_memory

logger = logging.getLogger(__name__)
T = TypeVar("T")
_ALIGNED = 64
"""Gradients begin at a multiple of so many bytes, as torch's own tensors do."""


_SMALLER = (
    "take a smaller model, another model.device or a device with more memory, or train an adapter (model.lora, with "
    "model.quantization below it)"
)
WITHOUT_COPY = (
    "set model.reference_dtype to bfloat16, train an adapter (model.lora), which is compared without a copy, or take a "
    "device with more memory"
)
"""Remedy if there is no memory for a copy of the full weights that the loss compares with."""


class MemoryHeldError(MemoryError):
    """No memory for a version that is trained again, and fitted before: something else may hold it now.

    It ends the learner's process, and is tried again by the next one, up to the limit of `Faults`.
    """


@contextmanager
def within_memory(subject: str, remedy: str = _SMALLER, *, alone: bool = True) -> Iterator[None]:
    """Raises ModelError naming the subject and the remedy if memory runs out within.

    Not `alone`, it flies: other processes, which take part in the work, would wait for this one. So does
    MemoryHeldError.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not alone or isinstance(error, MemoryHeldError) or not is_out_of_memory(error):
            raise
        # Without its traceback, which holds the tensors.
        failure = error.with_traceback(None)
        raise ModelError(f"{subject} does not fit into memory ({_refused(error)}); {remedy}") from failure


@contextmanager
def in_optimizer_step(budget: "MicroBatchBudget") -> Iterator[None]:
    """Raises RunFailedError with the remedy if memory runs out within: smaller micro-batches would not help.

    MemoryHeldError if a learner trains the batch of `budget` again.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        if budget.is_tried_again:
            raise MemoryHeldError(_held("in the optimizer step", _refused(error))) from error
        raise RunFailedError(
            f"out of memory in the optimizer step ({_refused(error)}), which needs its state beside weights and "
            "gradients; train an adapter (model.lora), set optimizer.kind to adamw_8bit, or take a device with more "
            "memory"
        ) from error


HALVED = "a restart makes smaller micro-batches"
"""Note of an exception that ends the process after its budget was halved."""


@dataclass(frozen=True, slots=True)
class KeptBudget:
    """A file beside a job's checkpoints with the budget that was halved by a process which then ended, as all did."""

    path: Path
    job_id: str

    def read(self, given: int) -> int:
        """The budget to begin with; `given`, which the job says, if it was not halved."""
        found = read_json(self.path)
        if (found.get("job_id"), found.get("given")) != (self.job_id, given):
            return given
        return min(given, max(1, int(found["tokens"])))

    def write(self, given: int, tokens: int) -> None:
        """Write the number to disk before it takes effect. Raises OSError."""
        written = json.dumps({"job_id": self.job_id, "given": given, "tokens": tokens})
        write_whole(self.path, written, is_private=False)
        sync_folder(self.path.parent)


class MicroBatchBudget:
    """Tokens of a micro-batch over the passes of a job's batches. A budget that was halved stays so."""

    def __init__(self, tokens: int, *, halves: bool = True, restarts: bool = False) -> None:
        """`tokens`: as the job says. Without `halves` a pass is not begun again, because several processes
        compute it in step: half as many are then kept for those that are started next, see `keep`, and the error flies.
        `restarts`: a learner's, whose process is started again after it has ended.
        """
        self._halves = halves
        self._restarts = restarts
        self._given = tokens
        self._tokens = tokens
        self._recorded: Sequence[int] | None = None
        self._passes: list[int] = []
        self._kept: KeptBudget | None = None

    def keep(self, kept: KeptBudget) -> None:
        """Continue with the stored number, and store it there when it is halved."""
        self._kept, self._tokens = kept, kept.read(self._given)

    def begin(self, recorded: Sequence[int] | None = None) -> None:
        """Begin a batch. `recorded`: what each of its passes was given when it was trained before, as StepTrained has
        it: nothing where all were given what the job says. None: it was not.
        """
        self._recorded, self._passes = recorded, []

    def to_others(self) -> dict[str, Any]:
        """State that the other processes need to divide a batch, and to fail, in the same way."""
        kept = self._kept
        where = {"path": str(kept.path.absolute()), "job_id": kept.job_id} if kept else None
        recorded = None if self._recorded is None else list(self._recorded)
        return {"tokens": self._tokens, "recorded": recorded, "kept": where, "restarts": self._restarts}

    def begin_as(self, first: Mapping[str, Any]) -> None:
        """Begin a batch as the first process does, by its `to_others`."""
        self.begin(first["recorded"])
        self._tokens, self._restarts, where = first["tokens"], first["restarts"], first["kept"]
        self._kept = KeptBudget(Path(where["path"]), where["job_id"]) if where else None

    def run(self, work: Callable[[int], T], num_units: int) -> T:
        """Do one pass with as many tokens as fit; half as many after each time that memory ran out.

        `num_units`: rows or pairs of the pass; no budget divides it further than into these. A pass that was recorded
        is given what it was given then, because the division decides the order of sums, so bits. Raises
        RunFailedError if that is too much, and MemoryHeldError in a learner.
        """
        at = len(self._passes)
        fixed = self._fixed(at)
        while True:
            tokens = fixed or self._tokens
            try:
                found = work(tokens)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                refused, is_least = _refused(error), fixed is not None or num_units <= 1 or tokens <= 1
                if fixed is not None and self._restarts:
                    raise MemoryHeldError(_held(f"with micro-batches of {tokens} tokens", refused)) from error
                if is_least or not (self._halves or self._kept):
                    raise RunFailedError(_remedy(tokens, num_units, refused, is_recorded=fixed is not None)) from error
                if not self._halves:
                    self._leave(tokens, refused, error)
                    raise
                self._tokens = tokens // 2
            else:
                self._passes.append(tokens)
                return found
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            logger.warning("out of memory (%s): micro-batches of %s tokens from here on", refused, self._tokens)

    @property
    def is_tried_again(self) -> bool:
        """Whether a learner trains the batch again, so that running out of memory ends its process and not the job."""
        return self._restarts and self._recorded is not None

    def _fixed(self, at: int) -> int | None:
        """Tokens that the pass was given when it was trained before; None if there is no record."""
        if self._recorded is None:
            return None
        if not self._recorded:
            return self._given
        return self._recorded[at] if at < len(self._recorded) else None

    def _leave(self, tokens: int, refused: str, error: BaseException) -> None:
        """Leave half of the budget to the processes that will be started in place of these, and note it."""
        assert self._kept is not None
        try:
            self._kept.write(self._given, tokens // 2)
        except OSError as error:
            logger.error("%s cannot be written, so a restart has the same micro-batches: %s", self._kept.path, error)
        else:
            error.add_note(HALVED)
            logger.error("out of memory (%s): a restart makes micro-batches of %s tokens", refused, tokens // 2)

    def of_batch(self) -> tuple[int, ...]:
        """Tokens given to each pass; empty if all passes had the number that the job sets."""
        return tuple(self._passes) if set(self._passes) - {self._given} else ()


class GradientMemory:
    """Main memory apart from the heap for gradients that are summed over micro-batches, given back when cleared.

    In the heap they lie between the activations of the micro-batch that made them, and fragment the free memory for the
    next one: with gradient checkpointing the peak is a sixth higher. Values are copied, so bits do not change.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """`parameters`: those that are not plain tensors in main memory keep gradients where autograd makes them."""
        plain = [one for one in parameters if type(one) is torch.nn.Parameter and _is_plain(one)]
        sizes = [-(-one.numel() * one.element_size() // _ALIGNED) * _ALIGNED for one in plain]
        self._memory = _mapped(max(_ALIGNED, sum(sizes)))
        self._is_used = True
        offset = 0
        for one, size in zip(plain, sizes, strict=True):
            own = torch.frombuffer(self._memory, dtype=one.dtype, count=one.numel(), offset=offset).view(one.shape)
            one.register_post_accumulate_grad_hook(partial(self._move, own))
            offset += size

    def clear(self, *, sums: bool = True) -> None:
        """Give the memory back. Gradients must be None. Without `sums` the next ones, of a single micro-batch, are in
        the heap: they fill what its activations leave.
        """
        self._is_used = sums
        if hasattr(mmap, "MADV_DONTNEED"):
            self._memory.madvise(mmap.MADV_DONTNEED)

    def _move(self, own: torch.Tensor, parameter: torch.Tensor) -> None:
        """Called after each micro-batch; autograd adds those after the first one in place."""
        gradient = parameter.grad
        if not self._is_used or gradient is None or gradient.data_ptr() == own.data_ptr():
            return
        if (gradient.dtype, gradient.device, gradient.shape) == (own.dtype, own.device, own.shape):
            parameter.grad = own.copy_(gradient)


def _mapped(size_bytes: int) -> mmap.mmap:
    """Memory of this process alone. Raises MemoryError, which `MicroBatchBudget` knows."""
    try:
        return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {size_bytes} bytes of gradients: {error}") from error


def _is_plain(parameter: torch.Tensor) -> bool:
    return parameter.device.type == "cpu" and parameter.is_contiguous() and parameter.numel() > 0


def _refused(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _held(where: str, refused: str) -> str:
    return (
        f"out of memory {where}, where the version that is trained again fitted before ({refused}); end what else uses "
        "the device's memory, or start the learner on a device with as much memory"
    )


def _remedy(tokens: int, num_units: int, refused: str, *, is_recorded: bool) -> str:
    if is_recorded:
        return (
            f"out of memory with micro-batches of {tokens} tokens, with which the version was trained ({refused}); "
            "replay it on a device with as much memory"
        )
    what = "one row or pair" if num_units <= 1 else f"micro-batches of {tokens} tokens"
    smaller = "lower algorithm.max_tokens_per_micro_batch, " if min(num_units, tokens) > 1 else ""
    return (
        f"out of memory with {what} ({refused}); {smaller}train an adapter, shorten the completions, or take a device "
        "with more memory"
    )
