"""Real vLLM servers that are killed, lose files and get other weights: no request is lost or answered by these."""

import asyncio
import multiprocessing
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollstream.eventlog.broker import guard
from rollstream.eventlog.http.http_json import HttpServer
from rollstream.producers.engines.base import Generation
from rollstream.producers.engines.vllm import VllmEngine
from rollstream.schemas.engine_settings import VllmSettings
from rollstream.schemas.errors import ModelError
from tests.producers.engines.vllm.server_rig import wait_until
from tests.producers.engines.vllm.servers_rig import LONG, check, is_same, is_sampling, request
from tests.rigs.services.vllm_server import (
    ENVIRONMENT,
    MAX_LORAS,
    START_S,
    WHOLE_PROMPTS,
    VllmServer,
    full_version,
    lora_version,
    started_settings,
    tiny_base,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_base(tmp_path_factory.mktemp("base"))


@asynccontextmanager
async def engine_of_its_own(folder: Path) -> AsyncIterator[VllmEngine]:
    """It starts its server with the first version."""
    os.environ.update(ENVIRONMENT)
    settings = started_settings(
        arguments=WHOLE_PROMPTS,
        folder=folder / "vllm",
        start_timeout_s=START_S,
        health_interval_s=0.5,
    )
    engine = VllmEngine(settings)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


def server_of(engine: VllmEngine) -> psutil.Process:
    """The process of the engine's own server."""
    (url,) = engine.states()
    port = f"--port={url.rpartition(':')[2]}"
    (found,) = [
        process
        for process in psutil.Process().children(recursive=True)
        if port in process.cmdline() and guard.__file__ not in process.cmdline()
    ]
    return found


def killing_in_reload(monkeypatch: pytest.MonkeyPatch, killed: Callable[[], None]) -> None:
    """The first reload of weights is sent, and the server killed before it answers."""
    sent, tried = HttpServer.sent, list[str]()

    async def sent_and_killed(self: HttpServer, method: str, path: str, body: Any = None, **more: Any) -> Any:
        if (body or {}).get("method") != "reload_weights" or tried:
            return await sent(self, method, path, body, **more)
        tried.append(path)
        answer = asyncio.create_task(sent(self, method, path, body, **more))
        await asyncio.sleep(0)
        killed()
        return await answer

    monkeypatch.setattr(HttpServer, "sent", sent_and_killed)


def test_a_server_killed_while_it_samples_returns_with_the_logs_version_and_no_request_is_lost(
    base: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        async with engine_of_its_own(tmp_path) as engine:
            await engine.load(*lora_version(base, tmp_path, 0))
            await engine.load(*lora_version(base, tmp_path, 1))
            before = await engine.generate(request())
            check([before], {1})
            calls = [asyncio.create_task(engine.generate(request(seed, LONG))) for seed in range(8)]
            (url,) = engine.states()
            while not await is_sampling(url):
                assert not all(call.done() for call in calls)
            first = server_of(engine)
            workers = first.children(recursive=True)
            assert workers
            first.send_signal(signal.SIGKILL)
            check(await asyncio.gather(*calls), {1})
            assert server_of(engine).pid != first.pid
            assert not [one for one in workers if one.is_running()], "they keep the memory that the next one needs"
            assert is_same(await engine.generate(request()), before), "not the base model's answer"

            (folder,) = (tmp_path / "vllm").glob("*-v1-*")
            shutil.rmtree(folder)
            (tmp_path / "lora-1.safetensors").unlink()
            server_of(engine).send_signal(signal.SIGKILL)
            await wait_until(lambda: "did not load" in "".join(engine.states().values()))
            waiting = asyncio.create_task(engine.generate(request()))
            await engine.load(*lora_version(base, tmp_path, 2))
            check([await waiting], {2})
            assert list(engine.states().values()) == ["ready"]

    asyncio.run(main())


def test_a_server_killed_in_a_reload_or_given_other_weights_answers_with_none_but_the_logs(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with engine_of_its_own(tmp_path) as engine:
            await engine.load(*full_version(base, tmp_path, 0))
            calls = [asyncio.create_task(engine.generate(request(seed, LONG))) for seed in range(8)]
            first = server_of(engine)
            with monkeypatch.context() as patched:
                killing_in_reload(patched, first.kill)
                await engine.load(*full_version(base, tmp_path, 1))
            check(await asyncio.gather(*calls), {0, 1})
            assert server_of(engine).pid != first.pid
            answer = await engine.generate(request())
            check([answer], {1})

            (url,) = engine.states()
            http = HttpServer(url, timeout_s=60, key="", key_variable=None)
            await http.sent(
                "POST", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(base)}}
            )
            await http.sent("POST", "/reset_prefix_cache?reset_running_requests=true")
            await http.sent("POST", "/update_weight_version", {"new_version": "default"})
            await http.close()
            again = await engine.generate(request())
            check([again], {1})
            assert is_same(again, answer), "not those of the weights that it had in between"
            long = [asyncio.create_task(engine.generate(request(seed, LONG))) for seed in range(4)]
            while not await is_sampling(url):
                assert not all(call.done() for call in long)
            await engine.load(*full_version(base, tmp_path, 2))
            check(await asyncio.gather(*long), {1, 2})

    asyncio.run(main())


def killed_in_reload(url: str, base: Path, folder: Path) -> None:
    """A process whose second version kills it after the server was paused and had begun to read the file."""
    sent = HttpServer.sent

    async def sent_and_killed(self: HttpServer, method: str, path: str, body: Any = None, **more: Any) -> Any:
        paths = (body or {}).get("kwargs", {}).get("weights_path", "")
        if "-v1-" in paths:
            asyncio.get_running_loop().call_later(0.001, os.kill, os.getpid(), signal.SIGKILL)
        return await sent(self, method, path, body, **more)

    HttpServer.sent = sent_and_killed

    async def main() -> None:
        engine = VllmEngine(joining(url, folder))
        await engine.start()
        await engine.load(*full_version(base, folder, 0))
        calls = [asyncio.create_task(engine.generate(request(seed, LONG))) for seed in range(4)]
        while not await is_sampling(url):
            assert not all(call.done() for call in calls)
        await engine.load(*full_version(base, folder, 1))

    asyncio.run(main())


def joining(url: str, folder: Path, **changes: Any) -> VllmSettings:
    return started_settings(
        **changes,
        executable="vllm",
        arguments=(),
        base_urls=(url,),
        folder=folder / "vllm",
        start_timeout_s=60,
        health_timeout_s=10,
    )


def test_a_server_whose_producers_were_killed_in_a_reload_serves_the_next_ones(
    vllm_server: VllmServer, tmp_path: Path
) -> None:
    vllm_server.restore()
    context = multiprocessing.get_context("spawn")
    killed = context.Process(target=killed_in_reload, args=(vllm_server.url, vllm_server.base, tmp_path))
    killed.start()
    killed.join(200)
    assert killed.exitcode == -signal.SIGKILL
    assert vllm_server.ask("/is_paused", method="GET")["is_paused"]

    async def main() -> None:
        engine = VllmEngine(joining(vllm_server.url, tmp_path))
        await engine.start()
        try:
            await engine.load(*full_version(vllm_server.base, tmp_path, 1))
            assert not vllm_server.ask("/is_paused", method="GET")["is_paused"]
            check([await engine.generate(request())], {1})
        finally:
            await engine.close()

    try:
        asyncio.run(main())
    finally:
        vllm_server.ask("/resume")


def test_sums_of_the_weights_differ_by_version_and_are_equal_after_a_reload(
    vllm_server: VllmServer, tmp_path: Path
) -> None:
    vllm_server.restore()

    async def main() -> None:
        engine, found = VllmEngine(joining(vllm_server.url, tmp_path, check_weights=True)), list[Any]()
        try:
            await engine.start()
            for version in (0, 1, 0):
                await engine.load(*full_version(vllm_server.base, tmp_path, version))
                check([await engine.generate(request())], {version})
                found.append(vllm_server.ask("/weight_checker", {"action": "checksum"})["checksums"])
        finally:
            await engine.close()
        assert found[0] == found[2]
        assert found[0].keys() == found[1].keys()
        assert found[0] != found[1]

    asyncio.run(main())


def test_two_processes_share_a_server_with_adapters(vllm_server: VllmServer, tmp_path: Path) -> None:
    vllm_server.restore()

    async def main() -> None:
        first, second = (VllmEngine(joining(vllm_server.url, tmp_path)) for _ in range(2))
        try:
            for engine in (first, second):
                await engine.start()
                for version in (0, 1):
                    await engine.load(*lora_version(vllm_server.base, tmp_path, version))
            one, other = await asyncio.gather(first.generate(request()), second.generate(request()))
            check([one, other], {1})
            assert is_same(one, other)
            await second.close()
            assert is_same(await first.generate(request()), one)
            assert list(first.states().values()) == ["ready"]
        finally:
            await first.close()
            await second.close()

    asyncio.run(main())


def test_kept_ids_are_the_same_by_either_way_to_ask(
    vllm_server: VllmServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answers(folder: Path) -> list[Generation]:
        settings = started_settings(executable="vllm", arguments=(), base_urls=(vllm_server.url,), folder=folder)
        engine = VllmEngine(settings)
        try:
            await engine.start()
            await engine.load(*lora_version(vllm_server.base, tmp_path, 0))
            how = {"top_k": 12, "top_p": 0.9, "record_kept_ids": True}
            return await asyncio.gather(*(engine.generate(request(seed, **how)) for seed in range(4)))
        finally:
            await engine.close()

    vllm_server.restore()
    generated = asyncio.run(answers(tmp_path / "generate"))
    monkeypatch.setattr("rollstream.producers.engines.vllm.vllm_server.GENERATE", "/not/offered")
    completed = asyncio.run(answers(tmp_path / "completions"))
    for one, other in zip(generated, completed, strict=True):
        assert one.token_ids == other.token_ids
        assert one.kept is not None
        assert other.kept is not None
        assert (list(one.kept.lengths), list(one.kept.ids)) == (list(other.kept.lengths), list(other.kept.ids))
        assert 1 <= max(one.kept.lengths) <= 12


def test_a_running_server_with_fewer_adapters_than_the_engine_keeps_is_refused(
    vllm_server: VllmServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def load(max_loras: int) -> None:
        engine = VllmEngine(
            started_settings(
                executable="vllm",
                arguments=(),
                base_urls=(vllm_server.url,),
                folder=tmp_path / str(max_loras),
                max_loras=max_loras,
                health_timeout_s=60,
            )
        )
        try:
            await engine.start()
            await engine.load(*lora_version(vllm_server.base, tmp_path, 0))
        finally:
            await engine.close()

    vllm_server.restore()
    asyncio.run(load(MAX_LORAS))
    assert "does not report how it was started" not in caplog.text
    with pytest.raises(ModelError, match=f"has --max-loras {MAX_LORAS} and would drop adapters in use"):
        asyncio.run(load(MAX_LORAS + 1))
