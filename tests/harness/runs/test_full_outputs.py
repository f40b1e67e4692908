"""Outputs that a full disk refuses: each is named in the error, and the file before it stays."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rollstream.harness.cli.main import error_line, rollstream
from rollstream.harness.services.workspace import Workspace
from rollstream.metrics.projection.database import Database

REMEDY = "No space left on device; free some space there, or write to another disk"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_standard_output_is_named_without_a_traceback(unbuffered: str) -> None:
    command = [sys.executable, "-m", "rollstream.harness.cli.main", "schema"]
    with Path("/dev/full").open("w") as full:
        env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=env, check=False)
    assert (done.returncode, done.stderr) == (1, f"error: standard output: {REMEDY}\n")


def test_the_workspaces_lock_and_a_tiny_model_are_named(small_disk: Callable[[int], Any]) -> None:
    disk = small_disk(1)
    disk.fill()
    with pytest.raises(OSError, match="No space left") as raised, Workspace(disk.folder).in_use("finetune"):
        pass
    assert error_line(raised.value) == f"{disk.folder / 'finetune.lock'}: {REMEDY}"
    error = CliRunner().invoke(rollstream, ["tiny-model", str(disk.folder / "tiny")]).exception
    assert error is not None
    assert error_line(error).startswith(f"{disk.folder / 'tiny'}")
    assert error_line(error).endswith(REMEDY)


def test_a_query_that_a_full_disk_cuts_off_leaves_the_file_that_was_there(
    tmp_path: Path, small_disk: Callable[[int], Any]
) -> None:
    Database(tmp_path / "metrics.duckdb").close()
    disk = small_disk(1)
    path = disk.folder / "rows.json"
    path.write_text("[]")
    query = ["SELECT repeat('x', 2000000) AS x", "--format", "json", "--no-wait", "-w", str(tmp_path)]
    error = CliRunner().invoke(rollstream, ["sql", *query, "--output", str(path)]).exception
    assert error is not None
    assert error_line(error) == f"{path}: {REMEDY}"
    assert {one.name: one.read_text() for one in disk.folder.iterdir()} == {"rows.json": "[]"}
