"""Logits that are equal in the server's dtype: top_k leaves more than k ids then, and nothing else changes."""

import asyncio
import itertools
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollstream.producers.engines.base import Generation, GenerationRequest
from rollstream.producers.engines.vllm import VllmEngine, answers, asking
from rollstream.producers.engines.vllm.probing import NUM_TOP, is_limited_to_largest
from rollstream.schemas.errors import ModelError
from rollstream.schemas.settings import Sampling
from tests.producers.engines.engine_rig import GROUP
from tests.producers.engines.vllm.server_rig import GENERATE, StandInServer, engine_over, lora
from tests.rigs.services.vllm_server import (
    ENVIRONMENT,
    START_S,
    WHOLE_PROMPTS,
    lora_version,
    started_settings,
    tiny_base,
)

EXCLUDED = -9999.0
TOP_K = 4


def request(seed: int = 1, prompt: int = 5, top_k: int = TOP_K) -> GenerationRequest:
    return GenerationRequest(GROUP, [prompt, 6, 7], Sampling(max_new_tokens=8, top_k=top_k, record_kept_ids=True), seed)


@pytest.mark.parametrize(
    ("logprob", "top", "is_limited"),
    [
        (0.0, [0.0], True),
        (0.0, [0.0, *[EXCLUDED] * 4], True),
        (-math.log(2), [-math.log(2)] * 2 + [EXCLUDED] * 3, True),
        (-math.log(9), [-math.log(9)] * NUM_TOP, True),
        (-0.7, [-0.7], False),
        (-0.7, [-0.7, -1.5, -2.0, -2.5, -3.0], False),
        (-5e-5, [-5e-5, -11.0, -12.0, -12.5, -13.0], False),
        (-0.7, [-0.7] * 3, False),
    ],
)
def test_log_probabilities_after_limits_are_distinguished_from_those_before(
    logprob: float, top: list[float], is_limited: bool
) -> None:
    assert is_limited_to_largest(logprob, top) is is_limited


@pytest.mark.parametrize("way", [GENERATE, "/v1/completions"])
@pytest.mark.parametrize("num_left", [TOP_K, 2 * TOP_K + 17, 16 * TOP_K])
def test_all_ids_that_were_left_are_recorded_however_many_are_equal(
    small_base: Path, tmp_path: Path, way: str, num_left: int
) -> None:
    async def main() -> None:
        server = StandInServer(small_base)
        server.top, server.left = (
            {"token_id:5": -math.log(2), "token_id:6": -math.log(2), "token_id:7": EXCLUDED},
            num_left,
        )
        server.logprob = -math.log(2)
        server.without = set() if way == GENERATE else {GENERATE}
        async with engine_over(tmp_path, server) as engine:
            await engine.load(*lora(small_base, tmp_path, 0))
            answer = await engine.generate(request())
            assert answer.kept is not None
            assert list(answer.kept.lengths) == [num_left] * len(answer.token_ids)

    asyncio.run(main())


@pytest.mark.parametrize("way", [GENERATE, "/v1/completions"])
def test_answers_with_kept_ids_are_parsed_outside_of_the_event_loop(
    small_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Each token has an entry for each id, and Kafka's heartbeats run in the loop."""
    threads: list[threading.Thread] = []

    def observe(name: str, function: Callable[..., Any]) -> None:
        def observed(*args: Any) -> Any:
            threads.append(threading.current_thread())
            return function(*args)

        monkeypatch.setattr(name, observed)

    async def main() -> None:
        server = StandInServer(small_base)
        server.without = set() if way == GENERATE else {GENERATE}
        async with engine_over(tmp_path, server) as engine:
            await engine.load(*lora(small_base, tmp_path, 0))
            observe("rollstream.producers.engines.vllm.vllm_server.choice_of", answers.choice_of)
            observe("rollstream.producers.engines.vllm.asking.kept_of", asking.kept_of)
            await engine.generate(request())

    asyncio.run(main())
    assert len(threads) == 2
    assert threading.main_thread() not in threads


def test_more_equal_logits_than_can_be_asked_for_are_an_error_with_a_remedy(small_base: Path, tmp_path: Path) -> None:
    async def main() -> None:
        server = StandInServer(small_base)
        server.left = 100
        async with engine_over(tmp_path, server) as engine:
            await engine.load(*lora(small_base, tmp_path, 0))
            with pytest.raises(ModelError, match=r"the 32 ids that it reports .*; if many logits are equal .*float32"):
                await engine.generate(request(top_k=1))

    asyncio.run(main())


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_server_in_bfloat16_is_taken_and_its_kept_ids_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, os.environ.get(name, value))

    async def answers_of(base: Path) -> list[Generation]:
        engine = VllmEngine(
            started_settings(
                dtype="bfloat16", arguments=WHOLE_PROMPTS, folder=tmp_path / "vllm", start_timeout_s=START_S
            )
        )
        try:
            await engine.start()
            await engine.load(*lora_version(base, tmp_path, 0))
            return await asyncio.gather(
                *(engine.generate(request(seed, 5 + seed, top_k)) for seed in range(10) for top_k in (1, 12, 20))
            )
        finally:
            await engine.close()

    generated = asyncio.run(answers_of(tiny_base(tmp_path)))
    lengths = [list(one.kept.lengths) for one in generated if one.kept is not None]
    assert len(lengths) == len(generated)
    assert max(map(max, lengths)) > 20, "of this model some logits are equal in bfloat16"
    for one, counts in zip(generated, lengths, strict=True):
        assert one.kept is not None
        ends = list(itertools.accumulate(counts))
        left = [one.kept.ids[end - count : end] for end, count in zip(ends, counts, strict=True)]
        assert len(left) == len(one.token_ids)
        assert all(token in ids for token, ids in zip(one.token_ids, left, strict=True))
