"""A group of agents with every real service on a log in memory, and a tiny model."""

from pathlib import Path

import pytest

from tests.rigs.runs.group_rig import GroupRig, make_scripted_model


@pytest.fixture(scope="session")
def scripted_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a Qwen2 of a few thousand parameters with the scripted engine's vocabulary."""
    return make_scripted_model(tmp_path_factory.mktemp("scripted") / "model")


@pytest.fixture
def rig(tmp_path: Path, scripted_model: Path) -> GroupRig:
    """An empty log, an empty workspace and the tiny model."""
    return GroupRig(tmp_path, scripted_model)
