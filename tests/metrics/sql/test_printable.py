"""No text of a model or a record makes a terminal do anything."""

import io
import json
import sys

import click
import pytest

from rollstream.metrics.sql.printable import PrintableStream, json_escaped, printable, printable_output, terminal_of

OBEYED = [
    "\x1b[2J",
    "\x1b]0;title\x07",
    "\x9b31m",
    "\x85",
    "\r",
    "\x08",
    "\x7f",
    "\u202e",
    "\u2066",
    "\u200f",
    "\u2028",
]


@pytest.mark.parametrize("text", OBEYED)
def test_terminal_control_characters_are_escaped(text: str) -> None:
    shown = printable(f"a{text}b\n\tc")
    assert shown.replace("\n\t", "").isprintable()
    assert shown.startswith("a\\")
    assert shown.endswith("b\n\tc")


def test_other_text_stays_as_it_is() -> None:
    text = "naïve 東京 🎉 \\x1b {}\n"
    assert printable(text) == text


@pytest.mark.parametrize("text", OBEYED)
def test_json_with_escapes_has_the_same_values(text: str) -> None:
    reported = json_escaped(json.dumps({text: [text]}, ensure_ascii=False, indent=1))
    assert reported.replace("\n", "").isprintable()
    assert json.loads(reported) == {text: [text]}


def test_all_output_of_a_command_is_printable_but_its_own_control_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    with printable_output():
        sys.stdout.write("out\x1b[31m\n")
        click.echo("err\x9b31m", err=True)  # of ESC click itself would take sequences away
        print("printed\r", file=sys.stderr)
        sys.stdout.writelines(["line\u202e\n"])
        terminal_of(sys.stdout).write("\x1b[K")
        assert not hasattr(sys.stdout, "buffer")
    reported = capsys.readouterr()
    assert reported.out == "out\\x1b[31m\nline\\u202e\n\x1b[K"
    assert reported.err == "err\\x9b31m\nprinted\\x0d\n"


def test_a_stream_is_what_it_was_otherwise() -> None:
    inner = io.StringIO()
    stream = PrintableStream(inner)
    assert stream.write("a\x1b") == 2
    assert not stream.isatty()
    assert inner.getvalue() == "a\\x1b"
