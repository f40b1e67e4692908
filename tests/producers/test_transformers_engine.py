"""The transformers engine on a tiny model: exact tokens, honest log-probabilities, versions, weights and errors."""

import asyncio
import random

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rollstream.harness.tiny_model import make_tiny_model
from rollstream.producers.engine import GenerationRequest
from rollstream.producers.sampling import SamplingBatch, distribution
from rollstream.producers.transformers_engine import TransformersEngine
from rollstream.schemas.errors import ModelError
from rollstream.schemas.events import WeightsPublished
from rollstream.schemas.services import EngineSettings
from rollstream.schemas.settings import ArtifactRef, Sampling

GROUP, OTHER = "run-1/policy", "run-1/other"
LIMITS = {"temperature": 0.7, "top_k": 20, "top_p": 0.9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", seed=0, num_layers=2)


@pytest.fixture(scope="module")
def base(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture
def versions(folder, tmp_path):
    """`versions(n)`: file of version n; each is the base with other noise on it, all far from uniform."""

    def make(version):
        path = tmp_path / f"v{version}.safetensors"
        if not path.exists():
            save_file(noised(folder, version), path)
        return path

    return make


def noised(folder, version):
    generator = torch.Generator().manual_seed(version)
    state = load_file(folder / "model.safetensors")
    return {name: value + 0.15 * torch.randn(value.shape, generator=generator) for name, value in state.items()}


def reference(base, folder, version):
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    model.load_state_dict(noised(folder, version), strict=False)
    return model


def published(folder, version=0, group=GROUP, **changes):
    fields = {
        "run_id": "run-1",
        "time_ms": 1,
        "model_group": group,
        "job_id": "run-1/rl",
        "batch_id": None,
        "version": version,
        "parent": None,
        "term": 1,
        "weights_sha256": "0" * 64,
        "weights_format": "full",
        "base_model": str(folder),
        "artifact": ArtifactRef(uri="none", sha256="0" * 64, size_bytes=0),
    }
    return WeightsPublished(**(fields | changes))


def requests(count, *, seed=0, group=GROUP, max_new_tokens=12, **sampling):
    rng = random.Random(seed)
    made = []
    for number in range(count):
        prompt = [rng.randrange(2, 100) for _ in range(rng.randint(1, 30))]
        settings = Sampling(max_new_tokens=rng.randint(1, max_new_tokens), **sampling)
        made.append(GenerationRequest(group, prompt, settings, seed * 1000 + number))
    return made


def run(work, *loads, **settings):
    """`await work(engine)` with an engine that has loaded `loads`."""

    async def main():
        engine = TransformersEngine(EngineSettings(device="cpu", **({"threads": 1} | settings)))
        await engine.start()
        try:
            for event, path in loads:
                await engine.load(event, path)
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(main())


def together(asked):
    async def work(engine):
        return await asyncio.gather(*(engine.generate(request) for request in asked))

    return work


def one_by_one(asked):
    async def work(engine):
        return [await engine.generate(request) for request in asked]

    return work


def full_forward_logprobs(model, request, generation):
    """By one plain forward over prompt and completion, without cache or padding."""
    ids = torch.tensor([[*request.prompt_ids, *generation.token_ids]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(request.prompt_ids) - 1 : -1]
    how = SamplingBatch.of([request.sampling] * len(logits), logits.shape[-1], torch.device("cpu"))
    return distribution(logits, how).gather(1, torch.tensor(generation.token_ids)[:, None])[:, 0]


@pytest.mark.parametrize("sampling", [{}, LIMITS], ids=["plain", "limited"])
def test_logprobs_are_those_of_a_plain_full_forward(folder, base, versions, sampling):
    asked = requests(40, **sampling)
    answers = run(together(asked), (published(folder, 3), versions(3)))
    model = reference(base, folder, 3)
    for request, generation in zip(asked, answers, strict=True):
        assert len(generation.token_ids) == len(generation.logprobs)
        expected = full_forward_logprobs(model, request, generation)
        assert torch.allclose(torch.tensor(generation.logprobs), expected, atol=1e-4)


def test_a_batch_and_single_calls_agree(folder, versions):
    asked = requests(50, seed=1)
    load = (published(folder), versions(0))
    batched, single = run(together(asked), load), run(one_by_one(asked), load)
    assert [one.token_ids for one in batched] == [one.token_ids for one in single]
    for one, other in zip(batched, single, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_completions_end_at_the_end_token_or_at_their_limit(folder, versions):
    asked = requests(300, seed=2, max_new_tokens=40)
    answers = run(together(asked), (published(folder, 5), versions(5)))
    reasons = set()
    for request, generation in zip(asked, answers, strict=True):
        reasons.add(generation.finish_reason)
        assert 1 not in generation.token_ids[:-1]
        if generation.finish_reason == "stop":
            assert generation.token_ids[-1] == 1
        else:
            assert len(generation.token_ids) == request.sampling.max_new_tokens
            assert generation.token_ids[-1] != 1
    assert reasons == {"stop", "length"}


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

    async def work(engine):
        calls = [asyncio.create_task(engine.generate(request)) for request in asked[:15]]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
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


def test_groups_are_generated_with_their_own_weights(folder, versions):
    loads = [(published(folder, 0), versions(0)), (published(folder, 7, OTHER), versions(7))]
    asked = requests(10) + requests(10, group=OTHER)
    answers = run(together(asked), *loads)
    assert answers[:10] == run(together(asked[:10]), loads[0])
    assert answers[10:] == run(together(asked[10:]), loads[1])
    assert {answer.spans[0].version for answer in answers[10:]} == {7}


# ---- adapters ----


def adapter(folder, tmp_path, seed, *, rank=4, modules=("q_proj", "v_proj")):
    """A peft model, its file of weights, and its configuration as a learner publishes it."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=16, target_modules=list(modules), task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    path = tmp_path / f"adapter-{seed}-{rank}.safetensors"
    save_file(dict(get_peft_model_state_dict(model)), path)
    lora = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": list(modules), "task_type": "CAUSAL_LM"}
    return model.eval(), path, lora


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
        return before, await together(asked)(engine), engine.version(GROUP)

    before, after, version = run(work)
    assert before == after
    assert version == 0


# ---- errors ----


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
        "extra": r"extra\.safetensors .* has not, such as model\.extra",
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


def test_a_missing_model_folder_is_named(versions, tmp_path):
    async def work(engine):
        with pytest.raises(ModelError, match=r"gone does not exist here; give a transformers folder"):
            await engine.load(published(tmp_path / "gone"), versions(0))
        return engine.version(GROUP)

    assert run(work) == -1


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


def test_a_batch_that_fails_fails_its_calls_and_not_the_next(folder, versions):
    async def work(engine):
        failing = GenerationRequest(GROUP, [9, 10_000], Sampling(), 0)
        with pytest.raises(IndexError):
            await engine.generate(failing)
        return await engine.generate(GenerationRequest(GROUP, [9], Sampling(max_new_tokens=1), 0))

    assert len(run(work, (published(folder), versions(0))).token_ids) == 1


def test_a_call_that_is_cancelled_leaves_the_others_whole(folder, versions):
    asked = requests(20, seed=6, max_new_tokens=100)
    load = (published(folder), versions(0))

    async def work(engine):
        calls = [asyncio.create_task(engine.generate(request)) for request in asked]
        await asyncio.sleep(0.002)
        for call in calls[::2]:
            call.cancel()
        return await asyncio.gather(*calls[1::2])

    assert [one.token_ids for one in run(work, load)] == [one.token_ids for one in run(together(asked[1::2]), load)]


def test_closing_cancels_what_is_under_way(folder, versions):
    async def work(engine):
        endless = GenerationRequest(GROUP, [9], Sampling(max_new_tokens=500), 0)
        calls = [asyncio.create_task(engine.generate(endless)) for _ in range(3)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await engine.close()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        with pytest.raises(ModelError, match="closed"):
            await engine.generate(endless)
        return answers

    answers = run(work, (published(folder), versions(0)), deterministic=True)
    assert all(isinstance(answer, asyncio.CancelledError) for answer in answers)


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
