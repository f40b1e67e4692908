"""A GPU that only another process can use: the services end, and no rollout is recorded as failed."""

import asyncio
from pathlib import Path

import aiohttp
import pytest

from rollstream.eventlog.files import read_json
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.producers import service
from rollstream.producers.engines import batching
from rollstream.producers.engines.base import DeviceLostError, Generation, GenerationRequest
from rollstream.producers.engines.scripted import ScriptedEngine
from rollstream.producers.openai import service as openai_service
from rollstream.schemas.events import RolloutFailed, RolloutStarted, WeightsPublished
from tests.producers import worker_rig as r
from tests.producers.openai.endpoint_rig import ASK, Lab
from tests.producers.rollout.names_rig import publish, settings_of

FAILED = RuntimeError("CUDA error: an illegal memory access was encountered")


class Lost(ScriptedEngine):
    """An engine whose GPU fails once weights are there."""

    async def generate(self, request: GenerationRequest) -> Generation:
        raise batching._failure(FAILED)


class LostAtLoad(ScriptedEngine):
    async def load(self, published: WeightsPublished, path: Path) -> None:
        raise batching._failure(FAILED)


@pytest.mark.parametrize("engine", [Lost, LostAtLoad])
def test_producers_end_and_leave_their_rollouts_to_the_next_process(
    tmp_path: Path, engine: type[ScriptedEngine]
) -> None:
    async def main() -> list[object]:
        log = MemoryLog(num_partitions=1)
        await publish(log, tmp_path, "none")
        inputs = {"question": "1 + 1", "answer": 2}
        await log.send(r.task(environment="arithmetic").model_copy(update={"inputs": inputs}))
        async with asyncio.timeout(30):
            with pytest.raises(DeviceLostError, match=r"CUDA error: an illegal memory .*this one ends"):
                await service.run(settings_of(tmp_path, "model:none"), log, engine())
        return [type(event) for event in await r.steps(log)]

    found = asyncio.run(main())
    assert RolloutFailed not in found
    assert (RolloutStarted in found) is (engine is Lost)


def test_the_endpoint_ends_so_that_its_supervisor_starts_it_again(tmp_path: Path) -> None:
    async def main() -> None:
        lab = Lab(tmp_path, Lost())
        await lab.publish(0)
        running = asyncio.create_task(openai_service.run(lab.settings, lab.log, lab.engine))
        path = openai_service.endpoint_file(tmp_path, "endpoint-1")
        async with asyncio.timeout(30), aiohttp.ClientSession() as http:
            while not (address := read_json(path)).get("pid"):
                await asyncio.sleep(0.005)
            url = f"http://127.0.0.1:{address['port']}/v1/chat/completions"
            with pytest.raises(aiohttp.ClientError):
                await http.post(url, json={"model": "policy", "messages": ASK})
            with pytest.raises(DeviceLostError, match="CUDA error"):
                await running

    asyncio.run(main())
