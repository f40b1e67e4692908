"""Servers that answer as a remote workflow does."""

import asyncio
import contextlib
import json
import threading

from aiohttp import web


def lines_of(steps, *values):
    """The server's lines of steps (without their ancestry), then of the answer."""
    lines = ['observability_trace: {"observability_trace_id": "0"}']
    for step in steps:
        payload = step["payload"]
        reported = {"id": payload["UUID"], "type": payload["event_type"], "name": payload["name"] or ""}
        reported |= {"parent_id": step["parent_id"], "payload": json.dumps(payload)}
        lines.append(f"intermediate_data: {json.dumps(reported)}")
    return [*lines, *(f"data: {json.dumps({'value': value})}" for value in values)]


@contextlib.contextmanager
def serving(answer, path="/v1/workflow/full"):
    """URL of a server whose `path` answers by the coroutine `answer(request)`; and the bodies that were posted."""
    loop, ready, bodies, ports = asyncio.new_event_loop(), threading.Event(), [], []

    async def handle(request):
        bodies.append(await request.json())
        return await answer(request)

    async def start():
        app = web.Application()
        app.router.add_post(path, handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        ports.append(runner.addresses[0][1])
        ready.set()
        return runner

    def serve():
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert ready.wait(10)
        yield f"http://127.0.0.1:{ports[0]}", bodies
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def streaming(lines, *, cut=7000):
    """Answers with the lines, in pieces that do not fall together with them."""

    async def answer(request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        data = "\n\n".join(lines).encode() + b"\n\n"
        for at in range(0, len(data), cut):
            await response.write(data[at : at + cut])
        await response.write_eof()
        return response

    return answer
