"""Fixtures of several folders: one embedded broker a session, and an empty workspace a test."""

import atexit
import gc
import logging
import os
import subprocess
import sys
import threading
import traceback
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from hypothesis import HealthCheck, settings

from rollstream.eventlog.broker.broker import EmbeddedBroker
from rollstream.schemas.kafka import KafkaSettings

if TYPE_CHECKING:
    from tests.rigs.services.vllm_server import VllmServer

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
"""A busy machine is not a fault of the code under test."""

TEST_DEVICE = "ROLLSTREAM_TEST_DEVICE"
"""Variable with the device of the tests marked `gpu`: `cpu` rehearses them."""
JOIN_TIMEOUT_S = 60.0
FORK_SERVER = "rollstream.harness.cli.finetune"
"""A module that the fork server of tests/rigs/services/forked_commands.py loads, and no other one."""
KEPT_CHILDREN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "matching_process.py", FORK_SERVER)
"""Helpers that a process keeps for further use and ends at its exit."""

gc.disable()
"""Imports and collecting leave few cycles and many objects, which would be looked through again and again. (The
controller of workers runs no test and stays so.)"""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests marked `vllm` to `make test-vllm`, which says where vLLM is, and those marked `gpu` to `make
    test-gpu`, which asks for them by name.
    """
    wanted = {"vllm": "ROLLSTREAM_VLLM" in os.environ}
    wanted["gpu"] = TEST_DEVICE in os.environ or "gpu" in str(config.getoption("markexpr"))
    unwanted = [marker for marker, is_wanted in wanted.items() if not is_wanted]
    left = [item for item in items if any(item.get_closest_marker(marker) for marker in unwanted)]
    for item in items:
        if item.get_closest_marker("gpu"):  # warnings there depend on the card and its driver: they are shown
            item.add_marker(pytest.mark.filterwarnings("default"))
    gone = set(left)
    items[:] = [item for item in items if item not in gone]
    config.hook.pytest_deselected(items=left)


def pytest_collection_finish() -> None:
    """Take off every test what its imports would cost it: together a seventh of the time."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # rarely: `_leftovers_of_a_file` collects after each file
    gc.enable()
    atexit.register(gc.unfreeze)  # DuckDB tells a page of leaks at the exit of a process that keeps its types
    # pytest's handlers go to the root logger, and three times a test to every logger that hands nothing on to it.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(scope="module", autouse=True)
def _leftovers_of_a_file() -> Iterator[None]:
    """Fails a file's last test for what the file leaves open: unclosed objects in cycles, and running threads."""
    before = set(threading.enumerate())
    yield
    gc.collect()
    gc.freeze()
    assert running_threads(before) == []


def running_threads(before: Collection[threading.Thread], timeout_s: float = JOIN_TIMEOUT_S) -> list[str]:
    """Names of threads that started since and do not end in time: all that would hold up the process's exit, and
    daemon threads that run rollstream's code.
    """
    started = [thread for thread in threading.enumerate() if thread not in before]
    started = [thread for thread in started if not thread.daemon or runs_rollstream(thread)]
    for thread in started:
        thread.join(timeout_s)
    return [thread.name for thread in started if thread.is_alive()]


def runs_rollstream(thread: threading.Thread) -> bool:
    """Whether a function of rollstream is on a thread's stack, called by others' code or calling it."""
    frame = sys._current_frames().get(thread.ident or 0)
    modules = [str(one.f_globals.get("__name__")) for one, _ in traceback.walk_stack(frame)] if frame else []
    return any(module.partition(".")[0] == "rollstream" for module in modules)


@pytest.fixture(scope="session", autouse=True)
def _leftovers_of_a_session() -> Iterator[None]:
    """Fails the last test for child processes that no test stopped. It ends after the shared broker has."""
    yield
    assert running_children() == []


def running_children(timeout_s: float = JOIN_TIMEOUT_S) -> list[str]:
    """Command lines of child processes, but KEPT_CHILDREN, that do not end in time."""
    children = psutil.Process().children(recursive=True)
    children = [child for child in children if not any(name in command(child) for name in KEPT_CHILDREN)]
    _, alive = psutil.wait_procs(children, timeout_s)
    return [command(child) for child in alive]


def command(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaSettings]:
    """Settings for a Kafka broker that the whole session shares, as users' processes do.

    Use fresh run ids and groups, begin at ends, and ensure topics with 6 partitions.
    """
    with EmbeddedBroker(tmp_path_factory.mktemp("broker-workspace")) as running:
        yield running.kafka


@pytest.fixture
def own_topics(kafka: KafkaSettings) -> KafkaSettings:
    """The shared broker with topics and groups of a test's own."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    return kafka.model_copy(update={"topic_prefix": f"{name}.", "group_prefix": name})


@pytest.fixture(scope="module")
def own_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaSettings]:
    """A broker of a module's own, whose topics it may cut off and delete."""
    with EmbeddedBroker(tmp_path_factory.mktemp("own-broker")) as running:
        yield running.kafka


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[VllmServer]":
    """A vLLM server with a tiny model that the whole session shares; tests leave it with its base weights."""
    from tests.rigs.services.vllm_server import serving

    with serving(tmp_path_factory.mktemp("vllm")) as server:
        yield server


@pytest.fixture(scope="session")
def gpu() -> str:
    """Device of the tests marked `gpu`: cuda:0, or what ROLLSTREAM_TEST_DEVICE says. Fails where it does not exist."""
    import torch

    from rollstream.learner.model.policy import make_deterministic

    device = os.environ.get(TEST_DEVICE, "cuda:0")
    if device != "cpu" and not torch.cuda.is_available():
        pytest.fail(
            f"there is no NVIDIA GPU for torch {torch.__version__}; set {TEST_DEVICE}=cpu to rehearse the tests"
        )
    make_deterministic(None, deterministic=False)  # before the first product on the GPU
    return device


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """An empty workspace."""
    return tmp_path / ".rollstream"


@pytest.fixture
def plant(tmp_path: Path) -> Callable[[str, str], Path]:
    """Writes a module below `tmp_path`, for checks of the source tree to find its faults; gives its path."""

    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


class SmallDisk:
    """A mounted folder of a few MiB."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / ".ballast"

    def fill(self) -> None:
        """Take all the room that is left."""
        with self._ballast.open("ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                try:
                    while True:
                        file.write(b"\0" * size)
                except OSError:
                    continue

    def free(self) -> None:
        """Give back what `fill` took."""
        self._ballast.unlink()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], SmallDisk]]:
    """Mounts a tmpfs of so many MiB, once a test. Skips where this process may not mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(size_mib: int) -> SmallDisk:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", str(folder)]
        try:
            mounted = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("there is no mount command")
        if mounted.returncode:
            pytest.skip(f"this process may not mount a tmpfs: {mounted.stderr.strip()}")
        return SmallDisk(folder)

    try:
        yield mount
    finally:
        if folder.is_mount():
            subprocess.run(["umount", "-l", str(folder)], check=True)
