"""`make demo` broken off, by Ctrl-C (which reaches all of the terminal's processes) or SIGTERM: its run is kept."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rollstream.eventlog.broker.lock import find_running

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo.py"
AS_A_TERMINAL_STARTS_IT = "import signal, sys, runpy; signal.signal(signal.SIGINT, signal.default_int_handler); "
RUN_IT = "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"

pytestmark = [pytest.mark.kafka, pytest.mark.slow]


def press_ctrl_c(demo: "subprocess.Popen[bytes]") -> None:
    os.killpg(demo.pid, signal.SIGINT)


def end_make(demo: "subprocess.Popen[bytes]") -> None:
    demo.terminate()


@pytest.mark.parametrize(("how", "status"), [(press_ctrl_c, 130), (end_make, 143)])
def test_an_interrupted_demo_ends_in_order_and_prints_how_to_resume(
    how: Callable[["subprocess.Popen[bytes]"], None], status: int, tmp_path: Path
) -> None:
    output = tmp_path / "said.txt"
    with output.open("w") as out:
        demo = subprocess.Popen(
            [sys.executable, "-c", AS_A_TERMINAL_STARTS_IT + RUN_IT, str(DEMO), "--workspace", str(tmp_path / "w")],
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 120
        while " · version " not in output.read_text():
            assert demo.poll() is None, output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.1)
        started = psutil.Process(demo.pid).children(recursive=True)
        how(demo)
        assert demo.wait(60) == status, output.read_text()
        assert psutil.wait_procs(started, timeout=20)[1] == []
    finally:
        if demo.poll() is None:
            os.killpg(demo.pid, signal.SIGKILL)
        demo.wait()
    assert "Traceback" not in output.read_text()
    assert " stays open: `rollstream finetune " in output.read_text()
    assert find_running(tmp_path / "w") is None
