"""Verification in several processes: the report of one, nothing imported from the current folder, failures."""

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollstream.replay import assembly
from rollstream.replay import verify as verification
from rollstream.replay.archive import manifest
from rollstream.replay.archive.log import open_export
from rollstream.replay.report import Report
from rollstream.replay.source import Source, read_run
from rollstream.replay.verify import verify

EXPORT = Path(__file__).parents[2] / "golden" / "exports" / "grpo"
RUN = json.loads((EXPORT / "manifest.json").read_text(encoding="utf-8"))["run_id"]


@pytest.fixture(autouse=True)
def two_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """The export has one partition, which is folded twice here."""
    ranges = assembly.ranges
    monkeypatch.setattr(assembly, "ranges", lambda *given: 2 * ranges(*given))


def verified(workers: int, export: Path = EXPORT) -> tuple[Report, list[str]]:
    """The report, and the messages of its progress."""
    messages: list[str] = []

    async def scenario() -> Report:
        async with open_export(EXPORT) as (log, artifacts):
            events, source = await read_run(log, RUN), Source(export=export)
            return await verify(log, events, artifacts, source=source, workers=workers, on_progress=messages.append)

    return asyncio.run(scenario()), messages


def test_several_processes_report_the_same_as_one() -> None:
    assembly.prepare_processes(Source(export=EXPORT))
    several, messages = verified(2)
    alone, _ = verified(1)
    assert (several.counts, several.differences, several.verdict) == (alone.counts, [], "equal")
    assert sum("steps partition" in text for text in messages) == 2


def test_a_worker_hashes_no_file_that_the_command_has_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[Path] = []
    monkeypatch.setattr(manifest, "hash_file", lambda path: hashed.append(path) or "")
    part = assembly.Range(RUN, 0, 5037, 5042, frozenset())
    assert assembly._fold_alone(Source(export=EXPORT), part).num_records == 5
    assert hashed == []


def test_a_failure_beside_the_processes_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        raise ZeroDivisionError("curation")

    monkeypatch.setattr(verification, "compare_curation", failing)
    with pytest.raises(ZeroDivisionError, match="curation"):
        verified(2)


def test_a_failure_in_a_process_is_raised_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=str(tmp_path / "gone")) as failed:
        verified(2, tmp_path / "gone")
    assert not isinstance(failed.value, BaseExceptionGroup)


def test_processes_import_nothing_from_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "orjson.py").write_text("raise SystemExit('imported from the current folder')\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import os\n"
        "from multiprocessing import forkserver\n"
        "from pathlib import Path\n"
        "from rollstream.replay import assembly\n"
        "from rollstream.replay.source import Source\n"
        "if __name__ == '__main__':\n"
        "    assembly.prepare_processes(Source(export=Path('x')))\n"
        "    assert 'PYTHONSAFEPATH' not in os.environ\n"
        "    from concurrent.futures import ProcessPoolExecutor\n"
        "    import multiprocessing\n"
        "    with ProcessPoolExecutor(1, multiprocessing.get_context('forkserver')) as pool:\n"
        "        print(pool.submit(os.path.basename, 'a/equal').result())\n"
    )
    found = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path / "here", capture_output=True, text=True, timeout=60
    )
    assert (found.stdout, found.stderr) == ("equal\n", "")


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path

import psutil

from rollstream.replay import assembly
from rollstream.replay.source import Source

def die(_):
    print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    parts = [assembly.Range("r", 0, 5037, 5038, frozenset())] * 2
    asyncio.run(assembly.fold_in_processes(Source(export=Path(sys.argv[1])), parts, 2, die))
"""


def test_a_killed_replay_leaves_no_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    command = [sys.executable, str(script), str(EXPORT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        pids = [int(pid) for pid in killed.stdout.readline().split()]
        assert killed.wait(60) == -signal.SIGKILL
    assert len(pids) >= 2
    left = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    alive = psutil.wait_procs(left, timeout=20)[1]
    for process in alive:
        process.kill()
    assert alive == []
