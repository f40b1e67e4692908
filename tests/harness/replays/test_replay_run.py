"""A replay's beginning and end: imports in another thread, what-ifs' changes, and the metrics beside their service."""

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollstream.harness.replays.run import ReplayRequest, project, replay_run
from rollstream.harness.replays.what_if import means
from rollstream.harness.services.workspace import Workspace
from rollstream.metrics.sql.client import is_caught_up, query
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


SERVICE = """
import asyncio, pathlib, sys
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.metrics import service
asyncio.run(service.run(MemoryLog(num_partitions=1), pathlib.Path(sys.argv[1])))
"""


@pytest.mark.slow
def test_metrics_that_a_service_has_are_left_to_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = Source(export=EXPORT)
    with subprocess.Popen([sys.executable, "-c", SERVICE, str(tmp_path)]) as child:
        try:
            while not is_caught_up(tmp_path):
                assert child.poll() is None
                time.sleep(0.05)
            asyncio.run(project(source, Workspace(tmp_path)))
            assert query(tmp_path, "SELECT count(*) FROM runs").rows == ((0,),)
        finally:
            child.terminate()
    alone = Workspace(tmp_path / "alone")
    alone.create()
    asyncio.run(project(source, alone))
    assert query(alone.folder, "SELECT count(*) FROM runs").rows == ((1,),)
    assert not caplog.records


def test_means_are_of_the_steps_that_have_the_metric() -> None:
    trained = {"reward/mean": 1.0, "policy/ess": 0.5}
    adopted: dict[str, float] = {}
    assert means([trained, adopted, {**trained, "reward/mean": 2.0}]) == {"reward/mean": 1.5, "policy/ess": 0.5}
    assert means([adopted]) == {}
