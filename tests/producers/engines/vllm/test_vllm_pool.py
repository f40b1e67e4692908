"""Selection of servers, and requests when one fails. Servers speak vLLM's paths."""

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rollstream.learner.tiny_model import make_tiny_model
from rollstream.producers.engines.vllm import VllmEngine
from rollstream.producers.engines.vllm.pool_members import IMBALANCE
from rollstream.schemas.engine_settings import VllmSettings
from rollstream.schemas.errors import ModelError
from tests.producers.engines.vllm.server_rig import (
    GENERATE,
    GROUP,
    StandInServer,
    engine_over,
    full,
    lora,
    request,
    versions_of,
    wait_until,
)

Case = Callable[[VllmEngine, StandInServer, StandInServer], Awaitable[None]]

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("base") / "model", seed=0, num_layers=1)


def with_two(base: Path, tmp_path: Path, case: Case, **settings: Any) -> None:
    async def main() -> None:
        first, second = StandInServer(base), StandInServer(base)
        async with engine_over(tmp_path, first, second, **settings) as engine:
            await case(engine, first, second)

    asyncio.run(main())


def with_one(base: Path, tmp_path: Path, case: Callable[[VllmEngine, StandInServer], Awaitable[None]]) -> None:
    async def main() -> None:
        server = StandInServer(base)
        async with engine_over(tmp_path, server) as engine:
            await case(engine, server)

    asyncio.run(main())


def state_of(engine: VllmEngine, server: StandInServer) -> str:
    return engine.states()[server.url]


async def both_ready(engine: VllmEngine, *servers: StandInServer) -> None:
    await wait_until(lambda: all(state_of(engine, one) == "ready" for one in servers))


def test_a_groups_requests_go_to_one_server_until_it_is_much_busier(base: Path, tmp_path: Path) -> None:
    async def case(engine: VllmEngine, first: StandInServer, second: StandInServer) -> None:
        await engine.load(*lora(base, tmp_path, 0))
        await both_ready(engine, first, second)
        for number in range(6):
            await engine.generate(request(f"run-1/policy/e0/t00001/m{number}/a0"))
        assert sorted((first.asked[GENERATE], second.asked[GENERATE])) == [0, 6]
        own, other = (first, second) if first.asked[GENERATE] else (second, first)
        for one in (own, other):
            one.held.clear()
        calls = [
            asyncio.create_task(engine.generate(request(f"run-1/policy/e0/t00001/m{number}/a0")))
            for number in range(IMBALANCE + 4)
        ]
        await wait_until(lambda: own.asked[GENERATE] == 6 + IMBALANCE + 2 and other.asked[GENERATE] == 2)
        for one in (own, other):
            one.held.set()
        await asyncio.gather(*calls)

    with_two(base, tmp_path, case)


def test_requests_of_no_group_go_to_the_least_busy_server(base: Path, tmp_path: Path) -> None:
    async def case(engine: VllmEngine, first: StandInServer, second: StandInServer) -> None:
        await engine.load(*lora(base, tmp_path, 0))
        await both_ready(engine, first, second)
        for one in (first, second):
            one.held.clear()
        calls = [asyncio.create_task(engine.generate(request())) for _ in range(8)]
        await wait_until(lambda: first.asked[GENERATE] == second.asked[GENERATE] == 4)
        for one in (first, second):
            one.held.set()
        await asyncio.gather(*calls)

    with_two(base, tmp_path, case)


@pytest.mark.parametrize("weights", [lora, full])
def test_requests_of_a_server_that_dies_are_made_again_on_the_other(base: Path, tmp_path: Path, weights: Any) -> None:
    async def case(engine: VllmEngine, first: StandInServer, second: StandInServer) -> None:
        await engine.load(*weights(base, tmp_path, 0))
        await both_ready(engine, first, second)
        first.held.clear()
        calls = [asyncio.create_task(engine.generate(request())) for _ in range(4)]
        await wait_until(lambda: first.asked[GENERATE] == 2)
        await first.stop()
        assert [versions_of(one)[0] for one in await asyncio.gather(*calls)] == [0] * 4
        assert state_of(engine, first).startswith("down: ")

    with_two(base, tmp_path, case)


@pytest.mark.parametrize("weights", [lora, full])
def test_a_server_that_returns_serves_after_it_was_given_the_newest_version(
    base: Path, tmp_path: Path, weights: Any
) -> None:
    async def case(engine: VllmEngine, first: StandInServer, second: StandInServer) -> None:
        await engine.load(*weights(base, tmp_path, 0))
        await both_ready(engine, first, second)
        await first.stop()
        await wait_until(lambda: state_of(engine, first).startswith("down: "))
        await engine.load(*weights(base, tmp_path, 1))
        first.failing = dict.fromkeys(("/v1/load_lora_adapter", "reload_weights"), 500)
        await first.return_()
        asked = "/v1/load_lora_adapter" if weights is lora else "reload_weights"
        tries = first.asked[asked]
        await wait_until(lambda: first.asked[asked] > tries)
        assert state_of(engine, first) != "ready"
        assert (await engine.generate(request())).spans[0].version == 1
        first.failing.clear()
        await both_ready(engine, first, second)
        assert first.label.startswith("run-1-policy-v1-") or any("-v1-" in name for name in first.adapters)

    with_two(base, tmp_path, case)


@pytest.mark.parametrize("weights", [lora, full])
def test_a_server_restarted_unseen_loses_no_request_and_answers_with_no_old_weights(
    base: Path, tmp_path: Path, weights: Any
) -> None:
    async def case(engine: VllmEngine, first: StandInServer, second: StandInServer) -> None:
        await engine.load(*weights(base, tmp_path, 3))
        await both_ready(engine, first, second)
        first.restarted()
        answers = await asyncio.gather(*(engine.generate(request()) for _ in range(4)))
        assert {version for one in answers for version in versions_of(one)} == {3}
        await both_ready(engine, first, second)

    with_two(base, tmp_path, case)


def test_a_reload_that_fails_in_the_middle_leaves_no_server_that_serves_unknown_weights(
    base: Path, tmp_path: Path
) -> None:
    async def case(engine: VllmEngine, first: StandInServer, second: StandInServer) -> None:
        await engine.load(*full(base, tmp_path, 0))
        await both_ready(engine, first, second)
        before = first.asked["/resume"]
        first.failing["/reset_prefix_cache"] = 500  # the weights are there, what it computed of the old ones too
        await engine.load(*full(base, tmp_path, 1))
        await wait_until(lambda: first.asked["/resume"] > before)
        assert state_of(engine, first) != "ready"
        assert first.label.endswith("-loading")
        assert versions_of(await engine.generate(request()))[0] == 1
        first.failing.clear()
        await both_ready(engine, first, second)
        assert first.label == second.label

    with_two(base, tmp_path, case)


def test_the_only_server_failing_in_a_reload_is_given_the_version_before_again(base: Path, tmp_path: Path) -> None:
    async def case(engine: VllmEngine, server: StandInServer) -> None:
        await engine.load(*full(base, tmp_path, 0))
        loaded = server.asked["reload_weights"]
        server.failing["/reset_prefix_cache"] = 400
        with pytest.raises(ModelError, match="is not loaded"):
            await engine.load(*full(base, tmp_path, 1))
        server.failing.clear()
        assert versions_of(await engine.generate(request()))[0] == engine.version(GROUP) == 0
        assert server.asked["reload_weights"] > loaded + 1

    with_one(base, tmp_path, case)


def test_requests_in_progress_take_over_new_weights_and_record_from_which_token(base: Path, tmp_path: Path) -> None:
    async def case(engine: VllmEngine, server: StandInServer) -> None:
        await engine.load(*full(base, tmp_path, 0))
        server.held.clear()
        call = asyncio.create_task(engine.generate(request()))
        await wait_until(lambda: server.asked[GENERATE])
        await engine.load(*full(base, tmp_path, 1))
        server.held.set()
        assert versions_of(await call) == [0, 1]

    with_one(base, tmp_path, case)


@pytest.mark.parametrize("weights", [lora, full])
def test_files_that_somebody_removed_are_made_again_of_the_artifact(base: Path, tmp_path: Path, weights: Any) -> None:
    async def case(engine: VllmEngine, server: StandInServer) -> None:
        await engine.load(*weights(base, tmp_path, 0))
        (folder,) = (tmp_path / "vllm").glob("*-v0-*")
        shutil.rmtree(folder)
        server.restarted()
        assert set(versions_of(await engine.generate(request()))) == {0}
        assert any(folder.glob("*.safetensors"))

    with_one(base, tmp_path, case)


def test_the_only_server_lacking_an_adapters_files_serves_again_with_the_next_version(
    base: Path, tmp_path: Path
) -> None:
    async def case(engine: VllmEngine, server: StandInServer) -> None:
        await engine.load(*lora(base, tmp_path, 0))
        shutil.rmtree(next(iter(server.adapters.values())))
        (tmp_path / "lora-0.safetensors").unlink()
        server.restarted()
        call = asyncio.create_task(engine.generate(request()))
        await wait_until(lambda: "did not load" in state_of(engine, server))
        await engine.load(*lora(base, tmp_path, 1))
        assert versions_of(await call) == [1]

    with_one(base, tmp_path, case)


def test_a_removed_adapter_folder_keeps_a_server_out_until_the_next_version(base: Path, tmp_path: Path) -> None:
    async def case(engine: VllmEngine, first: StandInServer, second: StandInServer) -> None:
        await engine.load(*lora(base, tmp_path, 0))
        await both_ready(engine, first, second)
        (name,) = first.adapters
        shutil.rmtree(first.adapters[name])
        (tmp_path / "lora-0.safetensors").unlink()
        first.restarted()
        await wait_until(lambda: "did not load" in state_of(engine, first))
        assert versions_of(await engine.generate(request())) == [0]
        await engine.load(*lora(base, tmp_path, 1))
        await both_ready(engine, first, second)

    with_two(base, tmp_path, case)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"num_replicas": 2}, "2 data-parallel replicas"),
        ({"logprob": -0.7}, "--logprobs-mode processed_logprobs"),
        ({"without": {"/v1/load_lora_adapter"}}, "--enable-lora"),
        ({"base": "/somewhere/else"}, "the run's base model is"),
        ({"served_name": "mine"}, "leave --served-model-name out"),
        ({"config": {"parallel_config": {"_api_process_count": 3}}}, "3 API server processes.*--api-server-count=1"),
        ({"config": {"parallel_config": {"data_parallel_size": 4}}}, "4 data-parallel replicas"),
        ({"config": {"model_config": {"logprobs_mode": "raw_logprobs"}}}, "--logprobs-mode processed_logprobs"),
        ({"config": {"lora_config": {"max_loras": 1}}}, r"--max-loras 1 .*engine.max_loras is 4; start it"),
        ({"config": {"lora_config": {"max_loras": 4, "max_lora_rank": 2}}}, "adapters up to rank 2; start it with"),
    ],
)
def test_a_server_that_cannot_be_used_is_refused_in_one_line(
    base: Path, tmp_path: Path, fault: dict[str, Any], message: str
) -> None:
    async def case(engine: VllmEngine, server: StandInServer) -> None:
        for name, value in fault.items():
            setattr(server, name, value)
        with pytest.raises(ModelError, match=message):
            await engine.load(*lora(base, tmp_path, 0))

    with_one(base, tmp_path, case)


@pytest.mark.parametrize(
    "fault", [{"without": {"/server_info"}}, {"failing": {"/server_info": 500}}, {"config": "text"}]
)
def test_a_server_that_does_not_report_how_it_was_started_is_one_warning(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: dict[str, Any]
) -> None:
    async def case(engine: VllmEngine, server: StandInServer) -> None:
        for name, value in fault.items():
            setattr(server, name, value)
        await engine.load(*lora(base, tmp_path, 0))
        await server.stop()
        await wait_until(lambda: state_of(engine, server).startswith("down"))
        await server.return_()
        await wait_until(lambda: state_of(engine, server) == "ready")

    with_one(base, tmp_path, case)
    (found,) = [one.getMessage() for one in caplog.records if "does not report how it was started" in one.getMessage()]
    assert "one API server process and --max-loras 4 or more" in found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "biases"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head, which vLLM drops"),
        ({"r": 128}, "rank 128 is above engine.max_lora_rank, 64"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"target_parameters": ["experts"]}, "target_parameters"),
    ],
)
def test_an_adapter_that_vllm_drops_or_misreads_is_refused_and_no_server_hears_of_it(
    base: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    async def case(engine: VllmEngine, server: StandInServer) -> None:
        with pytest.raises(ModelError, match=message):
            await engine.load(*lora(base, tmp_path, 0, **changes))
        assert not server.adapters

    with_one(base, tmp_path, case)


@pytest.mark.parametrize("is_named", [False, True])
def test_a_folder_that_no_setting_names_is_removed_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_named: bool
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / "named" if is_named else None

    async def scenario() -> None:
        engine = VllmEngine(VllmSettings(base_urls=("http://127.0.0.1:9",), folder=folder))
        await engine.start()
        assert list(tmp_path.iterdir())
        await engine.close()

    asyncio.run(scenario())
    assert list(tmp_path.iterdir()) == ([folder] if is_named else [])
