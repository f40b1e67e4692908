"""What a Faust app hosts here: shells of folds, which take batches of raw records and say how far they have come."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, cast

import faust
from faust.types import TP

from rollstream.eventlog.log import Record, TopicPartition


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive raw records of one partition, at least one."""

    partition: int
    generation: int
    """Of this process's assignment under which they were fetched; `Host.generation` counts them."""
    records: list[Record]


class Shell(Protocol):
    """A fold's shell as the host sees it: takes batches of one topic and says how far they may be committed."""

    topic: str

    async def take(self, batch: Batch) -> None:
        """Fold a batch; batches come one after the other. What it raises ends the service."""
        ...

    def mark(self, partition: int) -> int | None:
        """Offset from which the partition must be read again; None before its first batch."""
        ...

    def position(self, partition: int) -> int | None:
        """Offset of the next record to fold; None before its first batch."""
        ...

    def drop(self, partitions: Iterable[int]) -> None:
        """Forget partitions: they are revoked, or assigned anew and read again from their committed offset."""
        ...


class Placed(Protocol):
    """What a host's consumer tells of its reading."""

    wanted: Mapping[TP, int]


class Host(faust.App):
    """A Faust app that knows its shells by Kafka's topic name."""

    shells: dict[str, Shell]
    failed: "asyncio.Future[None]"
    """Gets the first error of a shell."""
    generation: int = 0
    """Grows whenever partitions are revoked or assigned; batches of an older one are read again."""

    def shell_of(self, tp: TP) -> Shell | None:
        """The shell that takes a partition's topic."""
        return self.shells.get(tp.topic)

    def fail(self, error: BaseException) -> None:
        """End the service with an error, if none has yet."""
        if not self.failed.done():
            self.failed.set_exception(error)

    def _create_directories(self) -> None:
        """Make none: Faust keeps tables in them, and no shell has one."""

    def positions(self) -> dict[TopicPartition, int | None]:
        """By assigned partition: offset of the next record to fold, None where the reading has no place yet."""
        found: dict[TopicPartition, int | None] = {}
        for tp in cast(set[TP], self.consumer.assignment()):
            shell = self.shell_of(tp)
            if shell is not None:
                position = shell.position(tp.partition)
                begin = cast(Placed, self.consumer).wanted.get(tp)
                found[TopicPartition(shell.topic, tp.partition)] = begin if position is None else position
        return found

    def drop(self, partitions: Iterable[TP]) -> None:
        """Have the shells forget partitions."""
        for tp in partitions:
            shell = self.shell_of(tp)
            if shell is not None:
                shell.drop([tp.partition])
