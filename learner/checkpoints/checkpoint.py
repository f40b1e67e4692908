"""Checkpoints: weights, optimizer, random state and position in one file, or in a folder of shards where several
processes train together. Whole or not there at all.

A file is named by version and hash: `v00000012.<sha256>.safetensors`. Where the published weights are exactly those
that are trained, they are a file of their own, `v00000012.<sha256>.weights`, with a second name as artifact. What a
checkpoint means to the log is in `commit`.
"""

import hashlib
import logging
import shutil
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar
from urllib.parse import quote, unquote

import orjson
import safetensors.torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from rollstream.eventlog.blocking_calls import NeededSpace, Retry, retrying
from rollstream.eventlog.files import (
    HashedFile,
    give_name,
    half_written,
    linked,
    remove_whole,
    sync_folder,
    write_hashed,
    write_whole,
)
from rollstream.learner.checkpoints.checkpoint_files import (
    CONTENT,
    SHARDS,
    SUFFIX,
    WEIGHTS,
    checkpoints_in,
    inspect,
    leftovers_in,
    position_in,
    weights_in,
    weights_of,
)
from rollstream.learner.model.tensor_file import pieces, published_pieces
from rollstream.schemas.events import StepTrained

logger = logging.getLogger(__name__)
T = TypeVar("T")


class CheckpointPosition(BaseModel):
    """Position of a checkpoint in the log."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    job_id: str
    version: int
    """Version of the weights."""
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
    weights: HashedFile | None = None
    """A file of the same weights, to be linked in place of writing them again."""
    path: Path | None = None
    """Path from which it was read."""
    write: Callable[[Path], Mapping[str, str]] | None = None
    """Function that writes the shards of all processes into a folder, if there are several; returns the sha256 of each
    file.
    """

    @property
    def size_bytes(self) -> int:
        """About what its file takes."""
        return sum(tensor.nbytes for name, tensor in self.tensors.items() if not self._is_linked(name))

    def _is_linked(self, name: str) -> bool:
        return self.weights is not None and name.startswith("weights/")

    @property
    def own_tensors(self) -> dict[str, Tensor]:
        """Tensors that are not in any file yet."""
        return {name: tensor for name, tensor in self.tensors.items() if not self._is_linked(name)}


def part(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Tensors whose names begin with `name/`, without it."""
    prefix = f"{name}/"
    return {one.removeprefix(prefix): value for one, value in tensors.items() if one.startswith(prefix)}


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
        version, tensors = checkpoint.position.version, checkpoint.tensors
        if (weights := checkpoint.weights) is not None:
            name = f"v{version:08d}.{weights.sha256}{WEIGHTS}"
            if linked(weights.path, self.path / name):
                metadata["weights"], tensors = name, checkpoint.own_tensors
        written = write_hashed(pieces(tensors, metadata), self.path, lambda sha256: f"v{version:08d}.{sha256}{SUFFIX}")
        sync_folder(self.path)
        return written.path

    def write_weights(self, version: int, tensors: Mapping[str, Tensor]) -> HashedFile:
        """Write a version's weights as they are published, hashed meanwhile: for `save` and the artifact store to link.

        It is for the caller to remove. Raises OSError.
        """
        name = f"v{version:08d}.%s.aside"
        return write_hashed(published_pieces(tensors), self.path, lambda sha256: name % sha256)

    def _save_shards(self, position: CheckpointPosition, write: Callable[[Path], Mapping[str, str]]) -> Path:
        """A folder of shards and of their hashes, under the hash of the latter."""
        temporary = self.path / f".v{position.version:08d}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        hashes = dict(sorted(write(temporary).items()))
        content = orjson.dumps({"position": position.model_dump(mode="json"), "sha256": hashes})
        write_whole(temporary / CONTENT, content, is_private=False)
        path = self.path / f"v{position.version:08d}.{hashlib.sha256(content).hexdigest()}{SHARDS}"
        give_name(temporary, path)
        return path

    def newest(
        self,
        *,
        job_id: str,
        max_version: int,
        digests: Mapping[int, str] = MappingProxyType({}),
        steps: Mapping[int, StepTrained] | None = None,
    ) -> Checkpoint | None:
        """The newest checkpoint of a job that is not above `max_version` and whose bytes have not changed.

        Only those of the job are hashed and loaded. A file that was changed, or is behind another manifest than that of
        the log, is named in a warning, and the one before it is used. `digests`: of manifests in the log, by index.
        `steps`: the job's recorded ones by version; a checkpoint of other weights is passed over, for the folder may
        hold those of another run with the same id.
        """
        for version, path in reversed(list(checkpoints_in(self.path))):
            if version > max_version or (found := position_in(path)).get("job_id", job_id) != job_id:
                continue
            if digests.get(found.get("next_index", 0) - 1) not in (None, found.get("previous_sha256")):
                logger.warning("checkpoint %s is behind a manifest that the log has otherwise; passed over", path)
                continue
            if steps is not None and not _has_weights(found, steps.get(version)):
                logger.warning(
                    "checkpoint %s has weights that the log does not record for version %s; passed over", path, version
                )
                continue
            checkpoint = read(path) if found else None
            if checkpoint is not None:
                return checkpoint
            logger.warning("checkpoint %s is damaged; going back to the one before it", path)
        return None

    def prune(self, *, newest: int, keep_last: int, keep_every: int, needed: Collection[int] = ()) -> None:
        """Remove all but the newest `keep_last`, every version that `keep_every` divides, and those `needed`.

        `newest`: version that the log has reached. Those above it are left of a log that was restored to an earlier
        point since; they are removed and do not count. What a kill left of folders of shards and of half written files
        goes too: only this learner writes here, and it is not writing now.
        """
        for path in leftovers_in(self.path):
            shutil.rmtree(path, ignore_errors=True)
        for path in half_written(self.path):
            path.unlink(missing_ok=True)
        files = list(checkpoints_in(self.path))
        above = {version for version, _ in files if version > newest}
        reached = sorted({version for version, _ in files} - above)
        kept = {*needed, *reached[-keep_last:]} - above
        for version, path in files:
            if version in above:
                logger.warning("checkpoint %s removed: the log goes up to v%s; was it restored?", path, newest)
            if version in above or (version not in kept and version % keep_every):
                remove_whole(path)
        last, left = max(reached, default=-1), set(self.versions())
        for version, path in list(weights_in(self.path)):
            if (version < last or version in above) and version not in left:
                path.unlink(missing_ok=True)

    def versions(self) -> list[int]:
        """Versions that are kept, from old to new."""
        return [version for version, _ in checkpoints_in(self.path)]


class CheckpointWriter:
    """Writes into the folder of a model group, in a thread that is given, once there is space on a full disk.

    Raises NotNeededError if nobody needs it any more by then.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        retry: Retry,
        in_thread: Callable[..., Awaitable[Any]],
        is_needed: Callable[[], Awaitable[bool]],
    ) -> None:
        self._is_needed = is_needed
        self._folder = folder
        self._retry = retry
        self._in_thread = in_thread

    async def weights(self, version: int, tensors: Mapping[str, Tensor]) -> HashedFile:
        """Write weights with the folder's `write_weights`, in another thread."""
        write = partial(self._folder.write_weights, version, tensors)
        return await self._written(write, f"weights v{version}", sum(tensor.nbytes for tensor in tensors.values()))

    async def checkpoint(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint with the folder's `save`, in another thread."""
        write = partial(self._folder.save, checkpoint)
        await self._written(write, f"checkpoint v{checkpoint.position.version}", checkpoint.size_bytes)

    async def _written(self, write: Callable[[], T], what: str, size_bytes: int) -> T:
        doing, space = f"write {what} of {unquote(self._folder.path.name)}", NeededSpace(self._folder.path, size_bytes)
        return await retrying(
            write, doing, self._retry, space=space, in_thread=self._in_thread, is_needed=self._is_needed
        )


def _has_weights(position: Mapping[str, Any], recorded: StepTrained | None) -> bool:
    """Whether a checkpoint has the weights of a recorded step; one without a readable position is not judged here."""
    step = position.get("step")
    if not isinstance(step, dict) or "weights_sha256" not in step:
        return True
    return recorded is not None and step["weights_sha256"] == recorded.weights_sha256


def read(path: Path) -> Checkpoint | None:
    """The checkpoint in a file, or the position of a folder of shards, which are read by those who take them over.

    None if the bytes are not those that were written.
    """
    try:
        _, found = inspect(path)
        position = CheckpointPosition.model_validate(found) if found is not None else None
        tensors = {} if path.is_dir() or position is None else _tensors(path)
    except (FileNotFoundError, ValidationError, safetensors.SafetensorError):
        return None
    return Checkpoint(position, tensors, path=path) if position is not None else None


def _tensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a checkpoint's file, and of the file of weights that it names."""
    found, weights = safetensors.torch.load_file(path), weights_of(path)
    named = {} if weights is None else safetensors.torch.load_file(weights)
    return found | {f"weights/{name}": tensor for name, tensor in named.items()}
