"""Gradients on the CPU lie apart from the heap: their bits are the same, and clearing gives their memory back."""

import mmap
import sys
from pathlib import Path

import pytest
import torch

from rollstream.learner.model.memory import GradientMemory
from rollstream.learner.model.policy import PolicyModel
from rollstream.schemas.settings import ModelSettings
from tests.rigs.runs.step_rows import padded, trained

SIZE = 4 * mmap.PAGESIZE


def layer() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(64, SIZE // 256)


def backward(module: torch.nn.Linear) -> None:
    torch.manual_seed(1)
    for _ in range(3):  # micro-batches
        module(torch.randn(5, 64)).square().sum().backward()


@pytest.mark.parametrize("sums", [True, False])
def test_gradients_of_several_micro_batches_have_the_bits_of_autograd(sums: bool) -> None:
    plain, apart = layer(), layer()
    memory = GradientMemory(apart.parameters())
    for _ in range(2):
        plain.zero_grad()
        apart.zero_grad()
        memory.clear(sums=sums)
        backward(plain)
        backward(apart)
        for one, other in zip(plain.parameters(), apart.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert torch.equal(one.grad, other.grad)


@pytest.mark.skipif(sys.platform != "linux", reason="what other systems do with the pages is not said")
def test_clearing_gives_the_memory_back() -> None:
    module = layer()
    memory = GradientMemory(module.parameters())
    backward(module)
    held = module.weight.grad
    assert held is not None
    assert held.abs().sum() > 0
    module.zero_grad()
    memory.clear()
    assert held.abs().sum() == 0


def test_a_model_in_another_type_keeps_its_gradients_where_autograd_makes_them(tiny_model: Path) -> None:
    model, _ = trained(tiny_model)
    model.module.double()
    model.clear_gradients(2)
    logprobs, _ = model.completion_terms(padded(), temperature=1.0, entropy_needs_grad=False)
    logprobs.sum().backward()
    assert {one.grad.dtype for _, one in model.trainable() if one.grad is not None} == {torch.float64}


def test_a_model_that_trains_nothing_has_no_gradients(tiny_model: Path) -> None:
    model = PolicyModel(ModelSettings(path=str(tiny_model), device="cpu"), seed=0)
    model.module.requires_grad_(requires_grad=False)
    model.clear_gradients(2)
    assert [name for name, one in model.module.named_parameters() if one.grad is not None] == []
