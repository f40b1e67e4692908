"""A replay that trains imports the learner only once no other thread is importing it."""

import asyncio
import json
from pathlib import Path

import pytest

from rollstream.harness.replays.run import ReplayRequest, replay_run
from rollstream.harness.services.workspace import Workspace
from rollstream.replay.source import Source

EXPORT = Path(__file__).parents[2] / "golden" / "exports" / "grpo"


class StillImportingError(Exception):
    """The other thread has not finished."""


def test_training_waits_for_whoever_imports_the_learner(tmp_path: Path) -> None:
    run_id = json.loads((EXPORT / "manifest.json").read_text(encoding="utf-8"))["run_id"]
    request = ReplayRequest(run_id, verify=False, train=True)

    def wait() -> None:
        raise StillImportingError

    with pytest.raises(StillImportingError):
        asyncio.run(replay_run(Source(export=EXPORT), Workspace(tmp_path), request, print, print, wait))
