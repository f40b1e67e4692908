"""`check_weights`: what servers have under a label is compared, parameter by parameter."""

import asyncio
from pathlib import Path

import pytest

from rollstream.schemas.errors import ModelError
from tests.producers.engines.vllm.server_rig import (
    StandInServer,
    engine_over,
    full,
    joined,
    request,
    versions_of,
    wait_until,
)

pytestmark = pytest.mark.timeout(60)


def test_a_server_that_returns_with_the_label_but_other_weights_is_given_the_version_again(
    small_base: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        server = StandInServer(small_base)
        server.loads = 7
        async with engine_over(tmp_path, server, check_weights=True) as engine:
            await engine.load(*full(small_base, tmp_path, 0))
            for weights, loads in ((7, 1), (8, 2)):
                await server.stop()
                await wait_until(lambda: engine.states()[server.url].startswith("down"))
                server.weights = weights
                await server.start(int(server.url.rpartition(":")[2]))
                await joined(engine, server)
                assert server.asked["reload_weights"] == loads
                assert server.weights == 7
            assert set(versions_of(await engine.generate(request()))) == {0}

    asyncio.run(main())


def test_a_server_that_loads_a_version_differently_serves_nothing(small_base: Path, tmp_path: Path) -> None:
    async def main() -> None:
        first, second = StandInServer(small_base), StandInServer(small_base)
        async with engine_over(tmp_path, first, second, check_weights=True) as engine:
            await engine.load(*full(small_base, tmp_path, 0))
            await joined(engine, first, second)
            second.loads = 1
            await engine.load(*full(small_base, tmp_path, 1))
            # one server that has proven the version is enough for `load`
            await wait_until(lambda: "has other weights than another server" in "".join(engine.states().values()))
            states = list(engine.states().values())
            assert states.count("ready") == 1
            assert "such as tp0:norm" in "".join(states)

    asyncio.run(main())


def test_weights_are_compared_only_if_asked_for_and_of_a_server_that_can(small_base: Path, tmp_path: Path) -> None:
    async def main() -> None:
        server = StandInServer(small_base)
        server.without = {"/weight_checker"}
        async with engine_over(tmp_path, server) as engine:
            await engine.load(*full(small_base, tmp_path, 0))
        assert not server.asked["/weight_checker"]
        async with engine_over(tmp_path / "checked", server, check_weights=True) as engine:
            with pytest.raises(ModelError, match="does not offer /weight_checker; leave engine"):
                await engine.load(*full(small_base, tmp_path, 0))

    asyncio.run(main())
