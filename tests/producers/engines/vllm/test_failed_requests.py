"""Cost of one failed call: the request goes elsewhere, and the server serves the others."""

import asyncio
import time
from pathlib import Path

import pytest

from rollstream.producers.engines.base import GenerationRequest
from rollstream.producers.engines.vllm.asking import completed, generated
from rollstream.producers.engines.vllm.base_model import read_base_model
from rollstream.producers.engines.vllm.pool import MAX_FAILED, MAX_TRIES
from rollstream.producers.engines.vllm.probing import LOAD_TRIES
from rollstream.schemas.errors import ModelError, PromptRefusedError
from rollstream.schemas.settings import Sampling
from tests.producers.engines.engine_rig import GROUP
from tests.producers.engines.vllm.server_rig import (
    CHECK,
    GENERATE,
    StandInServer,
    engine_over,
    full,
    held_open,
    joined,
    lora,
    request,
    versions_of,
    wait_until,
)

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("status", [408, 429, 500, 503])
@pytest.mark.parametrize("count", [1, 2])
def test_a_request_that_fails_once_leaves_the_server_in_use(
    small_base: Path, tmp_path: Path, status: int, count: int
) -> None:
    async def main() -> None:
        servers = [StandInServer(small_base) for _ in range(count)]
        async with engine_over(tmp_path, *servers, health_interval_s=30.0) as engine:
            await engine.load(*lora(small_base, tmp_path, 0))
            await joined(engine, *servers)
            checks = servers[0].asked[CHECK]
            servers[0].failing_next[GENERATE] = [(status, {})]
            answers = await asyncio.gather(*(engine.generate(request()) for _ in range(4)))
            assert [versions_of(one) for one in answers] == [[0]] * 4
            assert engine.states()[servers[0].url] == "ready"
            if status >= 500:
                await wait_until(lambda: servers[0].asked[CHECK] > checks)
                assert engine.states()[servers[0].url] == "ready"

    asyncio.run(main())


def test_a_server_that_fails_one_request_after_the_other_is_taken_out_of_use(small_base: Path, tmp_path: Path) -> None:
    async def main() -> None:
        first, second = StandInServer(small_base), StandInServer(small_base)
        async with engine_over(tmp_path, first, second, health_interval_s=30.0) as engine:
            await engine.load(*lora(small_base, tmp_path, 0))
            await joined(engine, first, second)
            first.failing[GENERATE] = first.failing["/v1/completions"] = 500
            answers = await asyncio.gather(*(engine.generate(request()) for _ in range(4 * MAX_FAILED)))
            assert [versions_of(one) for one in answers] == [[0]] * len(answers)
            assert engine.states()[first.url].startswith("down: answered 500")
            first.failing.clear()

    asyncio.run(main())


def test_a_server_rests_as_long_as_it_asks_for(small_base: Path, tmp_path: Path) -> None:
    async def main() -> None:
        first, second = StandInServer(small_base), StandInServer(small_base)
        async with engine_over(tmp_path, first, second) as engine:
            await engine.load(*lora(small_base, tmp_path, 0))
            await joined(engine, first, second)
            for server in (first, second):
                server.failing_next[GENERATE] = [(429, {"Retry-After": "1"})]
            began = time.monotonic()
            await engine.generate(request())
            assert 0.9 < time.monotonic() - began < 5
            first.failing_next[GENERATE] = [(503, {"Retry-After": "30"})]
            for _ in range(6):
                await engine.generate(request())
            asked = first.asked[GENERATE]
            await engine.generate(request())
            assert first.asked[GENERATE] == asked
            assert engine.states()[first.url] == "ready"

    asyncio.run(main())


def test_a_request_that_every_server_fails_ends_with_an_error(
    small_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollstream.producers.engines.vllm.pool.RETRY_S", 0.001)

    async def main() -> None:
        server = StandInServer(small_base)
        async with engine_over(tmp_path, server) as engine:
            await engine.load(*lora(small_base, tmp_path, 0))
            server.failing_next[GENERATE] = [(429, {})] * MAX_TRIES
            with pytest.raises(ModelError, match=r"no vLLM server answers: http\S+ answered 429"):
                await engine.generate(request())
            assert versions_of(await engine.generate(request())) == [0]

    asyncio.run(main())


def test_files_stay_for_requests_and_names_that_a_server_kept_while_it_was_away_are_unloaded(
    small_base: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        first, second = StandInServer(small_base), StandInServer(small_base)
        async with engine_over(tmp_path, first, second) as engine:
            await engine.load(*lora(small_base, tmp_path, 0))
            await joined(engine, first, second)
            (name,) = first.adapters
            second.held.clear()
            call = await held_open(engine, first)
            first.failing[CHECK] = first.failing["/openapi.json"] = 500
            await wait_until(lambda: engine.states()[first.url].startswith("down") and second.asked[GENERATE])
            for version in (1, 2, 3):
                await engine.load(*lora(small_base, tmp_path, version))
            folder = tmp_path / "vllm" / name
            assert folder.is_dir(), "the request that went to the other server still needs the files"
            second.held.set()
            assert versions_of(await call) == [0]
            await wait_until(lambda: name not in second.adapters)
            assert name in first.adapters
            first.failing.clear()
            await joined(engine, first)
            await wait_until(lambda: name not in first.adapters)
            await engine.load(*lora(small_base, tmp_path, 4))
            assert not folder.is_dir()

    asyncio.run(main())


def test_a_version_that_no_server_ever_shows_is_not_tried_without_a_pause(small_base: Path, tmp_path: Path) -> None:
    async def main() -> None:
        server = StandInServer(small_base)
        async with engine_over(tmp_path, server, start_timeout_s=3.0) as engine:
            server.keeps_label = True
            with pytest.raises(ModelError, match="is not loaded"):
                await engine.load(*full(small_base, tmp_path, 0))
            assert server.asked["reload_weights"] < 30

    asyncio.run(main())


def test_an_adapter_that_the_server_refuses_is_an_error_soon_and_the_other_groups_are_served_meanwhile(
    small_base: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        server, states = StandInServer(small_base), set[str]()
        server.refused = "-v1-"
        async with engine_over(tmp_path, server, start_timeout_s=600.0) as engine:
            await engine.load(*lora(small_base, tmp_path, 0))
            await engine.load(*lora(small_base, tmp_path, 0, group="run-1/other"))
            load = asyncio.create_task(engine.load(*lora(small_base, tmp_path, 1)))
            while not load.done():
                assert versions_of(await engine.generate(request(group="run-1/other"))) == [0]
                states.add(engine.states()[server.url])
            with pytest.raises(
                ModelError, match=r"run-1-policy-v1-\S+ is not loaded: http\S+ did not load .*answered 500"
            ):
                await load
            assert states == {"ready"}
            assert server.asked["/v1/load_lora_adapter"] == 2 + LOAD_TRIES
            assert versions_of(await engine.generate(request())) == [0]
            await engine.load(*lora(small_base, tmp_path, 2))

    asyncio.run(main())


def test_full_weights_that_the_server_refuses_are_an_error_soon_and_those_before_are_served_again(
    small_base: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        server = StandInServer(small_base)
        server.refused = "-v1-"
        async with engine_over(tmp_path, server, start_timeout_s=600.0) as engine:
            await engine.load(*full(small_base, tmp_path, 0))
            with pytest.raises(
                ModelError, match=r"run-1-policy-v1-\S+ is not loaded: http\S+ did not load .*answered 500"
            ):
                await engine.load(*full(small_base, tmp_path, 1))
            assert set(versions_of(await engine.generate(request()))) == {0}
            assert server.asked["reload_weights"] == 2 + LOAD_TRIES

    asyncio.run(main())


def test_full_weights_that_a_returning_server_refuses_for_a_while_are_loaded_afterwards(
    small_base: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        server = StandInServer(small_base)
        async with engine_over(tmp_path, server) as engine:
            await engine.load(*full(small_base, tmp_path, 0))
            server.refused = "-v0-"
            server.restarted()
            call = asyncio.create_task(engine.generate(request()))
            await wait_until(lambda: server.asked["reload_weights"] > 1 + 2 * LOAD_TRIES)
            server.refused = ""
            assert set(versions_of(await call)) == {0}

    asyncio.run(main())


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_request_that_waits_while_its_group_is_unloaded_fails_with_a_model_error(
    small_base: Path, tmp_path: Path, *, is_alone: bool
) -> None:
    async def main() -> None:
        server = StandInServer(small_base)
        async with engine_over(tmp_path, server) as engine:
            await engine.load(*lora(small_base, tmp_path, 0))
            if not is_alone:
                await engine.load(*lora(small_base, tmp_path, 0, group="run-1/other"))
            server.failing["/openapi.json"] = server.failing[CHECK] = 500
            await wait_until(lambda: engine.states()[server.url].startswith("down"))
            call = asyncio.create_task(engine.generate(request()))
            await asyncio.sleep(0.05)
            await engine.unload("run-1/policy")
            server.failing.clear()
            with pytest.raises(ModelError, match="load a version again"):
                await call

    asyncio.run(main())


def test_the_files_of_versions_that_failed_to_load_do_not_stay(small_base: Path, tmp_path: Path) -> None:
    async def main() -> None:
        server = StandInServer(small_base)
        server.num_replicas = 2
        async with engine_over(tmp_path, server) as engine:
            for version in range(5):
                with pytest.raises(ModelError, match="2 data-parallel replicas"):
                    await engine.load(*lora(small_base, tmp_path, version))
            assert len([*(tmp_path / "vllm").glob("run-1-policy-v*")]) <= 1

    asyncio.run(main())


# ---- full weights ----


def test_a_server_that_was_left_paused_is_resumed_and_serves_no_weights_of_before(
    small_base: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        server = StandInServer(small_base)
        server.is_paused, server.label = True, "run-1-policy-v7-00000000-loading"
        async with engine_over(tmp_path, server) as engine:
            await engine.load(*full(small_base, tmp_path, 0))
            assert not server.is_paused
            assert server.asked["reload_weights"] == 1
            assert set(versions_of(await engine.generate(request()))) == {0}

    asyncio.run(main())


def test_a_resume_that_fails_is_repeated(small_base: Path, tmp_path: Path) -> None:
    async def main() -> None:
        server = StandInServer(small_base)
        async with engine_over(tmp_path, server, start_timeout_s=5.0) as engine:
            server.failing_next["/resume"] = [(500, {}), (503, {})]
            await engine.load(*full(small_base, tmp_path, 0))
            assert set(versions_of(await engine.generate(request()))) == {0}
            server.failing["/resume"] = 500
            with pytest.raises(ModelError, match="answered 500"):
                await engine.load(*full(small_base, tmp_path, 1))
            server.failing.clear()
            answer = versions_of(await engine.generate(request()))
            assert set(answer) == {engine.version("run-1/policy")}

    asyncio.run(main())


def test_a_server_that_answers_nothing_is_not_waited_for_longer_than_for_its_health(
    small_base: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        server = StandInServer(small_base)
        server.without = {"/is_paused"}
        server.is_paused = True
        async with engine_over(tmp_path, server, health_timeout_s=0.3, start_timeout_s=1.5) as engine:
            with pytest.raises(ModelError, match=r"no answer within 0\.3 s \(health_timeout_s\)"):
                await engine.load(*full(small_base, tmp_path, 0))

    asyncio.run(main())


def test_a_temperature_that_vllm_would_raise_or_refuse_is_refused(small_base: Path, tmp_path: Path) -> None:
    async def main() -> None:
        server = StandInServer(small_base)
        async with engine_over(tmp_path, server) as engine:
            await engine.load(*lora(small_base, tmp_path, 0))
            for temperature in (0.0, 0.01, 2.0):
                await engine.generate(GenerationRequest(GROUP, [5], Sampling(temperature=temperature), 1))
            with pytest.raises(PromptRefusedError, match=r"temperature 0\.009: vLLM samples at 0\.01 instead; set 0"):
                await engine.generate(GenerationRequest(GROUP, [5], Sampling(temperature=0.009), 1))
            with pytest.raises(PromptRefusedError, match=r"temperature 2\.1: vLLM refuses more than 2; set 2 or less"):
                await engine.generate(GenerationRequest(GROUP, [5], Sampling(temperature=2.1), 1))

    asyncio.run(main())


@pytest.mark.parametrize(("temperature", "logprob"), [(0.0, 0.0), (1.0, -0.7)])
def test_at_temperature_0_the_likeliest_id_has_all_probability(
    small_base: Path, temperature: float, logprob: float
) -> None:
    request = GenerationRequest(GROUP, [5], Sampling(temperature=temperature), 1)
    base = read_base_model(str(small_base))
    content = [{"token_id": 5, "logprob": -0.7}]
    assert generated({"token_ids": [5], "logprobs": {"content": content}}, request, base).logprobs == (logprob,)
    assert completed({"token_ids": [5], "logprobs": {"token_logprobs": [-0.7]}}, request, base).logprobs == (logprob,)
