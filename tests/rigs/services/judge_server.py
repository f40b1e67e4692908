"""A real OpenAI-compatible endpoint on 127.0.0.1 that judges as it is told."""

import asyncio
import json

from aiohttp import web


def chat_completion(text):
    """A whole chat completion."""
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7, "details": {"cached": 0}}
    return {
        "choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": usage,
    }


class JudgeServer:
    """Answers in turn, the last one repeatedly: text, (status, body), seconds to hang, or a function of the request.

    Errors carry `error_headers`.
    """

    def __init__(self, *answers, error_headers=None):
        self.answers = list(answers)
        self._error_headers = error_headers
        self.requests = []
        """(headers, JSON body) of every request."""

    async def __aenter__(self):
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.base_url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *error):
        await self._runner.cleanup()

    async def _answer(self, request):
        body = await request.json()
        self.requests.append((dict(request.headers), body))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if callable(answer):
            answer = answer(body)
        if isinstance(answer, (int, float)):
            await asyncio.sleep(answer)
            answer = "too late"
        status, content = answer if isinstance(answer, tuple) else (200, chat_completion(answer))
        text = content if isinstance(content, str) else json.dumps(content)
        headers = self._error_headers if status >= 400 else None
        return web.Response(status=status, text=text, content_type="application/json", headers=headers)
