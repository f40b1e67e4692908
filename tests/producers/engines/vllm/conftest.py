"""The base model of the tests over servers that speak vLLM's paths."""

from pathlib import Path

import pytest

from rollstream.learner.tiny_model import make_tiny_model
from rollstream.producers.engines.vllm import probing


@pytest.fixture(scope="session")
def small_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("base") / "model", seed=0, num_layers=1)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that refuse a version are asked again at once: tests have seconds for what may take minutes."""
    monkeypatch.setattr(probing, "LOAD_PAUSE_S", 0.05)
