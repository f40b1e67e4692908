"""Checkpoints: weights, optimizer, random state and position in one file, or in a folder of shards where several
processes train together. Whole or not there at all.

A file is named by version and hash: `v00000012.<sha256>.safetensors`. What a checkpoint means to the log stands in
`commit`.
"""

import hashlib
import logging
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import orjson
import safetensors.torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from rollstream.eventlog.files import give_name, remove_whole, sync_folder, write_hashed, write_whole
from rollstream.learner.checkpoint_files import CONTENT, SHARDS, SUFFIX, checkpoints_in, inspect
from rollstream.learner.model.tensor_file import pieces
from rollstream.schemas.events import StepTrained

logger = logging.getLogger(__name__)


class CheckpointPosition(BaseModel):
    """Position of a checkpoint in the log."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    job_id: str
    version: int
    """Of the weights."""
    next_index: int
    """Manifest of the job to train next."""
    previous_sha256: str
    """Content digest of the manifest before it."""
    step: StepTrained
    """The events to publish if the log lacks them."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A position and everything that training goes on from."""

    position: CheckpointPosition
    tensors: dict[str, Tensor]
    """weights/..., optimizer/..., random/...; none where they are in a folder of shards."""
    path: Path | None = None
    """Where it was read from."""
    write: Callable[[Path], Mapping[str, str]] | None = None
    """What writes the shards of all processes into a folder, where there are several; gives the sha256 of each file."""

    @property
    def size_bytes(self) -> int:
        """About what its file takes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def part(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Tensors whose names begin with `name/`, without it."""
    return {key.split("/", 1)[1]: value for key, value in tensors.items() if key.startswith(f"{name}/")}


class CheckpointFolder:
    """The checkpoints of one model group."""

    def __init__(self, root: Path, model_group: str) -> None:
        self.path = root / quote(model_group, safe="")

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write aside, fsync, rename, fsync the folder: after a crash the file is whole or not there.

        Raises OSError if the disk does not take it; then nothing of it is left.
        """
        if checkpoint.write is not None:
            return self._save_shards(checkpoint.position, checkpoint.write)
        metadata = {"position": checkpoint.position.model_dump_json()}
        version = checkpoint.position.version
        written = pieces(checkpoint.tensors, metadata)
        path, _ = write_hashed(written, self.path, lambda sha256: f"v{version:08d}.{sha256}{SUFFIX}")
        sync_folder(self.path)
        return path

    def _save_shards(self, position: CheckpointPosition, write: Callable[[Path], Mapping[str, str]]) -> Path:
        """A folder of shards and of their hashes, under the hash of the latter."""
        aside = self.path / f".v{position.version:08d}"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        hashes = dict(sorted(write(aside).items()))
        content = orjson.dumps({"position": position.model_dump(mode="json"), "sha256": hashes})
        write_whole(aside / CONTENT, content, is_private=False)
        path = self.path / f"v{position.version:08d}.{hashlib.sha256(content).hexdigest()}{SHARDS}"
        give_name(aside, path)
        return path

    def newest(self, *, job_id: str, max_version: int) -> Checkpoint | None:
        """The newest checkpoint of a job that is not above `max_version` and whose bytes are what they were.

        A file that was changed is named in a warning, and the one before it is used.
        """
        for version, path in reversed(list(checkpoints_in(self.path))):
            if version > max_version:
                continue
            checkpoint = read(path)
            if checkpoint is None:
                logger.warning("checkpoint %s is damaged; going back to the one before it", path)
            elif checkpoint.position.job_id == job_id:
                return checkpoint
        return None

    def prune(self, *, keep_last: int, keep_every: int, needed: Collection[int] = ()) -> None:
        """Remove all but the newest `keep_last`, every version that `keep_every` divides, and those `needed`."""
        files = list(checkpoints_in(self.path))
        kept = {*needed, *(version for version, _ in files[-keep_last:])}
        for version, path in files:
            if version not in kept and version % keep_every:
                remove_whole(path)

    def versions(self) -> list[int]:
        """Versions that are kept, from old to new."""
        return [version for version, _ in checkpoints_in(self.path)]


def read(path: Path) -> Checkpoint | None:
    """The checkpoint in a file, or the position of a folder of shards, which are read by those who take them over.

    None if the bytes are not those that were written.
    """
    try:
        _, found = inspect(path)
        position = CheckpointPosition.model_validate(found) if found is not None else None
        tensors = {} if path.is_dir() or position is None else safetensors.torch.load_file(path)
    except (FileNotFoundError, ValidationError, safetensors.SafetensorError):
        return None
    return Checkpoint(position, tensors, path) if position is not None else None
