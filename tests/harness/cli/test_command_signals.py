"""Signals to a command: a what-if ends the run that it has begun, and process 1 ends before it has a handler."""

import asyncio
import signal
import subprocess
import sys

import pytest

from rollstream.harness.cli.replay import run_in_order


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_cancels_the_work_and_no_other_task(number: signal.Signals) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may ignore it
    lines: list[str] = []

    async def send() -> None:
        signal.raise_signal(number)
        await asyncio.sleep(0.01)
        lines.append("sent")

    async def work() -> None:
        sending = asyncio.create_task(send())
        try:
            await asyncio.sleep(60)
        finally:
            await sending
            lines.append("ended in order")

    try:
        with pytest.raises(KeyboardInterrupt):
            run_in_order(work())
    finally:
        signal.signal(signal.SIGHUP, before)
    assert lines == ["sent", "ended in order"]


def test_a_hangup_that_is_ignored_ends_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:

        async def work() -> str:
            signal.raise_signal(signal.SIGHUP)
            await asyncio.sleep(0.01)
            return "done"

        assert run_in_order(work()) == "done"
    finally:
        signal.signal(signal.SIGHUP, before)


def test_process_1_ends_at_sigterm_while_a_command_is_imported() -> None:
    program = (
        "import os, signal, time; own = os.getpid(); os.getpid = lambda: 1\n"
        "from rollstream.harness.cli.main import end_at_sigterm; end_at_sigterm()\n"
        "os.kill(own, signal.SIGTERM); time.sleep(60)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 128 + signal.SIGTERM
