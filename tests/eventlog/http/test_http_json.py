"""Connections to other servers."""

import asyncio
import json
import math

import pytest
from aiohttp import web

from rollstream.eventlog.http import http_json
from rollstream.eventlog.http.http_json import HttpServer, parsed_json


def test_a_connection_that_was_idle_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may be about to end it: the request that is on its way then looks as if the server had died."""
    monkeypatch.setattr(http_json, "KEPT_ALIVE_S", 0.05)
    peers: list[object] = []

    async def answer(request: web.Request) -> web.Response:
        assert request.transport is not None
        peers.append(request.transport.get_extra_info("peername"))
        return web.json_response({})

    async def scenario() -> None:
        app = web.Application()
        app.router.add_get("/", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        http = HttpServer(f"http://127.0.0.1:{runner.addresses[0][1]}", timeout_s=10)
        try:
            await http.sent("GET", "/")
            await asyncio.sleep(0.2)
            await http.sent("GET", "/")
        finally:
            await http.close()
            await runner.cleanup()

    asyncio.run(scenario())
    assert len(set(peers)) == 2


def test_bodies_that_only_pythons_json_knows_are_sent_and_read() -> None:
    sent: list[object] = []

    async def answer(request: web.Request) -> web.Response:
        assert request.content_type == "application/json"
        sent.append(json.loads(await request.read()))
        return web.Response(text='{"logprob": NaN}', content_type="application/json")

    async def scenario() -> None:
        app = web.Application()
        app.router.add_post("/", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        http = HttpServer(f"http://127.0.0.1:{runner.addresses[0][1]}", timeout_s=10)
        try:
            for body in ({"ids": [1, 2]}, {"text": "\ud800"}, {"bias": {5: 1}}):
                answered = http.parsed(http.checked(await http.sent("POST", "/", body)))
                assert math.isnan(answered["logprob"])
        finally:
            await http.close()
            await runner.cleanup()

    asyncio.run(scenario())
    assert sent == [{"ids": [1, 2]}, {"text": "\ud800"}, {"bias": {"5": 1}}]
    with pytest.raises(ValueError, match="Expecting value"):
        parsed_json(b"<html>")
