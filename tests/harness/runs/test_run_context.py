"""Checks around a run: space on the disk."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollstream.eventlog.disk_space import disk_of, disks_of
from rollstream.harness.runs.display import Display
from rollstream.harness.runs.progress import Progress
from rollstream.harness.runs.run_context import has_free_space


def test_a_full_disk_pauses_the_run_with_one_message_until_there_is_room(tmp_path: Path) -> None:
    shown = io.StringIO()
    display = Display(shown, clock=lambda: 1.0)
    paused = f"paused: less than 200% of the disk of {tmp_path} is free; free some space"
    assert not has_free_space([tmp_path], display, 2.0)
    assert not has_free_space([tmp_path], display, 2.0)
    assert shown.getvalue() == f"{paused}\n"
    display.update(Progress("r"))
    assert has_free_space([tmp_path], display, 0.0)
    display.finish(Progress("r"))
    assert shown.getvalue().splitlines() == [paused, "waiting for the log"]


@pytest.mark.slow
def test_a_disk_of_artifacts_or_output_alone_pauses_the_run(tmp_path: Path, small_disk: Callable[[int], Any]) -> None:
    shown = io.StringIO()
    display = Display(shown, clock=lambda: 1.0)
    disk = small_disk(1)
    folders = [tmp_path / "workspace", disk.folder / "artifacts" / "not made yet"]
    assert has_free_space(folders, display, 0.001)
    disk.fill()
    assert not has_free_space(folders, display, 0.001)
    assert shown.getvalue() == f"paused: less than 0% of the disk of {folders[1]} is free; free some space\n"
    disk.free()
    assert has_free_space(folders, display, 0.001)


def test_a_disk_is_looked_at_once_however_many_folders_lie_on_it(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b" / "c"]
    assert [disk.folder for disk in disks_of(folders)] == [tmp_path / "a"]
    assert disk_of(tmp_path / "b").total_bytes == disk_of(tmp_path).total_bytes > 0
