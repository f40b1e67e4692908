"""Weights of the transformers engine: adapters and full ones, version after version, and files that do not fit."""

import asyncio
import itertools
import shutil
import threading
from typing import Any

import peft
import pytest
import torch
from peft.tuners import lora
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GraniteMoeConfig, MambaConfig, Qwen3MoeConfig, RwkvConfig

from rollstream.learner.model.policy import PolicyModel
from rollstream.producers.engines import model_cache
from rollstream.producers.engines.generation import Model, check_cache
from rollstream.schemas.errors import ModelError
from rollstream.schemas.settings import LoraSettings, ModelSettings
from tests.producers.engines.engine_rig import (
    GROUP,
    OTHER,
    adapter,
    full_forward_logprobs,
    noised,
    one_by_one,
    published,
    requests,
    run,
    together,
)


def test_adapters_of_several_groups_share_a_base_model_and_change_versions(folder, tmp_path):
    first, first_path, lora = adapter(folder, tmp_path, 1)
    second, second_path, _ = adapter(folder, tmp_path, 2)
    third, third_path, wider = adapter(folder, tmp_path, 3, rank=8)
    asked, others = requests(10), requests(10, group=OTHER)

    async def work(engine):
        await engine.load(published(folder, 0, weights_format="lora", lora=lora), first_path)
        await engine.load(published(folder, 4, OTHER, weights_format="lora", lora=wider), third_path)
        before = await together(asked + others)(engine)
        await engine.load(published(folder, 1, weights_format="lora", lora=lora), second_path)
        after = await together(asked)(engine)
        await engine.load(published(folder, 2, weights_format="lora", lora=wider), third_path)
        return before[:10], before[10:], after, await together(asked)(engine)

    answers = run(work)
    for model, questions, generations in zip(
        (first, third, second, third), (asked, others, asked, asked), answers, strict=True
    ):
        for request, generation in zip(questions, generations, strict=True):
            expected = full_forward_logprobs(model, request, generation)
            assert torch.allclose(torch.tensor(generation.logprobs), expected, atol=1e-4)
    assert [one[0].spans[0].version for one in answers] == [0, 4, 1, 2]


def test_an_adapter_of_replaced_weights_has_a_base_model_of_its_own(folder, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(folder, base)
    first, first_path, lora = adapter(base, tmp_path, 1)
    asked, others = requests(5), requests(5, group=OTHER)

    async def work(engine):
        await engine.load(published(base, weights_format="lora", lora=lora, base_sha256="1" * 64), first_path)
        save_file(noised(base, 1), base / "new", {"format": "pt"})
        (base / "new").replace(base / "model.safetensors")
        second, path, _ = adapter(base, tmp_path, 2)
        await engine.load(published(base, 0, OTHER, weights_format="lora", lora=lora, base_sha256="2" * 64), path)
        return second, await together(asked + others)(engine)

    second, answers = run(work)
    for model, request, generation in zip([first] * 5 + [second] * 5, asked + others, answers, strict=True):
        expected = full_forward_logprobs(model, request, generation)
        assert torch.allclose(torch.tensor(generation.logprobs), expected, atol=1e-4)


def test_an_adapter_that_does_not_fit_leaves_the_one_before(folder, tmp_path):
    _, path, lora = adapter(folder, tmp_path, 1)
    _, narrow, _ = adapter(folder, tmp_path, 1, rank=2)
    _, other, other_lora = adapter(folder, tmp_path, 5, modules=("k_proj",))
    asked = requests(5)

    async def work(engine):
        await engine.load(published(folder, 0, weights_format="lora", lora=lora), path)
        before = await together(asked)(engine)
        with pytest.raises(ModelError, match=r"has shape .* the model has"):
            await engine.load(published(folder, 1, weights_format="lora", lora=lora), narrow)
        with pytest.raises(ModelError, match=r"lack .* tensors"):
            await engine.load(published(folder, 1, weights_format="lora", lora=lora), other)
        with pytest.raises(ModelError, match=r"lack .* tensors"):
            await engine.load(published(folder, 1, weights_format="lora", lora=other_lora), path)
        with pytest.raises(ModelError, match="adapter does not fit"):
            await engine.load(published(folder, 1, weights_format="lora", lora={**lora, "target_modules": ["x"]}), path)
        for other_kind in ({"peft_type": "IA3"}, {"target_modules": "all-linear"}):
            with pytest.raises(ModelError, match=r"its adapter is not LoRA with a list of target_modules; publish one"):
                await engine.load(published(folder, 1, weights_format="lora", lora={**lora, **other_kind}), path)
        return before, await together(asked)(engine), engine.version(GROUP)

    before, after, version = run(work)
    assert before == after
    assert version == 0


def out_of_memory_after(count, plain):
    """A function that runs out of memory after so many calls."""
    calls = itertools.count()

    def full(*args, **options):
        if next(calls) >= count:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return plain(*args, **options)

    return full


@pytest.mark.parametrize(
    ("owner", "name", "count"),
    [
        (peft.PeftModel, "add_adapter", 0),
        (lora.LoraLayer, "update_layer", 3),
        (peft, "set_peft_model_state_dict", 0),
        (model_cache, "probed_shape", 0),
    ],
    ids=["before", "midway", "weights", "probe"],
)
def test_an_adapter_without_memory_is_refused_and_leaves_nothing_beside_the_others(
    folder, tmp_path, monkeypatch, owner, name, count
):
    (_, path, config), (_, second, _) = (adapter(folder, tmp_path, seed) for seed in (1, 2))
    form, asked, others = {"weights_format": "lora", "lora": config}, requests(5), requests(5, group=OTHER)

    async def work(engine):
        before = await together(asked)(engine)
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, out_of_memory_after(count, getattr(owner, name)))
            with pytest.raises(ModelError, match=r"version 0 do not fit into the memory of cpu \(CUDA out of memory"):
                await engine.load(published(folder, 0, OTHER, **form), second)
        names = [key for key in engine.module(GROUP).state_dict() if "adapter_1" in key]
        after = await together(asked)(engine)
        await engine.load(published(folder, 0, OTHER, **form), second)
        return before, names, after, [one.token_ids for one in await together(others)(engine)]

    load = (published(folder, 0, **form), path)
    before, names, after, found = run(work, load)
    assert (before, names) == (after, [])
    expected = run(together(others), load, (published(folder, 0, OTHER, **form), second))
    assert found == [one.token_ids for one in expected]


@pytest.mark.parametrize("form", ["lora", "full"])
def test_a_version_without_memory_is_refused_and_the_one_before_stays(folder, versions, tmp_path, monkeypatch, form):
    (_, path, config), (_, second, _) = (adapter(folder, tmp_path, seed) for seed in (1, 2))
    written = {"weights_format": "lora", "lora": config} if form == "lora" else {}
    first, next_one = (path, second) if form == "lora" else (versions(0), versions(1))
    asked = requests(5)

    async def work(engine):
        before = await together(asked)(engine)
        other = shutil.copytree(folder, tmp_path / "other")
        with monkeypatch.context() as patched:
            patched.setattr(torch.nn.Module, "to", out_of_memory_after(0, None))
            patched.setattr(torch.Tensor, "to", out_of_memory_after(0, None))
            with pytest.raises(ModelError, match="version 1 do not fit into the memory of cpu"):
                await engine.load(published(folder if form == "lora" else other, 1, **written), next_one)
        return before, await together(asked)(engine), engine.version(GROUP)

    before, after, version = run(work, (published(folder, 0, **written), first))
    assert (before, version) == (after, 0)


def test_weights_that_do_not_fit_are_refused_by_name_and_the_version_before_stays(folder, versions, tmp_path):
    state = noised(folder, 1)
    lacking = {name: value for name, value in state.items() if "layers.1.mlp.up" not in name}
    save_file(lacking, tmp_path / "lacking.safetensors")
    save_file({**state, "model.extra": torch.zeros(1)}, tmp_path / "extra.safetensors")
    save_file({**state, "model.norm.weight": torch.zeros(3)}, tmp_path / "shape.safetensors")
    (tmp_path / "torn.safetensors").write_bytes(b"torn")
    asked = requests(5)
    cases = {
        "lacking": r"lacking\.safetensors .* lack 1 tensors, such as model\.layers\.1\.mlp\.up_proj\.weight",
        "extra": r"extra\.safetensors .* does not have, such as model\.extra",
        "shape": r"shape\.safetensors .* model\.norm\.weight has shape \[3\], the model has \[64\]",
        "torn": r"torn\.safetensors .* cannot be read",
    }

    async def work(engine):
        before = await together(asked)(engine)
        for name, message in cases.items():
            with pytest.raises(ModelError, match=message):
                await engine.load(published(folder, 1), tmp_path / f"{name}.safetensors")
        return before, await together(asked)(engine), engine.version(GROUP)

    before, after, version = run(work, (published(folder, 0), versions(0)))
    assert before == after
    assert version == 0


def test_tied_tensors_may_be_given_and_stay_tied(folder, versions, tmp_path):
    state = noised(folder, 1)
    save_file({**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()}, tmp_path / "tied.safetensors")
    asked = requests(5)
    given = run(together(asked), (published(folder, 1), tmp_path / "tied.safetensors"))
    assert given == run(together(asked), (published(folder, 1), versions(1)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_of_a_training_that_diverged_are_named(folder, versions, tmp_path, temperature):
    state = noised(folder, 1)
    save_file({name: value * torch.nan for name, value in state.items()}, tmp_path / "diverged.safetensors")

    async def work(engine):
        (asked,) = requests(1, temperature=temperature)
        with pytest.raises(
            ModelError, match=r"version 7 of model group run-1/policy .* not finite numbers; .* diverged"
        ):
            await engine.generate(asked)
        await engine.load(published(folder, 8), versions(8))
        return await engine.generate(asked)

    assert run(work, (published(folder, 7), tmp_path / "diverged.safetensors")).spans[0].version == 8


def test_a_missing_model_folder_is_named(versions, tmp_path):
    async def work(engine):
        with pytest.raises(ModelError, match=r"gone does not exist here; give a transformers folder"):
            await engine.load(published(tmp_path / "gone"), versions(0))
        return engine.version(GROUP)

    assert run(work) == -1


def test_an_unloaded_group_is_forgotten_and_can_come_again(folder, tmp_path, versions):
    _, path, lora = adapter(folder, tmp_path, 1)
    asked = requests(3)

    async def work(engine):
        for event, file in (
            (published(folder, 0), versions(0)),
            (published(folder, 0, weights_format="lora", lora=lora), path),
        ):
            await engine.load(event, file)
            before = await together(asked)(engine)
            await engine.unload(GROUP)
            assert engine.version(GROUP) == -1
            await engine.load(event, file)
            assert await together(asked)(engine) == before

    run(work)


def test_the_next_group_on_a_base_model_takes_the_module_of_an_unloaded_one(folder, tmp_path, versions):
    base = shutil.copytree(folder, tmp_path / "base")
    asked = requests(3)

    async def work(engine):
        await engine.load(published(base, 1), versions(1))
        await engine.unload(GROUP)
        shutil.rmtree(base)
        await engine.load(published(base, 2, OTHER), versions(2))
        found = await together(requests(3, group=OTHER))(engine)
        with pytest.raises(ModelError, match="does not exist here"):
            await engine.load(published(base, 1), versions(1))
        return [one.token_ids for one in found]

    expected = run(together(asked), (published(folder, 2), versions(2)))
    assert run(work) == [one.token_ids for one in expected]


MAMBA = MambaConfig(vocab_size=102, hidden_size=32, state_size=4, num_hidden_layers=2, initializer_range=0.3)
RWKV = RwkvConfig(vocab_size=102, hidden_size=32, attention_hidden_size=32, num_hidden_layers=2)
ROUNDED = GraniteMoeConfig(
    vocab_size=102,
    hidden_size=128,
    intermediate_size=128,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_local_experts=8,
    initializer_range=0.1,
)


def random_model(folder, base, config):
    shutil.copytree(folder, base)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    return published(base), base / "model.safetensors"


@pytest.mark.parametrize("how", [{}, {"batching": "static"}, {"deterministic": True}], ids=["pool", "static", "alone"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", [MAMBA, RWKV], ids=["mamba", "rwkv"])
def test_a_model_whose_state_is_not_in_the_cache_is_refused(folder, tmp_path, config, dtype, how):
    given = random_model(folder, tmp_path / "base", config)
    with pytest.raises(ModelError, match=r"cannot keep the state of .* between tokens .*; use engine.kind vllm"):
        run(one_by_one([]), given, dtype=dtype, **how)


def test_a_model_that_rounding_changes_much_is_not_refused():
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(ROUNDED).eval().to(torch.bfloat16)
    check_cache(Model(module, torch.device("cpu"), (1,), 0), is_batched=True)


def trained(folder, tmp_path, group, seed, *modules):
    """A learner's model with a changed adapter, and what it publishes."""
    lora = LoraSettings(rank=4, alpha=8, target_modules=modules)
    policy = PolicyModel(ModelSettings(path=str(folder), lora=lora), seed=0)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in policy.trainable():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    path = tmp_path / f"{group}-{seed}.safetensors".replace("/", "-")
    path.write_bytes(policy.weights_bytes())
    event = published(folder, seed, group, weights_format="lora", lora=policy.adapter_config())
    return policy.module.eval(), (event, path)


def check_two_adapters(folder, tmp_path, modules):
    """Two groups' adapters, one of them on `modules`, answer as their learners compute, version after version."""
    first, load = trained(folder, tmp_path, GROUP, 0, *modules)
    second, other_load = trained(folder, tmp_path, OTHER, 1, "q_proj")
    newer, newer_load = trained(folder, tmp_path, GROUP, 2, *modules)
    asked, others = requests(5), requests(5, group=OTHER)

    async def work(engine):
        before = await together(asked + others)(engine)
        await engine.load(*newer_load)
        return before, await together(asked)(engine)

    before, after = run(work, load, other_load)
    models = [first] * 5 + [second] * 5 + [newer] * 5
    for model, request, generation in zip(models, [*asked, *others, *asked], [*before, *after], strict=True):
        expected = full_forward_logprobs(model, request, generation)
        assert torch.allclose(torch.tensor(generation.logprobs), expected, atol=1e-4)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("modules", [("q_proj", "lm_head"), ("embed_tokens",), ("embed_tokens", "lm_head")])
def test_an_adapter_on_the_embeddings_or_the_head_is_generated_with(folder, tmp_path, modules):
    check_two_adapters(folder, tmp_path, modules)


EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
EXPERT_MODULES = frozenset({"gate_proj", "up_proj"})
"""The modules of experts in one tensor that `down_proj` is not in."""


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match any targeted module")
@pytest.mark.parametrize("modules", [("q_proj", "gate_proj", "up_proj", "down_proj"), ("down_proj",)])
def test_an_adapter_on_experts_in_one_tensor_is_generated_with(folder, tmp_path, modules):
    base = tmp_path / "experts"
    shutil.copytree(folder, base)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(vocab_size=102, **sizes, **EXPERTS)).save_pretrained(base)
    check_two_adapters(base, tmp_path, modules)
    _, load = trained(base, tmp_path, GROUP, 0, *modules)
    _, other = trained(base, tmp_path, OTHER, 1, *EXPERT_MODULES.difference(modules), "down_proj")
    with pytest.raises(
        ModelError, match=r"; give all model groups of .* the same experts in lora\.target_modules, or a copy each"
    ):
        run(one_by_one([]), load, other)


@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_that_peft_does_not_make_is_refused(folder, tmp_path, key):
    _, path, config = adapter(folder, tmp_path, 1)
    changed = published(folder, weights_format="lora", lora=config | {key: {"(q|q)*_proj": 4}})
    with pytest.raises(ModelError, match=rf"{key} of its adapter has '\(q\|q\)\*_proj', which is not loaded here"):
        run(one_by_one([]), (changed, path))


@pytest.mark.timeout(60)
def test_an_adapter_does_not_wait_for_the_full_weights_of_another_group(folder, tmp_path, versions):
    _, path, config = adapter(folder, tmp_path, 1)

    async def work(engine):
        is_loadable, is_over = engine._is_loadable, threading.Event()
        engine._is_loadable = lambda group, most: (group != GROUP or is_over.is_set()) and is_loadable(group, most)
        full = asyncio.create_task(engine.load(published(folder, 1), versions(1)))
        await asyncio.sleep(0)
        await engine.load(published(folder, 4, OTHER, weights_format="lora", lora=config), path)
        before = engine.version(GROUP), engine.version(OTHER)
        is_over.set()
        await full
        return before, engine.version(GROUP)

    assert run(work, (published(folder, 0), versions(0))) == ((0, 4), 1)
