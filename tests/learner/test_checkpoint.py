"""A checkpoint's file: written a tensor at a time, read by safetensors, whole or not there."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

from rollstream.learner.checkpoint import Checkpoint, CheckpointFolder, CheckpointPosition, read
from rollstream.learner.checkpoint_files import checkpoints_in, inspect
from rollstream.learner.model.tensor_file import pieces
from rollstream.schemas.events import StepTrained

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
    step = StepTrained.model_construct(run_id="r", version=1)
    position = CheckpointPosition.model_construct(
        job_id="r/rl", version=1, next_index=1, previous_sha256="0" * 64, step=step
    )
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


def test_a_folder_of_shards_is_found_and_a_changed_or_missing_shard_told(tmp_path: Path) -> None:
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
