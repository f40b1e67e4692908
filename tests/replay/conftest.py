"""A recorded run for the tests of a session, which change copies of its log and files of it only for a moment."""

from typing import Any

import pytest

from tests.rigs.runs import replay_rig


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A whole run of three epochs."""
    return replay_rig.record(tmp_path_factory.mktemp("replay"))


@pytest.fixture
def run(recorded: Any) -> Any:
    """The recorded run, to be tampered with."""
    return replay_rig.tampered(recorded)
