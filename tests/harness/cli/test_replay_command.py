"""The command `replay` where a part of it fails."""

import sys
import threading
from pathlib import Path
from types import FrameType

import pytest
from click.testing import CliRunner

from rollstream.harness.cli import replay as command
from rollstream.replay.archive.manifest import read_manifest
from rollstream.replay.training import versions_asked
from rollstream.schemas.errors import ConfigError

EXPORT = Path(__file__).parents[2] / "golden" / "exports" / "grpo"


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


def test_a_verification_is_reported_where_there_is_nothing_to_train(tmp_path: Path) -> None:
    asked = [read_manifest(EXPORT).run_id, "--export", str(EXPORT), "--workspace", str(tmp_path), "--any-libraries"]
    result = CliRunner().invoke(command.replay, [*asked, "--verify", "--train", "--steps", "98:99", "--trust"])
    assert "equal: run" in result.output
    with pytest.raises(ConfigError, match="has no version 98; give 1 to"):
        raise result.exception or AssertionError


def test_a_run_that_has_ended_will_train_nothing_later() -> None:
    for has_ended, reported in (True, "nothing; use --verify alone"), (False, "nothing yet; repeat this once"):
        with pytest.raises(ConfigError, match=reported):
            versions_asked("run-1", [], None, None, None, has_ended=has_ended)
