"""Real processes that find each other as those of a torchrun do, on a free port of this machine."""

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from typing import Any

import psutil

TIMEOUT_S = 240.0


def _rank(index: int, num: int, port: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ |= {
        "RANK": str(index),
        "LOCAL_RANK": str(index),
        "WORLD_SIZE": str(num),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    work(*arguments)


def with_libraries() -> ForkServerContext:
    """Starts processes as forks of one that has loaded what a learner needs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers", "peft", "rollstream.learner.trainer"])
    return context


def together(num: int, work: Callable[..., None], *arguments: Any) -> None:
    """Run `work`, a function of a module, in `num` processes at once. Raises AssertionError if one of them fails."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    context = with_libraries()
    ranks = [context.Process(target=_rank, args=(index, num, port, work, arguments)) for index in range(num)]
    for rank in ranks:
        rank.start()
    try:
        until = time.monotonic() + TIMEOUT_S
        for rank in ranks:
            rank.join(max(0.0, until - time.monotonic()))
        codes = [rank.exitcode for rank in ranks]
        assert codes == [0] * num, f"exit codes {codes}"
    finally:
        for rank in ranks:
            rank.kill()


def rank_of(process: psutil.Process) -> int | None:
    """None: it is not a rank, or has ended."""
    try:
        return int(process.environ()["RANK"])
    except (KeyError, psutil.Error):
        return None
