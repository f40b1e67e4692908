"""Continuous batches of the transformers engine: what is computed again, who waits for whom, two versions at once."""

import asyncio
import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollstream.producers.engines.base import GenerationRequest
from rollstream.producers.engines.transformers import Lanes
from rollstream.schemas.errors import ModelError
from rollstream.schemas.settings import Sampling
from tests.producers.engines.engine_rig import (
    GROUP,
    adapter,
    full_forward_logprobs,
    published,
    reference,
    requests,
    run,
    together,
)

LONG = GenerationRequest(GROUP, range(9, 20), Sampling(max_new_tokens=400), 2)


def asked(prompt, seed, max_new_tokens=12):
    return GenerationRequest(GROUP, prompt, Sampling(max_new_tokens=max_new_tokens), seed)


def counted(engine):
    """A list that gets the shape (rows, tokens) of every forward from now on."""
    shapes = []
    engine.module(GROUP).register_forward_pre_hook(
        lambda _module, _args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return shapes


async def talk(engine, seed, turns=4):
    """Prompts and answers of a talk that begins with a prompt of all talks."""
    prompt, calls = list(range(20, 60)), []
    for turn in range(turns):
        request = asked(prompt, 100 * turn + seed)
        calls.append((request, await engine.generate(request)))
        prompt = [*prompt, *calls[-1][1].token_ids, 7, 8 + seed, 9]
    return calls


async def talks(engine):
    return await asyncio.gather(*(talk(engine, seed) for seed in range(8)))


@pytest.mark.parametrize("settings", [{}, {"prefix_cache_mb": 0}, {"max_batch": 3}], ids=["kept", "not kept", "narrow"])
def test_talks_get_the_answers_of_static_batches_and_of_a_plain_forward(folder, base, versions, settings):
    load = (published(folder), versions(0))
    model = reference(base, folder, 0)
    static = run(talks, load, batching="static")
    for calls, others in zip(run(talks, load, **settings), static, strict=True):
        assert [one.token_ids for _, one in calls] == [one.token_ids for _, one in others]
        for request, generation in calls:
            expected = full_forward_logprobs(model, request, generation)
            assert torch.allclose(torch.tensor(generation.logprobs), expected, atol=1e-4)


def test_a_common_prompt_is_computed_once_and_later_turns_only_what_is_new(folder, versions):
    async def work(engine):
        shapes = counted(engine)
        first = await together([asked(range(20, 60), seed) for seed in range(8)])(engine)
        begun, shapes[:] = list(shapes), []
        again = await engine.generate(asked(range(20, 60), 0))
        known, shapes[:] = list(shapes), []
        await engine.generate(asked([*range(20, 60), *first[0].token_ids, 5, 6, 7], 1))
        return begun, known, shapes, first[0], again

    begun, known, later, first, again = run(work, (published(folder), versions(0)))
    assert begun[0] == (1, 40)
    assert all(tokens == 1 for _, tokens in begun[1:])
    assert all(tokens == 1 for _, tokens in known), "what the model said after the whole prompt is known"
    assert first.token_ids == again.token_ids
    assert later[0] == (1, 4), "the last sampled token and the new ones"


def test_turns_of_a_short_talk_compute_only_what_is_new(folder, versions):
    async def work(engine):
        shapes, prompt = counted(engine), list(range(20, 25))
        for turn in range(3):
            answer = await engine.generate(asked(prompt, turn, max_new_tokens=2))
            prompt = [*prompt, *answer.token_ids, 7, 8]
        return [tokens for _, tokens in shapes if tokens > 1]

    assert run(work, (published(folder), versions(0))) == [5, 3, 3], "the prompt, then the last sampled token and two"


def test_talks_that_begin_alike_keep_what_is_their_own_for_their_next_turns(folder, versions):
    common, turns = list(range(20, 60)), 3

    async def work(engine):
        shapes, prompts = counted(engine), [[*common, *[5 + number] * 17] for number in range(4)]
        for _ in range(turns):
            for number, prompt in enumerate(prompts):
                answer = await engine.generate(asked(prompt, number, max_new_tokens=8))
                prompts[number] = [*prompt, *answer.token_ids, 7, 8, 9]
        return [shape for shape in shapes if shape[1] > 1]

    first, *later = run(work, (published(folder), versions(0)))
    assert first == (1, 57)
    assert later == [(1, 17)] * 3 + [(1, 4)] * 4 * (turns - 1), "the common beginning, then the end and the new tokens"


def test_a_request_joins_what_is_being_generated(folder, versions):
    async def work(engine):
        shapes = counted(engine)
        long = asyncio.create_task(engine.generate(LONG))
        await engine.generate(asked([9], 1, max_new_tokens=2))
        joined = await together([asked([9, 10], seed, max_new_tokens=3) for seed in range(5)])(engine)
        assert not long.done()
        return joined, await long, max(rows for rows, _ in shapes)

    joined, long, most = run(work, (published(folder), versions(0)))
    assert len(joined) == 5
    assert len(long.token_ids) > 20
    assert most >= 6


def test_a_prompt_that_exceeds_memory_fails_alone(folder, versions):
    def refuse(_module, _args, kwargs):
        if kwargs["input_ids"].shape[1] == 33:
            raise RuntimeError("CUDA out of memory")

    async def work(engine):
        alone = await engine.generate(LONG)
        engine.module(GROUP).register_forward_pre_hook(refuse, with_kwargs=True)
        long = asyncio.create_task(engine.generate(LONG))
        await engine.generate(asked([9], 1, max_new_tokens=2))
        failing = [asyncio.create_task(engine.generate(asked(range(20, 53), seed))) for seed in range(3)]
        for call in failing:
            with pytest.raises(ModelError, match="CUDA out of memory"):
                await call
        assert not long.done()
        short = await engine.generate(asked(range(20, 52), 1))
        return alone, await long, short

    alone, long, short = run(work, (published(folder), versions(0)))
    assert long.token_ids == alone.token_ids
    assert len(short.token_ids) >= 1


def test_a_row_whose_kept_ids_no_record_holds_ends_at_once_and_alone(folder, versions, monkeypatch):
    """Its ids would take memory until its end: at top_p near 1, gigabytes for some hundred rows."""
    monkeypatch.setattr("rollstream.producers.engines.base.MAX_KEPT", 60)
    large = GenerationRequest(GROUP, range(9, 20), Sampling(max_new_tokens=400, top_k=9, record_kept_ids=True), 2)

    async def scenario(engine):
        shapes = counted(engine)
        failed, answer = await asyncio.gather(
            engine.generate(large), engine.generate(asked(range(9, 20), 3)), return_exceptions=True
        )
        return failed, answer, len(shapes)

    failed, answer, num_forwards = run(scenario, (published(folder), versions(0)))
    assert isinstance(failed, ModelError)
    assert "the 6 tokens of an answer were sampled from 54 ids in all, more than a record holds (60)" in str(failed)
    assert len(answer.token_ids) > 0
    assert num_forwards < 20


@pytest.mark.parametrize("kind", ["lora", "two modules"])
def test_a_version_is_used_while_the_one_before_ends_its_sequences(folder, base, versions, tmp_path, kind):
    if kind == "lora":
        (first, first_path, lora), (second, second_path, _) = (adapter(folder, tmp_path, seed) for seed in (1, 2))
        form = {"weights_format": "lora", "lora": lora}
    else:
        first, second = reference(base, folder, 0), reference(base, folder, 1)
        first_path, second_path, form = versions(0), versions(1), {}
    short = asked(range(30, 50), 5)

    async def work(engine):
        long = asyncio.create_task(engine.generate(LONG))
        await engine.generate(asked([9], 1, max_new_tokens=2))
        await engine.load(published(folder, 1, **form), second_path)
        new = await engine.generate(short)
        is_under_way = not long.done()
        old = await long
        for version in (2, 3):
            await engine.load(published(folder, version, **form), (first_path, second_path)[version % 2])
        return new, is_under_way, old, await engine.generate(short)

    new, is_under_way, old, last = run(work, (published(folder, 0, **form), first_path), full_copies=2)
    assert is_under_way
    for model, request, generation, version in (
        (second, short, new, 1),
        (first, LONG, old, 0),
        (second, short, last, 3),
    ):
        assert [(span.version, span.length) for span in generation.spans] == [(version, len(generation.token_ids))]
        expected = full_forward_logprobs(model, request, generation)
        assert torch.allclose(torch.tensor(generation.logprobs), expected, atol=1e-4)


@pytest.mark.parametrize("end", ["ends", "fails", "is stopped"])
def test_a_version_that_was_used_beside_the_newest_is_forgotten_with_its_group(folder, tmp_path, monkeypatch, end):
    (_, first, lora), (_, second, _) = (adapter(folder, tmp_path, seed) for seed in (1, 2))

    async def work(engine):
        await engine.load(published(folder, 0, weights_format="lora", lora=lora), first)
        module = engine.module(GROUP)
        long = asyncio.create_task(engine.generate(LONG))
        await engine.generate(asked([9], 1, max_new_tokens=2))
        await engine.load(published(folder, 1, weights_format="lora", lora=lora), second)
        if end == "ends":
            await long
        else:
            with monkeypatch.context() as patched:
                patched.setattr(*((module, "forward") if end == "fails" else (Lanes, "new_tokens")), no_memory)
                with pytest.raises(ModelError, match="CUDA out of memory"):
                    await long
        assert len(module.peft_config) == 2
        await engine.generate(asked([9], 1))
        await engine.unload(GROUP)
        return engine._model_cache._adapted

    def no_memory(*_, **options):
        raise RuntimeError("CUDA out of memory")

    assert run(work) == {}


def test_with_one_module_a_version_waits_for_what_is_being_generated_and_for_nothing_else(folder, versions):
    async def work(engine):
        long = asyncio.create_task(engine.generate(LONG))
        await engine.generate(asked([9], 1, max_new_tokens=2))
        load = asyncio.create_task(engine.load(published(folder, 1), versions(1)))
        while not (engine._batcher._jobs or load.done()):
            await asyncio.sleep(0.001)
        late = asyncio.create_task(engine.generate(LONG))
        await load
        assert long.done() or not late.done()
        return [one.spans[0].version for one in await asyncio.gather(long, late)]

    assert run(work, (published(folder), versions(0))) == [0, 1]


def test_a_model_whose_cache_is_of_another_kind_is_generated_in_static_batches(folder, tmp_path, versions):
    windowed = shutil.copytree(folder, tmp_path / "windowed")
    config = json.loads((windowed / "config.json").read_text())
    kinds = ["sliding_attention"] * config["num_hidden_layers"]
    config |= {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0, "layer_types": kinds}
    (windowed / "config.json").write_text(json.dumps(config))
    questions = requests(10)

    async def work(engine):
        shapes = counted(engine)
        return await together(questions)(engine), shapes

    answers, shapes = run(work, (published(windowed), windowed / "model.safetensors"))
    assert shapes[0][0] > 1
    model = AutoModelForCausalLM.from_pretrained(windowed).eval()
    for request, generation in zip(questions, answers, strict=True):
        expected = full_forward_logprobs(model, request, generation)
        assert torch.allclose(torch.tensor(generation.logprobs), expected, atol=1e-4)
