"""Errors of an engine behind the gateway that records nothing."""

import asyncio

import aiohttp
import pytest

from rollstream.producers.engines.scripted import ScriptedEngine
from rollstream.schemas.errors import ModelError
from tests.producers.openai.endpoint_rig import ASK, serving

MESSAGE = "no vLLM server answers; look into the servers' logs"


class Broken(ScriptedEngine):
    async def generate(self, request):
        raise ModelError(MESSAGE)


@pytest.mark.parametrize("path", ["chat/completions", "messages"])
def test_an_engine_that_fails_is_an_error_of_the_server_which_clients_try_again(tmp_path, path):
    async def scenario():
        async with serving(tmp_path, engine=Broken()) as lab, aiohttp.ClientSession() as http:
            body = {"model": "policy", "messages": ASK, "max_tokens": 5}
            async with http.post(f"{lab.url}/{path}", json=body) as response:
                return response.status, await response.json()

    status, body = asyncio.run(scenario())
    assert status == 500
    assert body["error"]["message"] == MESSAGE
