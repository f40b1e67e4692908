"""A thread or a child process that a test leaves behind is found."""

import asyncio
import subprocess
import sys
import threading
from contextlib import suppress

from rollstream.producers.rollout.rewards import in_thread
from tests.conftest import running_children, running_threads


def test_a_thread_that_would_hold_up_the_exit_is_found() -> None:
    before, release = set(threading.enumerate()), threading.Event()
    thread = threading.Thread(target=release.wait, name="left")
    thread.start()
    try:
        assert running_threads(before, 0.01) == ["left"]
    finally:
        release.set()
    assert running_threads(before) == []


def test_a_daemon_thread_that_runs_rollstream_is_found_and_no_other() -> None:
    before, release = set(threading.enumerate()), threading.Event()
    other = threading.Thread(target=release.wait, name="a library's", daemon=True)
    other.start()

    async def leave_a_reward_running() -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await in_thread(release.wait)

    asyncio.run(leave_a_reward_running())
    try:
        assert running_threads(before, 0.01) == ["reward"]
    finally:
        release.set()
    assert running_threads(before) == []
    other.join()


def test_a_child_process_is_found() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert f"{sys.executable} -c input()" in running_children(0.01)
        assert child.stdin is not None
        child.stdin.close()
        child.wait()
    assert f"{sys.executable} -c input()" not in running_children(0.01)
