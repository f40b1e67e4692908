"""The learning-rate schedule, and an optimizer's memory kept and taken over."""

from typing import Literal

import pytest
import torch

from rollstream.learner.model.optimizer import learning_rate, load_state_tensors, make_optimizer, state_tensors
from rollstream.schemas.settings import OptimizerSettings


def test_the_rate_warms_up_and_stays() -> None:
    settings = OptimizerSettings(learning_rate=1.0, warmup_steps=4)
    assert [learning_rate(settings, step, 10) for step in (0, 1, 3, 4, 9)] == [0.25, 0.5, 1.0, 1.0, 1.0]


def test_the_linear_schedule_ends_at_its_final_share() -> None:
    settings = OptimizerSettings(learning_rate=1.0, schedule="linear", final_fraction=0.2)
    assert [learning_rate(settings, step, 4) for step in range(5)] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert learning_rate(settings, 50, 4) == pytest.approx(0.2)


def test_the_cosine_schedule_is_half_way_in_the_middle() -> None:
    settings = OptimizerSettings(learning_rate=1.0, schedule="cosine")
    assert [learning_rate(settings, step, 4) for step in (0, 2, 4)] == pytest.approx([1.0, 0.5, 0.0])


def test_a_job_of_one_step_has_its_full_rate() -> None:
    settings = OptimizerSettings(learning_rate=1.0, schedule="linear")
    assert learning_rate(settings, 0, 0) == 1.0


def test_only_matrices_decay() -> None:
    module = torch.nn.Linear(2, 2)
    optimizer = make_optimizer(module.named_parameters(), OptimizerSettings(weight_decay=0.1))
    decays = {p.ndim: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays == {2: 0.1, 1: 0.0}


def test_muon_has_the_matrices_of_layers_and_adamw_the_rest() -> None:
    layer = torch.nn.Linear(2, 3)
    module = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer]), "head": torch.nn.Linear(3, 2)})
    settings = OptimizerSettings(kind="muon", learning_rate=0.1, weight_decay=0.1)
    optimizer = make_optimizer(module.named_parameters(), settings)
    muon = [p for group in optimizer.param_groups if "momentum" in group for p in group["params"]]
    assert len(muon) == 1
    assert muon[0] is layer.weight
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 4


def test_muons_update_is_orthogonal_and_of_adamws_size() -> None:
    """0.2 sqrt(max(rows, columns)) times an orthogonal matrix (arXiv 2502.16982, section 2.2)."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 8, bias=False)
    before = layer.weight.detach().clone()
    settings = OptimizerSettings(kind="muon", learning_rate=0.1)
    optimizer = make_optimizer(torch.nn.Sequential(layer).named_parameters(), settings)
    layer.weight.grad = torch.randn(8, 8)
    optimizer.step()
    update = (before - layer.weight.detach()) / (0.1 * 0.2 * 8**0.5)
    singular = torch.linalg.svdvals(update)
    assert 0.6 < singular.min() <= singular.max() < 1.3  # five Newton-Schulz steps in bfloat16 come so near to 1


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_an_optimizer_goes_on_from_kept_memory_to_the_same_bits(kind: Literal["adamw", "muon"]) -> None:
    def step(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        module(torch.ones(1, 2)).square().sum().backward()
        optimizer.step()

    torch.manual_seed(0)
    first, second = (torch.nn.Sequential(torch.nn.Linear(2, 2)) for _ in range(2))
    settings = OptimizerSettings(kind=kind, learning_rate=0.1)
    one = make_optimizer(first.named_parameters(), settings)
    assert state_tensors(one, first.named_parameters()) == {}
    step(first, one)
    second.load_state_dict(first.state_dict())
    other = make_optimizer(second.named_parameters(), settings)
    load_state_tensors(other, second.named_parameters(), state_tensors(one, first.named_parameters()))
    step(first, one)
    step(second, other)
    assert all(map(torch.equal, first.parameters(), second.parameters()))
