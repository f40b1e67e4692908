"""The transformers engine in the process of a learner: what torch has once a process, and another thread needs."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollstream.producers.engines.model_cache import ModelCache
from rollstream.schemas.engine_settings import TransformersSettings
from tests.producers.engines.engine_rig import OTHER, adapter, noised, published, requests, run, together
from tests.rigs.default_type import default_type

ADAPTERS = {
    "plain": {},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "embeddings": {"modules": ("embed_tokens", "q_proj")},
}


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_are_loaded_without_drawing_a_random_number(folder, tmp_path, kind):
    from peft import get_peft_model_state_dict

    first, path, lora = adapter(folder, tmp_path, 1, **ADAPTERS[kind])
    second, other_path, _ = adapter(folder, tmp_path, 2, **ADAPTERS[kind])
    cache = ModelCache(TransformersSettings(device="cpu"))
    before = torch.get_rng_state()
    for event, file in ((published(folder), path), (published(folder, group=OTHER), other_path)):
        given = event.model_copy(update={"weights_format": "lora", "lora": lora})
        cache.load(given, load_file(file), "weights")
    assert torch.get_rng_state().equal(before)
    ids = torch.arange(2, 30)[None, :]
    for model, event, file in ((first, published(folder), path), (second, published(folder, group=OTHER), other_path)):
        held = cache.held(event.model_group)
        assert held is not None
        assert held.adapter is not None
        held.activate()
        own = get_peft_model_state_dict(held.model.module, adapter_name=held.adapter, save_embedding_layers=False)
        given = load_file(file)
        assert own.keys() == given.keys()
        assert all(own[name].equal(value) for name, value in given.items())
        with torch.no_grad():
            assert held.model.module(input_ids=ids).logits.equal(model(input_ids=ids).logits)


def test_full_weights_on_a_base_model_that_lacks_some_are_loaded_without_drawing_one(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "base")
    state = load_file(folder / "model.safetensors")
    del state[next(name for name in state if name.endswith("q_proj.weight"))]
    save_file(state, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    cache = ModelCache(TransformersSettings(device="cpu"))
    before = torch.get_rng_state()
    cache.load(published(tmp_path / "base"), noised(folder, 1), "weights")
    assert torch.get_rng_state().equal(before)


@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_a_model_that_is_loaded_meanwhile_changes_no_answer(folder, versions, batching):
    asked = requests(8, temperature=0.7, top_p=0.9)

    async def work(engine):
        alone = await together(asked)(engine)
        with default_type(torch.bfloat16):
            return alone, await together(asked)(engine)

    alone, beside = run(work, (published(folder), versions(0)), batching=batching)
    assert [(one.token_ids, one.logprobs) for one in alone] == [(one.token_ids, one.logprobs) for one in beside]
