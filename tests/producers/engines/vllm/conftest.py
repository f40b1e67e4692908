"""The base model of the tests over servers that speak vLLM's paths."""

from pathlib import Path

import pytest

from rollstream.learner.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def small_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("base") / "model", seed=0, num_layers=1)
