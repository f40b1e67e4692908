"""Checkpoints that several processes wrote are folders; a collection keeps their versions as well."""

import asyncio
from pathlib import Path

from rollstream.eventlog.artifacts import ArtifactStore
from tests.harness.upkeep.test_gc import found_in, log_of, run


def test_what_a_checkpoint_stands_at_stays_be_it_a_file_or_a_folder_of_shards(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path / "artifacts"))
    log = asyncio.run(log_of(store, run("r")))
    left = [set(found_in(store, log, tmp_path).weights)]
    for suffix in ("safetensors", "shards"):
        path = tmp_path / suffix / "checkpoints" / "r%2Fpolicy" / f"v00000002.{'0' * 64}.{suffix}"
        path.parent.mkdir(parents=True)
        path.mkdir()
        left.append(set(found_in(store, log, tmp_path / suffix).weights))
    assert left[1] == left[2] < left[0]
