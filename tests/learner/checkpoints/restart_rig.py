"""Learners that crash at chosen writes, and rollbacks."""

from collections.abc import Sequence
from typing import Any

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.files import HashedFile
from rollstream.eventlog.log import Encoded, Position
from rollstream.learner.worker import Worker
from rollstream.schemas.base import Event
from rollstream.schemas.events import (
    BatchPlanned,
    JobSubmitted,
)
from rollstream.schemas.settings import ArtifactRef
from tests.learner.conftest import manifest_of


class Crash(BaseException):
    """The process is gone."""


class Fuse:
    """Burns at write number `at`, before it or after it."""

    def __init__(self, at: int, *, is_before: bool) -> None:
        self.left = at
        self.is_before = is_before

    def before(self) -> None:
        self.left -= 1
        if self.left < 0 and self.is_before:
            raise Crash

    def after(self) -> None:
        if self.left < 0:
            raise Crash


class FusedLog:
    """A log whose sends go through a fuse, one event at a time."""

    def __init__(self, log: Any, fuse: Fuse) -> None:
        self._log = log
        self._fuse = fuse

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    async def send(self, event: Event | Encoded, *, partition: int | None = None) -> Position:
        self._fuse.before()
        position = await self._log.send(event, partition=partition)
        self._fuse.after()
        return position

    async def send_all(self, events: Sequence[Event | Encoded], *, partition: int | None = None) -> list[Position]:
        return [await self.send(event, partition=partition) for event in events]


class FusedStore(ArtifactStore):
    """An artifact store whose writes go through a fuse."""

    fuse: Fuse

    def put_hashed(self, file: HashedFile, suffix: str = "") -> ArtifactRef:
        self.fuse.before()
        ref = super().put_hashed(file, suffix)
        self.fuse.after()
        return ref


def fused_worker(lab: Any, fuse: Fuse) -> Worker:
    store = FusedStore(lab.artifacts.uri)
    store.fuse = fuse
    log: Any = FusedLog(lab.log, fuse)
    return Worker(
        log, store, name="doomed", checkpoints=lab.folder / "checkpoints", threads=1, permissions=lab.permissions
    )


def num_before(planned: list[BatchPlanned]) -> int:
    """Rollbacks among the manifests so far."""
    return sum(one.adopts is not None for one in planned)


async def adopt(
    lab: Any, job: JobSubmitted, planned: list[BatchPlanned], version: int, *, counts: bool = True
) -> list[BatchPlanned]:
    """Plan a rollback after the manifests so far; all manifests."""
    num_adopted = num_before(planned) if counts else 0
    previous = codec.content_digest(planned[-1])
    batch = manifest_of(job, len(planned), previous, members=(), adopts=version, num_adopted=num_adopted)
    await lab.log.send(batch)
    return [*planned, batch]
