"""A checkpoint's file: written a tensor at a time, read by safetensors, whole or not there."""

import asyncio
import errno
import hashlib
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

from rollstream.eventlog import codec
from rollstream.learner.checkpoints import checkpoint_files
from rollstream.learner.checkpoints.checkpoint import Checkpoint, CheckpointFolder, CheckpointPosition, part, read
from rollstream.learner.checkpoints.checkpoint_files import checkpoints_in, inspect, weights_in
from rollstream.learner.model.tensor_file import pieces, to_bytes
from rollstream.schemas.events import JobFailed, JobSucceeded, StepTrained, WeightsPublished
from tests.learner.conftest import Lab

TENSORS = {
    "weights/w": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "weights/half": torch.arange(3).to(torch.bfloat16),
    "weights/odd": torch.arange(5).to(torch.float16)[::2],
    "weights/empty": torch.empty(0, 4),
    "optimizer/w/step": torch.tensor(3.0),
    "optimizer/w/is_there": torch.tensor([True, False, True]),
    "optimizer/w/count": torch.tensor([1, -2], dtype=torch.int32),
    "statistics/mean": torch.tensor(0.25, dtype=torch.float64),
    "statistics/num": torch.tensor(7),
    "random/cpu": torch.arange(7, dtype=torch.uint8),
}


def written(tensors: dict[str, torch.Tensor]) -> bytes:
    return b"".join(pieces(tensors, {"position": "here"}))


def test_safetensors_reads_what_was_written_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(written(TENSORS))
    found = safetensors.torch.load_file(path)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"position": "here"}


def test_equal_tensors_give_equal_bytes_in_any_order() -> None:
    assert written(TENSORS) == written(dict(reversed(TENSORS.items())))


def test_the_bytes_are_those_that_safetensors_writes() -> None:
    types = (torch.int16, torch.int8, torch.float64, torch.int64)
    tensors = {**TENSORS, **{f"more/{number}": torch.ones(3, dtype=one) for number, one in enumerate(types)}}
    tensors['name with é and "'] = torch.ones(1)
    contiguous = {name: value.contiguous() for name, value in tensors.items()}
    assert written(tensors) == safetensors.torch.save(contiguous, metadata={"position": "here"})


def checkpoint(**changes: Any) -> Checkpoint:
    where: dict[str, Any] = {"run_id": "r", "job_id": "r/rl", "model_group": "r/policy", "batch_id": "r/rl/b00000"}
    step = StepTrained(
        **where, time_ms=1, epoch=0, version=1, term=1, weights_sha256="0" * 64, num_optimizer_steps=1, metrics={},
        seconds={},
    )  # fmt: skip
    position = CheckpointPosition(job_id="r/rl", version=1, next_index=1, previous_sha256="0" * 64, step=step)
    return Checkpoint(position, {**TENSORS, **changes})


def test_a_file_is_named_by_its_bytes_and_a_changed_one_is_not_read(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, "r/policy")
    path = folder.save(checkpoint())
    assert folder.save(checkpoint()) == path
    assert folder.save(checkpoint(more=torch.ones(1))) != path
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert read(path) is None


def test_a_type_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, "r/policy")
    with pytest.raises(KeyError):
        folder.save(checkpoint(odd=torch.zeros(1, dtype=torch.complex64)))
    assert not list(folder.path.glob("*"))


def test_a_folder_of_shards_is_found_and_a_changed_or_missing_shard_is_reported(tmp_path: Path) -> None:
    def write(folder: Path) -> dict[str, str]:
        data = {"b.safetensors": b"two", "a.safetensors": b"one"}
        for name, one in data.items():
            (folder / name).write_bytes(one)
        return {name: hashlib.sha256(one).hexdigest() for name, one in data.items()}

    folder = CheckpointFolder(tmp_path, "r/policy")
    file = folder.save(checkpoint())
    whole = checkpoint()
    path = folder.save(Checkpoint(whole.position.model_copy(update={"version": 2}), {}, write=write))
    assert list(checkpoints_in(folder.path)) == [(1, file), (2, path)]
    for version, one in checkpoints_in(folder.path):
        sha256, position = inspect(one)
        assert sha256 == one.name.split(".")[1]
        assert position is not None
        assert position["version"] == version
    (path / "b.safetensors").write_bytes(b"too")
    assert inspect(path)[1] is None
    (path / "b.safetensors").unlink()
    assert inspect(path) == ("b.safetensors: nothing", None)


def test_weights_that_are_in_a_file_already_are_linked_and_read_back(tmp_path: Path) -> None:
    folder, whole = CheckpointFolder(tmp_path, "r/policy"), checkpoint()
    weights = folder.write_weights(1, part(TENSORS, "weights"))
    assert weights.path.read_bytes() == to_bytes(part(TENSORS, "weights"))
    path = folder.save(replace(whole, weights=weights))
    weights.path.unlink()
    (linked,) = folder.path.glob("*.weights")
    assert path.stat().st_size + linked.stat().st_size < folder.save(whole).stat().st_size + 1000
    found = read(path)
    assert found is not None
    assert found.tensors.keys() == TENSORS.keys()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in TENSORS.items())
    linked.write_bytes(b"other")
    assert inspect(path)[1] is None
    linked.unlink()
    assert inspect(path) == (f"{linked.name}: nothing", None)
    assert read(path) is None


def test_weights_of_checkpoints_that_are_gone_go_too(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, "r/policy")
    for version in (1, 2, 3):
        saved(folder, version)
    (folder.path / "v00000004.0.weights").touch()  # of a version whose checkpoint is being written
    folder.prune(newest=3, keep_last=1, keep_every=2)
    assert folder.versions() == [2, 3]
    assert sorted(version for version, _ in weights_in(folder.path)) == [2, 3, 4]


def saved(folder: CheckpointFolder, version: int, job_id: str = "r/rl") -> Path:
    """A checkpoint whose weights are a file of their own."""
    weights = folder.write_weights(version, {"w": torch.full((2,), float(version))})
    position = checkpoint().position.model_copy(update={"version": version, "job_id": job_id})
    path = folder.save(Checkpoint(position, {"weights/w": torch.ones(2)}, weights))
    weights.path.unlink()
    return path


def test_checkpoints_above_a_restored_log_do_not_push_new_ones_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = CheckpointFolder(tmp_path, "r/policy")
    for version in range(13, 21):
        saved(folder, version)
    for version in (1, 2, 3):
        saved(folder, version)
        folder.prune(newest=version, keep_last=8, keep_every=10, needed=[15])
        assert folder.versions() == list(range(1, version + 1))
    assert sorted(version for version, _ in weights_in(folder.path)) == [1, 2, 3]
    assert "the log goes up to v1" in caplog.text
    found = folder.newest(job_id="r/rl", max_version=4)
    assert found is not None
    assert found.position.version == 3


def test_two_files_of_a_version_count_once(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, "r/policy")
    for version, job_id in ((1, "r/rl"), (2, "r/rl"), (2, "r/other")):
        saved(folder, version, job_id)
    folder.prune(newest=2, keep_last=2, keep_every=100)
    assert folder.versions() == [1, 2, 2]


def test_a_new_job_hashes_no_checkpoint_of_the_jobs_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, hashed = CheckpointFolder(tmp_path, "r/policy"), list[Path]()
    path = saved(folder, 1)
    shards = checkpoint().position.model_copy(update={"version": 2, "job_id": "r/sharded"})
    folder.save(Checkpoint(shards, {}, write=lambda _: {}))
    saved(folder, 3, "r/other")
    known = checkpoint_files.sha256_of
    monkeypatch.setattr(checkpoint_files, "sha256_of", lambda path: hashed.append(path) or known(path))
    assert folder.newest(job_id="r/new", max_version=9) is None
    assert hashed == []
    found = folder.newest(job_id="r/rl", max_version=9)
    assert found is not None
    assert found.path == path == hashed[0]


class Restored(Lab):
    """A lab whose trajectories of the second manifest on have other rewards."""

    def trajectory(self, job: Any, index: int, position: int, **options: Any) -> Any:
        made = super().trajectory(job, index, position, **options)
        return made.model_copy(update={"reward": 1 - made.reward}) if index else made


def test_a_checkpoint_behind_a_manifest_that_a_restored_log_has_otherwise_is_passed_over(
    lab: Lab, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def planned(one: Lab) -> Lab:
        job = await one.submit()
        first = await one.plan(job, 1, seal=False)
        await one.work(one.has(WeightsPublished, "weights", 2))
        if one.folder.name == "restored":
            for path in (lab.folder / "checkpoints").rglob("v00000002.*"):
                shutil.copy(path, one.folder / path.relative_to(lab.folder))
        await one.plan(job, 2, first=1, previous=codec.content_digest(first[0]))
        ends = one.has(JobSucceeded), one.has(JobFailed)
        await one.work(lambda: any_of(*ends))
        return one

    async def scenario() -> None:
        await planned(lab)
        restored = await planned(Restored(tmp_path / "restored", lab.model))
        assert "is behind a manifest that the log has otherwise" in caplog.text
        assert await restored.outcome() == await (await planned(Restored(tmp_path / "other", lab.model))).outcome()

    asyncio.run(scenario())


async def any_of(*ends: Any) -> bool:
    return any([await one() for one in ends])


@pytest.mark.parametrize("head", [b"", b"\xff" * 8 + b"{}", (2).to_bytes(8, "little") + b"{}"])
def test_a_checkpoint_without_a_readable_header_is_named_and_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, head: bytes
) -> None:
    folder = CheckpointFolder(tmp_path, "r/policy")
    saved(folder, 1)
    damaged = saved(folder, 2)
    damaged.write_bytes(head)
    found = folder.newest(job_id="r/rl", max_version=9)
    assert found is not None
    assert found.position.version == 1
    assert f"{damaged} is damaged" in caplog.text


def test_files_that_a_kill_left_half_written_are_removed(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, "r/policy")
    path, weights = folder.save(checkpoint()), folder.write_weights(2, {"w": torch.ones(2)})
    (folder.path / f"{'0a' * 8}.aside").write_bytes(b"half")
    folder.prune(newest=3, keep_last=1, keep_every=1)
    assert sorted(folder.path.iterdir()) == sorted([path, weights.path])


def test_without_hard_links_a_checkpoint_holds_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "another disk")

    folder = CheckpointFolder(tmp_path, "r/policy")
    weights = folder.write_weights(1, part(TENSORS, "weights"))
    monkeypatch.setattr(os, "link", refuse)
    found = read(folder.save(replace(checkpoint(), weights=weights)))
    assert found is not None
    assert found.tensors.keys() == TENSORS.keys()
    assert not list(folder.path.glob("*.weights"))
