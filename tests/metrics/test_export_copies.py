"""An export, and a what-if that reads it, leave no second copy of a remote store's artifacts behind."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.replay.archive.export import export_run
from rollstream.replay.what_if.imports import OpenedExport, bring_artifact
from rollstream.schemas.events import WeightsPublished


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    """A store that is not a folder."""
    return ArtifactStore(f"memory://{tmp_path.name}", cache=tmp_path / "cache")


def copies(folder: Path) -> list[Path]:
    return [path for path in (folder / "cache").rglob("*") if path.is_file()]


def test_an_export_leaves_no_copy(tmp_path: Path, new_run: Callable[[str], Any], store: ArtifactStore) -> None:
    log = MemoryLog(num_partitions=2)
    asyncio.run(log.send_all(list(new_run("one").all_events())))
    asyncio.run(export_run(log, "one", tmp_path / "export", artifacts=store, with_weights=True))
    assert sum(path.is_file() for path in (tmp_path / "export" / "artifacts").rglob("*")) > 1
    assert copies(tmp_path) == []


def test_an_artifact_that_a_what_if_brings_leaves_no_copy(
    tmp_path: Path, new_run: Callable[[str], Any], store: ArtifactStore
) -> None:
    ref = next(one.artifact for one in new_run("one").all_events() if isinstance(one, WeightsPublished))
    elsewhere = ArtifactStore(str(tmp_path / "elsewhere"))
    assert bring_artifact(OpenedExport(MemoryLog(num_partitions=1), store), elsewhere, ref) == ref
    assert elsewhere.read(ref) == store.read(ref)
    assert copies(tmp_path) == []
