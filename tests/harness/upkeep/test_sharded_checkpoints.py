"""Checkpoints that several processes wrote are folders; a collection keeps their versions as well."""

import asyncio
import os
from pathlib import Path

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.harness.upkeep.collecting import remove
from rollstream.learner.checkpoints.checkpoint import CheckpointFolder
from tests.harness.upkeep.gc_rig import found_in, log_of, run


def test_the_version_of_a_checkpoint_is_kept_whether_a_file_or_a_folder_of_shards(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path / "artifacts"))
    log = asyncio.run(log_of(store, run("r")))
    left = [set(found_in(store, log, tmp_path).weights)]
    for suffix in ("safetensors", "shards"):
        path = tmp_path / suffix / "checkpoints" / "r%2Fpolicy" / f"v00000002.{'0' * 64}.{suffix}"
        path.parent.mkdir(parents=True)
        path.mkdir()
        left.append(set(found_in(store, log, tmp_path / suffix).weights))
    assert left[1] == left[2] < left[0]


def test_folders_of_shards_that_a_kill_left_are_removed_once_they_are_old(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path / "artifacts"))
    log = asyncio.run(log_of(store, run("r")))
    folder = tmp_path / "checkpoints" / "r%2Fpolicy"
    names = ("v00000001.0.shards", ".v00000002", f".v00000003.{'0' * 64}.shards", ".v00000004")
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "0.safetensors").write_bytes(b"x" * 1000)
        for path in (folder / name / "0.safetensors", folder / name):
            os.utime(path, (0, 0))
    (folder / names[3] / "1.safetensors").write_bytes(b"y")  # is being written
    found = found_in(store, log, tmp_path)
    assert [one.path.name for one in found.leftovers] == [*names[1:3]]
    assert all(one.size_bytes >= 1000 for one in found.leftovers)
    asyncio.run(remove(log, store, found._replace(weights={}, versions={})))
    assert sorted(path.name for path in folder.iterdir()) == [names[3], names[0]]
    CheckpointFolder(tmp_path / "checkpoints", "r/policy").prune(newest=3, keep_last=1, keep_every=1)
    assert [path.name for path in folder.iterdir()] == [names[0]]
