"""What tests of several folders share: one embedded broker a session."""

from collections.abc import Iterator

import pytest

from rollstream.eventlog.broker import EmbeddedBroker


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`host:port` of a Kafka broker that the whole session shares: use fresh run ids and groups, and begin at ends."""
    with EmbeddedBroker(tmp_path_factory.mktemp("broker-workspace")) as running:
        yield running.bootstrap_servers
