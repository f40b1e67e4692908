"""Values that are in the file in place of a block, as in `model: NAME`: the error says how to write the block."""

from typing import Any

import pytest

from rollstream.harness.config import file as config_file
from rollstream.schemas.errors import ConfigError


@pytest.mark.parametrize(
    ("path", "value", "remedy"),
    [
        ("trainer_adapters.a.model", "Qwen/Qwen3-0.6B", "; write `model: {path: Qwen/Qwen3-0.6B}`"),
        ("trainer_adapters.a.algorithm", "grpo", "; write `algorithm: {name: grpo}`"),
        ("trajectory_builders.b.engine", "vllm", "; write `engine: {kind: vllm}`"),
        ("finetuning.reward_function", "f", "; write `reward_function: {name: f}`"),
        ("finetuning.curriculum_learning", True, "; write `curriculum_learning: {enabled: true}`"),
        ("eval.general.dataset", "d.jsonl", "; write `dataset: {file_path: d.jsonl}`"),
        ("trainer_adapters.a.optimizer", 1e-3, " of betas, "),
        ("trainer_adapters.a.model", True, " of "),
    ],
)
def test_a_value_in_place_of_a_block_is_refused_with_what_to_write(
    written: dict[str, Any], path: str, value: Any, remedy: str
) -> None:
    *parents, name = path.split(".")
    block = written
    for part in parents:
        block = block.setdefault(part, {})
    block[name] = value
    with pytest.raises(ConfigError) as refused:
        config_file.resolve(written, {})
    assert str(refused.value).startswith(f"{path}: is {value!r}; expected a mapping{remedy}")
