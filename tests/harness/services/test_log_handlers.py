"""Logs whose disk is full: reported once, lines dropped, and on again when there is room."""

import logging
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from rollstream.harness.services.log_handlers import MAX_REMEMBERED, LogFileHandler, Repeats, StreamHandler

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


def line(text: str, at_s: float, *, name: str = "aiokafka") -> logging.LogRecord:
    record = logging.LogRecord(name, logging.ERROR, "client.py", 1, "Unable connect to node with id %s", (text,), None)
    record.created = at_s
    return record


def test_an_outages_equal_lines_of_a_library_are_written_once_in_a_while_with_their_number() -> None:
    repeats = Repeats()
    written = [repeats.thinned(line("1", 100 + n / 300)) for n in range(4000)]
    found = [one.getMessage() for one in written if one is not None]
    text = "Unable connect to node with id 1"
    assert found == [text, f"{text} (and 2999 equal lines in the last 10 s)"]
    assert repeats.thinned(line("2", 100.5)) is not None, "another line"
    assert repeats.thinned(line("1", 50)) is not None, "the clock was set back"


def test_no_line_of_our_own_is_left_out_and_no_more_than_some_lines_are_remembered() -> None:
    repeats = Repeats()
    own = line("1", 100, name="rollstream.eventlog.kafka.client")
    assert all(repeats.thinned(own) is own for _ in range(3))
    for number in range(10 * MAX_REMEMBERED):
        assert repeats.thinned(line(str(number), 100)) is not None
    assert len(repeats._known) == MAX_REMEMBERED
    for error in (ValueError("one"), ValueError("another")):
        raised = line("1", 100)
        raised.exc_info = (ValueError, error, None)
        assert repeats.thinned(raised) is raised
    for _ in range(2):
        reported = line("1", 100)
        reported.levelno = logging.INFO
        assert repeats.thinned(reported) is reported, "what an environment reports"


def test_services_and_finetune_write_repeated_lines_of_libraries_once(capsys: pytest.CaptureFixture[str]) -> None:
    library = logging.getLogger("some.library")
    library.propagate = False
    handler = StreamHandler(sys.stderr)
    library.addHandler(handler)
    try:
        for _ in range(100):
            library.error("no connection")
    finally:
        library.removeHandler(handler)
        library.propagate = True
    assert capsys.readouterr().err == "no connection\n"
