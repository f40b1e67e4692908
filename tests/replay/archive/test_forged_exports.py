"""An export whose manifest agrees with files that no export writes is refused by name, at once."""

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

import duckdb
import pytest

from rollstream.eventlog.reading import read_to_end
from rollstream.replay.archive.log import open_export
from rollstream.replay.archive.manifest import ExportManifest, hash_file, read_manifest, write_manifest
from rollstream.schemas.errors import LogError

EXPORT = Path(__file__).parents[2] / "golden" / "exports" / "grpo"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of an export."""
    return Path(shutil.copytree(EXPORT, tmp_path / "export"))


def read(folder: Path) -> None:
    """Read all groups."""

    async def scenario() -> None:
        async with open_export(folder) as (log, _):
            assert [record async for record in read_to_end(log, "groups")]

    asyncio.run(scenario())


def changed(manifest: ExportManifest, **changes: Any) -> ExportManifest:
    """A manifest with changes to the file of `groups`."""
    groups = manifest.topics["groups"].model_copy(update=changes)
    return manifest.model_copy(update={"topics": {**manifest.topics, "groups": groups}})


@pytest.mark.parametrize(
    ("sql", "reason"),
    [
        ('UPDATE t SET "partition" = 7', "a record is in none of 1 partitions"),
        ('UPDATE t SET "partition" = NULL', "a record is in none of 1 partitions"),
        ('UPDATE t SET "offset" = NULL', "lacks its offset or time"),
        ("UPDATE t SET headers = NULL", "a record lacks its headers"),
        ("UPDATE t SET headers = [NULL]", "a record lacks its headers"),
        ('ALTER TABLE t ALTER "partition" TYPE VARCHAR', "column partition is not BIGINT"),
        ("ALTER TABLE t DROP headers", "column headers is not STRUCT"),
    ],
)
def test_records_that_no_export_has_are_an_error_that_names_the_file(folder: Path, sql: str, reason: str) -> None:
    read(folder)
    manifest = read_manifest(folder)
    file = folder / "groups.parquet"
    with duckdb.connect() as connection:
        connection.execute(f"CREATE TABLE t AS SELECT * FROM read_parquet('{file}')")
        connection.execute(sql)
        connection.execute(f"COPY t TO '{file}' (FORMAT parquet)")
    write_manifest(folder, changed(manifest, sha256=hash_file(file)))
    with pytest.raises(LogError, match=f"groups.parquet is not of an export: .*{reason}"):
        read(folder)


@pytest.mark.parametrize("name", ["../../../dev/zero", "/dev/zero", "a/../../b", ""])
def test_a_file_outside_the_folder_is_not_read(folder: Path, name: str) -> None:
    write_manifest(folder, changed(read_manifest(folder), file=name))
    with pytest.raises(LogError, match=r"topics\.groups\.file: must be the relative path of a file below the folder"):
        read(folder)


def test_a_file_that_never_ends_is_not_read(folder: Path) -> None:
    os.mkfifo(folder / "fifo")
    write_manifest(folder, changed(read_manifest(folder), file="fifo"))
    with pytest.raises(LogError, match="fifo is not a regular file"):
        read(folder)
