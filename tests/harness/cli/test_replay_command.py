"""The command `replay` where a part of it fails."""

import sys
import threading
from pathlib import Path
from types import FrameType

import pytest
from click.testing import CliRunner

from rollstream.harness.cli import replay as command
from rollstream.schemas.errors import ConfigError


def is_joining(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_name != "join":
        frame = frame.f_back
    return frame is not None


def test_an_error_waits_for_the_thread_that_imports_the_learner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main, has_left, imported = threading.get_ident(), threading.Event(), []

    def import_learner() -> None:
        while not has_left.wait(0.01) and not is_joining(sys._current_frames().get(main)):
            pass
        imported.append(not has_left.is_set())

    monkeypatch.setattr(command, "_load_learner", import_learner)
    error = CliRunner().invoke(command.replay, ["run-1", "--train", "--workspace", str(tmp_path / "none")]).exception
    has_left.set()
    assert isinstance(error, ConfigError)
    assert imported == [True]
