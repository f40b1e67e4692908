"""The transformers engine on a tiny model: exact tokens, honest log-probabilities, one version a call, batches."""

import asyncio
import json
import random
from pathlib import Path

import pytest
import torch

from rollstream.producers.engines.base import GenerationRequest
from rollstream.schemas.errors import ModelError
from rollstream.schemas.settings import Sampling
from tests.producers.engines.engine_rig import (
    GROUP,
    OTHER,
    full_forward_logprobs,
    one_by_one,
    published,
    reference,
    requests,
    run,
    together,
)

RECORDED = Path(__file__).with_name("deterministic_answers.json")
LIMITS = {"temperature": 0.7, "top_k": 20, "top_p": 0.9}


@pytest.mark.parametrize("sampling", [{}, LIMITS], ids=["plain", "limited"])
def test_logprobs_are_those_of_a_plain_full_forward(folder, base, versions, sampling):
    asked = requests(40, **sampling)
    answers = run(together(asked), (published(folder, 3), versions(3)))
    model = reference(base, folder, 3)
    for request, generation in zip(asked, answers, strict=True):
        assert len(generation.token_ids) == len(generation.logprobs)
        expected = full_forward_logprobs(model, request, generation)
        assert torch.allclose(torch.tensor(generation.logprobs), expected, atol=1e-4)


def test_more_noise_than_is_made_at_a_time_is_met_by_long_sequences(folder, base, versions):
    asked = [GenerationRequest(GROUP, [9, 10], Sampling(max_new_tokens=200), seed) for seed in range(8)]
    load = (published(folder), versions(0))
    answers = run(together(asked), load)
    longest = max(answers, key=lambda generation: len(generation.token_ids))
    assert len(longest.token_ids) > 64
    assert run(one_by_one(asked[:2]), load)[0].token_ids == answers[0].token_ids
    row = answers.index(longest)
    expected = full_forward_logprobs(reference(base, folder, 0), asked[row], longest)
    assert torch.allclose(torch.tensor(longest.logprobs), expected, atol=1e-4)


def test_deterministic_answers_are_equal_to_the_bit_in_any_company(folder, versions):
    asked = requests(12, seed=3)
    company = requests(20, seed=4) + requests(20, seed=5, group=OTHER)
    loads = [(published(folder), versions(0)), (published(folder, 2, OTHER), versions(2))]
    alone = run(one_by_one(asked), *loads, deterministic=True)
    mixed = random.Random(0).sample(asked + company, len(asked + company))
    answers = run(together(mixed), *loads, deterministic=True)
    for request, generation in zip(asked, alone, strict=True):
        assert answers[mixed.index(request)] == generation


def test_a_call_ends_on_the_version_that_it_began_with(folder, base, versions):
    asked = [GenerationRequest(GROUP, [9, 10, 11], Sampling(max_new_tokens=100), seed) for seed in range(30)]
    short = GenerationRequest(GROUP, [9, 10, 11], Sampling(max_new_tokens=1), 0)

    async def work(engine):
        calls = [asyncio.create_task(engine.generate(request)) for request in asked[:15]]
        await engine.generate(short)  # asked for in the same turn of the loop: once it has ended, the others have begun
        await engine.load(published(folder, 1), versions(1))
        assert engine.version(GROUP) == 1
        calls += [asyncio.create_task(engine.generate(request)) for request in asked[15:]]
        return await asyncio.gather(*calls)

    answers = run(work, (published(folder, 0), versions(0)))
    models = {version: reference(base, folder, version) for version in (0, 1)}
    assert [answer.spans[0].version for answer in answers] == [0] * 15 + [1] * 15
    for request, generation in zip(asked, answers, strict=True):
        (span,) = generation.spans
        assert (span.model_group, span.length) == (GROUP, len(generation.token_ids))
        expected = full_forward_logprobs(models[span.version], request, generation)
        assert torch.allclose(torch.tensor(generation.logprobs), expected, atol=1e-4)


def test_short_answers_do_not_wait_for_long_ones(folder, versions):
    short = GenerationRequest(GROUP, [9], Sampling(max_new_tokens=1), 1)
    long = GenerationRequest(GROUP, [9], Sampling(max_new_tokens=400), 2)
    order = []

    async def ask(engine, name, request):
        order.append((name, len((await engine.generate(request)).token_ids)))

    async def work(engine):
        await asyncio.gather(ask(engine, "long", long), ask(engine, "short", short))

    run(work, (published(folder), versions(0)))
    assert [name for name, _ in order] == ["short", "long"]
    assert order[1][1] > 5


# ---- errors ----


def test_a_group_without_weights_and_prompts_that_cannot_be_are_refused(folder, versions):
    async def work(engine):
        with pytest.raises(ModelError, match="other has no weights yet"):
            await engine.generate(GenerationRequest(OTHER, [9], Sampling(), 0))
        with pytest.raises(ModelError, match="has no weights yet"):
            engine.tokenizer(OTHER)
        with pytest.raises(ModelError, match="has no tokens"):
            await engine.generate(GenerationRequest(GROUP, [], Sampling(), 0))
        with pytest.raises(ModelError, match="600 tokens leaves no room"):
            await engine.generate(GenerationRequest(GROUP, [9] * 600, Sampling(), 0))
        return await engine.generate(GenerationRequest(GROUP, [9] * 510, Sampling(max_new_tokens=9, temperature=0), 0))

    assert len(run(work, (published(folder), versions(0))).token_ids) <= 2


def deterministic_requests():
    """Short and long answers, limited ones, greedy ones, and talks whose prompts continue each other."""
    long = [GenerationRequest(GROUP, range(9, 9 + n), Sampling(max_new_tokens=90), n) for n in (1, 5, 40)]
    nested = [GenerationRequest(GROUP, range(10, 10 + n), Sampling(max_new_tokens=6), 7) for n in (20, 20, 45, 70)]
    limited = requests(6, seed=1, **LIMITS)
    return [*long, *nested, *limited, *requests(4, seed=2, temperature=0.0), *requests(6, seed=3)]


def test_deterministic_answers_are_those_that_were_recorded_before_batches_became_continuous(folder, versions):
    """Log-probabilities may differ in their last digits on another processor (by 2e-6 on one); ids may not."""
    answers = run(together(deterministic_requests()), (published(folder), versions(0)), deterministic=True)
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert [list(one.token_ids) for one in answers] == [one["token_ids"] for one in recorded]
    for one, kept in zip(answers, recorded, strict=True):
        assert one.logprobs == pytest.approx(kept["logprobs"], abs=1e-5)
