"""A run's export as an event log that can only be read, with the partitions and offsets that its records had.

Offsets may have holes: a reader goes on to the next record that there is, and reading ends at the end of what the
export covers. Every file is checked against the manifest before the first record is read.

The artifacts of an export: found by their hash below its folder, whatever name the run's events have for them.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import duckdb

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.files import HashedFile
from rollstream.eventlog.log import OpenedByBlock, Position, ReadableLog, Record, TopicPartition
from rollstream.metrics.rebuild import ExportedRun, Report, rebuild
from rollstream.replay.archive.manifest import ExportManifest, check_files, read_manifest
from rollstream.replay.archive.reader import ExportReader, Table
from rollstream.schemas.errors import ArtifactError, LogError, TopicError
from rollstream.schemas.settings import ArtifactRef

POLL_S = 0.02


@asynccontextmanager
async def open_export(folder: Path, *, is_checked: bool = False) -> AsyncIterator[tuple[ReadableLog, ArtifactStore]]:
    """The log and the artifacts of an exported run, both to be read only. `is_checked`: its files are not hashed again.

    Raises LogError naming the file if the folder is not an export or any file of it was changed.
    """
    async with ExportLog(folder, is_checked=is_checked) as log:
        yield log, ExportArtifacts(folder, log.manifest)


class ExportLog(OpenedByBlock):
    """The reading part of `EventLog` over the folder of an export."""

    def __init__(self, folder: Path, *, is_checked: bool = False) -> None:
        self.folder = folder
        self._is_checked = is_checked
        self._manifest: ExportManifest | None = None
        self._tables: dict[str, Table] = {}
        self._connection: duckdb.DuckDBPyConnection | None = None

    @property
    def manifest(self) -> ExportManifest:
        """The export's manifest. Raises LogError before `start`."""
        if self._manifest is None:
            raise LogError("the export is not open; await start() first")
        return self._manifest

    async def start(self) -> None:
        """Check every file, unless that was done, and learn which offsets there are.

        Raises LogError naming the file that is wrong.
        """
        await asyncio.to_thread(self._open)

    async def close(self) -> None:
        """Let go of the files, as soon as a query has ended that a cancelled reader left under way."""
        connection, self._connection = self._connection, None
        while connection is not None:
            try:
                connection.close()
                connection = None
            except duckdb.ResourceInUseException:
                await asyncio.sleep(POLL_S)

    async def num_partitions(self, topic: str) -> int:
        """Partition count of a topic."""
        return len(self._table(topic).covered)

    async def begin_offsets(self, topic: str) -> dict[int, int]:
        """First offset that the export covers, by partition."""
        return {number: covered.begin for number, covered in enumerate(self._table(topic).covered)}

    async def end_offsets(self, topic: str) -> dict[int, int]:
        """Offset after what the export covers, by partition."""
        return {number: covered.end for number, covered in enumerate(self._table(topic).covered)}

    async def reader(self, start: Mapping[TopicPartition, int]) -> "ExportReader":
        """A reader of the given partitions from the given offsets (-1: the first one covered)."""
        return ExportReader({where: self._table(where.topic) for where in start}, start)

    async def fetch(self, positions: Iterable[Position]) -> list[Record]:
        """The records at the given positions, in the order given. Raises TruncatedError if one is not there."""
        asked = list(positions)
        wanted: dict[TopicPartition, set[int]] = {}
        for position in asked:
            wanted.setdefault(TopicPartition(position.topic, position.partition), set()).add(position.offset)
        found: dict[Position, Record] = {}
        for where, offsets in wanted.items():
            table = self._table(where.topic)
            records = await asyncio.to_thread(table.at, where.partition, sorted(offsets))
            found |= {record.position: record for record in records}
        return [found[position] for position in asked]

    async def cluster_id(self) -> str:
        """Identity of the cluster that the run was on."""
        return self.manifest.cluster_id

    def _open(self) -> None:
        manifest = read_manifest(self.folder)
        if not self._is_checked:
            check_files(self.folder, manifest)
        self._connection = duckdb.connect(config={"threads": "1", "autoinstall_known_extensions": "false"})
        self._connection.execute("SET parquet_metadata_cache = true")
        self._tables = {
            topic: Table(self._connection.cursor(), topic, self.folder / file.file, file)
            for topic, file in manifest.topics.items()
        }
        self._manifest = manifest

    def _table(self, topic: str) -> "Table":
        if topic not in self._tables:
            raise TopicError(f"topic {topic} is not in the export {self.folder}; export the run again")
        return self._tables[topic]


async def rebuild_exported(log: ExportLog, path: Path, *, report: Report = lambda *_: None) -> None:
    """Make a metrics file of an export's run, see `rebuild`. Raises MetricsFileError."""
    exported = ExportedRun(log.manifest.run_id, is_whole=log.manifest.num_left_out == 0)
    await rebuild(log, path, exported=exported, report=report)


class ExportArtifacts(ArtifactStore):
    """The artifacts that an export holds, found by their hash; others are not read from anywhere."""

    def __init__(self, folder: Path, manifest: ExportManifest) -> None:
        super().__init__(str(folder / "artifacts"))
        self._folder = folder
        self._files = {a.sha256: folder / a.file for a in manifest.artifacts if a.file is not None}

    def put_file(self, path: Path) -> ArtifactRef:
        """Raises ArtifactError."""
        raise self._read_only()

    def put_bytes(self, data: bytes, suffix: str = "") -> ArtifactRef:
        """Raises ArtifactError."""
        raise self._read_only()

    def put_hashed(self, file: HashedFile, suffix: str = "") -> ArtifactRef:
        """Raises ArtifactError."""
        raise self._read_only()

    def fetch(self, ref: ArtifactRef) -> Path:
        """A local file with the artifact's verified bytes. Raises ArtifactError if it is nowhere, or differs."""
        try:
            return super().fetch(self._here(ref))
        except ArtifactError as error:
            raise self._missing(ref, error) from error.__cause__

    def read(self, ref: ArtifactRef, *, max_bytes: int | None = None) -> bytes:
        """The artifact's verified bytes. Raises ArtifactError if it is nowhere, differs or is larger than allowed."""
        try:
            return super().read(self._here(ref), max_bytes=max_bytes)
        except ArtifactError as error:
            raise self._missing(ref, error) from error.__cause__

    def check(self, ref: ArtifactRef) -> None:
        """Raises ArtifactError if it is nowhere, or differs."""
        try:
            super().check(self._here(ref))
        except ArtifactError as error:
            raise self._missing(ref, error) from error.__cause__

    def _here(self, ref: ArtifactRef) -> ArtifactRef:
        path = self._files.get(ref.sha256)
        return ref if path is None else ref.model_copy(update={"uri": str(path.absolute())})

    def _missing(self, ref: ArtifactRef, error: ArtifactError) -> ArtifactError:
        if ref.sha256 in self._files:
            return error
        return ArtifactError(
            f"{error}; the export {self._folder} does not hold it; export the run again (with --weights, for weights)"
        )

    def _read_only(self) -> ArtifactError:
        return ArtifactError(f"an export is read-only: nothing can be stored in {self._folder}; use a workspace")
