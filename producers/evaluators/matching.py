"""Regular expressions and JSON schemas that a record brings, matched in processes with a limit of processor time.

One pattern such as `(a+)+$` would otherwise hold the whole producer. At most `MAX_PROCESSES` are kept; after one that
met its limit the next question starts another.
"""

import atexit
import contextlib
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from rollstream.producers.rollout.rewards import RewardError
from rollstream.schemas.permissions import quoted

CPU_S = 1.0
"""Processor time of one question; a match of an ordinary pattern takes microseconds."""
MEMORY_BYTES = 2 * 1024**3
MAX_PROCESSES = 2
PROGRAM = Path(__file__).with_name("matching_process.py")

_slots = threading.BoundedSemaphore(MAX_PROCESSES)
_idle: list["subprocess.Popen[str]"] = []


def search(location: str, pattern: str, text: str, *, ignore_case: bool, group: int | str) -> tuple[bool, str | None]:
    """Whether a pattern is found in a text, and the text of its group.

    Blocks for up to `CPU_S` of processor time. Raises RewardError naming the place and the pattern if it is not valid
    or takes longer.
    """
    found, taken = _ask(
        f"{location}.pattern: {quoted(pattern)}",
        {"ask": "search", "pattern": pattern, "text": text, "ignore_case": ignore_case, "group": group},
    )
    return found, taken


def last(location: str, pattern: str, text: str) -> str | None:
    """The text of the last match: its one group, else all of it. Blocks and raises as `search` does."""
    asked = {"ask": "last", "pattern": pattern, "text": text}
    taken: str | None = _ask(f"{location}.pattern: {quoted(pattern)}", asked)
    return taken


def is_valid_json(location: str, schema: Any, text: str) -> bool:
    """Whether a text is JSON that a schema accepts. Blocks and raises as `search` does."""
    found: bool = _ask(f"{location}.schema", {"ask": "is_valid", "schema": json.dumps(schema), "text": text})
    return found


def _ask(where: str, question: dict[str, Any]) -> Any:
    with _slots:
        process = _idle_process() or _start()
        try:
            answer = _exchange(process, json.dumps(question))
        except BaseException:
            _end(process)
            raise
        if answer is None:
            raise RewardError(f"{where} {_ending(_end(process))}")
        _idle.append(process)
    if "invalid" in answer:
        raise RewardError(f"{where} {answer['invalid']}")
    if "raised" in answer:
        raise RewardError(f"{where} raised {answer['raised']}; simplify it")
    return answer["value"]


def _idle_process() -> "subprocess.Popen[str] | None":
    while _idle:
        process = _idle.pop()
        if process.poll() is None:
            return process
        _end(process)  # somebody has killed it
    return None


def _start() -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-P", str(PROGRAM), str(CPU_S), str(MEMORY_BYTES)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="ascii",
        process_group=0,  # Ctrl-C is for the process that asks
    )


def _exchange(process: "subprocess.Popen[str]", question: str) -> dict[str, Any] | None:
    """The answer; None if the process ended instead."""
    if process.stdin is None or process.stdout is None:
        raise AssertionError("it was started with both pipes")
    try:
        process.stdin.write(question + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return None
    line = process.stdout.readline()
    return json.loads(line) if line.endswith("\n") else None


def _end(process: "subprocess.Popen[str]") -> int:
    """The exit status of a process that is to be gone."""
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
    if process.stdout is not None:
        process.stdout.close()
    return process.wait()


def _ending(status: int) -> str:
    if status == -signal.SIGPROF:
        return f"takes more than {CPU_S:g} s of CPU time on one answer; simplify it, for example avoid nested repeats"
    return f"cannot be matched: its process ended with status {status}; simplify it"


@atexit.register
def _end_all() -> None:
    while _idle:
        _end(_idle.pop())
