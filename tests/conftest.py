"""What tests of several folders share: one embedded broker a session, and an empty workspace a test."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.eventlog.broker import EmbeddedBroker

os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1")
"""Brokers of tests live for seconds: compiling their code a second time would cost more than it brings."""


def pytest_collection_finish() -> None:
    """Spare for good what imports have made: looking for cycles in it took a twentieth of the tests' time."""
    gc.freeze()


def pytest_unconfigure() -> None:
    """Give it back: DuckDB tells a page of leaks at the exit of a process that keeps its types."""
    gc.unfreeze()


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
