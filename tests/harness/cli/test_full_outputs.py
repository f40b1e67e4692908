"""Outputs that a full disk refuses: each is named in the error, and the file before it stays."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rollstream.harness.cli.inspect import tiny_model
from rollstream.harness.cli.main import one_line
from rollstream.harness.services.workspace import Workspace

REMEDY = "No space left on device; free some space there, or write to another disk"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_standard_output_is_named_without_a_traceback(unbuffered: str) -> None:
    command = [sys.executable, "-m", "rollstream.harness.cli.main", "schema"]
    with Path("/dev/full").open("w") as full:
        environ = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environ, check=False)
    assert (done.returncode, done.stderr) == (1, f"error: standard output: {REMEDY}\n")


def test_the_workspaces_lock_and_a_tiny_model_are_named(small_disk: Callable[[int], Any]) -> None:
    disk = small_disk(1)
    disk.fill()
    with pytest.raises(OSError, match="No space left") as raised, Workspace(disk.folder).in_use("finetune"):
        pass
    assert one_line(raised.value) == f"{disk.folder / 'finetune.lock'}: {REMEDY}"
    error = CliRunner().invoke(tiny_model, [str(disk.folder / "tiny")]).exception
    assert error is not None
    assert one_line(error).startswith(f"{disk.folder / 'tiny'}")
    assert one_line(error).endswith(REMEDY)
