"""One line of progress: replaced in place on a terminal as wide as it is, plain lines elsewhere."""

import errno
import fcntl
import io
import os
import struct
import subprocess
import sys
import termios

import pytest

from rollstream.harness.services.live_line import PLAIN_INTERVAL_S, LiveLine
from rollstream.metrics.sql.table import table

CLEAR = "\r\x1b[2K"


def on_a_terminal(code: str, *, columns: int = 40, **variables: str) -> str:
    """Output of a program on a terminal of that width; a line feed is one."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    known = {name: text for name, text in os.environ.items() if name not in ("COLUMNS", "LINES")}
    program = [sys.executable, "-c", f"import sys\nfrom {LiveLine.__module__} import LiveLine\n{code}"]
    done = subprocess.run(
        program, stdin=slave, stdout=slave, stderr=slave, env={**known, "TERM": "xterm", **variables}, check=True
    )
    assert done.returncode == 0
    os.close(slave)
    found = b""
    try:
        while part := os.read(master, 4096):
            found += part
    except OSError:
        pass  # nobody holds the other end any more
    os.close(master)
    return found.decode().replace("\r\n", "\n")


def test_on_a_terminal_a_line_replaces_the_one_before_and_printed_lines_stay() -> None:
    code = (
        "line = LiveLine(sys.stdout)\nline.show('a')\nline.show('b')\n"
        "line.print('stays')\nline.show('c')\nline.finish()"
    )
    assert on_a_terminal(code) == f"a{CLEAR}b{CLEAR}stays\nc\n"
    assert on_a_terminal("line = LiveLine(sys.stderr)\nline.show('a')\nline.clear()\nline.clear()") == f"a{CLEAR}"


def test_a_line_wider_than_the_terminal_is_cut_so_that_it_can_be_cleared() -> None:
    assert on_a_terminal("LiveLine(sys.stdout).show('x' * 300)", columns=20) == "x" * 18 + "…"
    assert on_a_terminal("LiveLine(sys.stdout).show('東' * 300)", columns=20) == "東" * 9 + "…"


def test_a_shown_text_is_escaped_and_not_read_as_markup() -> None:
    code = "LiveLine(sys.stdout).show('[bold]a[/bold] :smile:\\x1b[2J\\r\\nb')"
    assert on_a_terminal(code, columns=80) == "[bold]a[/bold] :smile:\\x1b[2J\\x0d b"


def test_the_live_line_still_moves_the_cursor_on_a_printable_stream() -> None:
    code = (
        "from rollstream.metrics.sql.printable import printable_output\n"
        "with printable_output():\n    line = LiveLine(sys.stdout)\n    line.show('a')\n    line.show('b\\x1b')"
    )
    assert on_a_terminal(code) == f"a{CLEAR}b\\x1b"


def test_a_terminal_without_a_cursor_that_moves_gets_plain_lines() -> None:
    assert on_a_terminal("line = LiveLine(sys.stdout)\nline.show('a')\nline.show('b')", TERM="dumb") == "a\nb\n"


def test_no_secret_is_shown() -> None:
    assert on_a_terminal("LiveLine(sys.stdout).show('key hunter2hunter2')", columns=80, HF_TOKEN="hunter2hunter2") == (
        "key ${HF_TOKEN}"
    )


def test_elsewhere_progress_is_a_plain_line_an_interval_and_never_cut() -> None:
    now, stream = [0.0], io.StringIO()
    line = LiveLine(stream, lambda: now[0])
    for moment in (0.0, 1.0, PLAIN_INTERVAL_S, PLAIN_INTERVAL_S + 1):
        now[0] = moment
        line.show_when_due(f"{moment} " + "x" * 300)
    line.clear()
    line.finish()
    assert stream.getvalue() == "".join(f"{moment} {'x' * 300}\n" for moment in (0.0, PLAIN_INTERVAL_S))


def test_elsewhere_the_same_progress_is_written_once_or_not_at_all() -> None:
    stream = io.StringIO()
    line = LiveLine(stream)
    line.show("a")
    line.show("a")
    silent = LiveLine(stream, is_live_only=True)
    silent.show("b")
    silent.print("c")
    assert stream.getvalue() == "a\nc\n"


def test_wide_characters_stay_aligned_and_nothing_is_markup() -> None:
    assert table(("name", "n"), [("東京", "1"), ("[red]", "10"), ("a\n\tb\x1b", "2")], (False, True)) == (
        "name        n\n東京        1\n[red]      10\na\\n b\\x1b   2"
    )


class Refusing(io.StringIO):
    """A file on a disk that is full for a while."""

    is_full = True

    def flush(self) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_stream_that_refuses_output_is_reported_once_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    stream = Refusing()
    line = LiveLine(stream)
    with caplog.at_level("INFO"):
        line.show("a")
        line.print("b")
        line.finish()
        stream.is_full = False
        line.show("c")
    assert [record.getMessage() for record in caplog.records] == [
        "the output cannot be written ([Errno 28] No space left on device); the command continues without it",
        "not shown: b",
    ]
    assert stream.getvalue().endswith("c\n")


def test_output_that_was_refused_does_not_change_the_exit_status() -> None:
    code = f"import sys\nfrom {LiveLine.__module__} import LiveLine\n"
    code += "line = LiveLine(sys.stdout)\nline.print('a')\nline.let_go()\nsys.stdout.flush()"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 0
    assert b"cannot be written" in done.stderr
