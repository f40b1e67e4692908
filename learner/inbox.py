"""The learner's view of the log: follows jobs, batches, weights and groups, and folds what counts into one state.

Jobs that are open are known from `jobs`; of a job that is served, `follow` reads what the log holds of it so far. A
start reads on where the position file says. A record that is not an event goes to the dead letters, once; one of
`groups` is left to curation, which sends it to the dead letters.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.dead_letters import send_dead_letter
from rollstream.eventlog.log import EventLog, LogReader, Position, Received, Record, TopicPartition
from rollstream.eventlog.reading import read_to_end
from rollstream.eventlog.run_offsets import LETTERS, start_offsets_of
from rollstream.learner import progress
from rollstream.learner.progress import GroupState, LearnerJobState, LogState, evolve
from rollstream.learner.reading import position
from rollstream.learner.reading.letters import Letters
from rollstream.learner.reading.members import FORK
from rollstream.learner.reading.position import ReadPosition
from rollstream.schemas import ids
from rollstream.schemas.base import Event
from rollstream.schemas.errors import ConfigError, DecodeError, RollstreamError, TruncatedError
from rollstream.schemas.events import (
    BatchPlanned,
    EpochSealed,
    JobCancelled,
    JobFailed,
    JobProgressed,
    JobSubmitted,
    JobSucceeded,
    RunEnded,
    WeightsPublished,
)
from rollstream.schemas.events.weights import JobEvent, WeightEvent
from rollstream.schemas.settings import EXTERNAL

logger = logging.getLogger(__name__)

DEAD_LETTERED = ("jobs", "batches", "weights")
TOPICS = (*DEAD_LETTERED, "groups")
LOOK_BACK = 1000
"""Records before the end that a first start searches for records that are not events."""
SAVE_EVERY_S = 5.0
_RUN_ENDED = "run_ended"
_JOB_PROGRESSED = "job_progressed"


class Inbox:
    """Reader and state; `open` it, then `poll` or `catch_up`."""

    def __init__(
        self,
        log: EventLog,
        artifacts: ArtifactStore | None,
        *,
        cluster_id: str,
        begins: Mapping[TopicPartition, int],
        file: Path | None,
        model_groups: tuple[str, ...],
    ) -> None:
        self.state = LogState()
        self._begins = dict(begins)
        """Oldest offsets that are kept."""
        self._log = log
        self._artifacts = artifacts
        self._letters = Letters(log, DEAD_LETTERED)
        self._cluster_id = cluster_id
        self._file = file
        self._model_groups = model_groups
        self._followed: set[str] = set()
        """Jobs whose manifests are taken in."""
        self._reader: LogReader | None = None
        self._pending: deque[Record] = deque()
        """Records that the reader is past, and the state is not: what is left of a poll that was cancelled."""
        self._polling = asyncio.Lock()
        self._saved: ReadPosition | None = None
        self._saved_s = 0.0

    @classmethod
    async def open(
        cls,
        log: EventLog,
        artifacts: ArtifactStore | None = None,
        *,
        file: Path | None = None,
        model_groups: tuple[str, ...] = (),
    ) -> "Inbox":
        """Read on to the log's end. `artifacts` takes the bytes of dead letters above the record limit; `file` is where
        the position is kept; of `model_groups`, if there are any, jobs are taken in.
        """
        begins = {topic: await log.begin_offsets(topic) for topic in TOPICS}
        inbox = cls(
            log,
            artifacts,
            cluster_id=await log.cluster_id(),
            begins={TopicPartition(topic, n): offset for topic, found in begins.items() for n, offset in found.items()},
            file=file,
            model_groups=model_groups,
        )
        await inbox._letters.take_cut()
        start = await inbox._restored() or await inbox._first_start()
        inbox._reader = await log.reader({TopicPartition(topic, 0): offset for topic, offset in start.items()})
        await inbox.catch_up()
        return inbox

    async def poll(self, *, timeout_s: float) -> None:
        """Fold in the available records; wait up to `timeout_s` for it. Those of a cancelled call come first."""
        async with self._polling:
            if not self._pending:
                self._pending.extend(await self._require().poll(timeout_s=timeout_s))
            while self._pending:
                record = self._pending[0]
                received = None if self._is_of_others(record) else await self._decoded(record)
                if received is not None and isinstance(received.event, JobSubmitted):
                    self._letters.add_cut(received.event.start_offsets)
                if received is not None and self._counts(received.event):
                    self._take(received)
                self._pending.popleft()

    async def catch_up(self, topics: Sequence[str] = TOPICS) -> None:
        """Fold in everything that the given topics hold by now."""
        ends = {topic: (await self._log.end_offsets(topic))[0] for topic in topics}
        while any(self._position(topic) < end for topic, end in ends.items()):
            await self.poll(timeout_s=1.0)

    def is_followed(self, job: JobSubmitted) -> bool:
        """Whether everything that the log holds of a job is in the state, less what was forgotten."""
        return job.job_id in self._followed and job.model_group in self.state.groups

    async def follow(self, job: JobSubmitted) -> None:
        """Read the records of an open job and its model group, from the run's first record; go on with both.

        What was forgotten of them is there again. The state stays as it is until the last record is read. A job that
        turns out to be over is closed instead.
        """
        known, group = self.state.jobs.get(job.job_id, LearnerJobState()), job.model_group
        read, ends = LogState(), list[Received]()
        read.jobs[job.job_id] = LearnerJobState(submitted=known.submitted, submitted_offset=known.submitted_offset)
        keys = {"batches": job.run_id, "groups": job.run_id, "weights": group, "jobs": group}
        for topic, key in keys.items():
            begin, end = self._begins[TopicPartition(topic, 0)], self._position(topic)
            start = (job.start_offsets or {}).get(topic, begin)
            start = start if begin <= start <= end else begin
            async for record in read_to_end(self._log, topic, {0: start}, {0: end}):
                received = await self._decoded(record, job.start_offsets) if record.key == key.encode() else None
                if received is not None and _is_end(received.event, job):
                    ends.append(received)
                elif received is not None and _is_of(received.event, job):
                    evolve(read, received)
        if all(isinstance(one.event, RunEnded) for one in ends):
            progress.replace(self.state, read, job)
            self._followed.add(job.job_id)
        for one in ends:
            self._take(one)

    async def version_of(self, model_group: str, version: int) -> WeightsPublished | None:
        """A published version of any model group of the log, None if there is none."""
        start = await start_offsets_of(self._log, ids.run_of(model_group), ("weights", LETTERS))
        begin = self._begins[TopicPartition("weights", 0)]
        state = LogState()
        async for record in read_to_end(self._log, "weights", {0: max(begin, start.get("weights", begin))}):
            received = await self._decoded(record, start) if record.key == model_group.encode() else None
            if received is not None:
                evolve(state, received)
            if (found := state.group(model_group).published.get(version)) is not None:
                return found
        return None

    def forget(self, job: JobSubmitted, *, next_index: int, version: int) -> None:
        """Drop the state before a checkpoint."""
        if job.job_id in self.state.jobs:
            progress.forget(self.state, job, next_index=next_index, version=version)

    def missing(self, what: str, topic: str) -> RollstreamError:
        """The error of something that must be in a topic: TruncatedError where it may have been removed."""
        begin = self._begins[TopicPartition(topic, 0)]
        if not begin:
            return DecodeError(f"{what} is missing in topic {topic}; {FORK}")
        return TruncatedError(
            f"{what} is gone: topic {topic} partition 0 no longer has records before offset {begin}, retention or a "
            f"truncation removed it; {FORK}"
        )

    def save(self, *, every_s: float = SAVE_EVERY_S) -> None:
        """Keep the position, if it has moved and was not kept within `every_s`; a start without it only reads more."""
        if self._file is None or time.monotonic() < self._saved_s + every_s:
            return
        self._saved_s = time.monotonic()
        found = self._read_position()
        if found == self._saved:
            return
        try:
            position.save(self._file, found)
            self._saved = found
        except OSError as error:
            logger.warning("position file %s cannot be written: %s", self._file, error)

    async def close(self) -> None:
        """Let go of the reader."""
        await self._require().close()

    def _require(self) -> LogReader:
        assert self._reader is not None
        return self._reader

    def _position(self, topic: str) -> int:
        """Offset of the first record that is not folded in."""
        pending = (record.offset for record in self._pending if record.topic == topic)
        return next(pending, self._require().position(TopicPartition(topic, 0)))

    def _read_position(self) -> ReadPosition:
        anchors: dict[str, list[int]] = {topic: [] for topic in TOPICS}
        for anchor in sorted(progress.anchors(self.state)):
            anchors[anchor.topic].append(anchor.offset)
        next_offsets = {topic: self._position(topic) for topic in TOPICS}
        return ReadPosition(
            cluster_id=self._cluster_id,
            model_groups=self._model_groups,
            next_offsets=next_offsets,
            cut=self._letters.cut_before(next_offsets),
            anchors=anchors,
            first_indexes={job_id: self.state.job(job_id).first_index for job_id in sorted(self._followed)},
            groups=tuple(self.state.groups),
        )

    async def _restored(self) -> dict[str, int] | None:
        """Next offsets by the position file, whose records are taken in; None if it does not fit."""
        saved = position.load(self._file) if self._file is not None else None
        if saved is None or (saved.cluster_id, saved.model_groups) != (self._cluster_id, self._model_groups):
            return None
        for topic in TOPICS:
            end = (await self._log.end_offsets(topic))[0]
            if not self._begins[TopicPartition(topic, 0)] <= saved.next_offsets.get(topic, -1) <= end:
                return None
        try:
            received = [codec.decode(record) for record in await self._log.fetch(_positions(saved))]
        except (DecodeError, TruncatedError) as error:
            logger.info("the position file %s does not fit the log: %s", self._file, error)
            return None
        self._letters.add_cut(saved.cut)
        self._followed = set(saved.first_indexes)
        self.state.groups = {name: GroupState(is_whole=False) for name in saved.groups}
        for job_id, first_index in saved.first_indexes.items():
            self.state.job(job_id).first_index = first_index
        for one in received:
            evolve(self.state, one)
        return dict(saved.next_offsets)

    async def _first_start(self) -> dict[str, int]:
        """Next offsets of a first start: all of `jobs`, which is taken in, and of the others what came last.

        A record of these that is not an event is looked up in the letters since a run before it began, and
        `jobs` names the runs.
        """
        jobs = TopicPartition("jobs", 0)
        self._reader = await self._log.reader({jobs: self._begins[jobs]})
        await self.catch_up(("jobs",))
        start = {"jobs": self._reader.position(jobs)}
        await self._reader.close()
        for topic in TOPICS:
            end = (await self._log.end_offsets(topic))[0]
            start.setdefault(topic, max(self._begins[TopicPartition(topic, 0)], end - LOOK_BACK))
        return start

    def _take(self, received: Received) -> None:
        """Fold one event in, and drop the state that it ends."""
        evolve(self.state, received)
        event, state = received.event, self.state
        if isinstance(event, RunEnded):
            groups = [name for name in state.groups if ids.run_of(name) == event.run_id]
        else:
            groups = [event.model_group] if isinstance(event, JobEvent) and event.run_id in state.ended_runs else []
        for name in groups:
            if name not in state.queues:
                progress.let_go(state, name)
        self._followed &= state.jobs.keys()

    def _is_of_others(self, record: Record) -> bool:
        """Whether a record is a JobProgressed, of which there are many, of a model group that is not followed."""
        return codec.kind_of(record) == _JOB_PROGRESSED and _text(record.key) not in self.state.groups

    def _counts(self, event: Event) -> bool:
        match event:
            case BatchPlanned() | EpochSealed():
                return event.job_id in self._followed
            case JobProgressed() | WeightEvent():
                return event.model_group in self.state.groups
            case JobSubmitted() if event.is_what_if and not self._model_groups:
                return False  # it has a learner of its own, which names its model group
            case JobSubmitted() if event.settings.kind == EXTERNAL:
                return False
            case JobEvent():
                return not self._model_groups or event.model_group in self._model_groups
            case _:
                return isinstance(event, RunEnded)

    async def _decoded(self, record: Record, of_run: Mapping[str, int] | None = None) -> Received | None:
        """The event of a record; None if it is not an event, or of a kind that does not count here.

        `of_run`: start offsets of the run that it is read for.
        """
        kind = codec.kind_of(record)
        if record.topic == "groups" and kind not in (_RUN_ENDED, None):
            return None
        try:
            return codec.decode(record)
        except DecodeError as error:
            logger.warning("%s %s@%s is not an event: %s", record.topic, record.partition, record.offset, error)
            if record.topic in DEAD_LETTERED:
                await self._send_dead_letter(record, error, of_run)
            return None

    async def _send_dead_letter(self, record: Record, error: DecodeError, of_run: Mapping[str, int] | None) -> None:
        """Write a letter unless there is one: what is read again has one already."""
        if not await self._letters.has(record, of_run):
            await send_dead_letter(
                self._log, record, service="learner", stage="decode", error=error, artifacts=self._artifacts
            )


def _text(key: bytes | None) -> str:
    return (key or b"").decode(errors="replace")


def _positions(saved: ReadPosition) -> list[Position]:
    return [Position(topic, 0, offset) for topic in TOPICS for offset in saved.anchors.get(topic, ())]


def _is_of(event: Event, job: JobSubmitted) -> bool:
    """Whether an event says something of a job or its model group that is not known from `jobs` alone."""
    match event:
        case BatchPlanned() | EpochSealed():
            return event.job_id == job.job_id
        case JobProgressed() | WeightEvent():
            return event.model_group == job.model_group
        case _:
            return False


def _is_end(event: Event, job: JobSubmitted) -> bool:
    """Whether an event ends a job or its run."""
    match event:
        case JobSucceeded() | JobFailed() | JobCancelled():
            return event.job_id == job.job_id
        case _:
            return isinstance(event, RunEnded)


def check_follows(planned: BatchPlanned, job: JobSubmitted, previous_sha256: str) -> None:
    """Raises DecodeError if a manifest of `job` does not follow the one with digest `previous_sha256`."""
    if planned.previous_sha256 != previous_sha256:
        raise DecodeError(
            f"manifest {planned.batch_id} follows {planned.previous_sha256}, not {previous_sha256}: "
            f"the chain of manifests is broken; {FORK}"
        )
    version = job.base_version + planned.index
    if planned.trains_at_version != version or planned.model_group != job.model_group:
        raise DecodeError(
            f"manifest {planned.batch_id} trains {planned.model_group} at version {planned.trains_at_version}, "
            f"not {job.model_group} at {version}; {FORK}"
        )
    if planned.adopts is not None and not job.base_version <= planned.adopts <= version:
        raise DecodeError(
            f"manifest {planned.batch_id} adopts version {planned.adopts}; versions {job.base_version} to {version} "
            f"of the job come before it; {FORK}"
        )


def check_next(job: JobSubmitted, published: WeightsPublished | None) -> None:
    """Raises ConfigError if another job has already trained from the version that `job` begins with.

    `published`: the version after that, if there is one.
    """
    if published is not None and published.job_id != job.job_id:
        raise ConfigError(
            f"job {job.job_id} begins at version {job.base_version} of {job.model_group}, but job "
            f"{published.job_id} has already published version {published.version}; submit the job from the newest "
            f"version, or begin a new run with --fork {ids.version_name(job.run_id, job.base_version)}"
        )
