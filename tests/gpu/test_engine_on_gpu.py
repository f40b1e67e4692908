"""The transformers engine on a real GPU beyond its contract: bfloat16, equal bits, a learner beside it.

The contract itself runs there too, see `LOADING` of `test_engine_contract.py`.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rollstream.learner.model.policy import make_deterministic
from rollstream.learner.tiny_model import make_tiny_model
from rollstream.producers.engines.base import Engine, Generation, GenerationRequest
from rollstream.producers.engines.transformers import TransformersEngine
from rollstream.schemas.engine_settings import TransformersSettings
from rollstream.schemas.settings import LoraSettings, ModelSettings, Sampling
from tests.contracts.engines import GROUP, MAX_LENGTH, recomputed, transformers
from tests.rigs.grouped_batches import Scale, grouped, make_model, step

pytestmark = pytest.mark.gpu
LORA = LoraSettings(rank=4, alpha=16, target_modules=("q_proj", "v_proj"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", num_layers=2, max_length=MAX_LENGTH)


def asked(count: int = 8, **sampling: Any) -> list[GenerationRequest]:
    settings = Sampling(max_new_tokens=24, record_kept_ids=True, **sampling)
    return [GenerationRequest(GROUP, range(10, 13 + seed % 5), settings, seed) for seed in range(count)]


async def loaded(subject: Any) -> Engine:
    engine: Engine = subject.new()
    await engine.start()
    await engine.load(*subject.weights(GROUP, 1))
    return engine


def answers(subject: Any, requests: Sequence[GenerationRequest]) -> list[Generation]:
    async def scenario() -> list[Generation]:
        engine = await loaded(subject)
        try:
            return await asyncio.gather(*(engine.generate(one) for one in requests))
        finally:
            await engine.close()

    return asyncio.run(scenario())


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_p": 0.8, "top_k": 30}], ids=["all", "truncated"])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-5), ("bfloat16", 0.1)])
def test_log_probabilities_are_near_what_the_learner_computes_again(
    gpu: str, base: Path, tmp_path: Path, dtype: Any, limit: float, lora: Any, sampling: dict[str, Any]
) -> None:
    make_deterministic(None, deterministic=False)
    subject = transformers(tmp_path, base, lora=lora, device=gpu, dtype=dtype)
    assert subject.learner is not None
    requests = asked(**sampling)
    pairs = [
        recomputed(subject.learner(1), [(request, answer)])
        for request, answer in zip(requests, answers(subject, requests), strict=True)
    ]
    recorded, again = (torch.cat(column) for column in zip(*pairs, strict=True))
    assert len(recorded) > 40
    assert float((recorded - again).abs().mean()) < limit


def test_a_deterministic_engine_gives_equal_bits_for_equal_seeds(gpu: str, base: Path, tmp_path: Path) -> None:
    make_deterministic(None, deterministic=False)
    subject = transformers(tmp_path, base, deterministic=True, device=gpu, dtype="bfloat16")
    requests = asked(6, top_p=0.9)
    assert answers(subject, requests) == answers(subject, list(reversed(requests)))[::-1]


@pytest.mark.parametrize("deterministic", [False, True], ids=["batched", "deterministic"])
def test_an_engine_beside_a_learner_on_one_gpu_answers_as_alone_and_changes_no_bit_of_its_steps(
    gpu: str, base: Path, tmp_path: Path, scale: Scale, deterministic: bool
) -> None:
    make_deterministic(None, deterministic=False)
    folder, batch = make_model(tmp_path / "model", scale), grouped(scale)
    settings = ModelSettings(path=str(folder), device=gpu)
    subject = transformers(tmp_path, base, deterministic=deterministic, device=gpu)
    requests = asked(12, top_p=0.9)
    alone, trained = answers(subject, requests), step(settings, batch, times=3)

    async def scenario() -> list[Generation]:
        engine = await loaded(subject)
        try:
            training = asyncio.create_task(asyncio.to_thread(step, settings, batch, times=3))
            found = await asyncio.gather(*(engine.generate(one) for one in requests))
            beside = await training
        finally:
            await engine.close()
        assert beside.model.weights_bytes() == trained.model.weights_bytes()
        return found

    found = asyncio.run(scenario())
    assert [one.token_ids for one in found] == [one.token_ids for one in alone]
    if deterministic:
        assert found == alone


def test_settings_without_a_device_take_the_gpu_and_its_type(cuda: str, base: Path, tmp_path: Path) -> None:
    subject = transformers(tmp_path, base, device=cuda, dtype="bfloat16")

    async def scenario() -> tuple[torch.device, torch.dtype]:
        engine = TransformersEngine(TransformersSettings())
        await engine.start()
        await engine.load(*subject.weights(GROUP, 1))
        weight = engine.module(GROUP).get_input_embeddings().weight
        await engine.close()
        return weight.device, weight.dtype

    assert asyncio.run(scenario()) == (torch.device("cuda:0"), torch.bfloat16)
