"""Adapters of several model groups and processes on one server: who has a slot, and when it is given back."""

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest

from rollstream.producers.engines.vllm import VllmEngine
from rollstream.producers.engines.vllm.version_files import Client
from rollstream.schemas.errors import ModelError
from tests.producers.engines.vllm.server_rig import (
    CHECK,
    GROUP,
    StandInServer,
    engine_over,
    held_open,
    joined,
    lora,
    new_engine,
    request,
    versions_of,
    wait_until,
)

OTHER = "run-1/other"
LOAD = "/v1/load_lora_adapter"

pytestmark = pytest.mark.timeout(60)


def loaded(server: StandInServer) -> list[str]:
    """Adapters by model group and version."""
    return sorted("-".join(name.split("-")[2:4]) for name in server.adapters)


def coming(engine: VllmEngine) -> bool:
    """Whether a version is being given to its servers."""
    return any(pool._wanted.coming is not None for pool in engine._pools.values())


def test_a_group_that_holds_all_slots_gives_one_to_another_group_as_soon_as_a_request_ends(
    small_base: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        server = StandInServer(small_base)
        async with engine_over(tmp_path, server, max_loras=4) as engine:
            calls = list[asyncio.Task[Any]]()
            for version in range(4):
                await engine.load(*lora(small_base, tmp_path, version))
                calls.append(await held_open(engine, server))
            assert loaded(server) == ["policy-v0", "policy-v1", "policy-v2", "policy-v3"]
            loading = asyncio.create_task(engine.load(*lora(small_base, tmp_path, 0, group=OTHER)))
            checks = server.asked[CHECK]
            await wait_until(lambda: server.asked[CHECK] > checks + 2)
            assert not loading.done(), "a name that a request uses was unloaded"
            assert engine.states()[server.url] == "ready"
            calls[1].cancel()
            await loading
            assert loaded(server) == ["other-v0", "policy-v0", "policy-v2", "policy-v3"]
            server.held.set()
            await asyncio.gather(*(call for call in calls if call is not calls[1]))
            await wait_until(lambda: loaded(server) == ["other-v0", "policy-v3"])
            assert versions_of(await engine.generate(request(group=OTHER))) == [0]
            await engine.load(*lora(small_base, tmp_path, 1, group=OTHER))
            await wait_until(lambda: loaded(server) == ["other-v1", "policy-v3"])

    asyncio.run(main())


def test_a_version_waits_only_for_requests_of_versions_that_others_have_followed(
    small_base: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        server = StandInServer(small_base)
        async with engine_over(tmp_path, server, max_loras=3) as engine:
            await engine.load(*lora(small_base, tmp_path, 0))
            old = await held_open(engine, server)
            await engine.load(*lora(small_base, tmp_path, 1))
            await engine.load(*lora(small_base, tmp_path, 0, group=OTHER))
            new = [await held_open(engine, server, OTHER)]
            loading = asyncio.create_task(engine.load(*lora(small_base, tmp_path, 1, group=OTHER)))
            for _ in range(3):
                new.append(await held_open(engine, server, OTHER))
            assert not loading.done()
            old.cancel()
            await loading
            assert loaded(server) == ["other-v0", "other-v1", "policy-v1"]
            server.held.set()
            assert [versions_of(one) for one in await asyncio.gather(*new)] == [[0]] * 4
            await wait_until(lambda: loaded(server) == ["other-v1", "policy-v1"])

    asyncio.run(main())


def test_the_newest_versions_are_never_unloaded_and_too_few_slots_are_an_error(
    small_base: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        server = StandInServer(small_base)
        async with engine_over(tmp_path, server, max_loras=2) as engine:
            await engine.load(*lora(small_base, tmp_path, 0))
            await engine.load(*lora(small_base, tmp_path, 0, group=OTHER))
            with pytest.raises(ModelError, match="max_loras is 2, and the newest versions of run-1/other, run-1/pol"):
                await engine.load(*lora(small_base, tmp_path, 1))
            assert loaded(server) == ["other-v0", "policy-v0"]
            assert engine.states()[server.url] == "ready"
            assert versions_of(await engine.generate(request())) == [0]
            await engine.unload(OTHER)
            await engine.load(*lora(small_base, tmp_path, 1))
            assert versions_of(await engine.generate(request())) == [1]

    asyncio.run(main())


def test_two_groups_that_wait_for_room_on_two_servers_do_not_wait_for_each_other(
    small_base: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        servers = StandInServer(small_base), StandInServer(small_base)
        async with engine_over(tmp_path, *servers, max_loras=3) as engine:
            for group in (GROUP, OTHER):
                await engine.load(*lora(small_base, tmp_path, 0, group=group))
            await joined(engine, *servers)
            for version in range(1, 6):
                loads = [engine.load(*lora(small_base, tmp_path, version, group=group)) for group in (GROUP, OTHER)]
                await asyncio.gather(*loads)
            await wait_until(lambda: all(loaded(one) == ["other-v5", "policy-v5"] for one in servers))

    asyncio.run(main())


def test_an_unloaded_groups_adapter_goes_with_its_last_request(small_base: Path, tmp_path: Path) -> None:
    async def main() -> None:
        server = StandInServer(small_base)
        async with engine_over(tmp_path, server) as engine:
            await engine.load(*lora(small_base, tmp_path, 0))
            await engine.load(*lora(small_base, tmp_path, 0, group=OTHER))
            call = await held_open(engine, server, OTHER)
            await engine.unload(OTHER)
            with pytest.raises(ModelError, match="has no weights"):
                await engine.generate(request(group=OTHER))
            assert loaded(server) == ["other-v0", "policy-v0"]
            server.held.set()
            assert versions_of(await call) == [0]
            await wait_until(lambda: loaded(server) == ["policy-v0"])

    asyncio.run(main())


def test_state_of_unloaded_groups_and_their_base_models_is_dropped(small_base: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with engine_over(tmp_path, StandInServer(small_base)) as engine:
            for number in range(3):
                await engine.load(*lora(small_base, tmp_path, 0, group=f"run-{number}/policy"))
                await engine.unload(f"run-{number}/policy")
            gc.collect()
            assert len(engine._locks) == 0
            assert len(engine._bases) <= 1, "that of the version whose files are kept"

    asyncio.run(main())


def test_a_load_that_is_cancelled_and_asked_for_again_at_once_ends_with_the_first_ones_answer(
    small_base: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        server = StandInServer(small_base)
        async with engine_over(tmp_path, server) as engine, asyncio.timeout(10):
            await engine.load(*lora(small_base, tmp_path, 0))
            server.silent.add(LOAD)
            first = asyncio.create_task(engine.load(*lora(small_base, tmp_path, 0, group=OTHER)))
            await wait_until(lambda: server.asked[LOAD] == 2)
            first.cancel()
            await asyncio.wait({first})
            await engine.unload(OTHER)  # as the one that cancelled does
            again = asyncio.create_task(engine.load(*lora(small_base, tmp_path, 0, group=OTHER)))
            await wait_until(lambda: coming(engine))
            server.silent.clear()
            await again
            await engine.load(*lora(small_base, tmp_path, 1))
            assert versions_of(await engine.generate(request(group=OTHER))) == [0]
            await wait_until(lambda: loaded(server) == ["other-v0", "policy-v1"])

    asyncio.run(main())


def test_a_load_again_of_a_cancelled_one_fails_as_that_does(small_base: Path, tmp_path: Path) -> None:
    async def main() -> None:
        server = StandInServer(small_base)
        async with engine_over(tmp_path, server) as engine, asyncio.timeout(10):
            await engine.load(*lora(small_base, tmp_path, 0))
            server.silent.add(LOAD)
            first = asyncio.create_task(engine.load(*lora(small_base, tmp_path, 1)))
            await wait_until(lambda: server.asked[LOAD] == 2)
            first.cancel()
            await asyncio.wait({first})
            again = asyncio.create_task(engine.load(*lora(small_base, tmp_path, 1)))
            await wait_until(lambda: coming(engine))
            server.refused = "policy-v1"
            server.silent.clear()
            with pytest.raises(ModelError, match=r"policy-v1-.* is not loaded"):
                await again
            assert versions_of(await engine.generate(request())) == [0]

    asyncio.run(main())


def test_a_group_that_is_unloaded_and_loaded_again_while_a_request_is_open_serves_at_once(
    small_base: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        server = StandInServer(small_base)
        async with engine_over(tmp_path, server) as engine, asyncio.timeout(10):
            await engine.load(*lora(small_base, tmp_path, 0))
            await engine.load(*lora(small_base, tmp_path, 0, group=OTHER))
            call = await held_open(engine, server, OTHER)
            await engine.unload(OTHER)
            await engine.load(*lora(small_base, tmp_path, 0, group=OTHER))
            await engine.load(*lora(small_base, tmp_path, 0, group=OTHER))
            assert server.asked[LOAD] == 2, "it was there"
            server.held.set()
            assert versions_of(await call) == [0]
            assert versions_of(await engine.generate(request(group=OTHER))) == [0]
            await engine.unload(OTHER)
            await wait_until(lambda: loaded(server) == ["policy-v0"])

    asyncio.run(main())


def test_a_load_that_is_cancelled_as_soon_as_a_server_has_it_keeps_no_slot(small_base: Path, tmp_path: Path) -> None:
    async def main() -> None:
        server = StandInServer(small_base)
        async with engine_over(tmp_path, server, max_loras=2) as engine, asyncio.timeout(10):
            await engine.load(*lora(small_base, tmp_path, 0))
            loading = asyncio.create_task(engine.load(*lora(small_base, tmp_path, 0, group=OTHER)))
            (pool,) = engine._pools.values()
            while OTHER not in pool._wanted.by_group:
                await asyncio.sleep(0)
            loading.cancel()
            await asyncio.wait({loading})
            assert loading.cancelled()
            await engine.unload(OTHER)
            await wait_until(lambda: loaded(server) == ["policy-v0"])
            await engine.load(*lora(small_base, tmp_path, 1))
            assert versions_of(await engine.generate(request())) == [1]

    asyncio.run(main())


@pytest.mark.parametrize("folders", [("one", "other"), ("common", "common")])
def test_two_processes_share_a_server_and_one_ends_without_the_other_noticing(
    small_base: Path, tmp_path: Path, folders: tuple[str, str]
) -> None:
    async def main() -> None:
        server = StandInServer(small_base)
        async with engine_over(tmp_path / folders[0], server) as first:
            second = new_engine(tmp_path / folders[1] / "vllm", server)
            await second.start()
            for engine in (first, second):
                await engine.load(*lora(small_base, tmp_path, 0))
                await engine.load(*lora(small_base, tmp_path, 1))
            await wait_until(lambda: loaded(server) == ["policy-v1", "policy-v1"])
            for engine in (first, second):
                assert versions_of(await engine.generate(request())) == [1]
            await second.close()
            ((_, folder),) = server.adapters.items()
            assert any(Path(folder).glob("*.safetensors"))
            assert first.states()[server.url] == "ready"
            assert versions_of(await first.generate(request())) == [1]

    asyncio.run(main())


def test_a_process_that_was_killed_leaves_no_adapters_or_files_to_the_next_one(
    small_base: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        server = StandInServer(small_base)
        folder = tmp_path / "vllm"
        before, beside = Client(folder), Client(folder)
        names = [f"run-1-policy-v{version}-00000000-{before.id}" for version in range(4)]
        others = f"run-1-policy-v3-00000000-{beside.id}"
        for name in (*names, others):
            (folder / name).mkdir()
            server.adapters[name] = str(folder / name)
        for name in (names[3], others):
            (folder / f"{name}.0a1b2c3d.aside").mkdir()  # what a process is killed in the middle of
        before.close()
        async with engine_over(tmp_path, server) as engine:
            await engine.load(*lora(small_base, tmp_path, 4))
            await wait_until(lambda: loaded(server) == ["policy-v3", "policy-v4"])
            assert others in server.adapters
            assert sorted(one.name.split("-")[3] for one in folder.glob("run-*")) == ["v3", "v3", "v4"]
            assert [one.name for one in folder.glob("*.aside")] == [f"{others}.0a1b2c3d.aside"]
            assert versions_of(await engine.generate(request())) == [4]
        beside.close()

    asyncio.run(main())
