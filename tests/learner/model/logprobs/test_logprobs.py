"""Log-probabilities of chosen tokens against a log-softmax of all logits, in values, gradients and memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Gemma2Config, GemmaConfig, LlamaConfig, MistralConfig, Qwen2Config

from rollstream.learner.model import logprobs
from rollstream.learner.model.collate import MicroBatch
from rollstream.learner.model.logprobs import Head, KeptSets, selected_logprobs
from rollstream.learner.model.policy import PolicyModel
from rollstream.schemas.errors import RunFailedError
from rollstream.schemas.settings import LoraSettings, ModelSettings

N, D, V = 7, 5, 11


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "CPU_CHUNK", 3 * V)


def given(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden, weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((N, D), (V, D), (V,)))
    targets = torch.randint(V, (N,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), targets


def kept_sets(targets: Tensor) -> KeptSets:
    """For every token, its target and the two ids after it."""
    return KeptSets(((targets[:, None] + torch.arange(3)) % V).flatten(), torch.full((N,), 3))


def plain(
    hidden: Tensor, head: Head, targets: Tensor, temperature: float, kept: KeptSets | None
) -> tuple[Tensor, Tensor]:
    logits = torch.nn.functional.linear(hidden, head.weight, head.bias) / temperature
    if kept is not None:
        is_kept = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, kept.token_ids_M.view(N, 3), value=True)
        logits = logits.masked_fill(~is_kept, -1e30)
    log_softmax = torch.log_softmax(logits, dim=-1)
    return log_softmax.gather(1, targets[:, None])[:, 0], -(log_softmax.exp() * log_softmax).sum(-1)


@pytest.mark.parametrize("truncated", [False, True])
def test_the_gradient_is_that_of_finite_differences(truncated: bool) -> None:
    hidden, weight, bias, targets = given(torch.float64)
    kept = kept_sets(targets) if truncated else None

    def terms(hidden: Tensor, weight: Tensor, bias: Tensor) -> Any:
        return selected_logprobs(hidden, Head(weight, bias), targets, 0.7, kept, entropy_needs_grad=True)

    assert torch.autograd.gradcheck(terms, (hidden, weight, bias))


@pytest.mark.parametrize("truncated", [False, True])
def test_values_and_gradients_are_those_of_log_softmax(truncated: bool) -> None:
    found, wanted = [], []
    for function, kept_of in ((selected_logprobs, found), (plain, wanted)):
        hidden, weight, bias, targets = given(torch.float32)
        options: dict[str, Any] = {"entropy_needs_grad": True} if function is selected_logprobs else {}
        kept = kept_sets(targets) if truncated else None
        one, entropy = function(hidden, Head(weight, bias), targets, 0.7, kept, **options)
        assert entropy is not None
        (one * torch.arange(1.0, N + 1) + 0.3 * entropy).sum().backward()
        kept_of.extend([one, entropy, hidden.grad, weight.grad, bias.grad])
    for one, other in zip(found, wanted, strict=True):
        assert one is not None
        assert other is not None
        assert (one - other).detach().abs().max() <= 1e-6 * other.detach().abs().max().clamp(min=1)


def test_equal_input_gives_equal_bits_and_a_frozen_head_has_no_gradient() -> None:
    def once() -> list[Tensor]:
        hidden, weight, _, targets = given(torch.float32)
        one, _ = selected_logprobs(hidden, Head(weight.detach()), targets, 1.0)
        one.sum().backward()
        assert hidden.grad is not None
        return [one, hidden.grad]

    assert all(one.equal(other) for one, other in zip(once(), once(), strict=True))


def test_no_tensor_has_as_many_elements_as_all_logits() -> None:
    sizes: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            sizes.extend([found.numel()] if isinstance(found, Tensor) else [])
            return found

    hidden, weight, _, targets = given(torch.float32)
    with Watch():
        selected_logprobs(hidden, Head(weight), targets, 1.0)[0].sum().backward()
    assert max(sizes) <= max(3 * V, V * D) < N * V


def test_a_call_waits_once_for_kept_sets_and_casts_the_head_once() -> None:
    reads: list[Any] = []
    casts: list[Any] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.overloadpacket
            reads.extend([name] * (name in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero)))
            casts.extend([name] * (name is torch.ops.aten._to_copy and args[0].shape == (V, D)))
            return func(*args, **(kwargs or {}))

    for kept, at_most in ((None, 0), (kept_sets(given(torch.float32)[3]), 4)):
        reads.clear()
        casts.clear()
        hidden, weight, _, targets = given(torch.float32)
        with Watch():
            one, _ = selected_logprobs(hidden, Head(weight), targets, 0.7, kept, compute_dtype=torch.bfloat16)
            one.sum().backward()
        assert len(reads) <= at_most, "numbers of one list: whether a set is odd, and where each of 3 chunks begins"
        assert len(casts) == 1


def test_a_gpu_computes_more_tokens_at_once_than_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    sizes = [logprobs.chunk_tokens(torch.device(name), 151_936) for name in ("cpu", "cuda")]
    assert sizes == [27, 1766]


def test_without_entropy_there_is_none() -> None:
    hidden, weight, _, targets = given(torch.float32)
    assert selected_logprobs(hidden, Head(weight), targets, 1.0, entropy=False)[1] is None


def test_a_kept_set_without_the_sampled_token_is_an_error() -> None:
    hidden, weight, _, targets = given(torch.float32)
    kept = kept_sets((targets + 1) % V)
    with pytest.raises(RunFailedError, match="not in its recorded kept set"):
        selected_logprobs(hidden, Head(weight), targets, 1.0, kept)


SHAPE: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("config", [Qwen2Config, LlamaConfig, GemmaConfig, MistralConfig, Gemma2Config])
def test_terms_are_those_of_the_models_own_logits(tmp_path: Path, config: Any, tied: bool) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config(**SHAPE, tie_word_embeddings=tied)).save_pretrained(tmp_path)
    model = PolicyModel(ModelSettings(path=str(tmp_path), device="cpu"), seed=0)
    assert model.selects_logprobs == (config is not Gemma2Config), "Gemma 2 caps its logits"
    compare(model)


@pytest.mark.parametrize("targets", [("q_proj",), ("q_proj", "lm_head")])
def test_adapters_count_and_one_on_the_head_needs_all_logits(tmp_path: Path, targets: tuple[str, ...]) -> None:
    AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE)).save_pretrained(tmp_path)
    lora = LoraSettings(rank=2, target_modules=targets)
    model = PolicyModel(ModelSettings(path=str(tmp_path), device="cpu", lora=lora), seed=0)
    for name, parameter in model.trainable():
        torch.nn.init.normal_(parameter, std=0.1) if "lora_B" in name else None
    assert model.selects_logprobs == ("lm_head" not in targets)
    compare(model)


def compare(model: PolicyModel) -> None:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 32, (3, 9), generator=generator)
    mask = torch.rand((3, 9), generator=generator) < 0.5
    mask[:, 0] = False
    batch = MicroBatch(ids, mask, torch.zeros(3, 9), torch.zeros(3, 9))
    results: list[tuple[Tensor, ...]] = []
    for selects in (model.selects_logprobs, False):
        model.selects_logprobs = selects
        model.module.zero_grad()
        one, entropy = model.completion_terms(batch, temperature=0.7, entropy_needs_grad=True)
        (one.sum() + entropy.sum()).backward()
        grads = [parameter.grad for _, parameter in model.trainable() if parameter.grad is not None]
        results.append((one, entropy, *grads))
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-5)
