"""An endpoint with an engine on a log in memory, and requests to it."""

import asyncio
import contextlib

import httpx
import openai
from openai.types.chat import (
    ChatCompletionMessageParam,
)
from pydantic import SecretStr

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.files import read_json
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.producers.engines.scripted import ScriptedEngine
from rollstream.producers.openai.service import endpoint_file, run
from rollstream.schemas.engine_settings import ScriptedSettings
from rollstream.schemas.events import WeightsPublished
from rollstream.schemas.services import EndpointSettings

GROUP = "run-1/policy"
ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "3+4=?"}]
SECRET = "very-secret-token"


class Lab:
    """A log in memory, an artifact store, and an endpoint on a free port."""

    def __init__(self, folder, engine=None, **settings):
        self.log = MemoryLog(num_partitions=2)
        self.engine = engine or ScriptedEngine()
        self.artifacts = ArtifactStore(str(folder / "artifacts"))
        self.settings = EndpointSettings(
            bootstrap_servers="memory",
            artifact_uri=str(folder / "artifacts"),
            workspace=folder,
            name="endpoint-1",
            model_group=GROUP,
            port=0,
            engine=ScriptedSettings(),
            **settings,
        )
        self.url = ""

    async def publish(self, version, weights=None, base_model="none"):
        artifact = self.artifacts.put_bytes(weights or f"weights {version}".encode())
        await self.log.send(
            WeightsPublished(
                run_id="run-1",
                time_ms=100 + version,
                model_group=GROUP,
                job_id="run-1/rl",
                batch_id=None,
                version=version,
                parent=None if version == 0 else version - 1,
                term=1,
                weights_sha256=artifact.sha256,
                weights_format="full",
                base_model=base_model,
                artifact=artifact,
            )
        )

    def client(self, **options):
        return openai.AsyncOpenAI(base_url=self.url, **{"api_key": "none", "max_retries": 0} | options)

    @contextlib.asynccontextmanager
    async def langchain(self, **options):
        from langchain_openai import ChatOpenAI  # a second that only these tests need

        async with httpx.AsyncClient() as client:  # its own is one for all models, and nothing closes it
            options |= {"api_key": SecretStr("none"), "max_retries": 0, "http_async_client": client}
            yield ChatOpenAI(base_url=self.url, model="policy", **options)


@contextlib.asynccontextmanager
async def serving(folder, script=None, *, versions=(0,), token=None, engine=None, **settings):
    lab = Lab(folder, engine or (ScriptedEngine(script) if script else None), **settings)
    for version in versions:
        await lab.publish(version)
    task = asyncio.create_task(run(lab.settings, lab.log, lab.engine, token))
    while not (address := read_json(endpoint_file(folder, "endpoint-1"))).get("pid"):
        assert not task.done(), task.exception()
        await asyncio.sleep(0.005)
    lab.url = f"http://127.0.0.1:{address['port']}/v1"
    try:
        yield lab
    finally:
        task.cancel()
        await asyncio.wait({task})
        assert read_json(endpoint_file(folder, "endpoint-1"))["pid"] is None


def answering(text):
    return lambda prompt, rng, version: (text, -0.5)
