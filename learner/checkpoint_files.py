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
    data = (path / CONTENT if path.is_dir() else path).read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if found != path.name.split(".")[1]:
        return found, None
    if not path.is_dir():
        header = orjson.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return found, orjson.loads(header["__metadata__"]["position"])
    content = orjson.loads(data)
    for name, sha256 in content["sha256"].items():
        file = path / name
        changed = hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else "nothing"
        if changed != sha256 and path.exists():
            return f"{name}: {changed}", None
    return found, content["position"]
