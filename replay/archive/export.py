"""Exports one run: its raw records as Parquet, one file a topic, the artifacts that it needs, and a manifest of hashes.

Order: 1. the ends of all topics are asked for, those that are written last first, so that what is exported has its
causes exported too; 2. topics are copied in bounded memory; 3. artifacts are copied; 4. the manifest is written;
5. the folder, written aside until now, gets its name.

Of every topic the run's own records are kept, by key (`RUN` or `RUN/...`; those without a key by their event); dead
letters also by their origin, and trajectories of other runs where the run's manifests name them, as those of a what-if
do. Of each partition of `steps` every record of every run is kept, ticks too, from the run's first record to its last
one or to the one that closed its last group, whichever is later: event time decides what a group closes with, and other
runs' records move it too.
"""

import asyncio
import platform
import shutil
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from rollstream.eventlog import dead_letters
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.codec import kind_of
from rollstream.eventlog.files import beside
from rollstream.eventlog.log import ReadableLog, Record, TopicPartition, check_exists, check_kept
from rollstream.eventlog.reading import decode_or_none, unknown_run
from rollstream.replay.archive.manifest import ArtifactFile, Covered, ExportManifest, TopicFile, write_manifest
from rollstream.replay.archive.needs import ArtifactNeeds, Need
from rollstream.replay.archive.staging import Staging
from rollstream.schemas import ids
from rollstream.schemas.errors import ArtifactError, ConfigError, LogError, StoreUnavailableError
from rollstream.schemas.topics import TOPICS

Report = Callable[[str, int, int], None]
"""Called with the current activity, the number of records examined, and their total."""
ORDER = ("groups", "jobs", "weights", "batches", "tasks", "trajectories", "steps", "dlq")
"""Order of the topics: records of the first ones decide which records of the last ones an export needs."""
POLL_RECORDS = 500
NOT_COLLECTED = "the file is gone, and no collection removed it"


async def export_run(
    log: ReadableLog,
    run_id: str,
    folder: Path,
    *,
    artifacts: ArtifactStore,
    with_weights: bool = False,
    is_partial: bool = False,
    report: Report = lambda *_: None,
) -> ExportManifest:
    """Write the export of a run to a folder that does not exist yet. `with_weights`: all published versions too.

    `is_partial`: what is left of a run of which retention removed some, noted in the manifest.

    Raises ConfigError for a folder that exists or cannot be written and for a run that the log does not have,
    TruncatedError if retention removed some of the run (unless `is_partial`), ArtifactError if its dataset or base
    weights are gone.
    """
    folder = folder.absolute()
    try:
        check_new(folder)
        with beside(folder) as temporary:
            temporary.mkdir()
            export = _Export(log, run_id, temporary, artifacts, with_weights, report, is_partial=is_partial)
            manifest = await export.write()
            check_new(folder)
    except OSError as error:
        raise ConfigError(f"export folder {folder} is not writable ({error.strerror}); give another") from error
    return manifest


def check_new(folder: Path) -> None:
    """Raises ConfigError if there is something already."""
    if folder.exists():
        raise ConfigError(f"export folder {folder} already exists; remove it, or give another with --output")


class _Export:
    """The making of one export."""

    def __init__(
        self,
        log: ReadableLog,
        run_id: str,
        folder: Path,
        artifacts: ArtifactStore,
        with_weights: bool,
        report: Report,
        *,
        is_partial: bool,
    ) -> None:
        self._log = log
        self._run_id = run_id
        self._folder = folder
        self._artifacts = artifacts
        self._with_weights = with_weights
        self._report = report
        self._is_partial = is_partial
        self._needs = ArtifactNeeds()
        self._ranges: dict[str, dict[int, Covered]] = {}
        self._num_left_out = 0
        self._looked = self._total = 0

    async def write(self) -> ExportManifest:
        """Everything; the manifest last."""
        await self._look_around()
        scratch = self._folder / "scratch"
        staging = Staging(scratch)
        try:
            files = {topic: await self._write_topic(staging, topic) for topic in ORDER}
        finally:
            staging.close()
            shutil.rmtree(scratch, ignore_errors=True)
        started = self._needs.started
        manifest = ExportManifest(
            run_id=self._run_id,
            cluster_id=await self._log.cluster_id(),
            exported_at=datetime.now(UTC).isoformat(timespec="seconds"),
            library_versions={} if started is None else started.library_versions,
            exported_with={
                "python": platform.python_version(),
                **{name: metadata.version(name) for name in ("rollstream", "duckdb")},
            },
            topics=files,
            artifacts=tuple(await self._copy_artifacts()),
            num_left_out=self._num_left_out,
            is_partial=self._is_partial,
        )
        write_manifest(self._folder, manifest)
        return manifest

    async def _look_around(self) -> None:
        for topic in reversed(TOPICS):
            ends = await self._log.end_offsets(topic)
            begins = await self._log.begin_offsets(topic)
            self._ranges[topic] = {n: Covered(begin=min(begins[n], end), end=end) for n, end in sorted(ends.items())}
            num_passes = 2 if topic == "steps" else 1
            self._total += num_passes * sum(one.end - one.begin for one in self._ranges[topic].values())

    async def _write_topic(self, staging: Staging, topic: str) -> TopicFile:
        if topic == "steps":
            await self._find_steps()
        for number, covered in self._ranges[topic].items():
            async for records in self._read(topic, number, covered):
                chosen = [record for record in records if self._is_chosen(record, staging)]
                self._count_left_out(records, chosen)
                for record in chosen:
                    self._needs.take(record)
                await asyncio.to_thread(staging.add, chosen)
        if topic == "groups" and self._needs.started is None:
            raise unknown_run(self._run_id, self._ranges["groups"][0].begin, unreadable=self._needs.unreadable)
        if topic == "batches" and not self._is_partial:
            self._check_kept()
        name = f"{topic}.parquet"
        written = await asyncio.to_thread(staging.write, self._folder / name)
        return TopicFile(file=name, partitions=tuple(self._ranges[topic].values()), **written._asdict())

    async def _find_steps(self) -> None:
        """Narrow the ranges of `steps` to the records that the run's groups need."""
        for number, covered in self._ranges["steps"].items():
            first, last = self._needs.first_steps.get(number), self._needs.last_steps.get(number, -1)
            async for records in self._read("steps", number, covered):
                own = [record.offset for record in records if self._is_own(record)]
                if own:
                    first, last = own[0] if first is None else min(first, own[0]), max(last, own[-1])
                self._num_left_out += sum(1 for record in records if record.key and not self._is_own(record))
            begin = covered.end if first is None else max(first, covered.begin)
            self._ranges["steps"][number] = Covered(begin=begin, end=max(begin, min(last + 1, covered.end)))

    def _check_kept(self) -> None:
        """Raises TruncatedError if a record that groups or manifests name is missing, TopicError for a partition."""
        needs = self._needs
        for topic, first_offsets, last_offsets in (
            ("steps", needs.first_steps, needs.last_steps),
            ("trajectories", needs.first_trajectory, needs.last_trajectory),
        ):
            for number, first in first_offsets.items():
                check_exists(TopicPartition(topic, number), self._ranges[topic])
                kept = self._ranges[topic][number]
                for offset in (first, last_offsets[number] + 1):
                    check_kept(TopicPartition(topic, number), offset, kept.begin, kept.end)

    def _is_own(self, record: Record) -> bool:
        """Whether a record is the run's by its key; one without a key, which readers accept, by its event."""
        if record.key is not None:
            return ids.is_key_of_run(record.key, self._run_id)
        if record.topic == "dlq" or kind_of(record) == "tick":  # ticks never have a key
            return False
        received = decode_or_none(record)
        return received is not None and received.event.run_id == self._run_id

    def _is_chosen(self, record: Record, staging: Staging) -> bool:
        if record.topic == "steps" or self._is_own(record):
            return True
        if record.topic == "trajectories":
            return record.offset in self._needs.borrowed.get(record.partition, ())
        return record.topic == "dlq" and self._is_from_run(record, staging)

    def _is_from_run(self, letter: Record, staging: Staging) -> bool:
        """Whether the record that a dead letter without the run's key came from is in the export."""
        try:
            topic, number, offset = dead_letters.origin(letter.headers)
        except LogError:
            return False
        if number not in self._ranges.get(topic, {}) or topic == letter.topic:
            return False  # of other programs, where dead letters are of dead letters
        if not self._ranges[topic][number].begin <= offset < self._ranges[topic][number].end:
            return False
        if topic == "steps":
            return True
        has_lost_key = any(name == dead_letters.WHOLE for name, _ in letter.headers)
        return has_lost_key and staging.holds(self._folder / f"{topic}.parquet", number, offset)

    def _count_left_out(self, records: list[Record], chosen: list[Record]) -> None:
        if not records or records[0].topic != "steps":
            self._num_left_out += len(records) - len(chosen)
        else:  # all were counted when the ranges were looked for
            self._num_left_out -= sum(1 for record in chosen if record.key and not self._is_own(record))

    async def _read(self, topic: str, number: int, covered: Covered) -> AsyncIterator[list[Record]]:
        """The records of one partition in a range, as they come."""
        if covered.begin >= covered.end:
            return
        where = TopicPartition(topic, number)
        reader = await self._log.reader({where: covered.begin})
        try:
            while reader.position(where) < covered.end:
                records = await reader.poll(timeout_s=1.0, max_records=POLL_RECORDS)
                self._looked += len(records)
                self._report(topic, self._looked, self._total)
                yield [record for record in records if record.offset < covered.end]
        finally:
            await reader.close()

    async def _copy_artifacts(self) -> list[ArtifactFile]:
        needs = self._needs.artifacts(with_weights=self._with_weights)
        found: list[ArtifactFile] = []
        for number, need in enumerate(needs):
            self._report("artifacts", number, len(needs))
            found.append(await asyncio.to_thread(self._copy, need))
        return found

    def _copy(self, need: Need) -> ArtifactFile:
        described = {
            "uri": need.ref.uri,
            "sha256": need.ref.sha256,
            "size_bytes": need.ref.size_bytes,
            "what": need.what,
        }
        try:
            source = self._artifacts.fetch(need.ref)
        except ArtifactError as error:
            missing = self._needs.collected.get(need.ref.sha256, "")
            is_away = isinstance(error, StoreUnavailableError)
            is_gone = bool(missing) or (isinstance(error.__cause__, FileNotFoundError) and not is_away)
            if need.is_required or (is_away and not is_gone):
                raise
            if need.is_weights and not is_gone and not self._is_partial:
                raise ArtifactError(f"{need.what}: {error}, or make a partial export without it") from error
            return ArtifactFile(**described, file=None, missing=missing or (NOT_COLLECTED if is_gone else str(error)))
        try:
            kept = ArtifactStore(str(self._folder / "artifacts")).put_file(source)
        finally:
            self._artifacts.drop_copy(need.ref)
        return ArtifactFile(**described, file=f"artifacts/{kept.uri}")
