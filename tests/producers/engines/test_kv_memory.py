"""Memory for keys and values: requests wait for room, rows that find none begin again instead of failing, and query
heads read the keys and values that they share in place.
"""

import asyncio
import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rollstream.producers.engines import kv_pool
from rollstream.producers.engines.base import GenerationRequest
from rollstream.producers.engines.kv_pool import PLAIN, SHARED_KEYS, KVPool, PoolShape, attend, left_in_container
from rollstream.producers.engines.scheduling import (
    Block,
    JoinLimits,
    PoolCapacity,
    WaitingPrompt,
    joining,
    padded_length,
)
from rollstream.schemas.errors import ModelError
from rollstream.schemas.settings import Sampling
from tests.producers.engines.engine_rig import GROUP, noised, one_by_one, published, run, together

pytestmark = pytest.mark.timeout(60)
SHAPE = PoolShape(1, 1, 1, torch.float32)
NUM_ROWS, NUM_COLUMNS, WIDTH = 5, 37, 16


def asked(length, seed, max_new_tokens, on_tokens=None):
    prompt = [5 + (seed + index) % 10 for index in range(length)]
    return GenerationRequest(GROUP, prompt, Sampling(max_new_tokens=max_new_tokens), seed, "", on_tokens)


SHORT = [asked(10, seed, 40) for seed in range(12)]
LONG, LATE = asked(200, 99, 10), asked(50, 98, 120)


@pytest.fixture
def sizes(monkeypatch):
    """Sizes (slots, columns) of the pools that were made; above `most` slots times columns there is no memory."""
    made, make = Sizes(), KVPool._empty

    def bounded(self, slots, columns):
        made.append((slots, columns))
        if slots * columns > made.most:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {slots} x {columns}")
        return make(self, slots, columns)

    monkeypatch.setattr(KVPool, "_empty", bounded)
    return made


class Sizes(list):
    most = 10**9


def ids_of(answers):
    return [getattr(one, "token_ids", one) for one in answers]


@given(
    waiting=st.lists(st.integers(1, 500), min_size=1, max_size=20),
    live=st.lists(st.integers(1, 500), max_size=5),
    most=st.integers(0, 8000),
)
def test_rows_join_while_there_is_room_for_the_longest_of_all_and_one_always_joins_alone(waiting, live, most):
    prompts = [WaitingPrompt("a", 1, 9, length) for length in waiting]
    capacity = PoolCapacity(len(live), max(live, default=0), most)
    chosen = joining(prompts, num_live=len(live), limits=JoinLimits(100), capacity_of=lambda _: capacity)
    assert chosen == list(range(len(chosen)))
    rows = [*live, *(waiting[index] for index in chosen)]
    assert len(rows) * padded_length(max(rows, default=0)) <= most or not chosen or len(rows) == 1
    if not live:
        assert chosen


def test_one_long_row_takes_no_more_than_the_bound_beside_others(folder, versions, sizes):
    load = (published(folder), versions(0))
    expected = run(one_by_one([*SHORT, LONG, LATE]), load)
    sizes.clear()
    token_bytes = run(token_bytes_of, load)
    sizes.clear()
    num_mb = 1
    answers = run(together([*SHORT, LONG, LATE] * 3), load, kv_cache_mb=num_mb, prefix_cache_mb=0)
    assert ids_of(answers) == ids_of(expected) * 3
    assert max(slots * columns for slots, columns in sizes) * token_bytes <= num_mb * 2**20


async def token_bytes_of(engine):
    shape = engine._model_cache.held(GROUP).pool_shape
    return shape.token_bytes


@pytest.mark.parametrize("late", [LONG, LATE], ids=["joins", "grows"])
def test_rows_that_find_no_memory_begin_again_and_every_answer_is_the_same(folder, versions, sizes, late):
    async def beside(engine):
        calls = [asyncio.create_task(engine.generate(one)) for one in SHORT]
        await engine.generate(asked(9, 1, 1))
        return await asyncio.gather(*calls, engine.generate(late))

    load = (published(folder), versions(0))
    expected = run(one_by_one([*SHORT, late]), load)
    sizes.most = 1000
    assert ids_of(run(beside, load)) == ids_of(expected)


def test_a_row_that_begins_again_hands_no_token_on_twice(folder, versions, sizes):
    reported = [[] for _ in range(4)]
    rows = [asked(10, seed, 150, reported[seed].extend) for seed in range(4)]
    load = (published(folder), versions(0))
    expected = ids_of(run(one_by_one([asked(10, seed, 150) for seed in range(4)]), load))
    sizes.most = 300
    assert ids_of(run(together(rows), load)) == expected
    for given_on, whole in zip(reported, expected, strict=True):
        assert given_on == list(whole[: len(given_on)])


def test_only_a_row_that_does_not_fit_alone_fails(folder, versions, sizes):
    async def work(engine):
        return await asyncio.gather(*map(engine.generate, [*SHORT, LONG, LATE]), return_exceptions=True)

    load = (published(folder), versions(0))
    expected = ids_of(run(one_by_one([*SHORT, LATE]), load))
    sizes.most = 192
    *short, long, late = run(work, load)
    assert ids_of([*short, late]) == expected
    with pytest.raises(ModelError, match="CUDA out of memory"):
        raise long


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"memory.max": "1000", "memory.current": "700", "memory.stat": "anon 400\ninactive_file 250"}, 550),
        ({"memory.max": "max", "memory.current": "700", "memory.stat": "inactive_file 250"}, None),
        ({"memory.max": "1000", "memory.current": "1200", "memory.stat": "inactive_file 0"}, 0),
        (
            {
                "memory/memory.limit_in_bytes": "1000",
                "memory/memory.usage_in_bytes": "300",
                "memory/memory.stat": "inactive_file 9\ntotal_inactive_file 100",
            },
            800,
        ),
        ({}, None),
    ],
)
def test_a_container_has_what_its_limit_leaves_beside_what_it_took(tmp_path, files, left):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert left_in_container(tmp_path) == left


def test_a_pool_shrinks_to_its_rows_before_it_grows_beyond_its_bound():
    pool = KVPool(SHAPE, torch.device("cpu"))
    pool.reserve(100, 100)
    pool._data[:, :, :3, :90] = 7
    pool.max_tokens = 20_000
    pool.reserve(3, 4000)
    assert pool._data.shape[2] * pool._data.shape[3] <= 20_000
    assert bool((pool._data[:, :, :3, :90] == 7).all())
    pool.reserve(200, 91)
    assert pool._data.shape[2] >= 200
    assert pool._data.shape[2] * pool._data.shape[3] <= 200 * 128
    assert bool((pool._data[:, :, :3, :90] == 7).all())


@pytest.mark.parametrize("num_versions", [1, 3])
def test_rows_have_the_memory_of_those_before_them_also_of_earlier_versions(folder, versions, sizes, num_versions):
    async def again(engine):
        answers = await together(SHORT)(engine)
        sizes.clear()
        for version in range(1, num_versions):
            await engine.load(published(folder, version), versions(version))
            answers = await together(SHORT)(engine)
        return answers, await together(SHORT)(engine)

    newest = (published(folder, num_versions - 1), versions(num_versions - 1))
    expected = ids_of(run(one_by_one(SHORT), newest))
    found = run(again, (published(folder), versions(0)), prefix_cache_mb=0)
    assert list(map(ids_of, found)) == [expected, expected]
    assert not sizes


@torch.inference_mode()
def test_rows_that_were_in_a_pool_change_no_bit_of_later_ones(folder):
    module = AutoModelForCausalLM.from_pretrained(folder).eval()
    shape = kv_pool.probed_shape(module, torch.device("cpu"))
    assert shape is not None
    ids, found = torch.arange(30)[None, :], list[torch.Tensor]()
    for left in (0.0, 1e3):
        pool = KVPool(shape, torch.device("cpu"))
        pool.reserve(8, 64)
        pool._data[...] = left * torch.randn(pool._data.shape)
        made = kv_pool._joined(module, pool, ids, (0, 2, 1), (0, 0, 0), (3, 9, 5))
        made += kv_pool._joined(module, pool, ids, (0, 2), (3, 9), (1, 6))
        mask, positions = pool.for_decode([4, 5, 15])
        new: dict[str, Any] = {"input_ids": ids[0, positions], "position_ids": positions, "past_key_values": pool}
        found.append(torch.cat([*made, module(attention_mask=mask, use_cache=True, **new).logits[:, -1]]))
    assert found[0].equal(found[1])


def test_rows_after_a_version_of_nan_are_sound(folder, versions, tmp_path):
    state = noised(folder, 1)
    save_file({name: value * torch.nan for name, value in state.items()}, tmp_path / "diverged.safetensors")

    async def work(engine):
        unequal = [asked(10, seed, 1 + 3 * (seed % 5)) for seed in range(12)]  # so that rows move to freed slots
        failed = await asyncio.gather(*map(engine.generate, [*unequal, LONG]), return_exceptions=True)
        assert {type(one) for one in failed} == {ModelError}
        await engine.load(published(folder, 8), versions(8))
        return await together([*SHORT, LATE])(engine)

    found = run(work, (published(folder, 7), tmp_path / "diverged.safetensors"))
    assert ids_of(found) == ids_of(run(one_by_one([*SHORT, LATE]), (published(folder, 8), versions(8))))


def test_a_long_row_does_not_get_as_many_slots_as_the_short_ones_before_it(folder, versions, sizes):
    async def work(engine):
        await together(SHORT)(engine)
        sizes.clear()
        return await engine.generate(LONG)

    found = run(work, (published(folder), versions(0)), prefix_cache_mb=0)
    assert found.token_ids == run(one_by_one([LONG]), (published(folder), versions(0)))[0].token_ids
    assert max(slots for slots, _ in sizes[:2]) <= 1


@pytest.mark.parametrize("kept_bytes", [0, 10**9])
def test_a_pool_without_rows_keeps_memory_up_to_its_bound(monkeypatch, kept_bytes):
    monkeypatch.setattr(kv_pool, "KEPT_BYTES", kept_bytes)
    pool = KVPool(SHAPE, torch.device("cpu"))
    pool.reserve(3, 100)
    pool.clear()
    assert bool(pool._data.numel()) == bool(kept_bytes)
    pool.free()
    assert not pool._data.numel()


def test_a_model_group_that_is_unloaded_leaves_no_pool(folder, versions):
    async def work(engine):
        await together(SHORT)(engine)
        await engine.load(published(folder, 1), versions(1))
        assert engine._lanes._spare is not None
        await engine.unload(GROUP)
        return engine._lanes._spare, engine._lanes._lanes

    assert run(work, (published(folder), versions(0))) == (None, {})


def test_keys_and_values_of_an_earlier_version_wait_for_no_gc(folder, versions):
    """Producers rarely collect: what cycles kept alive were gigabytes."""

    async def work(engine):
        for version in range(2):
            await engine.load(published(folder, version), versions(version))
            answers = await together(SHORT)(engine)
            prompts = [*zip(SHORT, answers, strict=True)]
            await together([replace(one, prompt_ids=[*one.prompt_ids, *answer.token_ids]) for one, answer in prompts])(
                engine
            )
        await engine.load(published(folder, 2), versions(2))
        await engine.generate(asked(5, 1, 1))
        return sum(block.size_bytes for block in gc.get_objects() if isinstance(block, Block))

    gc.collect()
    gc.disable()
    try:
        assert 0 < run(work) < 20_000
    finally:
        gc.enable()


def test_answers_arrive_without_memory_to_keep_them_for_later_prompts(folder, versions, monkeypatch):
    def full(self, slots, width):
        raise torch.OutOfMemoryError("CUDA out of memory")

    load = (published(folder), versions(0))
    expected = ids_of(run(one_by_one(SHORT), load))
    monkeypatch.setattr(KVPool, "take", full)
    assert ids_of(run(together(SHORT), load)) == expected


class Heads(torch.nn.Module):
    """A layer as transformers' attention asks for it."""

    is_causal = True

    def __init__(self, num_key_value_groups):
        super().__init__()
        self.num_key_value_groups = num_key_value_groups


def inputs(num_heads, num_groups, num_new, dtype=torch.float32):
    """Query, key, value and mask; keys and values lie as in a pool, with room beside them."""
    torch.manual_seed(0)
    query = torch.randn(NUM_ROWS, num_new, num_heads, WIDTH, dtype=dtype).transpose(1, 2)
    key, value = torch.randn(2, NUM_ROWS + 3, NUM_COLUMNS + 27, num_groups, WIDTH, dtype=dtype)[
        :, :NUM_ROWS, :NUM_COLUMNS
    ].transpose(2, 3)
    positions = torch.tensor([3, 30, 12, 7, 36 - num_new])[:, None] + torch.arange(num_new)
    return query, key, value, (torch.arange(NUM_COLUMNS) <= positions[:, :, None])[:, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_new", [1, 4])
@pytest.mark.parametrize(("num_heads", "num_groups"), [(4, 2), (6, 2), (4, 1), (4, 4)])
def test_attention_equals_that_with_a_copy_for_each_query_head(num_heads, num_groups, num_new, dtype):
    query, key, value, mask = inputs(num_heads, num_groups, num_new, dtype)
    module = Heads(num_heads // num_groups)
    expected, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    found, _ = attend(module, query, key, value, mask, scaling=0.3)
    assert found.shape == expected.shape
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected)


def test_attention_without_a_mask_or_with_a_bias_is_that_of_transformers():
    query, key, value, mask = inputs(4, 2, 4)
    bias = torch.randn(1, 4, 4, NUM_COLUMNS)
    cases: list[tuple[torch.Tensor | None, dict[str, Any]]] = [(None, {}), (mask, {"position_bias": bias})]
    for masked, options in cases:
        expected, _ = sdpa_attention_forward(Heads(2), query, key, value, masked, **options)
        assert torch.equal(attend(Heads(2), query, key, value, masked, **options)[0], expected)


@pytest.mark.parametrize(
    ("settings", "attention"), [({}, SHARED_KEYS), ({"batching": "static"}, PLAIN), ({"deterministic": True}, PLAIN)]
)
def test_models_attend_so_in_continuous_batches_only(folder, versions, settings, attention):
    async def used(engine):
        return engine.module(GROUP).config._attn_implementation

    assert run(used, (published(folder), versions(0)), **settings) == attention
