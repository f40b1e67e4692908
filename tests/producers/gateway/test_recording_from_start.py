"""A producers process whose settings have a `gateway`: it listens before there is a rollout, and records all."""

import asyncio
import contextlib
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import TopicPartition
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.producers import GatewayClient
from rollstream.producers.engines.scripted import ScriptedEngine
from rollstream.producers.gateway.call_keys import address_file
from rollstream.producers.service import run
from rollstream.schemas.errors import RollstreamError
from rollstream.schemas.services import GatewaySection, ProducerSettings
from tests.producers.conftest import answers, published, task_of

NAME = "gateway-1"


def settings_of(folder: Path, gateway: GatewaySection | None) -> ProducerSettings:
    given: dict[str, Any] = {
        "bootstrap_servers": "none",
        "artifact_uri": str(folder / "artifacts"),
        "num_partitions": 1,
    }
    return ProducerSettings(**given, workspace=folder, name=NAME, gateway=gateway)


@contextlib.asynccontextmanager
async def producing(folder: Path, gateway: GatewaySection | None):
    log = MemoryLog(num_partitions=1)
    task = asyncio.create_task(run(settings_of(folder, gateway), log, ScriptedEngine(answers("7"))))
    try:
        yield log, task
    finally:
        task.cancel()
        await asyncio.wait({task})


async def wait_until(is_true: Any) -> None:
    async with asyncio.timeout(10):
        while not is_true():
            await asyncio.sleep(0.005)


def test_it_listens_before_the_first_task_and_records_the_rollout_that_a_waiting_agent_plays(tmp_path):
    async def scenario() -> None:
        async with producing(tmp_path, GatewaySection()) as (log, _):
            await wait_until(address_file(tmp_path, NAME).exists)
            async with GatewayClient.of_workspace(tmp_path, NAME) as gateway:
                assert await gateway.claim(wait_s=0.0) is None
                claiming = asyncio.create_task(gateway.claim(wait_s=10.0))
                artifact = ArtifactStore(str(tmp_path / "artifacts")).put_bytes(b"weights")
                await log.send(published().model_copy(update={"artifact": artifact}))
                await log.send(task_of("gateway"))
                rollout = await claiming
                assert rollout is not None
                async with rollout:
                    await rollout.chat([{"role": "user", "content": "3+4"}])
                    await rollout.reward(1.0)
            reader = await log.reader({TopicPartition("steps", 0): 0})
            kinds: list[str | None] = []
            while "rollout_ended" not in kinds:
                kinds += [codec.kind_of(record) for record in await reader.poll(timeout_s=5.0)]
        assert "step_recorded" in kinds

    asyncio.run(scenario())


def test_without_the_section_nothing_listens_before_a_rollout(tmp_path):
    async def scenario() -> None:
        async with producing(tmp_path, None) as (_, task):
            await asyncio.sleep(0.2)
            assert not task.done()
            assert not address_file(tmp_path, NAME).exists()

    asyncio.run(scenario())


def test_a_port_in_use_ends_the_process_with_the_setting_to_change(tmp_path):
    async def scenario() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            async with producing(tmp_path, GatewaySection(port=port)) as (_, task):
                with pytest.raises(RollstreamError, match=rf"gateway: port {port} of 127.0.0.1 cannot be used .*set "):
                    await task

    asyncio.run(scenario())


def test_the_address_of_a_gateway_at_an_ipv6_host_is_a_url_that_agents_can_ask(tmp_path):
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no ::1")

    async def scenario() -> None:
        async with producing(tmp_path, GatewaySection(host="::1")):
            await wait_until(address_file(tmp_path, NAME).exists)
            assert json.loads(address_file(tmp_path, NAME).read_text())["url"].startswith("http://[::1]:")
            async with GatewayClient.of_workspace(tmp_path, NAME) as gateway:
                assert await gateway.claim(wait_s=0.0) is None

    asyncio.run(scenario())
