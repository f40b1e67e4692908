"""A whole run on a disk that is full for most of a minute: it goes on when there is room, nothing lost or doubled."""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.end_to_end.killing import versions_loaded, wait_versions

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(900)]

EPOCHS = 16
FULL_S = 45.0


def test_a_run_whose_disk_was_full_for_45_seconds_comes_to_its_end(
    project: Any, small_disk: Callable[[int], Any]
) -> None:
    disk = small_disk(256)
    (disk.folder / "w").mkdir()
    (project.folder / ".rollstream").symlink_to(disk.folder / "w")
    configuration = project.configuration(num_epochs=EPOCHS, session_timeout_s=6)
    config = project.write(configuration | {"workflow": "python:game.digits"})
    command = project.start("finetune", "--config_file", str(config), "--result_json_path", str(project.result))
    try:
        wait_versions(project, command, 4)
        disk.fill()
        time.sleep(FULL_S)
        assert command.poll() is None, project.output()
        disk.free()
        began, seen = time.monotonic(), versions_loaded(project)
        wait_versions(project, command, seen)
        print(f"goes on {time.monotonic() - began:.1f} s after there was room")
        assert command.wait(400) == 0, project.output() + project.logs()
    finally:
        command.kill()
        command.wait()
    result = json.loads(project.result.read_text())
    assert (result["status"], result["message"]) == ("completed", "")
    assert "the disk of" in project.output()
    epochs = project.rows("SELECT epoch FROM epoch_summary ORDER BY epoch")
    assert [row["epoch"] for row in epochs] == list(range(EPOCHS))
    for table, key in (("groups", "group_id"), ("batch_members", "trajectory_id")):
        (found,) = project.rows(f"SELECT count(*) AS n, count(DISTINCT {key}) AS d FROM {table}")
        assert found["n"] == found["d"] > 0
    versions = project.rows("SELECT version, is_collected FROM weight_versions ORDER BY version")
    assert [row["version"] for row in versions] == list(range(len(versions)))
    assert [row["version"] for row in versions if row["is_collected"]] == list(range(1, len(versions) - 8))
    assert [row["state"] for row in project.rows("SELECT state FROM runs")] == ["completed"]
