"""What is looked at around a run: room on the disk."""

import io
from pathlib import Path

from rollstream.harness.display import Display
from rollstream.harness.progress import Progress
from rollstream.harness.surroundings import has_room


def test_a_full_disk_pauses_the_run_with_one_message_until_there_is_room(tmp_path: Path) -> None:
    shown = io.StringIO()
    display = Display(shown, clock=lambda: 1.0)
    paused = f"paused: less than 200% of the disk of {tmp_path} is free"
    assert not has_room(tmp_path, display, 2.0)
    assert not has_room(tmp_path, display, 2.0)
    assert shown.getvalue() == f"{paused}\n"
    display.update(Progress("r"))
    assert has_room(tmp_path, display, 0.0)
    display.finish(Progress("r"))
    assert shown.getvalue().splitlines() == [paused, "waiting for the log"]
