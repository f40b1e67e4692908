"""Logs whose disk is full: reported once, lines dropped, and on again when there is room."""

import logging
from contextlib import suppress
from pathlib import Path

import pytest

from rollstream.harness.services.log_handlers import LogFileHandler, StreamHandler

logger = logging.getLogger("rollstream.test")


def test_a_log_on_a_full_disk_reports_it_once_and_goes_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "finetune.log"
    to_file, to_terminal = LogFileHandler(path), logging.StreamHandler()
    monkeypatch.setattr(logging.root, "handlers", [to_file, to_terminal])
    assert to_file.stream is not None
    to_file.stream.close()
    to_file.stream = Path("/dev/full").open("w")  # noqa: SIM115 - the handler closes it
    for number in range(3):
        logger.warning("line %d", number)
    reported = capsys.readouterr().err
    assert "Traceback" not in reported
    assert reported.count(f"cannot write {path}: [Errno 28] No space left on device; its lines are dropped") == 1
    assert [line for line in reported.splitlines() if line.startswith("line")] == ["line 0", "line 1", "line 2"]
    with suppress(OSError):
        to_file.stream.close()  # as a rotation does
    logger.warning("there is room")
    to_file.close()
    assert path.read_text() == "there is room\n"


def test_a_stream_on_a_full_disk_prints_no_tracebacks_and_other_errors_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = Path("/dev/full").open("w")  # noqa: SIM115 - its end raises
    monkeypatch.setattr(logging.root, "handlers", [StreamHandler(stream)])
    logger.warning("line")
    assert capsys.readouterr().err == ""
    logger.warning("no number: %d", "a")
    assert "TypeError" in capsys.readouterr().err
    with suppress(OSError):
        stream.close()
