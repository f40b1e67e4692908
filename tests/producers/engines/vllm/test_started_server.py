"""A vLLM server that an engine starts: its environment, its arguments, and the restart of one that hangs."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollstream.producers.engines.vllm import VllmEngine
from rollstream.producers.engines.vllm.child import check_settings, environment
from rollstream.schemas.engine_settings import VllmSettings
from rollstream.schemas.errors import ConfigError
from tests.producers.engines.vllm.server_rig import (
    ALL,
    CHECK,
    GENERATE,
    StandInServer,
    full,
    lora,
    request,
    versions_of,
    wait_until,
)

FORWARDER = """#!{python} -IS
import asyncio, sys

async def copy(reader, writer):
    try:
        while part := await reader.read(65536):
            writer.write(part)
            await writer.drain()
    finally:
        writer.close()

async def serve(reader, writer):
    there_reader, there_writer = await asyncio.open_connection("127.0.0.1", to)
    await asyncio.gather(copy(reader, there_writer), copy(there_reader, writer), return_exceptions=True)

async def main(port):
    async with await asyncio.start_server(serve, "127.0.0.1", port) as server:
        await server.serve_forever()

with open({started!r}, "a+") as started:
    started.write(".")
    to = {ports}[started.tell() - 1]
asyncio.run(main(next(int(one.partition("=")[2]) for one in sys.argv if one.startswith("--port="))))
"""
"""Executable of a server: its first process passes what it is asked on to the first port, and so on."""

pytestmark = pytest.mark.timeout(60)


@asynccontextmanager
async def started_engine(tmp_path: Path, *servers: StandInServer, **settings: Any) -> AsyncIterator[VllmEngine]:
    """An engine that starts a server: each of its processes answers as the next of the stand-ins."""
    for server in servers:
        await server.start()
    executable = tmp_path / "vllm-command"
    ports = [int(server.url.rpartition(":")[2]) for server in servers]
    executable.write_text(FORWARDER.format(python=sys.executable, started=str(tmp_path / "started"), ports=ports))
    executable.chmod(0o700)
    chosen: dict[str, Any] = {"health_interval_s": 30.0, "health_timeout_s": 1.0, "start_timeout_s": 20.0} | settings
    engine = VllmEngine(VllmSettings(executable=str(executable), folder=tmp_path / "vllm", **chosen), os.environ)
    try:
        await engine.start()
        yield engine
    finally:
        for server in servers:
            server.held.set()
            server.silent.clear()
        await engine.close()
        for server in servers:
            await server.stop()


def test_a_server_that_hangs_after_a_load_did_not_end_is_started_again(small_base: Path, tmp_path: Path) -> None:
    async def main() -> None:
        first, second = StandInServer(small_base), StandInServer(small_base)
        async with started_engine(tmp_path, first, second, load_timeout_s=1.0) as engine:
            await engine.load(*lora(small_base, tmp_path, 0))
            first.silent = {"/v1/load_lora_adapter"}
            load = asyncio.create_task(engine.load(*lora(small_base, tmp_path, 1)))
            await wait_until(lambda: first.asked["/v1/load_lora_adapter"] > 1)
            await asyncio.sleep(0.6)
            first.silent |= {"/is_paused", CHECK, GENERATE, "/v1/completions"}
            await load
            assert any("-v1-" in name for name in second.adapters)
            assert versions_of(await engine.generate(request())) == [1]

    asyncio.run(main())


def test_a_server_that_hangs_is_started_again_though_its_requests_fail_before_its_check_ends(
    small_base: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        first, second = StandInServer(small_base), StandInServer(small_base)
        async with started_engine(tmp_path, first, second, timeout_s=0.5, health_timeout_s=3.0) as engine:
            await engine.load(*lora(small_base, tmp_path, 0))
            first.silent = {ALL}
            answers = await asyncio.gather(*(engine.generate(request()) for _ in range(3)))
            assert [versions_of(one) for one in answers] == [[0]] * 3
            assert second.asked[GENERATE] == 3

    asyncio.run(main())


def test_a_server_that_does_not_serve_in_time_after_its_start_is_started_again(
    small_base: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        first, second, third = (StandInServer(small_base) for _ in range(3))
        second.silent = {ALL}
        async with started_engine(tmp_path, first, second, third, start_timeout_s=3.0) as engine:
            await engine.load(*lora(small_base, tmp_path, 0))
            (pool,) = engine._pools.values()
            (member,) = pool._members
            assert member.child is not None
            assert member.child.pid is not None
            os.kill(member.child.pid, signal.SIGKILL)
            await wait_until(lambda: second.asked["/openapi.json"])
            await wait_until(lambda: third.asked["/v1/load_lora_adapter"])
            assert versions_of(await engine.generate(request())) == [0]

    asyncio.run(main())


def test_each_started_server_has_a_log_of_its_own_also_after_another_was_stopped(
    small_base: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        async with started_engine(tmp_path, *(StandInServer(small_base) for _ in range(3))) as engine:
            published, path = full(small_base, tmp_path, 0)
            for group in ("run-1/a", "run-1/b", "run-1/c"):
                await engine.load(published.model_copy(update={"model_group": group}), path)
                if group == "run-1/b":
                    await engine.unload("run-1/a")
            logs = sorted(one.name for one in (tmp_path / "vllm" / "logs").iterdir())
            assert logs == ["server-1.log", "server-2.log", "server-3.log"]

    asyncio.run(main())


def test_a_server_gets_no_secrets_of_this_process() -> None:
    given: dict[str, Any] = dict.fromkeys(
        [
            *("PATH", "HOME", "LANG", "LC_CTYPE", "LD_LIBRARY_PATH", "LD_PRELOAD", "https_proxy", "SSL_CERT_FILE"),
            *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "NCCL_DEBUG", "VLLM_CPU_KVCACHE_SPACE", "HF_TOKEN"),
            *("HF_HOME", "TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR", "PYTORCH_CUDA_ALLOC_CONF", "OMP_NUM_THREADS"),
        ],
        "kept",
    )
    secrets = dict.fromkeys(
        [
            *(
                "KAFKA_PASSWORD",
                "ROLLSTREAM_ENDPOINT_TOKEN",
                "WANDB_API_KEY",
                "MLFLOW_TRACKING_PASSWORD",
                "OPENAI_API_KEY",
            ),
            *("AWS_SECRET_ACCESS_KEY", "VLLM_API_KEY", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "MYPATH"),
        ],
        "hidden",
    )
    found = environment({**given, **secrets}, is_lora=True)
    own = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    assert found == given | own
    assert environment({}, is_lora=False).keys() == own.keys() - {"VLLM_ALLOW_RUNTIME_LORA_UPDATING"}


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--data-parallel-size=2", "not for a server that is started here"),
        ("--data_parallel_size=2", "not for a server that is started here"),
        ("--data-parallel-si", "not for a server that is started here"),
        ("-dp2", "not for a server that is started here"),
        ("-dpl", "not for a server that is started here"),
        ("--api_server_count=2", "not for a server that is started here"),
        ("-asc", "not for a server that is started here"),
        ("--ho=0.0.0.0", "not for a server that is started here"),
        ("--api_key=x", "not for a server that is started here"),
        ("--config=server.yaml", "not for a server that is started here"),
        ("--served_model_name=other", "not for a server that is started here"),
        ("--max-loras=1", "from engine.max_loras; leave it out"),
        ("--max_lora_rank", "from engine.max_lora_rank; leave it out"),
        ("--dty=half", "from engine.dtype; leave it out"),
        ("--logprobs_mode=raw_logprobs", "from what the learner needs; leave it out"),
    ],
)
def test_an_argument_that_the_engine_gives_itself_is_refused_however_it_is_written(argument: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_settings(VllmSettings(executable=sys.executable, arguments=("--enforce-eager", argument)))


@pytest.mark.parametrize(
    "arguments",
    [
        ("--max-model-len", "512", "--max-num-seqs=64"),
        ("--config-format=hf", "--model-impl=vllm", "--quantization", "bitsandbytes"),
        ("-tp", "2", "--hf-overrides.rope_theta=1"),
    ],
)
def test_other_arguments_are_passed_on(arguments: tuple[str, ...]) -> None:
    check_settings(VllmSettings(executable=sys.executable, arguments=arguments))
