"""A streamed chat of an agent at the gateway, which is asked again under its key until all of it has come."""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

from rollstream.eventlog.http.http_json import HttpServer, TryAgainError
from rollstream.producers import RemoteRollout
from rollstream.producers.gateway.call_keys import IDEMPOTENCY_KEY

END = b"data: [DONE]\n\n"
PAUSE_S = 0.2
PATH = "/v1/chat/completions"


class StreamedChat:
    """One call."""

    def __init__(self, count: Callable[[int], None]) -> None:
        """`count`: given 1 when the first piece of an answer has come, and -1 when its stream is over."""
        self.num_broken = 0
        """Streams that broke off after their first piece."""
        self._count = count

    async def ask(self, rollout: RemoteRollout, body: dict[str, Any], key: str, *, for_s: float) -> dict[str, Any]:
        """The answer, in the form of one that is not streamed."""
        server = HttpServer(rollout.base_url, timeout_s=for_s, key=rollout.key)
        try:
            async with asyncio.timeout(for_s):
                while (answer := await self._tried(server, body, key)) is None:
                    await asyncio.sleep(PAUSE_S)
                return answer
        finally:
            await server.close()

    async def _tried(self, server: HttpServer, body: dict[str, Any], key: str) -> dict[str, Any] | None:
        is_begun = False

        def begin(part: bytes) -> None:
            nonlocal is_begun
            if not is_begun and b'"content"' in part:
                is_begun = True
                self._count(1)

        try:
            answered = await server.sent("POST", PATH, body, headers={IDEMPOTENCY_KEY: key}, on_part=begin)
            return _whole(server.checked(answered))
        except TryAgainError:
            self.num_broken += is_begun
            return None
        finally:
            self._count(-int(is_begun))


def _whole(body: bytes) -> dict[str, Any]:
    assert body.endswith(END), body
    choices: dict[int, dict[str, Any]] = {}
    names = set[str]()
    for event in _events(body):
        assert "error" not in event, event
        names.add(event["id"])
        for part in event["choices"]:
            one = choices.setdefault(part["index"], {"message": {"role": "assistant", "content": ""}})
            one["message"]["content"] += part["delta"].get("content") or ""
            if part["logprobs"] is not None:
                assert "logprobs" not in one, "the log-probabilities of a choice come once"
                one["logprobs"] = part["logprobs"]
    (name,) = names
    return {"id": name, "choices": [choices[index] for index in sorted(choices)]}


def _events(body: bytes) -> Iterator[dict[str, Any]]:
    for line in body.removesuffix(END).split(b"\n\n"):
        if line.startswith(b"data: "):
            yield json.loads(line.removeprefix(b"data: "))
