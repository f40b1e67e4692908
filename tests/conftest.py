"""What tests of several folders share: one embedded broker a session, and an empty workspace a test."""

import atexit
import gc
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from rollstream.eventlog.broker import EmbeddedBroker

os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1")
"""Brokers of tests live for seconds: compiling their code a second time would cost more than it brings."""


sys.modules["sklearn"] = None  # type: ignore[assignment]
"""transformers imports it, and it scipy, where NAT has brought it: two seconds a process for what nobody asks."""

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
"""A busy machine is no fault of what is tested."""

if "PYTEST_XDIST_WORKER" in os.environ:
    atexit.register(os._exit, 0)
    """A worker has told all: to take its objects down one by one takes seconds, and DuckDB tells a page of leaks."""

gc.disable()
"""Imports and collecting leave few cycles and many objects, which would be looked through again and again. (The
controller of workers runs no test and stays so.)"""


def pytest_collection_finish() -> None:
    """Take off every test what its imports would cost it: together a seventh of the time."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # seldom: `_garbage` looks after each file
    gc.enable()
    atexit.register(gc.unfreeze)  # DuckDB tells a page of leaks at the exit of a process that keeps its types
    # pytest's handlers go to the root logger, and thrice a test to every logger that hands nothing on to it.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(scope="module", autouse=True)
def _garbage() -> Iterator[None]:
    """What a file leaves in cycles, if it is an error, fails its last test: at a worker's end nobody would hear it."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def bootstrap_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`host:port` of a Kafka broker that the whole session shares.

    Use fresh run ids and groups, begin at ends, and ensure topics with 6 partitions.
    """
    with EmbeddedBroker(tmp_path_factory.mktemp("broker-workspace")) as running:
        yield running.bootstrap_servers


@pytest.fixture(scope="module")
def own_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A broker of a module's own, whose topics it may cut off and delete."""
    with EmbeddedBroker(tmp_path_factory.mktemp("own-broker")) as running:
        yield running.bootstrap_servers


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """An empty workspace."""
    return tmp_path / ".rollstream"
