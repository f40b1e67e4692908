"""A server with vLLM's paths whose answers take time and hardly any CPU, as of a model on a GPU that batches.

    python -m benchmarks.timed_server MODEL MS

Every token takes MS milliseconds, however many requests are under way; an answer has `max_tokens` tokens, which mean
nothing. Prints its address once it listens. It serves to measure a gateway's own time; it says nothing of vLLM's.
"""

import argparse
import asyncio
import functools
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from tests.producers.engines.vllm.server_rig import GENERATE, StandInServer

CHAT = "/v1/chat/completions"
IDS = range(10, 42)


@functools.lru_cache(maxsize=1024)
def answer_of(length: int, label: str) -> bytes:
    """Answer for both paths, in OpenAI's form and vLLM's."""
    ids = [IDS[index % len(IDS)] for index in range(length)]
    logprobs = [{"token": "a", "token_id": one, "logprob": -1.5, "bytes": [97], "top_logprobs": []} for one in ids]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "a" * length},
        "token_ids": ids,
        "logprobs": {"content": logprobs},
        "finish_reason": "length",
        "weight_versions": [{"version": label, "start": 0, "end": length}],
    }
    usage = {"prompt_tokens": 32, "completion_tokens": length, "total_tokens": 32 + length}
    return orjson.dumps({"id": "a", "object": "chat.completion", "created": 0, "choices": [choice], "usage": usage})


class TimedServer(StandInServer):
    """A server for a model folder that takes `token_s` seconds a token."""

    def __init__(self, base: Path, token_s: float) -> None:
        super().__init__(base)
        self._token_s = token_s

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path not in (CHAT, GENERATE):
            return await super()._answer(request)
        body: dict[str, Any] = orjson.loads(await request.read())
        length: int = body.get("sampling_params", body)["max_tokens"]
        await asyncio.sleep(length * self._token_s)
        return web.Response(body=answer_of(length, self.label), content_type="application/json")


async def main() -> None:
    """Serve until cancelled."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("ms", type=float)
    given = parser.parse_args()
    server = TimedServer(given.model, given.ms / 1000)
    await server.start()
    print(server.url, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
