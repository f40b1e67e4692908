"""The Faust app that hosts shells of folds, which take batches of raw records and report their commit offsets."""

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, cast

import faust
from faust.types import TP

from rollstream.eventlog.log import SEND_TIMEOUT_S, Record, TopicPartition
from rollstream.schemas.kafka import KafkaSettings

QUEUED_BATCHES = 4
"""Batches of a topic that wait for its fold; more would only be later."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive raw records of one partition, at least one."""

    partition: int
    generation: int
    """Generation of the assignment under which they were fetched; counted by `Host.generation`."""
    records: list[Record]
    begin: int | None = None
    """Offset after the batch before; from there to the first record are only control records. None: there are none."""

    @property
    def first_offset(self) -> int:
        """Offset of the first record, or of the control records before it."""
        return self.records[0].offset if self.begin is None else self.begin


@dataclass(slots=True)
class Acknowledgement:
    """Context of waiting for acknowledgements."""

    _since: float | None = None

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, *error: object) -> None:
        self._since = None

    @property
    def is_under_way(self) -> bool:
        """Whether a wait is in progress and within the send time-out."""
        return self._since is not None and time.monotonic() < self._since + SEND_TIMEOUT_S


class Shell(Protocol):
    """A fold's shell as used by the host: takes batches of one topic and reports the offset to commit."""

    topic: str

    async def prepare(self, partition: int, offset: int, metadata: str = "") -> None:
        """Prepare an assigned partition for batches from its committed offset and `metadata`.

        The shell may keep matching state of the partition. The partition gets no batch before this returns; others do.
        An error ends the service.
        """
        ...

    async def take(self, batch: Batch) -> None:
        """Fold a batch; calls are sequential. An error ends the service."""
        ...

    def commit_offset(self, partition: int) -> int | None:
        """The offset to commit, from which the partition is read again; before its first batch None or the given."""
        ...

    def metadata(self, partition: int) -> str:
        """Metadata to commit with the offset."""
        ...

    def position(self, partition: int) -> int | None:
        """Offset of the next record to fold; None before its first batch."""
        ...

    def progress(self, partition: int) -> int:
        """A number that changes with all work on the partition, including refolds."""
        ...

    def is_waiting(self, partition: int) -> bool:
        """Whether the fold waits for the artifact store or acknowledgements."""
        ...

    def drop(self, partitions: Iterable[int]) -> None:
        """Forget partitions that were reassigned or whose state is invalid."""
        ...


class Placed(Protocol):
    """The interface of the host's consumer."""

    wanted: Mapping[TP, int]
    passed: Mapping[TP, tuple[int, int]]
    flow_active: bool

    def check_membership(self) -> None:
        """Fail the host if joining the group is denied."""
        ...


class Host(faust.App):
    """A Faust app that knows its shells by Kafka's topic name."""

    kafka: KafkaSettings
    """Connection settings of its clients."""
    shells: dict[str, Shell]
    failed: "asyncio.Future[None]"
    """Gets the first error of a shell."""
    generation: int = 0
    """Grows whenever partitions are revoked or assigned; batches of an older one are read again."""

    @cached_property
    def queued(self) -> Counter[str]:
        """Number of delivered batches of this generation that are not folded yet, by topic."""
        return Counter()

    @cached_property
    def preparing(self) -> "dict[TP, asyncio.Task[None]]":
        """Preparation of each assigned partition's shell, running or done."""
        return {}

    @cached_property
    def taking(self) -> "dict[str, asyncio.Task[None]]":
        """Folding of the newest batch, running or done, by topic."""
        return {}

    @cached_property
    def changed(self) -> asyncio.Event:
        """Set when a partition may have become ready."""
        return asyncio.Event()

    def shell_of(self, tp: TP) -> Shell | None:
        """The shell of a partition's topic."""
        return self.shells.get(tp.topic)

    def shell(self, where: TopicPartition) -> Shell:
        """The shell of a partition, by its topic's short name."""
        return self.shells[self.kafka.topic_name(where.topic)]

    def fail(self, error: BaseException) -> None:
        """End the service with an error, if none has yet."""
        if not self.failed.done():
            self.failed.set_exception(error)

    def _create_directories(self) -> None:
        """Create none: Faust keeps tables in them, which are not used here."""

    def check_membership(self) -> None:
        """End the service if Kafka's ACLs keep it out of its consumer group."""
        cast(Placed, self.consumer).check_membership()

    @property
    def is_flowing(self) -> bool:
        """Whether records are fetched; false during a rebalance."""
        return cast(Placed, self.consumer).flow_active

    def positions(self) -> dict[TopicPartition, int | None]:
        """Offset of the next record to fold, by assigned partition, after control records that no other record follows;
        None if the consumer has no position yet."""
        found: dict[TopicPartition, int | None] = {}
        placed = cast(Placed, self.consumer)
        for tp in cast(set[TP], self.consumer.assignment()):
            shell = self.shell_of(tp)
            if shell is not None:
                position = shell.position(tp.partition)
                position = placed.wanted.get(tp) if position is None else position
                first, end = placed.passed.get(tp, (None, None))
                found[TopicPartition(shell.topic, tp.partition)] = position if position != first else end
        return found

    def is_ready(self, tp: TP) -> bool:
        """Whether a partition's shell can take a batch: it is prepared and its queue is not full."""
        preparation = self.preparing.get(tp)
        return preparation is not None and preparation.done() and self.queued[tp.topic] < QUEUED_BATCHES

    def prepare(self, tp: TP, offset: int, metadata: str) -> None:
        """Start the preparation of a partition's shell, once per generation."""
        shell = self.shell_of(tp)
        if shell is not None and tp not in self.preparing:
            self.preparing[tp] = self.watched(shell.prepare(tp.partition, offset, metadata))

    def watched(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """A task whose error ends the service; Faust would log it and continue with the next batch."""
        task = asyncio.ensure_future(work)
        task.add_done_callback(self._batch_done)
        return task

    def _batch_done(self, task: "asyncio.Task[None]") -> None:
        self.changed.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def next_generation(self) -> None:
        """Start a new generation in a rebalance: queued batches are dropped and preparations end."""
        self.generation += 1
        self.queued.clear()
        for task in self.preparing.values():
            task.cancel()
        self.preparing.clear()

    async def finish_batches(self, within_s: float) -> None:
        """Wait for batches that are being folded; the state of those that take longer is dropped."""
        under_way = {topic: task for topic, task in self.taking.items() if not task.done()}
        if not under_way:
            return
        _, late = await asyncio.wait(under_way.values(), timeout=within_s)
        for topic, task in under_way.items():
            if task in late:
                task.cancel()
                self.drop(tp for tp in cast(set[TP], self.consumer.assignment()) if tp.topic == topic)

    def drop(self, partitions: Iterable[TP]) -> None:
        """Make the shells forget partitions."""
        for tp in partitions:
            shell = self.shell_of(tp)
            if shell is not None:
                shell.drop([tp.partition])
