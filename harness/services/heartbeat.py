"""The sign of life of a long-running service: a file that its event loop touches, read by `rollstream health`.

It says that the loop turns, not that the work goes on: lag is what `rollstream status` shows.
"""

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

INTERVAL_S = 2.0
FRESH_S = 30.0
"""Older signs mean that the process is gone or stuck (a training step may hold the loop for a while)."""


class Sign(NamedTuple):
    """The newest sign of life of a service."""

    service: str
    name: str
    pid: int
    age_s: float

    @property
    def is_alive(self) -> bool:
        """Whether the service gave a sign lately."""
        return self.age_s <= FRESH_S


async def beat(folder: Path, service: str, name: str) -> None:
    """Give signs of life until cancelled, then take the file away."""
    folder.mkdir(parents=True, exist_ok=True)
    path, temporary = folder / f"{name}.json", folder / f".{name}.tmp"
    try:
        while True:
            temporary.write_text(json.dumps({"service": service, "pid": os.getpid()}), encoding="utf-8")
            temporary.replace(path)
            await asyncio.sleep(INTERVAL_S)
    finally:
        path.unlink(missing_ok=True)


def read_sign(folder: Path, name: str) -> Sign | None:
    """The newest sign of one service, None if there is none."""
    path = folder / f"{name}.json"
    try:
        told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return Sign(str(told["service"]), name, int(told["pid"]), max(0.0, time.time() - path.stat().st_mtime))
    except (FileNotFoundError, ValueError, KeyError):
        return None


def read_signs(folder: Path) -> list[Sign]:
    """The newest sign of every service of a workspace, by name."""
    found = [read_sign(folder, path.stem) for path in sorted(folder.glob("*.json"))]
    return [sign for sign in found if sign is not None]
