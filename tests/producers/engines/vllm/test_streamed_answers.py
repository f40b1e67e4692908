"""Tokens that are handed on while a server samples, and what becomes of them when it fails in between."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollstream.schemas.errors import ModelError
from tests.producers.engines.vllm.server_rig import (
    GENERATE,
    StandInServer,
    engine_over,
    full,
    joined,
    lora,
    request,
    wait_until,
)

IDS = [5, 6, 7, 8]

pytestmark = pytest.mark.timeout(60)


def sampling(base: Path, ids: list[int] = IDS) -> StandInServer:
    server = StandInServer(base)
    server.sampled = ids
    return server


@pytest.mark.parametrize("weights", [lora, full])
def test_tokens_are_handed_on_before_the_end_and_the_newest_with_the_answer(
    small_base: Path, tmp_path: Path, weights: Any
) -> None:
    async def main() -> None:
        server = sampling(small_base)
        async with engine_over(tmp_path, server) as engine:
            await engine.load(*weights(small_base, tmp_path, 0))
            whole = await engine.generate(request())
            server.stops_after, given = 3, list[int]()
            server.held.clear()
            call = asyncio.create_task(engine.generate(request(on_tokens=given.extend)))
            await wait_until(lambda: given == IDS[:2])
            assert not call.done()
            server.held.set()
            assert await call == whole
            assert given == IDS[:3]

    asyncio.run(main())


def test_a_whole_answer_may_be_as_long_as_its_tokens_need(small_base: Path, tmp_path: Path) -> None:
    async def main() -> None:
        ids = [5] * 65_000
        async with engine_over(tmp_path, sampling(small_base, ids)) as engine:
            await engine.load(*lora(small_base, tmp_path, 0))
            assert len((await engine.generate(request(num_tokens=len(ids)))).token_ids) == len(ids)

    asyncio.run(main())


@pytest.mark.parametrize("fault", ["breaks_after", "fails_after"])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_stream_that_ends_early_is_made_again_and_no_token_is_handed_on_twice(
    small_base: Path, tmp_path: Path, fault: str, after: int
) -> None:
    async def main() -> None:
        servers = [sampling(small_base) for _ in range(2)]
        async with engine_over(tmp_path, *servers) as engine:
            await engine.load(*lora(small_base, tmp_path, 0))
            await joined(engine, *servers)
            given = list[int]()
            setattr(servers[0], fault, after)
            answer = await engine.generate(request(on_tokens=given.extend))
            assert getattr(servers[0], fault) is None
            assert servers[1].asked[GENERATE] == 1
            assert list(answer.token_ids) == IDS
            assert given == IDS[:3]

    asyncio.run(main())


@pytest.mark.parametrize("others", [[5, 9, 7, 8], [5, 6]], ids=str)
@pytest.mark.parametrize("streams", [True, False])
def test_an_answer_of_another_server_that_begins_differently_is_an_error_once_tokens_were_handed_on(
    small_base: Path, tmp_path: Path, others: list[int], *, streams: bool
) -> None:
    async def main() -> None:
        first, second = sampling(small_base), sampling(small_base, others)
        second.streams = streams
        async with engine_over(tmp_path, first, second) as engine:
            await engine.load(*lora(small_base, tmp_path, 0))
            await joined(engine, first, second)
            first.breaks_after, given = 3, list[int]()
            with pytest.raises(ModelError, match=r"2 tokens of its answer were handed on.*differs at token 1"):
                await engine.generate(request(on_tokens=given.extend))
            assert given == IDS[:2]
            first.breaks_after = 1
            await joined(engine, first, second)
            answer = await engine.generate(request(on_tokens=given.extend))
            assert list(answer.token_ids) == others, "nothing was handed on of it before"

    asyncio.run(main())


def test_a_server_that_has_only_whole_answers_is_not_asked_for_a_stream(small_base: Path, tmp_path: Path) -> None:
    async def main() -> None:
        server = sampling(small_base)
        server.streams, given = False, list[int]()
        async with engine_over(tmp_path, server) as engine:
            await engine.load(*lora(small_base, tmp_path, 0))
            assert list((await engine.generate(request(on_tokens=given.extend))).token_ids) == IDS
            assert given == []

    asyncio.run(main())


def test_a_caller_that_goes_ends_the_stream(small_base: Path, tmp_path: Path) -> None:
    async def main() -> None:
        server = sampling(small_base)
        async with engine_over(tmp_path, server) as engine:
            await engine.load(*lora(small_base, tmp_path, 0))
            server.stops_after, given = 2, list[int]()
            server.held.clear()
            call = asyncio.create_task(engine.generate(request(on_tokens=given.extend)))
            await wait_until(lambda: given)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            server.held.set()
            assert engine.states()[server.url] == "ready"
            assert list((await engine.generate(request())).token_ids) == IDS

    asyncio.run(main())
