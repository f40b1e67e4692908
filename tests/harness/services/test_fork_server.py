"""The fork server with real, tiny processes, alone and under the supervisor."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from rollstream.harness.services import fork_server
from rollstream.harness.services.fork_server import (
    IS_POSSIBLE,
    ForkedProcess,
    ForkServer,
    ForkServerError,
    start_where_possible,
)
from rollstream.harness.services.supervisor import ChildSpec, Supervisor
from tests.rigs.services.ended import is_gone

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not IS_POSSIBLE, reason="only Linux without a GPU can fork safely")]

LIBRARY = "import os; PID = os.getpid(); print('{}')"
PROGRAM = """
import os, sys, library
print(library.PID == os.getpid(), os.getppid() == library.PID, __name__, sys.argv[1:], sys.stdin.read())
sys.exit(3)
"""
TIED = """
import os, sys, time
from rollstream.harness.services.liveness import die_with_parent
die_with_parent(os.environ)
print('up', os.getpid(), flush=True)
time.sleep(60)
"""


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Variables with which the programs of the test are found."""
    for name, text in (("library", LIBRARY), ("program", PROGRAM), ("tied", TIED), ("broken", "1 / 0")):
        (tmp_path / f"{name}.py").write_text(text)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}


@pytest.fixture
def server(tmp_path: Path, environment: dict[str, str]) -> Iterator[ForkServer]:
    made = ForkServer(["library", "broken"], tmp_path / "server.log", environment)
    wait_until(made.is_ready)
    yield made
    made.close()


def tied(server: ForkServer, log: Path) -> ForkedProcess:
    """A process that sleeps and dies with its parent."""
    process = server.fork(["tied"], b"", log)
    wait_until(lambda: log.exists() and "up" in log.read_text())
    return process


def test_a_forked_process_is_like_one_that_was_started_alone(server: ForkServer, tmp_path: Path) -> None:
    log = tmp_path / "one.log"
    log.write_text("before\n")
    assert server.fork(["program", "--name", "one"], b"settings" * 20_000, log).wait() == 3
    assert log.read_text() == f"before\nFalse True __main__ ['--name', 'one'] {'settings' * 20_000}\n"


def test_it_has_its_own_group_and_title(server: ForkServer, tmp_path: Path) -> None:
    process = tied(server, tmp_path / "one.log")
    assert (os.getpgid(process.pid), os.getsid(process.pid)) == (process.pid, os.getsid(0))
    assert " ".join(psutil.Process(process.pid).cmdline()).split() == [sys.executable, "-m", "tied"]
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM
    process.kill()


def test_a_library_that_prints_or_fails_while_it_is_imported_is_logged(server: ForkServer, tmp_path: Path) -> None:
    log = (tmp_path / "server.log").read_text()
    assert log.count("{}") == 1
    assert 'broken.py", line 1' in log
    failing = server.fork(["broken"], b"", tmp_path / "one.log")
    assert failing.wait() == 1
    assert "ZeroDivisionError" in (tmp_path / "one.log").read_text()


def test_forks_die_with_the_server_and_count_as_killed(server: ForkServer, tmp_path: Path) -> None:
    processes = [tied(server, tmp_path / f"{name}.log") for name in ("one", "two")]
    psutil.Process(processes[0].pid).parent().kill()  # pyright: ignore[reportOptionalMemberAccess]
    assert [process.wait() for process in processes] == [-signal.SIGKILL] * 2
    wait_until(lambda: all(is_gone(process.pid) for process in processes))
    with pytest.raises(ForkServerError, match=r"has ended with status -9|takes no requests"):
        server.fork(["program"], b"", tmp_path / "one.log")


def test_signals_to_all_processes_end_the_forks_alone(server: ForkServer, tmp_path: Path) -> None:
    process = tied(server, tmp_path / "one.log")
    parent = psutil.Process(process.pid).ppid()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        os.kill(parent, number)
    time.sleep(0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM
    assert server.fork(["program"], b"", tmp_path / "two.log").wait() == 3


def test_a_server_that_does_not_answer_is_ended_with_what_it_would_have_started(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = tied(server, tmp_path / "one.log")
    monkeypatch.setattr(fork_server, "ANSWER_TIMEOUT_S", 0.5)
    os.kill(psutil.Process(process.pid).ppid(), signal.SIGSTOP)
    with pytest.raises(ForkServerError, match=r"has not answered for 0 s"):
        server.fork(["tied"], b"", tmp_path / "two.log")
    assert server.is_closed
    assert process.wait() == -signal.SIGKILL
    wait_until(lambda: is_gone(process.pid))
    time.sleep(0.2)
    assert not (tmp_path / "two.log").exists()


def test_a_killed_fork_ends_the_server_that_does_not_report_its_end(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = tied(server, tmp_path / "one.log")
    monkeypatch.setattr(fork_server, "ANSWER_TIMEOUT_S", 0.5)
    os.kill(psutil.Process(process.pid).ppid(), signal.SIGSTOP)
    process.kill()
    assert (process.poll(), server.is_closed) == (-signal.SIGKILL, True)


def test_settings_are_read_once(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "reads.py").write_text("import sys; sys.stdin.read(); print(repr(open('/proc/self/fd/0').read()))")
    assert server.fork(["reads"], b"secret", tmp_path / "one.log").wait() == 0
    assert (tmp_path / "one.log").read_text() == "''\n"


def test_a_server_that_cannot_be_started_is_a_warning(
    tmp_path: Path, environment: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "fork-server.log").mkdir()
    assert start_where_possible([], tmp_path, environment) is None
    assert "the fork server cannot be started: [Errno 21]" in caplog.text


def test_children_that_wait_for_the_server_are_stopped_before_they_start(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    server = ForkServer(["slow"], tmp_path / "server.log", environment)
    one = ChildSpec("one", [sys.executable, "-m", "tied"], is_forked=True)
    supervisor = Supervisor([one], tmp_path, environment, fork_server=server)
    supervisor.start()
    supervisor.check()
    assert supervisor.pids() == {}
    asyncio.run(supervisor.stop())
    server.close()
    assert not (tmp_path / "one.log").exists()


@asynccontextmanager
async def supervised(module: str, folder: Path, environment: dict[str, str]) -> AsyncIterator[Supervisor]:
    """A supervisor that watches one child, a fork."""
    server = ForkServer(["library"], folder / "server.log", environment)
    one = ChildSpec("one", [sys.executable, "-m", module], is_forked=True)
    supervisor = Supervisor([one], folder, environment, fork_server=server, first_backoff_s=0.01)
    supervisor.start()
    watching = asyncio.create_task(supervisor.watch())
    yield supervisor
    watching.cancel()
    await supervisor.stop()
    server.close()


def test_a_fork_that_fails_by_itself_is_started_as_an_ordinary_process(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    log = tmp_path / "one.log"

    async def scenario() -> None:
        async with supervised("program", tmp_path, environment):
            while not log.exists() or log.read_text().count("__main__") < 2:
                await asyncio.sleep(0.02)

    asyncio.run(scenario())
    lines = [line for line in log.read_text().splitlines() if "__main__" in line]
    assert [line[:10] for line in lines[:2]] == ["False True", "True False"]


def test_server_and_forks_die_with_the_process_that_started_them(tmp_path: Path, environment: dict[str, str]) -> None:
    code = (
        "import os, sys, time; from pathlib import Path; "
        "from rollstream.harness.services.fork_server import ForkServer; "
        f"s = ForkServer([], Path({str(tmp_path / 'server.log')!r}), os.environ); "
        f"p = s.fork(['tied'], b'', Path({str(tmp_path / 'one.log')!r})); print(p.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        fork = psutil.Process(int(parent.stdout.readline()))
        server = fork.ppid()
        wait_until(lambda: "up" in (tmp_path / "one.log").read_text())
        parent.kill()
    wait_until(lambda: is_gone(fork.pid) and is_gone(server))


def test_a_supervisor_starts_children_again_without_importing_again_until_the_server_ends(
    tmp_path: Path, environment: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with supervised("tied", tmp_path, environment) as supervisor:

            async def started_after(pid: int) -> psutil.Process:
                while supervisor.pids().get("one", pid) == pid:
                    await asyncio.sleep(0.02)
                return psutil.Process(supervisor.pids()["one"])

            first = await started_after(0)
            parent = psutil.Process(first.ppid())
            first.kill()
            second = await started_after(first.pid)
            assert second.ppid() == parent.pid != os.getpid()
            parent.kill()
            third = await started_after(second.pid)
            assert third.ppid() == os.getpid()
            assert supervisor.total_restarts == 2

    asyncio.run(scenario())
    assert "the fork server has ended with status -9" in caplog.text
