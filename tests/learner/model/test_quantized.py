"""QLoRA and AdamW in 8 bits, by bitsandbytes on the CPU: near what 32 bits give, kept and trained again bit by bit."""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rollstream.learner.algorithms.builtin.grpo import Grpo
from rollstream.learner.model import collate
from rollstream.learner.model.loading import load_module
from rollstream.learner.model.optimizer import load_state_tensors, make_optimizer, state_tensors
from rollstream.learner.model.policy import PolicyModel
from rollstream.learner.model.tensor_file import from_bytes
from rollstream.learner.tiny_model import make_tiny_model
from rollstream.producers.engines.base import GenerationRequest
from rollstream.schemas.algorithms import GrpoSettings
from rollstream.schemas.errors import ConfigError, ModelError
from rollstream.schemas.events import JobSucceeded, WeightsPublished
from rollstream.schemas.settings import LoraSettings, ModelSettings, OptimizerSettings, Sampling
from tests.producers.engines.engine_rig import run, together
from tests.rigs.runs.retrained import assert_retrained, steps_of
from tests.rigs.runs.step_rows import rows

LORA = LoraSettings(rank=2, alpha=4)

bitsandbytes: Any = pytest.importorskip("bitsandbytes")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose matrices have some blocks of 64 numbers each."""
    folder = tmp_path_factory.mktemp("quantized") / "model"
    return make_tiny_model(folder, seed=0, hidden_size=64, intermediate_size=128)


def model_of(folder: Path, **changes: Any) -> ModelSettings:
    return ModelSettings(path=str(folder), device="cpu", lora=LORA, **changes)


@pytest.mark.parametrize("shares", [False, True], ids=["padded", "tree"])
def test_a_base_in_4_bits_is_an_eighth_and_gives_what_its_numbers_give(folder: Path, shares: bool) -> None:
    batch = collate.pad(*collate.prepared_rows(rows(), Grpo().prepare(rows(), GrpoSettings())), shares=shares)
    plain, low = (PolicyModel(model_of(folder, quantization=name), seed=0) for name in (None, "nf4"))
    modules = low.module.named_modules()
    held = {name: one.weight for name, one in modules if isinstance(one, bitsandbytes.nn.Linear4bit)}
    assert len(held) == 7 * len(low.module.get_base_model().model.layers)
    for name, weight in held.items():
        whole = plain.module.get_submodule(name).weight
        assert whole.nbytes == 8 * weight.nbytes
        whole.data.copy_(bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state))
    found: list[list[torch.Tensor | None]] = []
    for policy in (plain, low):
        assert policy.shares_prefixes(10)
        logprobs, _ = policy.completion_terms(batch, temperature=1.0, entropy_needs_grad=False)
        logprobs.sum().backward()
        found.append([logprobs.detach(), *(one.grad for name, one in policy.trainable() if "lora" in name)])
    assert len(found[0]) == len(found[1]) > 1
    for one, other in zip(*found, strict=True):
        assert one is not None
        assert other is not None
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5 * one.abs().max().item())


def trained(lab: Any, **changes: Any) -> list[WeightsPublished]:
    """The versions of a job that was trained, and trained again from a checkpoint in its middle to equal bits."""

    async def scenario() -> list[WeightsPublished]:
        job = await lab.submit(**changes)
        await lab.plan(job)
        await lab.work(lab.has(JobSucceeded))
        steps = await steps_of(lab)
        await assert_retrained(lab, job, steps)
        await assert_retrained(lab, job, steps, first=3)
        return await lab.events("weights", WeightsPublished)

    return asyncio.run(scenario())


def test_adapters_over_4_bits_are_retrained_bit_by_bit_and_record_their_quantization(lab: Any, folder: Path) -> None:
    lab.model = folder
    published = trained(lab, model=model_of(folder, quantization="nf4"))
    assert [one.version for one in published] == [0, 1, 2, 3]
    assert {one.quantization for one in published} == {"nf4"}
    assert len({one.weights_sha256 for one in published}) == 4


@pytest.mark.parametrize("quantization", ["nf4", None])
def test_the_engine_has_the_numbers_that_the_learner_has(lab: Any, folder: Path, quantization: Any) -> None:
    lab.model = folder
    model = model_of(folder, quantization=quantization)
    published = trained(lab, model=model)[-1]
    path = lab.artifacts.fetch(published.artifact)
    requests = [GenerationRequest(published.model_group, [5, 6, number], Sampling(), number) for number in range(4)]
    sampled = run(together(requests), (published, path))
    policy = PolicyModel(model_of(folder, quantization="nf4"), seed=0)
    policy.load_weights(from_bytes(path.read_bytes(), "weights"))
    errors = [
        abs(found - wanted)
        for request, one in zip(requests, sampled, strict=True)
        for found, wanted in zip(one.logprobs, plain_logprobs(policy, request.prompt_ids, one.token_ids), strict=True)
    ]
    assert len(errors) > 20
    assert (max(errors) < 1e-3) == (quantization == "nf4")


@torch.no_grad()
def plain_logprobs(policy: PolicyModel, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> list[float]:
    """Log-probabilities of sampled tokens, by one forward of the learner's module."""
    ids = torch.tensor([[*prompt_ids, *token_ids]])
    policy.use_dropout(False)
    found = policy.module(input_ids=ids).logits[0, len(prompt_ids) - 1 : -1].log_softmax(-1)
    return found.gather(1, torch.tensor(token_ids)[:, None])[:, 0].tolist()


@pytest.mark.parametrize("offload", [None, "cpu"])
def test_adamw_in_8_bits_goes_on_from_a_checkpoint_to_the_same_bits(lab: Any, folder: Path, offload: Any) -> None:
    lab.model = folder
    settings = OptimizerSettings(kind="adamw_8bit", learning_rate=1e-3, offload=offload)
    published = trained(lab, model=ModelSettings(path=str(folder), device="cpu"), optimizer=settings)
    assert len({one.weights_sha256 for one in published}) == 4


def test_moments_in_8_bits_give_about_the_same_steps() -> None:
    def after(kind: Any, steps: int) -> tuple[torch.Tensor, int]:
        torch.manual_seed(0)
        module = torch.nn.Linear(128, 128, bias=False)
        optimizer = make_optimizer(module.named_parameters(), OptimizerSettings(kind=kind, learning_rate=1e-2))
        for _ in range(steps):
            module.weight.grad = torch.randn(128, 128) + 1
            optimizer.step()
        state = state_tensors(optimizer, module.named_parameters())
        return module.weight.detach(), state["weight/exp_avg" if kind == "adamw" else "weight/state1"].nbytes

    (full, in_32), (low, in_8) = after("adamw", 10), after("adamw_8bit", 10)
    start, _ = after("adamw", 1)
    assert in_32 == 4 * in_8
    assert (full - low).abs().mean() < 0.05 * (full - start).abs().mean()


def test_a_step_is_counted_as_its_library_counts_it() -> None:
    module = torch.nn.Linear(128, 128)
    settings = OptimizerSettings(kind="adamw_8bit")
    optimizer = make_optimizer(module.named_parameters(), settings)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = state_tensors(optimizer, module.named_parameters())
    other = make_optimizer(module.named_parameters(), settings)
    load_state_tensors(other, module.named_parameters(), kept)
    assert {type(state["step"]) for state in other.state.values()} == {int}


def test_without_the_library_the_error_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ModelError, match=r"quantization nf4 needs bitsandbytes.*'\.\[learner,quantized\]'"):
        load_module(model_of(folder, quantization="nf4"), str(folder), torch.device("cpu"), seed=0)
    with pytest.raises(ConfigError, match=r"adamw_8bit needs bitsandbytes.*'\.\[learner,quantized\]'"):
        make_optimizer(torch.nn.Linear(2, 2).named_parameters(), OptimizerSettings(kind="adamw_8bit"))
