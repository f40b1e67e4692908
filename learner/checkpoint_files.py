"""The checkpoints of a model group as files: which there are, and whether they are as written. Loads no tensors."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

SUFFIX = ".safetensors"
SHARDS = ".shards"
"""Of a folder that several processes wrote."""
CONTENT = "content.json"
"""In such a folder: the position, and the hashes of the other files."""


def checkpoints_in(folder: Path) -> Iterator[tuple[int, Path]]:
    """Version and path of each checkpoint of a model group's folder, from old to new."""
    for path in sorted([*folder.glob(f"v*{SUFFIX}"), *folder.glob(f"v*{SHARDS}")]):
        number = path.name[1:].split(".", 1)[0]
        if number.isdigit():
            yield int(number), path


def inspect(path: Path) -> tuple[str, dict[str, Any] | None]:
    """The hash of what is there, and the position in it; without one if something is not as it was written.

    Raises FileNotFoundError if the checkpoint is gone.
    """
    file = path / CONTENT if path.is_dir() else path
    found = _sha256(file)
    if found != path.name.split(".")[1]:
        return found, None
    if file == path:
        return found, _position(path)
    content = orjson.loads(file.read_bytes())
    for name, sha256 in content["sha256"].items():
        shard = path / name
        changed = _sha256(shard) if shard.exists() else "nothing"
        if changed != sha256 and path.exists():
            return f"{name}: {changed}", None
    return found, content["position"]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _position(path: Path) -> dict[str, Any]:
    """From the header of a safetensors file."""
    with path.open("rb") as file:
        header = orjson.loads(file.read(int.from_bytes(file.read(8), "little")))
    return orjson.loads(header["__metadata__"]["position"])
