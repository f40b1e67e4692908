"""Two real vLLM servers, started as docker-compose.yml says, behind one engine: one is killed while both sample."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollstream.producers.engines.base import Generation
from rollstream.producers.engines.vllm import VllmEngine
from rollstream.schemas.engine_settings import VllmSettings
from tests.producers.engines.vllm.server_rig import wait_until
from tests.producers.engines.vllm.servers_rig import LONG, check, is_same, is_sampling, request
from tests.rigs.services.vllm_server import START_S, ComposedServer, lora_version, tiny_base

ROOT = Path(__file__).resolve().parents[4]
SERVICES: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
SETTINGS: dict[str, Any] = json.loads((ROOT / SERVICES["gateway"]["command"][-1]).read_text())["engine"]

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@asynccontextmanager
async def composed(base: Path, folder: Path) -> AsyncIterator[tuple[VllmEngine, ComposedServer, ComposedServer]]:
    """The engine with the settings of `gateway`, but for its addresses and folders, and both its servers."""
    first, second = (ComposedServer(SERVICES[name], base, folder) for name in ("vllm-1", "vllm-2"))
    changes = {
        "base_urls": (first.url, second.url),
        "folder": folder / "vllm",
        "start_timeout_s": 2 * START_S,
        "health_interval_s": 0.5,
    }
    engine = VllmEngine(VllmSettings(**(SETTINGS | changes)))
    try:
        first.start()
        second.start()
        await engine.start()
        yield engine, first, second
    finally:
        await engine.close()
        for server in (first, second):
            server.stop()


def test_requests_of_a_killed_server_end_on_the_other_and_it_returns_with_the_newest_version(
    tmp_path: Path,
) -> None:
    base = tiny_base(tmp_path)

    async def case(engine: VllmEngine, first: ComposedServer, second: ComposedServer) -> None:
        async def many() -> list[asyncio.Task[Generation]]:
            calls = [asyncio.create_task(engine.generate(request(seed, LONG))) for seed in range(16)]
            while not (await is_sampling(first.url) and await is_sampling(second.url)):
                assert not all(call.done() for call in calls)
            return calls

        def are(one: str, other: str) -> bool:
            states = engine.states()
            return states[first.url].startswith(one) and states[second.url].startswith(other)

        await engine.load(*lora_version(base, tmp_path, 0))
        await wait_until(lambda: are("ready", "ready"))
        assert first.is_healthy(), first.last_words()
        before = await asyncio.gather(*await many())
        check(before, {0})

        calls = await many()
        first.kill()
        after = await asyncio.gather(*calls)
        check(after, {0})
        assert all(map(is_same, before, after)), "what another server made of it is not what the killed one had"
        assert are("down", "ready")
        assert not first.is_healthy()

        await engine.load(*lora_version(base, tmp_path, 1))
        newest = await engine.generate(request())
        check([newest], {1})
        (made,) = (tmp_path / "vllm").glob("*-v1-*")
        shutil.rmtree(made)
        assert is_same(await engine.generate(request()), newest), "a server no longer needs the files that it has read"
        first.start()
        while not are("ready", "ready"):
            assert is_same(await engine.generate(request()), newest), "a server without the version has answered"
            await asyncio.sleep(0.5)
        assert any(made.glob("*.safetensors")), "it was given files that are not there"

        calls = await many()
        second.kill()
        check(await asyncio.gather(*calls), {1})
        assert are("ready", "down")
        assert is_same(await engine.generate(request()), newest), "it returned with other weights"

    async def main() -> None:
        async with composed(base, tmp_path) as (engine, first, second):
            try:
                await case(engine, first, second)
            except BaseException:
                print(engine.states(), first.last_words(), second.last_words(), sep="\n")
                raise

    asyncio.run(main())
