"""The supervisor with real, tiny child processes."""

import asyncio
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollstream.eventlog.broker.restarts import MAX_RESTARTS
from rollstream.harness.services import supervisor as supervisor_module
from rollstream.harness.services.supervisor import MAX_RELAYED, SILENCE_S, WARN_S, LogRelay, Supervisor
from rollstream.schemas.errors import RunFailedError
from tests.rigs.services.ended import is_gone
from tests.rigs.services.service_processes import spec

pytestmark = pytest.mark.slow

SLEEPS = "import time; time.sleep(60)"
TIED = (
    "import os, time; from rollstream.harness.services.liveness import die_with_parent; die_with_parent(os.environ); "
)
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


async def wait_until(condition, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def test_a_child_reads_its_settings_and_writes_its_log(tmp_path: Path) -> None:
    async def scenario() -> None:
        code = f"import sys; print(sys.stdin.read(), flush=True); {SLEEPS}"
        supervisor = Supervisor([spec("one", code, b"settings")], tmp_path)
        supervisor.start()
        await wait_until(lambda: "settings" in (tmp_path / "one.log").read_text())
        assert supervisor.last_words("one") == "settings"
        await supervisor.stop()
        assert supervisor.pids() == {}

    asyncio.run(scenario())


def test_an_exit_is_not_blamed_on_the_last_words_of_an_earlier_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "one.log").write_text("error: of last week\n")

    async def scenario() -> None:
        supervisor = Supervisor([spec("one", SLEEPS)], tmp_path, first_backoff_s=0.0)
        supervisor.start()
        os.kill(supervisor.pids()["one"], signal.SIGKILL)
        await wait_until(lambda: not supervisor.pids())
        supervisor.check()
        (tmp_path / "one.log").write_text("x")
        assert supervisor.last_words("one") == "x", "the log was emptied because it was too large"
        for level, words in (("INFO", "(no warnings in its log)"), ("ERROR", "d t ERROR a: x")):
            (tmp_path / "one.log").write_text(f"d t {level} a: x")
            assert supervisor.last_words("one") == words
        await supervisor.stop()

    asyncio.run(scenario())
    assert "service one was killed by signal 9; restarting in 0.0 s: (no log output)" in caplog.text


def test_a_child_is_a_process_group_in_the_session_of_its_parent(tmp_path: Path) -> None:
    """Ctrl-C does not reach it, and Linux schedules it with its parent."""

    async def scenario() -> None:
        supervisor = Supervisor([spec("one", SLEEPS)], tmp_path)
        supervisor.start()
        pid = supervisor.pids()["one"]
        assert (os.getpgid(pid), os.getsid(pid)) == (pid, os.getsid(0))
        await supervisor.stop()

    asyncio.run(scenario())


def test_a_killed_child_is_started_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        supervisor = Supervisor([spec("one", SLEEPS)], tmp_path, first_backoff_s=0.01)
        supervisor.start()
        watching = asyncio.create_task(supervisor.watch())
        first = supervisor.pids()["one"]
        os.kill(first, signal.SIGKILL)
        await wait_until(lambda: supervisor.pids().get("one", first) != first)
        assert supervisor.total_restarts == 1
        watching.cancel()
        await supervisor.stop()

    asyncio.run(scenario())


def test_a_child_that_ends_again_and_again_fails_the_run_with_its_last_words(tmp_path: Path) -> None:
    async def scenario() -> None:
        supervisor = Supervisor([spec("one", "raise SystemExit('error: no weights')")], tmp_path, first_backoff_s=0.01)
        supervisor.start()
        with pytest.raises(RunFailedError, match=r"service one exited 6 times .* error: no weights"):
            await supervisor.watch()
        assert supervisor.total_restarts == MAX_RESTARTS + 1
        await supervisor.stop()

    asyncio.run(scenario())


def test_a_log_that_ends_within_a_line_is_continued_on_the_next(tmp_path: Path) -> None:
    async def scenario() -> None:
        (tmp_path / "one.log").write_text("killed within a li")
        supervisor = Supervisor([spec("one", f"print('ready', flush=True); {SLEEPS}")], tmp_path)
        supervisor.start()
        await wait_until(lambda: "ready" in (tmp_path / "one.log").read_text())
        assert (tmp_path / "one.log").read_text() == "killed within a li\nready\n"
        await supervisor.stop()

    asyncio.run(scenario())


def test_a_librarys_output_at_exit_is_not_the_reason_of_the_exit(tmp_path: Path) -> None:
    (tmp_path / "one.log").write_text(
        """error: no weights
nanobind: leaked 4 instances!
 - leaked instance 0x7fc1ba2bc568 of type "triton._C.libtriton.ir.attribute"
nanobind: leaked 64 types!
 - leaked type "triton._C.libtriton.ir.location"
 - ... skipped remainder
nanobind: this is likely caused by a reference counting issue in the binding code.
See https://nanobind.readthedocs.io/en/latest/refleaks.html"""
    )
    assert Supervisor([], tmp_path).last_words("one") == "error: no weights"


def test_progress_forgives_restarts(tmp_path: Path) -> None:
    async def scenario() -> None:
        supervisor = Supervisor([spec("one", "pass")], tmp_path, first_backoff_s=0.001)
        supervisor.start()
        watching = asyncio.create_task(supervisor.watch())
        while supervisor.total_restarts < MAX_RESTARTS + 3:
            supervisor.progressed()
            await asyncio.sleep(0.01)
            assert not watching.done()
        watching.cancel()
        await supervisor.stop()

    asyncio.run(scenario())


def test_children_are_stopped_rank_by_rank(tmp_path: Path) -> None:
    async def scenario() -> None:
        ends = (
            "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (print(time.time_ns()), sys.exit(0)));"
        )
        code = f"{ends} print('up', flush=True); time.sleep(60)"
        supervisor = Supervisor([spec("late", code, rank=1), spec("early", code, rank=0)], tmp_path)
        supervisor.start()
        await wait_until(lambda: all("up" in (tmp_path / f"{name}.log").read_text() for name in ("late", "early")))
        await supervisor.stop()
        early, late = (int((tmp_path / f"{name}.log").read_text().split()[1]) for name in ("early", "late"))
        assert early < late

    asyncio.run(scenario())


ASKS = """
import os
from rollstream.harness.services.liveness import leave_terminal
leave_terminal(os.environ)
try:
    open("/dev/tty").read(1)
except OSError as error:
    print(error, flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="waitid and the words of the error are Linux's")
def test_a_child_that_asks_on_the_terminal_gets_an_error_and_is_not_stopped(tmp_path: Path) -> None:
    parent = (
        "import os, time; from pathlib import Path; "
        "from rollstream.harness.services.supervisor import ChildSpec, Supervisor; "
        f"s = Supervisor([ChildSpec('one', {[sys.executable, '-c', ASKS]!r})], Path({str(tmp_path)!r})); s.start(); "
        "os.waitid(os.P_PID, s.pids()['one'], os.WEXITED | os.WSTOPPED | os.WNOWAIT); open('/dev/tty').close(); "
        "print('done', flush=True)"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", parent])
    try:
        output = b""
        while b"done" not in output:
            output += os.read(terminal, 10_000)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)
    assert "No such device" in (tmp_path / "one.log").read_text()


def test_a_child_that_does_not_end_is_killed_after_the_grace_period(tmp_path: Path) -> None:
    async def scenario() -> None:
        supervisor = Supervisor([spec("one", STUBBORN)], tmp_path, grace_s=0.3)
        supervisor.start()
        await wait_until(lambda: "up" in (tmp_path / "one.log").read_text())
        pid = supervisor.pids()["one"]
        await supervisor.stop()
        assert not psutil.pid_exists(pid)

    asyncio.run(scenario())


def test_without_a_log_children_of_all_ranks_are_stopped_at_once_and_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "GRACE_WITHOUT_LOG_S", 0.3)

    async def scenario() -> None:
        specs = [spec(f"rank-{rank}", STUBBORN, rank=rank) for rank in range(3)]
        supervisor = Supervisor(specs, tmp_path, has_log=lambda: False)
        supervisor.start()
        for one in specs:
            await wait_until(lambda name=one.name: "up" in (tmp_path / f"{name}.log").read_text())
        pids = supervisor.pids().values()
        async with asyncio.timeout(10):
            await supervisor.stop()
        assert all(is_gone(pid) for pid in pids)

    asyncio.run(scenario())


@pytest.mark.skipif(sys.platform != "linux", reason="the tie to the parent is Linux's")
def test_no_child_outlives_a_killed_parent(tmp_path: Path) -> None:
    child = repr([sys.executable, "-c", TIED + "print('up', flush=True); time.sleep(60)"])
    parent = (
        "import time; from pathlib import Path; "
        "from rollstream.harness.services.supervisor import ChildSpec, Supervisor; "
        f"s = Supervisor([ChildSpec('one', {child})], Path({str(tmp_path)!r})); s.start(); "
        "print(s.pids()['one'], flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        orphan = psutil.Process(int(process.stdout.readline()))
        asyncio.run(wait_until(lambda: "up" in (tmp_path / "one.log").read_text()))
        process.kill()
    _, alive = psutil.wait_procs([orphan], timeout=5)
    assert alive == []


def test_a_child_without_a_sign_of_life_is_killed_and_started_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        stuck: list[int] = []
        supervisor = Supervisor(
            [spec("one", SLEEPS)],
            tmp_path,
            first_backoff_s=0.01,
            silence_s=lambda _, pid: 1000.0 if pid in stuck else 0.0,
        )
        supervisor.start()
        watching = asyncio.create_task(supervisor.watch())
        first = supervisor.pids()["one"]
        await asyncio.sleep(0.5)
        assert supervisor.pids()["one"] == first
        stuck.append(first)
        await wait_until(lambda: supervisor.pids().get("one", first) != first)
        watching.cancel()
        await supervisor.stop()

    asyncio.run(scenario())


def test_errors_of_services_are_passed_on_once(tmp_path: Path) -> None:
    log = tmp_path / "one.log"
    log.write_text("2026-01-01 00:00:00,000 ERROR rollstream.old: before this run\n")
    relay = LogRelay(tmp_path)
    with log.open("a") as file:
        file.write("2026-01-01 00:00:01,000 INFO rollstream.a: fine\n")
        file.write("2026-01-01 00:00:01,000 ERROR aiokafka: not ours\n")
        file.write("2026-01-01 00:00:01,000 ERROR rollstream.producers.engines.weight_follower: wrong hash\n")
        file.write("2026-01-01 00:00:02,000 ERROR rollstream.producers.engines.weight_follower: wrong hash\n")
        file.write("2026-01-01 00:00:02,000 ERROR rollstream.b: half a li")
    assert relay.new_errors(["one", "none"]) == ["one: wrong hash"]
    with log.open("a") as file:
        file.write("ne\n")
    assert relay.new_errors(["one"]) == ["one: half a line"]


def test_a_pause_of_the_supervisor_itself_kills_no_child(tmp_path: Path) -> None:
    """A suspended laptop: when everything goes on, all signs of life are old at once."""

    async def scenario() -> None:
        now, signed = [1000.0], [1000.0]
        supervisor = Supervisor(
            [spec("one", SLEEPS)], tmp_path, silence_s=lambda name, pid: now[0] - signed[0], monotonic=lambda: now[0]
        )
        supervisor.start()
        (child,) = supervisor.pids().values()
        supervisor.check()
        now[0] += 8 * 3600
        supervisor.check()
        now[0] += 1.0
        supervisor.check()
        signed[0] = now[0]
        assert not is_gone(child)
        for _ in range(int(SILENCE_S) + 2):  # silent although the supervisor looks on: stuck
            now[0] += 1.0
            supervisor.check()
        await wait_until(lambda: is_gone(child))
        await supervisor.stop()

    asyncio.run(scenario())


def test_a_silent_child_is_reported_once_before_it_is_killed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        now, silence = [1000.0], [0.0]
        supervisor = Supervisor(
            [spec("one", SLEEPS)],
            tmp_path,
            silence_s=lambda name, pid: silence[0],
            monotonic=lambda: now[0],
            waits_for=lambda: "the disk is full" if silence[0] < WARN_S + 5 else "",
        )
        supervisor.start()
        for _ in range(int(WARN_S) + 10):
            now[0] += 1.0
            silence[0] += 1.0
            supervisor.check()
            assert bool(caplog.records) is (silence[0] >= WARN_S + 5)
        assert len(supervisor.pids()) == 1
        silence[0] = 0.0
        supervisor.check()
        await supervisor.stop()

    asyncio.run(scenario())
    (message,) = [record.getMessage() for record in caplog.records if "no heartbeat" in record.getMessage()]
    assert message.startswith("service one has sent no heartbeat for 30 s: something blocks its event loop")


def test_a_child_that_ends_while_something_is_missing_is_started_again_after_that_and_it_does_not_count(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        missing: list[str] = []
        launched: list[object] = []
        supervisor = Supervisor(
            [spec("one", "pass")], tmp_path, first_backoff_s=0.001, waits_for=lambda: missing[0] if missing else ""
        )
        launch = supervisor._launch

        def launch_and_lack(child: Any) -> None:
            launch(child)
            launched.append(child)
            missing.append("the disk is full")  # at once: it may end before anybody else looks

        supervisor._launch = launch_and_lack
        supervisor.start()
        watching = asyncio.create_task(supervisor.watch())
        for ended in range(1, MAX_RESTARTS + 3):
            await wait_until(lambda ended=ended: supervisor.total_restarts == ended)
            assert len(launched) == ended
            missing.clear()
            await wait_until(lambda ended=ended: len(launched) > ended)
        assert not watching.done()
        watching.cancel()
        await supervisor.stop()

    asyncio.run(scenario())


def test_a_log_that_grows_too_large_leaves_one_old_copy_and_its_writer_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "one.log"
    relay = LogRelay(tmp_path, max_log_bytes=1000)
    error = "2026-01-01 00:00:01,000 ERROR rollstream.a: number {}\n"
    with path.open("ab", buffering=0) as writer:
        for number in range(200):
            writer.write(error.format(number).encode())
            assert relay.new_errors(["one"]) == ([f"one: number {number}"] if number < MAX_RELAYED else [])
            assert path.stat().st_size <= 1000
    assert sorted(file.name for file in tmp_path.iterdir()) == ["one.log", "one.log.1"]
    kept = (tmp_path / "one.log.1").read_text() + path.read_text()
    numbers = [int(line.rsplit(" ", 1)[1]) for line in kept.splitlines()]
    assert numbers == list(range(200 - len(numbers), 200))
    assert len(numbers) > 10
