"""The processes of a torchrun: who they are, what they tell each other, and which rows each one computes."""

import copy
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import orjson
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from rollstream.learner.model.micro_batch import MicroBatch, Unit
from rollstream.learner.model.ranks import Divide, Ranks
from rollstream.schemas import ids
from rollstream.schemas.errors import ModelError, RollstreamError, RunFailedError
from rollstream.schemas.settings import Device
from rollstream.schemas.variables import MAX_JOB_ERROR, recordable

T = TypeVar("T")

PATIENCE = timedelta(days=365)
"""Timeout for messages from other processes: rank 0 may have no manifest for days, and torchrun ends all processes when
one dies."""
_FAILED, _AWAY, _DONE, _UNDONE = b"!", b"?", b"+", b"-"
"""First byte of a process's message to the others: that it failed, or met an OSError, which may pass; or within
`agreed` that it has done something or not. No other message begins so.
"""
LOAD, DROP, END = "load", "drop", "end"
"""Commands of rank 0: to load a job's model, to let go of it, and its last one."""


@dataclass(slots=True)
class _CommonWork:
    """The work of this process with the others, whichever job it is for."""

    command: str = ""
    is_within: bool = False
    has_ended: bool = False
    """Another process has left it, because it failed."""
    is_stuck: bool = False
    failure: Exception | None = None
    """An error of this process that the others do not know yet."""


class Command(NamedTuple):
    """An order of rank 0 to the others."""

    name: str
    job_id: str
    """Empty: it is about no job."""
    data: bytes


class ProcessRanks(Ranks):
    """One process of several. Blocking, and always used from the one thread that trains."""

    def __init__(self, local_index: int) -> None:
        """`local_index`: among the processes of this machine. The default process group is there."""
        self.index, self.num = dist.get_rank(), dist.get_world_size()
        self._local_index = local_index
        self._control: Any = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._meshes: dict[str, DeviceMesh] = {}
        self._job_id = ""
        self._work = _CommonWork()

    @property
    def is_stuck(self) -> bool:
        return self._work.is_stuck

    def of_job(self, job_id: str) -> "ProcessRanks":
        found = copy.copy(self)
        found._job_id = job_id
        return found

    def mesh(self, device: torch.device) -> DeviceMesh:
        """All processes in one dimension, on devices of this kind."""
        if device.type not in self._meshes:
            self._meshes[device.type] = init_device_mesh(device.type, (self.num,))
        return self._meshes[device.type]

    def device(self, given: Device, where: str) -> Device:
        """The device of this process: a GPU of its own, where there are any. Raises ModelError.

        `given`: auto or cpu, see `refusals`.
        """
        num_gpus = torch.cuda.device_count()
        if given == "cpu" or not num_gpus:
            return "cpu"
        if self._local_index >= num_gpus:
            raise ModelError(f"{where}: process {self._local_index} of this machine has no GPU; start {num_gpus}")
        torch.cuda.set_device(self._local_index)  # of this thread
        return f"cuda:{self._local_index}"

    def divide(self, plain: Divide, lengths: Sequence[int], units: Sequence[Unit], max_tokens: int) -> list[MicroBatch]:
        own = shares(units, lengths, self.num)[self.index]
        found = plain(own, max_tokens) if own else []
        most = int(max(values["num"] for values in self._gathered({"num": len(found)})))
        if most == len(found):
            return found
        shortest = min(units, key=lambda unit: sum(lengths[row] for row in unit))
        filler = replace(plain([shortest], max_tokens)[0], is_filler=True)
        return [*found, *[filler] * (most - len(found))]

    def summed(self, values: dict[str, float]) -> dict[str, float]:
        total: dict[str, float] = {}
        for part in self._gathered(values):
            for name, value in part.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def seed(self, seed: int) -> int:
        return ids.derive_seed(seed, "rank", self.index)

    @contextmanager
    def together(self, command: str, data: bytes = b"") -> Iterator[None]:
        """Raises RunFailedError if another process failed at it, OSError if that may pass.

        A process that is stuck reports nothing: torchrun ends the others with it.
        """
        work = self._work
        if work.is_within:
            yield
            return
        if self.index == 0:
            self.send(command, data)
        work.command, work.is_within, work.has_ended, work.failure = command, True, False, None
        try:
            yield
            self.gathered(b"")
        except (RollstreamError, OSError) as error:
            if not (work.has_ended or work.is_stuck):
                self._exchanged(_reported(error))
            raise
        finally:
            work.is_within = False

    @contextmanager
    def collective(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._work.is_stuck = True
            raise

    def tried(self, work: Callable[[], T], otherwise: Callable[[], T]) -> T:
        if self._work.failure is None:
            try:
                return work()
            except Exception as error:  # noqa: BLE001 -- raised in `gathered`
                self._work.failure = error
        return otherwise()

    def agreed(self, work: Callable[[], bytes], what: str) -> list[bytes]:
        """Within `together`: what the work of each process gave, by rank. No process goes on if that of one failed.

        Raises what `work` raises, or RunFailedError (OSError, if that may pass) that begins with `what`.
        """
        failure: RollstreamError | OSError | None = None
        try:
            own = _DONE + work()
        except (RollstreamError, OSError) as error:
            failure, own = error, _UNDONE + _reported(error)
        found = self.gathered(own)
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # its traceback has this frame, and with it all that failed
        _check([b"" if one[:1] == _DONE else one[1:] for one in found], what)
        return [one[1:] for one in found]

    def send(self, command: str, data: bytes = b"") -> None:
        """Tell the others, which must `receive`."""
        written = orjson.dumps([command, self._job_id]) + b"\n" + data
        dist.broadcast(torch.tensor([len(written)]), 0, group=self._control)
        dist.broadcast(_tensor(written), 0, group=self._control)

    def receive(self) -> Command:
        """Receive rank 0's next command, however long that takes."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, 0, group=self._control)
        written = torch.zeros(int(size), dtype=torch.uint8)
        dist.broadcast(written, 0, group=self._control)
        head, _, data = written.numpy().tobytes().partition(b"\n")
        name, job_id = orjson.loads(head)
        return Command(name, job_id, data)

    def _gathered(self, values: Mapping[str, float]) -> list[dict[str, float]]:
        """Values of every process, by rank."""
        written = orjson.dumps({name: float(value).hex() for name, value in values.items()})
        return [
            {name: float.fromhex(value) for name, value in orjson.loads(one).items()} for one in self.gathered(written)
        ]

    def gathered(self, data: bytes) -> list[bytes]:
        """The bytes that every process gave, by rank. Raises what `tried` kept; RunFailedError, or OSError if that may
        pass, if another process has failed.
        """
        failure, self._work.failure = self._work.failure, None
        if failure is not None:
            try:
                raise failure
            finally:
                del failure
        found = self._exchanged(data)
        self._work.has_ended = any(one[:1] in (_FAILED, _AWAY) for one in found)
        _check(found, self._work.command)
        return found

    def _exchanged(self, data: bytes) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.num)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self._control)
        longest = max(int(size) for size in sizes)
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.num)]
        dist.all_gather(parts, _tensor(data.ljust(longest, b"\0")), group=self._control)
        return [part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]


def _reported(error: RollstreamError | OSError) -> bytes:
    """The message to the others about an error of this process, without secrets."""
    text = recordable(str(error) or type(error).__name__, MAX_JOB_ERROR).encode()
    return _AWAY + str(error.errno or 0).encode() + b" " + text if isinstance(error, OSError) else _FAILED + text


def _check(found: Sequence[bytes], what: str) -> None:
    """Raises the errors that processes reported: RunFailedError, or OSError if all of them may pass."""
    failed = [(rank, one) for rank, one in enumerate(found) if one[:1] in (_FAILED, _AWAY)]
    if not failed:
        return
    texts = [one[1:] if one[:1] == _FAILED else one.partition(b" ")[2] for _, one in failed]
    named = [f"process {rank}: {text.decode()}" for (rank, _), text in zip(failed, texts, strict=True)]
    message = f"{what}: {'; '.join(named)}"
    if any(one[:1] == _FAILED for _, one in failed):
        raise RunFailedError(message)
    raise OSError(int(failed[0][1][1:].partition(b" ")[0]), message)


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)


def shares(units: Sequence[Unit], lengths: Sequence[int], num: int) -> list[list[Unit]]:
    """The units of each of `num` processes: in the given order, in which what begins alike is together, and about
    equal in tokens. `lengths`: tokens of each row.
    """
    sizes = [sum(lengths[row] for row in unit) for unit in units]
    total = max(1, sum(sizes))
    found: list[list[Unit]] = [[] for _ in range(num)]
    for unit, size, end in zip(units, sizes, itertools.accumulate(sizes), strict=True):
        found[min(num - 1, int((end - size / 2) * num / total))].append(unit)
    return found


@contextmanager
def joined() -> Iterator[ProcessRanks]:
    """Find the other processes of the torchrun that started this one, by the variables that it sets.

    They meet under the number of the restart: torchrun keeps its store, in which those before left their addresses.
    """
    local_index = int(os.environ.get("LOCAL_RANK", "0"))
    if local_index < torch.cuda.device_count():
        torch.cuda.set_device(local_index)
    store, index, num = next(rendezvous("env://"))
    store = PrefixStore(f"restart-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=index, world_size=num)
    try:
        yield ProcessRanks(local_index)
    finally:
        dist.destroy_process_group()
