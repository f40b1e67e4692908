"""Full weights replaced while requests are in progress: each answer is recorded with the versions that sampled it."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rollstream.producers.engines.vllm import VllmEngine
from rollstream.producers.engines.vllm.open_calls import Gate
from rollstream.schemas.errors import ModelError
from tests.producers.engines.vllm.server_rig import (
    GENERATE,
    GROUP,
    StandInServer,
    engine_over,
    full,
    held_open,
    joined,
    request,
    versions_of,
    wait_until,
)

COMPLETIONS = "/v1/completions"
SOON_S = 20.0
"""Far below the limit of a request, 10 minutes."""

pytestmark = pytest.mark.timeout(60)

Case = Callable[[VllmEngine, StandInServer], Awaitable[None]]


def with_version_0(base: Path, tmp_path: Path, case: Case, *, without: str = "", **settings: Any) -> None:
    """A server that has version 0. `without`: a path that it does not offer."""

    async def main() -> None:
        server = StandInServer(base)
        server.without.add(without)
        async with engine_over(tmp_path, server, **settings) as engine:
            await engine.load(*full(base, tmp_path, 0))
            await case(engine, server)

    asyncio.run(main())


async def half_loaded(engine: VllmEngine, server: StandInServer, base: Path, tmp_path: Path) -> "asyncio.Task[None]":
    """The load of version 1, which stands still in its middle while `silent` is set."""
    server.silent = {"reload_weights"}
    before = server.asked["reload_weights"]
    loading = asyncio.create_task(engine.load(*full(base, tmp_path, 1)))
    await wait_until(lambda: server.asked["reload_weights"] > before)
    return loading


# ---- answers that name their weights ----


def test_a_request_across_three_versions_has_tokens_of_each(small_base: Path, tmp_path: Path) -> None:
    async def case(engine: VllmEngine, server: StandInServer) -> None:
        server.sampled = [5, 5, 5]
        call = await held_open(engine, server)
        for version in (1, 2):
            await engine.load(*full(small_base, tmp_path, version))
        server.held.set()
        assert versions_of(await call) == [0, 1, 2]
        assert server.asked[GENERATE] == 1
        assert engine.states()[server.url] == "ready"

    with_version_0(small_base, tmp_path, case)


def test_a_request_of_a_version_that_another_one_precedes_again_is_recorded(small_base: Path, tmp_path: Path) -> None:
    async def case(engine: VllmEngine, server: StandInServer) -> None:
        server.sampled = [5, 5, 5, 5]
        call = await held_open(engine, server)
        for version in (1, 0, 2):
            await engine.load(*full(small_base, tmp_path, version))
        server.held.set()
        assert versions_of(await call) == [0, 1, 0, 2]
        assert server.asked[GENERATE] == 1

    with_version_0(small_base, tmp_path, case)


def test_a_server_that_loses_its_version_loses_no_answer_of_requests_in_progress(
    small_base: Path, tmp_path: Path
) -> None:
    async def case(engine: VllmEngine, server: StandInServer) -> None:
        calls = [await held_open(engine, server) for _ in range(4)]
        name, server.label, server.silent = server.label, "of somebody else", {"/pause"}
        await wait_until(lambda: engine.states()[server.url].startswith("pending_weights: no longer has"))
        server.label = name
        server.held.set()
        assert [versions_of(one) for one in await asyncio.gather(*calls)] == [[0, 0]] * 4
        assert server.asked[GENERATE] == 4
        server.silent = set()
        await joined(engine, server)

    with_version_0(small_base, tmp_path, case)


def test_versions_are_forgotten_with_the_requests_that_may_have_tokens_of_them(
    small_base: Path, tmp_path: Path
) -> None:
    async def case(engine: VllmEngine, server: StandInServer) -> None:
        (pool,) = engine._pools.values()
        (of_pool,) = pool._servers
        for version in range(1, 5):
            await engine.load(*full(small_base, tmp_path, version))
        assert [one.published.version for one in of_pool._named._given] == [3, 4]
        assert versions_of(await engine.generate(request())) == [4, 4]

    with_version_0(small_base, tmp_path, case)


# ---- answers that do not ----


def test_a_request_sent_during_a_reload_is_recorded_with_the_version_that_sampled_it(
    small_base: Path, tmp_path: Path
) -> None:
    async def case(engine: VllmEngine, server: StandInServer) -> None:
        loading = await half_loaded(engine, server, small_base, tmp_path)
        asked = server.asked[COMPLETIONS]
        call = asyncio.create_task(engine.generate(request()))
        await asyncio.sleep(0.3)
        assert not server.begun
        assert engine.states()[server.url] == "ready"
        server.silent = set()
        assert versions_of(await call) == [1]
        await loading
        assert [one.split("-")[3] for one in server.begun] == ["v1"]
        assert server.asked[COMPLETIONS] == asked + 1
        assert engine.states()[server.url] == "ready"

    with_version_0(small_base, tmp_path, case, without=GENERATE)


def test_weights_are_replaced_after_the_requests_in_progress_and_before_those_that_come_later(
    small_base: Path, tmp_path: Path
) -> None:
    async def case(engine: VllmEngine, server: StandInServer) -> None:
        asked, reloads = server.asked[COMPLETIONS], server.asked["reload_weights"]
        first = [await held_open(engine, server) for _ in range(2)]
        loading = asyncio.create_task(engine.load(*full(small_base, tmp_path, 1)))
        await asyncio.sleep(0.2)
        later = [asyncio.create_task(engine.generate(request())) for _ in range(2)]
        await asyncio.sleep(0.2)
        assert server.asked["reload_weights"] == reloads
        assert not loading.done()
        server.held.set()
        await loading
        assert [versions_of(one) for one in await asyncio.gather(*first, *later)] == [[0], [0], [1], [1]]
        assert server.asked[COMPLETIONS] == asked + 4
        assert server.asked["reload_weights"] == reloads + 1
        assert engine.states()[server.url] == "ready"

    with_version_0(small_base, tmp_path, case, without=GENERATE)


def test_a_request_that_waits_for_a_reload_which_fails_is_recorded_with_the_version_before(
    small_base: Path, tmp_path: Path
) -> None:
    async def case(engine: VllmEngine, server: StandInServer) -> None:
        loading = await half_loaded(engine, server, small_base, tmp_path)
        call = asyncio.create_task(engine.generate(request()))
        await asyncio.sleep(0.1)
        server.failing["/reset_prefix_cache"] = 400
        server.silent = set()
        with pytest.raises(ModelError, match="is not loaded"):
            await loading
        server.failing.clear()
        assert versions_of(await call) == [engine.version(GROUP)] == [0]

    with_version_0(small_base, tmp_path, case, without=GENERATE)


def test_an_answer_of_a_server_that_was_restarted_meanwhile_is_not_used(small_base: Path, tmp_path: Path) -> None:
    async def case(engine: VllmEngine, server: StandInServer) -> None:
        call = await held_open(engine, server)
        server.restarted()
        server.held.set()
        assert versions_of(await call) == [0]
        assert len(server.begun) == 2
        assert server.asked["reload_weights"] == 2

    with_version_0(small_base, tmp_path, case, without=GENERATE, health_interval_s=30.0)


def test_an_engine_ends_while_a_reload_waits_for_a_request_that_hangs(small_base: Path, tmp_path: Path) -> None:
    async def case(engine: VllmEngine, server: StandInServer) -> None:
        calls = [await held_open(engine, server)]
        loading = asyncio.create_task(engine.load(*full(small_base, tmp_path, 1)))
        calls.append(asyncio.create_task(engine.generate(request())))
        await asyncio.sleep(0.2)
        async with asyncio.timeout(SOON_S):
            await engine.close()
            ends = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(one) for one in ends] == [asyncio.CancelledError] * 2
            with pytest.raises(ModelError, match="no longer used"):
                await loading

    with_version_0(small_base, tmp_path, case, without=GENERATE)


def test_a_request_that_hangs_holds_a_reload_up_until_its_own_limit(small_base: Path, tmp_path: Path) -> None:
    async def case(engine: VllmEngine, server: StandInServer) -> None:
        call = await held_open(engine, server)
        async with asyncio.timeout(SOON_S):
            await engine.load(*full(small_base, tmp_path, 1))
            server.held.set()
            assert versions_of(await call) == [1]

    with_version_0(small_base, tmp_path, case, without=GENERATE, timeout_s=1.0)


def test_a_change_that_is_cancelled_while_it_waits_lets_further_calls_begin() -> None:
    async def main() -> None:
        gate = Gate()

        async def change() -> None:
            async with gate.closed():
                pytest.fail("a call is in progress")

        async def call() -> str:
            async with gate.within():
                return "made"

        async with gate.within():
            changing = asyncio.create_task(change())
            await asyncio.sleep(0)
            calls = [asyncio.create_task(call()) for _ in range(2)]
            await asyncio.sleep(0.01)
            assert not any(one.done() for one in calls)
            calls[0].cancel()
            changing.cancel()
            assert await calls[1] == "made"
        async with gate.closed():
            late = asyncio.create_task(call())
            await asyncio.sleep(0.01)
            assert not late.done()
        assert await late == "made"

    asyncio.run(main())
