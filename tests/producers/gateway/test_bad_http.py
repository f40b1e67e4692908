"""Requests that are not good HTTP: what is answered, and that no log holds the key which they bear."""

import asyncio
import gzip
import json
import logging
import urllib.parse
from typing import Any

import pytest

from tests.producers.gateway.gateway_rig import play_outside

CHAT = "/v1/chat/completions"
BODY = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "a"}]}).encode()


async def sent(one: Any, authorization: str, headers: str, body: bytes) -> tuple[int, str]:
    """Status and text of the answer to a request, written by hand."""
    url = urllib.parse.urlsplit(one.rollout["base_url"] + CHAT)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    head = f"POST {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\nAuthorization: {authorization}\r\n"
    head += f"Content-Type: application/json\r\nConnection: close\r\n{headers}\r\n"
    writer.write(head.encode() + body)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return int(answer.split(b" ", 2)[1]), answer.decode()


@pytest.mark.parametrize(
    ("authorization", "headers", "body", "status"),
    [
        ("Bearer {key}", "Content-Length: {size}\r\n", BODY, 200),
        ("bearer {key}", "Content-Length: {size}\r\n", BODY, 200),
        ("BEARER   {key}", "Content-Length: {size}\r\n", BODY, 200),
        ("Basic {key}", "Content-Length: {size}\r\n", BODY, 401),
        ("Bearer {key}", "Content-Encoding: gzip\r\nContent-Length: {size}\r\n", gzip.compress(BODY, mtime=0), 200),
        ("Bearer {key}", "Content-Encoding: gzip\r\nContent-Length: {size}\r\n", BODY, 400),
        (
            "Bearer {key}",
            "Content-Encoding: gzip\r\nContent-Length: {size}\r\n",
            gzip.compress(b" " * 10**8, mtime=0),
            413,
        ),
        ("Bearer {key}", "Transfer-Encoding: chunked\r\n", b"{key}\r\n", 400),
        ("Bearer {key}\x00", "Content-Length: {size}\r\n", BODY, 400),
        ("Bearer {key}" + "a" * 9000, "Content-Length: {size}\r\n", BODY, 400),
        ("Bearer {key}", "Content-Length: {key}\r\n", BODY, 400),
        ("Bearer {key}", "X-Odd {key}\r\n", BODY, 400),
    ],
)
def test_a_request_that_is_odd_is_answered_and_its_key_is_in_no_log(
    tmp_path, caplog, authorization, headers, body, status
):
    caplog.set_level(logging.DEBUG)
    keys: list[str] = []

    async def agent(one: Any) -> None:
        key = one.rollout["key"]
        keys.append(key)
        filled = body.replace(b"{key}", key.encode())
        given = [text.replace("{key}", key).replace("{size}", str(len(filled))) for text in (authorization, headers)]
        found, text = await sent(one, given[0], given[1], filled)
        assert found == status, text
        await one.chat("after")
        await one.reward(1.0)
        await one.end()

    play_outside(tmp_path, agent).assert_complete()
    assert keys[0].rpartition(".")[2] not in caplog.text
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
