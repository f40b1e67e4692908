"""A server's child processes end with the server, however that ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rollstream.eventlog.broker import guard

LEAVES = "setsid sh -c 'sleep 1000 & sleep 1000' & echo $! > {pids}.new; mv {pids}.new {pids}; exec sleep 1000"
"""A server whose two workers have a session of their own."""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, None], ids=["killed", "ended", "parent stops it"])
def test_child_processes_end_with_their_server(tmp_path: Path, number: signal.Signals | None) -> None:
    pids, log = tmp_path / "pids", tmp_path / "log"
    command = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(log)]
    running = subprocess.Popen(
        [*command, "sh", "-c", LEAVES.format(pids=pids)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert running.stdin is not None
    assert running.stdout is not None
    with running.stdout as output:
        server = psutil.Process(int(output.readline()))
    while not pids.exists() or len(psutil.Process(int(pids.read_text())).children()) < 2:
        assert running.poll() is None
    left = [psutil.Process(int(pids.read_text())), *psutil.Process(int(pids.read_text())).children()]
    with running.stdin:
        if number is not None:
            server.send_signal(number)
            running.wait(timeout=30)
    running.wait(timeout=30)
    assert not [one for one in [server, *left] if one.is_running()]
