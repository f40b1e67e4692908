"""The contract of `Engine`, run on every implementation of it, by what the protocol offers alone.

What builds on a capability is not asked of an engine that declares to be without it.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rollstream.learner.tiny_model import make_tiny_model
from rollstream.producers.engines.base import Engine, Generation, GenerationRequest, Tokenizer, check_generation
from rollstream.schemas.errors import ModelError, PromptTooLongError
from rollstream.schemas.settings import LoraSettings, Sampling
from tests.contracts.engines import GROUP, MAX_LENGTH, NO_MODEL, OTHER, Subject, openai, recomputed, transformers, vllm

PROMPT, PROJECTIONS = (10, 11, 12), ("q_proj", "v_proj")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", seed=0, num_layers=1, max_length=MAX_LENGTH)


TRUNCATED = {"temperature": 0.7, "top_p": 0.7, "top_k": 20}
LOADING: list[Any] = [
    *("scripted", "routed", "transformers", "transformers-lora-deterministic", "transformers-lora-dora"),
    *(pytest.param(name, marks=pytest.mark.vllm) for name in ("vllm-lora", "vllm-full")),
    *(pytest.param(name, marks=pytest.mark.gpu) for name in ("transformers-gpu", "transformers-lora-gpu")),
]


@pytest.fixture(scope="module", params=[*LOADING, "openai", pytest.param("openai-vllm", marks=pytest.mark.vllm)])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    tmp_path = tmp_path_factory.mktemp("engine")
    if request.param == "openai":
        with openai(tmp_path, request.getfixturevalue("base")) as frozen:
            yield frozen
        return
    yield loading_subject(request, tmp_path)


@pytest.fixture(scope="module", params=LOADING)
def loading(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """Engines that load weights and know their tokens."""
    return loading_subject(request, tmp_path_factory.mktemp("engine"))


def loading_subject(request: pytest.FixtureRequest, tmp_path: Path) -> Subject:
    if request.param in NO_MODEL:
        return NO_MODEL[request.param](tmp_path)
    options: Any = dict.fromkeys(("use_dora", "use_rslora"), "dora" in request.param)
    lora = LoraSettings(rank=4, alpha=16, target_modules=PROJECTIONS, **options) if "lora" in request.param else None
    if "vllm" in request.param:
        return vllm(tmp_path, request.getfixturevalue("vllm_server"), lora=lora, is_frozen="openai" in request.param)
    base, device = request.getfixturevalue("base"), request.getfixturevalue("gpu") if "gpu" in request.param else "cpu"
    return transformers(tmp_path, base, lora=lora, deterministic="deterministic" in request.param, device=device)


@asynccontextmanager
async def started(subject: Subject, *versions: tuple[str, int]) -> AsyncIterator[Engine]:
    engine = subject.new()
    try:
        await engine.start()
        given = [] if subject.is_frozen else [subject.weights(*one) for one in versions]
        await asyncio.gather(*(engine.load(*one) for one in given))  # loads of different groups may overlap
        yield engine
    finally:
        await engine.close()


def play(subject: Subject, scenario: Callable[[Engine], Awaitable[Any]], *versions: tuple[str, int]) -> Any:
    """Result of the scenario, with an engine that holds version 0 of GROUP, or these versions."""

    async def run() -> Any:
        async with started(subject, *(versions or [(GROUP, 0)])) as engine:
            return await asyncio.wait_for(scenario(engine), 300)

    return asyncio.run(run())


def request(
    seed: int = 0, *, prompt: Sequence[int] = PROMPT, group: str = GROUP, max_new_tokens: int = 12, **sampling: Any
) -> GenerationRequest:
    return GenerationRequest(group, prompt, Sampling(max_new_tokens=max_new_tokens, **sampling), seed)


def requests(count: int, **options: Any) -> list[GenerationRequest]:
    return [request(seed, prompt=range(10, 11 + seed % 7), **options) for seed in range(count)]


async def together(engine: Engine, asked: Sequence[GenerationRequest]) -> list[Generation]:
    return await asyncio.gather(*(engine.generate(one) for one in asked))


async def in_turn(engine: Engine, asked: Sequence[GenerationRequest]) -> list[Generation]:
    return [await engine.generate(one) for one in asked]


def ids_of(generations: Sequence[Generation]) -> list[tuple[int, ...]]:
    return [generation.token_ids for generation in generations]


def versions_of(generations: Sequence[Generation]) -> set[int]:
    return {span.version for generation in generations for span in generation.spans}


async def progress(engine: Engine) -> None:
    """Until requests that were made before have surely reached the engine."""
    await engine.generate(request(99, max_new_tokens=1))


# ---- token ids, log-probabilities ----


def test_a_text_comes_back_from_its_token_ids(subject: Subject) -> None:
    async def scenario(engine: Engine) -> None:
        tokenizer: Tokenizer = engine.tokenizer(GROUP)
        talk = [{"role": "user", "content": "12 + 3?"}]
        text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        assert "12 + 3?" in tokenizer.decode(ids, skip_special_tokens=True)
        assert tokenizer.encode(tokenizer.decode([tokenizer.eos_token_id]), add_special_tokens=False) == [
            tokenizer.eos_token_id
        ]

    play(subject, scenario)


def test_every_token_has_a_log_probability_and_a_version(loading: Subject) -> None:
    for generation in play(loading, lambda engine: together(engine, requests(20))):
        assert len(generation.token_ids) == len(generation.logprobs) >= 1
        assert all(math.isfinite(logprob) and logprob <= 0 for logprob in generation.logprobs)
        assert sum(span.length for span in generation.spans) == len(generation.token_ids)
        assert {(span.model_group, span.version) for span in generation.spans} == {(GROUP, 0)}


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7}, {"top_p": 0.8}, TRUNCATED], ids=str)
def test_log_probabilities_are_what_the_learner_recomputes_over_turns_and_versions(
    loading: Subject, sampling: dict[str, Any]
) -> None:
    async def talks(engine: Engine) -> list[list[tuple[GenerationRequest, Generation]]] | None:
        if not engine.capabilities.loads_models:
            return None
        found = []
        for seed in range(5):
            calls, prompt = list[tuple[GenerationRequest, Generation]](), [9, 10 + seed]
            for turn in range(3):
                one = request(100 * turn + seed, prompt=prompt, record_kept_ids=True, **sampling)
                calls.append((one, await engine.generate(one)))
                prompt = [*prompt, *calls[-1][1].token_ids, 7, 8]
            found.append(calls)
        return found

    async def scenario(engine: Engine) -> list[Any]:
        found = [await talks(engine)]
        await engine.load(*loading.weights(GROUP, 1))
        return [*found, await talks(engine)]

    for version, found in enumerate(play(loading, scenario)):
        assert (found is None) == (loading.learner is None), "an engine that loads models names the learner's"
        for calls in found or ():
            assert loading.learner is not None
            recorded, again = recomputed(loading.learner(version), calls)
            assert torch.allclose(recorded, again, atol=1e-4)


# ---- seeds, ends, limits ----


def test_noise_derives_from_the_seed_alone(subject: Subject) -> None:
    asked = requests(10)
    answers = play(subject, lambda engine: in_turn(engine, [*asked, *asked]))
    assert answers[:10] == answers[10:]
    by_seed = play(subject, lambda engine: together(engine, [request(seed) for seed in range(40)]))
    assert len(set(ids_of(by_seed))) > 5


def test_tokens_reported_while_sampling_are_a_prefix_of_the_answer(subject: Subject) -> None:
    plain, seen = [request(seed, max_new_tokens=40) for seed in range(4)], [list[int]() for _ in range(4)]
    asked = [replace(one, on_tokens=ids.extend) for one, ids in zip(plain, seen, strict=True)]
    answers = play(subject, lambda engine: in_turn(engine, [*plain, *asked]))
    assert (answers[:4], any(seen)) == (answers[4:], subject.tells_tokens)
    assert seen == [list(answer.token_ids[:-1])[: len(ids)] for ids, answer in zip(seen, answers[4:], strict=True)]


def test_temperature_zero_is_greedy(subject: Subject) -> None:
    answers = play(subject, lambda engine: in_turn(engine, [request(seed, temperature=0.0) for seed in range(8)]))
    assert len(set(ids_of(answers))) == 1


def test_an_answer_ends_at_its_end_token_or_at_its_limit(loading: Subject) -> None:
    asked = [request(seed, max_new_tokens=1 + seed % 30) for seed in range(90)]

    async def scenario(engine: Engine) -> tuple[int, list[Generation]]:
        return engine.tokenizer(GROUP).eos_token_id, await together(engine, asked)

    end, answers = play(loading, scenario)
    for one, generation in zip(asked, answers, strict=True):
        assert end not in generation.token_ids[:-1]
        if generation.finish_reason == "stop":
            assert generation.token_ids[-1] == end
            assert len(generation.token_ids) <= one.sampling.max_new_tokens
        else:
            assert generation.finish_reason == "length"
            assert generation.token_ids[-1] != end
            assert len(generation.token_ids) == one.sampling.max_new_tokens
    assert {generation.finish_reason for generation in answers} == {"stop", "length"}


def test_too_long_a_prompt_is_refused_and_one_that_leaves_room_gets_that_much(loading: Subject) -> None:
    async def scenario(engine: Engine) -> list[Generation]:
        for length in (MAX_LENGTH, MAX_LENGTH + 88):
            with pytest.raises(PromptTooLongError, match=f"{length} tokens"):
                await engine.generate(request(prompt=[10] * length))
        return await in_turn(engine, [request(seed, prompt=[10] * (MAX_LENGTH - 1)) for seed in range(4)])

    assert {len(generation.token_ids) for generation in play(loading, scenario)} == {1}


@pytest.mark.parametrize("prompt", [(), (10, -1), (10, 10_000_000)], ids=["empty", "negative", "unknown"])
def test_a_prompt_that_no_model_can_read_fails_alone(subject: Subject, prompt: tuple[int, ...]) -> None:
    asked = requests(10)

    async def scenario(engine: Engine) -> list[Generation]:
        wrong = asyncio.create_task(engine.generate(request(prompt=prompt)))
        answers = await together(engine, asked)
        with pytest.raises(ModelError):
            await wrong
        return answers

    assert ids_of(play(subject, scenario)) == ids_of(play(subject, lambda engine: in_turn(engine, asked)))


def test_a_frozen_engine_answers_in_text_at_version_zero_and_loads_nothing(subject: Subject) -> None:
    async def scenario(engine: Engine) -> None:
        assert engine.capabilities.is_frozen == subject.is_frozen
        if not subject.is_frozen:
            return
        assert (engine.version(GROUP), engine.version(OTHER)) == (0, 0)
        for generation in await together(engine, requests(20)):
            check_generation(generation)
            assert generation.token_ids
            assert (generation.logprobs, generation.spans) == ((), ())
            has_end = engine.tokenizer(GROUP).eos_token_id == generation.token_ids[-1]
            assert has_end == (generation.finish_reason == "stop")
        with pytest.raises(ModelError, match="loads no weights"):
            await engine.load(*subject.weights(GROUP, 1))
        with pytest.raises(PromptTooLongError, match=r"leaves no room|maximum context length"):
            await engine.generate(request(prompt=[10] * (MAX_LENGTH + 88)))

    play(subject, scenario)


# ---- weight versions ----


def test_a_group_without_weights_can_do_nothing(loading: Subject) -> None:
    async def scenario(engine: Engine) -> None:
        assert engine.version(OTHER) == -1
        with pytest.raises(ModelError, match=OTHER):
            await engine.generate(request(group=OTHER))
        with pytest.raises(ModelError, match=OTHER):
            engine.tokenizer(OTHER)
        await engine.unload(OTHER)

    play(loading, scenario)


def test_after_an_update_answers_are_those_of_the_new_version(loading: Subject) -> None:
    asked = requests(10)

    async def scenario(engine: Engine) -> tuple[list[Generation], list[Generation]]:
        before = await in_turn(engine, asked)
        await engine.load(*loading.weights(GROUP, 3))
        assert engine.version(GROUP) == 3
        return before, await in_turn(engine, asked)

    before, after = play(loading, scenario)
    assert (versions_of(before), versions_of(after)) == ({0}, {3})
    assert ids_of(before) != ids_of(after)
    assert after == play(loading, lambda engine: in_turn(engine, asked), (GROUP, 3))


def test_an_update_loses_no_request_in_progress(loading: Subject) -> None:
    asked = requests(10, max_new_tokens=40)

    async def scenario(engine: Engine) -> tuple[list[Generation], list[Generation]]:
        calls = [asyncio.create_task(engine.generate(one)) for one in asked]
        await progress(engine)
        await engine.load(*loading.weights(GROUP, 1))
        return await together(engine, asked), await asyncio.gather(*calls)

    later, earlier = play(loading, scenario)
    assert versions_of(later) == {1}
    assert versions_of(earlier) <= {0, 1}
    of = {0: play(loading, lambda engine: in_turn(engine, asked)), 1: later}
    for index, generation in enumerate(earlier):
        assert sum(span.length for span in generation.spans) == len(generation.token_ids)
        if len(generation.spans) == 1:
            assert generation.token_ids == of[generation.spans[0].version][index].token_ids


def test_weights_that_do_not_fit_leave_the_version_before(loading: Subject) -> None:
    asked = requests(6)

    async def scenario(engine: Engine) -> None:
        before = await in_turn(engine, asked)
        for event, path in loading.unfit(GROUP, 1):
            with pytest.raises(ModelError):
                await engine.load(event, path)
            assert engine.version(GROUP) == 0
            assert await in_turn(engine, asked) == before
        for event, path in loading.unfit(OTHER, 1):
            with pytest.raises(ModelError):
                await engine.load(event, path)
            assert engine.version(OTHER) == -1
        await engine.load(*loading.weights(GROUP, 1))
        assert versions_of(await in_turn(engine, asked)) == {1}

    play(loading, scenario)


def test_groups_have_weights_of_their_own(loading: Subject) -> None:
    if not loading.holds_groups:
        return
    asked, others = requests(6), requests(6, group=OTHER)
    mixed = [one for pair in zip(asked, others, strict=True) for one in pair]

    async def scenario(engine: Engine) -> list[Generation]:
        answers = await together(engine, mixed)
        await engine.unload(OTHER)
        assert (engine.version(GROUP), engine.version(OTHER)) == (0, -1)
        assert ids_of(await in_turn(engine, asked)) == ids_of(answers[::2])
        with pytest.raises(ModelError, match=OTHER):
            await engine.generate(others[0])
        await engine.load(*loading.weights(OTHER, 5))
        assert ids_of(await in_turn(engine, others)) == ids_of(answers[1::2])
        return answers

    answers = play(loading, scenario, (GROUP, 0), (OTHER, 5))
    assert (versions_of(answers[::2]), versions_of(answers[1::2])) == ({0}, {5})
    assert ids_of(answers[::2]) == ids_of(play(loading, lambda engine: in_turn(engine, asked)))
    assert ids_of(answers[1::2]) == ids_of(play(loading, lambda engine: in_turn(engine, others), (OTHER, 5)))


# ---- concurrent requests, cancelled ones, the end ----


def test_concurrent_requests_get_the_answers_that_they_get_one_by_one(subject: Subject) -> None:
    asked = requests(20)
    answers = play(subject, lambda engine: together(engine, asked))
    for one, other in zip(answers, play(subject, lambda engine: in_turn(engine, asked)), strict=True):
        assert (one.token_ids, one.spans, one.finish_reason) == (other.token_ids, other.spans, other.finish_reason)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_a_request_that_is_cancelled_leaves_the_others_whole(subject: Subject) -> None:
    asked = requests(12, max_new_tokens=40)

    async def scenario(engine: Engine) -> list[Generation]:
        calls = [asyncio.create_task(engine.generate(one)) for one in asked]
        await progress(engine)
        late = [asyncio.create_task(engine.generate(one)) for one in asked]
        for call in (*calls[::2], *late):
            call.cancel()
        left = await asyncio.gather(*calls[1::2])
        assert all(
            isinstance(one, asyncio.CancelledError) for one in await asyncio.gather(*late, return_exceptions=True)
        )
        return [*left, await engine.generate(asked[0])]

    alone = play(subject, lambda engine: in_turn(engine, asked))
    assert ids_of(play(subject, scenario)) == [*ids_of(alone[1::2]), alone[0].token_ids]


def test_closing_cancels_what_is_in_progress_and_refuses_what_comes_later(subject: Subject) -> None:
    async def scenario(engine: Engine) -> list[Any]:
        calls = [asyncio.create_task(engine.generate(request(seed, max_new_tokens=400))) for seed in range(8)]
        await asyncio.sleep(0)
        await engine.close()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        late = (engine.generate(request()), engine.load(*subject.weights(GROUP, 1)))
        assert [type(one) for one in await asyncio.gather(*late, return_exceptions=True)] == [ModelError] * 2
        return answers

    answers = play(subject, scenario)
    assert {type(answer) for answer in answers} <= {asyncio.CancelledError, Generation}
    assert any(isinstance(answer, asyncio.CancelledError) for answer in answers)


def test_an_engine_that_never_started_can_be_closed(subject: Subject) -> None:
    asyncio.run(asyncio.wait_for(subject.new().close(), 60))
