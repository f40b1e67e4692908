"""The checkpoints of a model group as files: which there are, and whether they are as written. Loads no tensors."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from rollstream.eventlog.files import sha256_of

SUFFIX = ".safetensors"
WEIGHTS = ".weights"
"""Suffix of a safetensors file of the weights of one version, which its checkpoint names instead of holding them: it
often is the version's artifact by a second name."""
SHARDS = ".shards"
"""Suffix of a folder that several processes wrote."""
CONTENT = "content.json"
"""File in such a folder with the position, and the hashes of the other files."""


def checkpoints_in(folder: Path) -> Iterator[tuple[int, Path]]:
    """Version and path of each checkpoint of a model group's folder, from old to new."""
    for path in sorted([*folder.glob(f"v*{SUFFIX}"), *folder.glob(f"v*{SHARDS}")]):
        yield from _versioned(path)


def leftovers_in(folder: Path) -> list[Path]:
    """Folders of shards that are half written or half removed, as a kill leaves them: their names are hidden."""
    return [path for path in sorted(folder.glob(".v*")) if path.is_dir()]


def inspect(path: Path) -> tuple[str, dict[str, Any] | None]:
    """The hash of the checkpoint found there, and its position; without one if something is not as it was written.

    Raises FileNotFoundError if the checkpoint is gone.
    """
    file = path / CONTENT if path.is_dir() else path
    found = sha256_of(file)
    if found != _named_sha256(path):
        return found, None
    if file == path:
        position, weights = orjson.loads(_metadata(path)["position"]), weights_of(path)
        expected = {} if weights is None else {weights: _named_sha256(weights)}
    else:
        content = orjson.loads(file.read_bytes())
        position, expected = content["position"], {path / name: sha256 for name, sha256 in content["sha256"].items()}
    for other, sha256 in expected.items():
        changed = sha256_of(other) if other.exists() else "nothing"
        if changed != sha256 and path.exists():
            return f"{other.name}: {changed}", None
    return found, position


def position_in(path: Path) -> dict[str, Any]:
    """Position of a checkpoint, by what is read of it at once, before any of it is hashed; empty if that fails."""
    try:
        found: Any = orjson.loads((path / CONTENT).read_bytes()) if path.is_dir() else _metadata(path)
        position = found["position"] if path.is_dir() else orjson.loads(found["position"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return {}
    return position if isinstance(position, dict) else {}


def weights_of(path: Path) -> Path | None:
    """The file of weights that a checkpoint's file names; None if it holds them itself."""
    name = _metadata(path).get("weights")
    return path.with_name(Path(name).name) if name else None


def weights_in(folder: Path) -> Iterator[tuple[int, Path]]:
    """Version and path of each file of weights that checkpoints of a model group's folder may name."""
    for path in folder.glob(f"v*{WEIGHTS}"):
        yield from _versioned(path)


def _versioned(path: Path) -> Iterator[tuple[int, Path]]:
    number = path.name[1:].split(".", 1)[0]
    if number.isdigit():
        yield int(number), path


def _named_sha256(path: Path) -> str:
    return path.name.split(".")[1]


def _metadata(path: Path) -> dict[str, str]:
    """Metadata from the header of a safetensors file."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = orjson.loads(file.read(min(size, path.stat().st_size)))  # a damaged size may be anything
    return header["__metadata__"]
