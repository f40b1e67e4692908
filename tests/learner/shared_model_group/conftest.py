"""A group of agents with every real service on a log in memory, and a tiny model."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from rollstream.producers.engines.scripted import ScriptedTokenizer
from tests.rigs.group_rig import GroupRig


@pytest.fixture(scope="session")
def scripted_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a Qwen2 of a few thousand parameters with the scripted engine's vocabulary."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(ScriptedTokenizer()),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    path = tmp_path_factory.mktemp("scripted") / "model"
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest.fixture
def rig(tmp_path: Path, scripted_model: Path) -> GroupRig:
    """An empty log, an empty workspace and the tiny model."""
    return GroupRig(tmp_path, scripted_model)
