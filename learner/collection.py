"""Collects the weights of a run that goes on: versions that nothing needs any more leave the artifact store.

Which ones decides `retention`; here the log is read for it, the event is written and the files are removed.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.codec import decode, kind_of
from rollstream.eventlog.failpoints import failpoint
from rollstream.eventlog.log import EventLog, Position, Record
from rollstream.learner.retention import Stored, WeightNeeds, due, evolve, unfinished
from rollstream.schemas import ids
from rollstream.schemas.errors import ArtifactError, DecodeError, TruncatedError
from rollstream.schemas.events import WeightsCollected

TOPICS = ("jobs", "weights")
"""A fork's JobSubmitted names what it begins from; `groups` says no more of an open run."""
READ_KINDS = (
    "run_started",
    "run_ended",
    "job_started",
    "job_submitted",
    "learner_claimed",
    "weights_published",
    "weights_loaded",
    "weights_collected",
    None,
)
"""All others are passed over undecoded."""
FETCH_RECORDS = 200
MAX_VERSIONS = 200
"""Maximum number of versions in one event."""

logger = logging.getLogger(__name__)


def take(needs: WeightNeeds, record: Record) -> None:
    """Take in one record; one that cannot be read keeps all weights of its run."""
    if kind_of(record) not in READ_KINDS:
        return
    try:
        evolve(needs, decode(record))
    except DecodeError:
        needs.doubtful.add(ids.run_of((record.key or b"").decode(errors="replace")))


def collected(found: Sequence[Stored], model_group: str, *, time_ms: int, by: str) -> WeightsCollected:
    """The event that says that artifacts of one model group go, given by rising version."""
    return WeightsCollected(
        run_id=ids.run_of(model_group),
        time_ms=time_ms,
        model_group=model_group,
        versions=tuple(stored.version for stored in found),
        weights_sha256=tuple(stored.ref.sha256 for stored in found),
        artifacts=tuple(stored.ref for stored in found),
        by=by,
    )


class NeedsReader:
    """The state of all weights by `jobs` and `weights`, read from their beginning once a process and then followed.

    Its owner calls `read_on` from one task at a time.
    """

    def __init__(self, log: EventLog) -> None:
        self.needs = WeightNeeds()
        self._log = log
        self._next: dict[str, int] = {}

    async def read_on(self) -> None:
        """Fold in the records that the topics hold by now. Raises LogError; what was fetched before is not fetched
        again.

        Records that retention removes meanwhile are passed over, as for a process that starts after that.
        """
        for topic in TOPICS:
            end = (await self._log.end_offsets(topic))[0]
            first = max(self._next.get(topic, 0), (await self._log.begin_offsets(topic))[0])
            while first < end:
                offsets = range(first, min(end, first + FETCH_RECORDS))
                try:
                    records = await self._log.fetch(Position(topic, 0, offset) for offset in offsets)
                except TruncatedError:
                    begin = (await self._log.begin_offsets(topic))[0]
                    if begin <= first:
                        raise
                    first = begin
                    continue
                for record in records:
                    take(self.needs, record)
                self._next[topic] = first = offsets.stop


class Collector:
    """Collects for one model group, which the learner `by` owns."""

    def __init__(self, log: EventLog, artifacts: ArtifactStore, reader: NeedsReader, model_group: str, by: str) -> None:
        """`reader`: shared by the model groups of a process."""
        self._log = log
        self._artifacts = artifacts
        self._model_group = model_group
        self._by = by
        self._reader = reader
        self._removed: WeightsCollected | None = None
        """The event whose files are gone."""

    async def collect(
        self, at_checkpoints: Collection[int], time_ms: int, check_owner: Callable[[], Awaitable[None]]
    ) -> None:
        """Remove what nothing needs any more, in this order:

        1. read on, and work out what nothing needs: what the last event named and a kill left, and what is due now
        2. remove what the last event named
        3. write WeightsCollected of what is due, acknowledged by all replicas
        4. read on again: what a fork or a job has come to need meanwhile stays
        5. remove the files

        A kill before 3 changes nothing; after it, the next collection's step 2, or `gc`, removes the files. So no file
        is missing of which the log does not say so. A store that does not answer is left for the next collection.
        Raises what `check_owner` raises, before anything is written or removed, and LogError.
        """
        await self._reader.read_on()
        if not await self._remove(at_checkpoints):
            return
        while found := self._due(at_checkpoints):
            await check_owner()
            event = collected(found[:MAX_VERSIONS], self._model_group, time_ms=time_ms, by=self._by)
            await self._log.send(event)
            failpoint("learner/between-collected-and-removed")
            await self._reader.read_on()
            if not await self._remove(at_checkpoints):
                return

    def _due(self, at_checkpoints: Collection[int]) -> list[Stored]:
        found = due(self._reader.needs, self._model_group, at_checkpoints)
        return [stored for stored in found if self._artifacts.name_of(stored.ref) is not None]

    async def _remove(self, at_checkpoints: Collection[int]) -> bool:
        """Remove the files that the last event names; False if the store did not let that be done."""
        last = self._reader.needs.group(self._model_group).collected
        if last is self._removed:
            return True
        found = unfinished(self._reader.needs, self._model_group, at_checkpoints)
        try:
            for stored in found:
                if self._artifacts.name_of(stored.ref) is not None:
                    await asyncio.to_thread(self._artifacts.remove, stored.ref)
        except ArtifactError as error:
            logger.warning("weights of %s stay for now: %s", self._model_group, error)
            return False
        self._removed = last
        return True
