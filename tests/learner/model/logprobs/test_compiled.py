"""Layers compiled by torch.compile, with what compiles C++ here: the numbers and gradients of layers that are not."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor

from rollstream.learner.algorithms.builtin.grpo import Grpo
from rollstream.learner.model import collate
from rollstream.learner.model.policy import PolicyModel
from rollstream.learner.tiny_model import make_tiny_model
from rollstream.schemas.algorithms import GrpoSettings
from rollstream.schemas.errors import ModelError
from rollstream.schemas.settings import ModelSettings
from tests.rigs.runs.step_rows import rows

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # asked by torch.compile
]


@pytest.fixture(autouse=True)
def in_this_process() -> Iterator[None]:
    """Compile without further processes, and nothing of what other tests compiled."""
    torch.compiler.reset()
    with inductor.patch(compile_threads=1):
        yield


def backward(path: Path, **changes: Any) -> list[torch.Tensor]:
    """Log-probabilities and gradients of a prefix tree."""
    model = PolicyModel(ModelSettings(path=str(path), device="cpu", **changes), seed=0)
    model.use_dropout(False)
    batch = collate.pad(*collate.prepared_rows(rows(), Grpo().prepare(rows(), GrpoSettings())), shares=True)
    logprobs, _ = model.completion_terms(batch, temperature=1.0, entropy_needs_grad=False)
    logprobs.sum().backward()
    return [logprobs.detach(), *(one.grad for _, one in model.trainable() if one.grad is not None)]


def test_a_tree_has_the_numbers_and_gradients_of_layers_that_are_not_compiled(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", seed=0, hidden_size=16, intermediate_size=32, num_layers=1)
    plain = backward(folder)
    for found in (backward(folder, compile=True), backward(folder, compile=True, gradient_checkpointing=True)):
        assert len(found) == len(plain)
        for one, other in zip(found, plain, strict=True):
            assert torch.allclose(one, other, rtol=1e-5, atol=1e-5 * other.abs().max().item())


def test_without_a_compiler_the_job_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_model(tmp_path / "model", seed=0, hidden_size=24, intermediate_size=32, num_layers=1)
    monkeypatch.setattr(inductor.cpp, "cxx", ("no-such-compiler",))
    with pytest.raises(ModelError, match=r"cannot be compiled here: .*; leave model\.compile off"):
        PolicyModel(ModelSettings(path=str(folder), device="cpu", compile=True), seed=0)
