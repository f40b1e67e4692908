"""Servers that stop answering: versions reach the others, requests move to them, and waits begin with the failure."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from rollstream.producers.engines.vllm import VllmEngine
from rollstream.producers.engines.vllm.open_calls import finished
from rollstream.producers.engines.vllm.pool import MAX_FAILED
from rollstream.schemas.errors import ModelError
from tests.producers.engines.vllm.server_rig import (
    ALL,
    CHECK,
    GENERATE,
    GROUP,
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

OTHER = "run-1/other"
SOON_S = 20.0
"""Far below the limits of a request or a load that a test leaves at 10 minutes."""

pytestmark = pytest.mark.timeout(60)


def state_of(engine: VllmEngine, server: StandInServer) -> str:
    return engine.states()[server.url]


# ---- versions ----


@pytest.mark.parametrize("weights", [lora, full])
def test_a_version_serves_from_one_server_while_another_stops_answering(
    small_base: Path, tmp_path: Path, weights: Any
) -> None:
    async def main() -> None:
        first, second = StandInServer(small_base), StandInServer(small_base)
        async with engine_over(tmp_path, first, second, health_timeout_s=1.5) as engine:
            await engine.load(*weights(small_base, tmp_path, 0))
            await joined(engine, first, second)
            second.silent = {ALL}
            async with asyncio.timeout(SOON_S):
                await engine.load(*weights(small_base, tmp_path, 1))
                assert state_of(engine, first) == "ready"
                assert state_of(engine, second) != "ready"
                assert [versions_of(await engine.generate(request())) for _ in range(4)] in ([[1]] * 4, [[1, 1]] * 4)
                await wait_until(lambda: state_of(engine, second).startswith("down: gave no answer within 1.5 s"))
                await engine.load(*weights(small_base, tmp_path, 2))
            second.silent.clear()
            await joined(engine, second)
            assert not second.is_paused
            assert second.label.startswith("run-1-policy-v2-") or any("-v2-" in name for name in second.adapters)

    asyncio.run(main())


@pytest.mark.parametrize(("weights", "load"), [(lora, "/v1/load_lora_adapter"), (full, "reload_weights")])
def test_a_server_whose_load_hangs_is_asked_for_its_health_and_given_the_version_again(
    small_base: Path, tmp_path: Path, weights: Any, load: str
) -> None:
    async def main() -> None:
        first, second = StandInServer(small_base), StandInServer(small_base)
        async with engine_over(tmp_path, first, second, load_timeout_s=4.0) as engine:
            await engine.load(*weights(small_base, tmp_path, 0))
            await joined(engine, first, second)
            second.silent = {load}
            async with asyncio.timeout(SOON_S):
                await engine.load(*weights(small_base, tmp_path, 1))
            assert state_of(engine, second).startswith("pending_weights: has not proven run-1-policy-v1-")
            lives = second.asked["/health"]
            await wait_until(lambda: second.asked["/health"] > lives)
            checks, lives = second.asked[CHECK], second.asked["/health"]
            await wait_until(lambda: second.asked["/health"] > lives)
            assert second.asked[CHECK] == checks, "its workers are busy with the load"
            tries = second.asked[load]
            await wait_until(lambda: second.asked[load] > tries)
            second.silent.clear()
            await joined(engine, second)
            assert not second.is_paused

    asyncio.run(main())


def test_a_load_that_hangs_on_one_server_delays_no_other_model_group(small_base: Path, tmp_path: Path) -> None:
    async def main() -> None:
        first, second = StandInServer(small_base), StandInServer(small_base)
        async with engine_over(tmp_path, first, second) as engine:
            await engine.load(*lora(small_base, tmp_path, 0))
            await engine.load(*lora(small_base, tmp_path, 0, group=OTHER))
            await joined(engine, first, second)
            second.silent = {"/v1/load_lora_adapter"}
            async with asyncio.timeout(SOON_S):
                await engine.load(*lora(small_base, tmp_path, 1))
                await engine.load(*lora(small_base, tmp_path, 1, group=OTHER))
                assert versions_of(await engine.generate(request())) == [1]
                assert versions_of(await engine.generate(request(group=OTHER))) == [1]

    asyncio.run(main())


def test_a_server_without_a_groups_new_version_serves_the_other_groups(small_base: Path, tmp_path: Path) -> None:
    async def main() -> None:
        first, second = StandInServer(small_base), StandInServer(small_base)
        async with engine_over(tmp_path, first, second) as engine:
            await engine.load(*lora(small_base, tmp_path, 0))
            await engine.load(*lora(small_base, tmp_path, 0, group=OTHER))
            await joined(engine, first, second)
            second.silent = {"/v1/load_lora_adapter"}
            await engine.load(*lora(small_base, tmp_path, 1))
            before = second.asked[GENERATE]
            calls = [await held_open(engine, first, OTHER)]
            assert versions_of(await engine.generate(request(group=OTHER))) == [0]
            assert second.asked[GENERATE] == before + 1
            first.held.set()
            assert versions_of(await calls[0]) == [0]
            before = second.asked[GENERATE]
            assert [versions_of(await engine.generate(request())) for _ in range(4)] == [[1]] * 4
            assert second.asked[GENERATE] == before

    asyncio.run(main())


def test_the_only_server_that_does_not_load_in_time_is_named_with_the_limit(small_base: Path, tmp_path: Path) -> None:
    async def main() -> None:
        server = StandInServer(small_base)
        async with engine_over(tmp_path, server, load_timeout_s=0.3, start_timeout_s=3.0) as engine:
            server.silent = {"/v1/load_lora_adapter"}
            named = r"is not loaded: http\S+ did not load run-1-policy-v0-\S+ within 0\.3 s \(load_timeout_s\)"
            with pytest.raises(ModelError, match=named):
                await engine.load(*lora(small_base, tmp_path, 0))

    asyncio.run(main())


@pytest.mark.parametrize("weights", [lora, full])
def test_an_engine_ends_while_its_server_does_not_answer_a_load(small_base: Path, tmp_path: Path, weights: Any) -> None:
    async def main() -> None:
        server = StandInServer(small_base)
        async with engine_over(tmp_path, server, health_timeout_s=1.5, health_interval_s=30.0) as engine:
            await engine.load(*weights(small_base, tmp_path, 0))
            loads = server.asked["/v1/load_lora_adapter"] + server.asked["reload_weights"]
            server.silent = {"/v1/load_lora_adapter", "reload_weights"}
            loading = asyncio.create_task(engine.load(*weights(small_base, tmp_path, 1)))
            await wait_until(lambda: server.asked["/v1/load_lora_adapter"] + server.asked["reload_weights"] > loads)
            server.silent = {ALL}
            async with asyncio.timeout(SOON_S):
                await engine.close()
                with pytest.raises(ModelError, match="no longer used"):
                    await loading

    asyncio.run(main())


def test_a_call_that_must_reach_its_end_does_though_its_caller_is_cancelled_twice() -> None:
    async def main() -> None:
        ended = asyncio.Event()

        async def call() -> None:
            await asyncio.sleep(0.1)
            ended.set()
            raise ModelError("failed")

        caller = asyncio.create_task(finished(call()))
        for _ in range(2):
            await asyncio.sleep(0.01)
            caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert ended.is_set()

    asyncio.run(main())


# ---- requests ----


@pytest.mark.parametrize("weights", [lora, full])
def test_the_requests_of_a_server_that_is_found_dead_are_made_again_on_another(
    small_base: Path, tmp_path: Path, weights: Any
) -> None:
    async def main() -> None:
        first, second = StandInServer(small_base), StandInServer(small_base)
        async with engine_over(tmp_path, first, second, health_timeout_s=1.5) as engine:
            await engine.load(*weights(small_base, tmp_path, 0))
            await joined(engine, first, second)
            call = await held_open(engine, first)
            first.silent = {ALL}
            async with asyncio.timeout(SOON_S):
                assert set(versions_of(await call)) == {0}
            assert state_of(engine, first).startswith("down: ")
            assert second.asked[GENERATE] == 1

    asyncio.run(main())


def test_a_stream_of_a_server_that_is_found_dead_goes_on_with_the_tokens_that_the_caller_lacks(
    small_base: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        first, second = StandInServer(small_base), StandInServer(small_base)
        first.sampled = second.sampled = [5, 6, 7, 8]
        first.stops_after = 3
        given = list[int]()
        async with engine_over(tmp_path, first, second, health_timeout_s=1.5) as engine:
            await engine.load(*lora(small_base, tmp_path, 0))
            await joined(engine, first, second)
            first.held.clear()
            call = asyncio.create_task(engine.generate(request(on_tokens=given.extend)))
            await wait_until(lambda: given == [5, 6])
            first.silent = {ALL}
            async with asyncio.timeout(SOON_S):
                assert (await call).token_ids == (5, 6, 7, 8)
            first.held.set()
            await asyncio.sleep(0.1)
            assert given == [5, 6, 7]

    asyncio.run(main())


def test_a_caller_that_hangs_up_ends_its_request_alone(small_base: Path, tmp_path: Path) -> None:
    async def main() -> None:
        first, second = StandInServer(small_base), StandInServer(small_base)
        async with engine_over(tmp_path, first, second) as engine:
            await engine.load(*lora(small_base, tmp_path, 0))
            await joined(engine, first, second)
            first.held.clear()
            second.held.clear()
            calls = [asyncio.create_task(engine.generate(request())) for _ in range(4)]
            await wait_until(lambda: first.asked[GENERATE] + second.asked[GENERATE] == 4)
            calls[0].cancel()
            with pytest.raises(asyncio.CancelledError):
                await calls[0]
            first.held.set()
            second.held.set()
            assert [versions_of(one) for one in await asyncio.gather(*calls[1:])] == [[0]] * 3
            assert first.asked[GENERATE] + second.asked[GENERATE] == 4

    asyncio.run(main())


def test_a_server_that_answers_a_look_keeps_its_requests_though_others_fail(small_base: Path, tmp_path: Path) -> None:
    async def main() -> None:
        server = StandInServer(small_base)
        async with engine_over(tmp_path, server) as engine:
            await engine.load(*lora(small_base, tmp_path, 0))
            call = await held_open(engine, server)
            server.failing_next[GENERATE] = [(500, {})] * MAX_FAILED
            other = asyncio.create_task(engine.generate(request()))
            await wait_until(lambda: server.asked[GENERATE] == 2 + MAX_FAILED)
            server.held.set()
            assert [versions_of(one) for one in await asyncio.gather(call, other)] == [[0]] * 2
            assert server.asked[GENERATE] == 2 + MAX_FAILED

    asyncio.run(main())


def test_a_request_waits_for_a_restart_from_when_its_server_failed(small_base: Path, tmp_path: Path) -> None:
    async def main() -> None:
        server = StandInServer(small_base)
        async with engine_over(tmp_path, server, start_timeout_s=3.0) as engine:
            await engine.load(*lora(small_base, tmp_path, 0))
            began = time.monotonic()
            call = await held_open(engine, server)
            await asyncio.sleep(3.2)
            await server.stop()
            await asyncio.sleep(0.4)
            server.held.set()
            await server.return_()
            assert versions_of(await call) == [0]
            assert time.monotonic() - began > 3.5
            assert engine.version(GROUP) == 0

    asyncio.run(main())


def test_a_server_whose_queue_is_longer_than_its_health_takes_can_be_joined(small_base: Path, tmp_path: Path) -> None:
    async def main() -> None:
        server = StandInServer(small_base)
        server.slow_s["/v1/completions"] = 0.9
        async with engine_over(tmp_path, server, health_timeout_s=0.3, start_timeout_s=4.0) as engine:
            await engine.load(*lora(small_base, tmp_path, 0))
            assert versions_of(await engine.generate(request())) == [0]

    asyncio.run(main())


# ---- answers of another form ----


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/openapi.json", {"paths": 3}),
        ("/v1/models", []),
        ("/v1/completions", {"choices": [[]]}),
        ("/is_paused", {"detail": "warming up"}),
        ("/get_world_size", {"world_size": "many"}),
        ("/weight_info", [7]),
        ("/v1/models", b"<html>Please wait</html>"),
        ("/v1/completions", b"<html>Please wait</html>"),
    ],
)
def test_a_server_that_answers_in_another_form_at_first_serves_afterwards(
    small_base: Path, tmp_path: Path, path: str, answer: Any
) -> None:
    async def main() -> None:
        server = StandInServer(small_base)
        server.foreign[path] = answer
        async with engine_over(tmp_path, server) as engine, asyncio.timeout(SOON_S):
            load = asyncio.create_task(engine.load(*full(small_base, tmp_path, 0)))
            expected = f"down: gave an answer of another form than vLLM's to {path}"
            await wait_until(lambda: engine.states() and state_of(engine, server).startswith(expected))
            server.foreign.clear()
            await load
            assert set(versions_of(await engine.generate(request()))) == {0}

    asyncio.run(main())


def test_a_watched_server_that_answers_in_another_form_serves_again_afterwards(
    small_base: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        first, second = StandInServer(small_base), StandInServer(small_base)
        async with engine_over(tmp_path, first, second) as engine, asyncio.timeout(SOON_S):
            await engine.load(*lora(small_base, tmp_path, 0))
            await joined(engine, first, second)
            first.foreign["/v1/models"] = {"data": None}
            await wait_until(lambda: state_of(engine, first).startswith("down: gave an answer of another form"))
            assert versions_of(await engine.generate(request())) == [0]
            first.foreign.clear()
            await joined(engine, first, second)

    asyncio.run(main())


@pytest.mark.parametrize("method", ["check", "connect", "unload_unused"])
def test_a_failure_that_nobody_expected_is_logged_and_its_server_is_used_again(
    small_base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    async def main() -> None:
        first, second = StandInServer(small_base), StandInServer(small_base)
        async with engine_over(tmp_path, first, second) as engine, asyncio.timeout(SOON_S):
            await engine.load(*lora(small_base, tmp_path, 0))
            await joined(engine, first, second)
            (pool,) = engine._pools.values()
            server: Any = pool._servers[0]

            async def fail(*_args: Any, **_options: Any) -> None:
                delattr(server, method)
                raise ZeroDivisionError("a bug")

            setattr(server, method, fail)
            if method == "connect":
                server.leave("down", "for a while")
                pool._recheck()
            if method == "unload_unused":
                server.unused.set()
            # the log keeps it: the server may be up again before its state is read
            await wait_until(lambda: "is not used: http" in caplog.text)
            assert "cannot be looked after: ZeroDivisionError" in caplog.text
            assert versions_of(await engine.generate(request())) == [0]
            await joined(engine, first, second)

    asyncio.run(main())
    assert "ZeroDivisionError: a bug" in caplog.text
