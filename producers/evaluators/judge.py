"""A model as the judge of a rollout, asked through any OpenAI-compatible endpoint.

Question and answer are recorded before the score counts, so that a replay does not ask again. Secrets are in the
request alone.
"""

import asyncio
import functools
import json
import logging
import math
import os
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from rollstream.eventlog.http.http_json import TRY_AGAIN, HttpServer, TryAgainError, proxy_of, retry_after
from rollstream.producers.evaluators import matching
from rollstream.producers.evaluators.builtin import final_answer, right_answer
from rollstream.producers.rollout.reply import text_of
from rollstream.producers.rollout.rewards import Asked, FinishedRollout, NoScoreError, Recorder, RewardError, in_thread
from rollstream.schemas.errors import ModelError
from rollstream.schemas.evaluators import PLACEHOLDER, SECTION, LlmJudge
from rollstream.schemas.variables import encodable, one_line

PATH = "/chat/completions"
MAX_ANSWER_BYTES = 1024 * 1024
SHOWN_CHARS = 200
"""Maximum characters of an unusable answer that its error shows."""

logger = logging.getLogger(__name__)


class JudgeAnswer(NamedTuple):
    """The answer of an endpoint."""

    text: str
    usage: dict[str, Any] | None
    num_tries: int


class Judge:
    """One evaluator in one rollout."""

    def __init__(
        self, name: str, config: LlmJudge, recorder: Recorder, hide: Callable[[str], str], ends: float
    ) -> None:
        """`hide` writes `${ENV}` in place of its value. `ends`: of the rollout, by `time.monotonic`."""
        self._ends = ends
        self._name = name
        self._location = f"{SECTION}.{name}"
        self._config = config
        self._recorder = recorder
        self._hide = hide
        self._base_url = config.base_url.rstrip("/")

    async def score(self, rollout: FinishedRollout) -> float:
        """The judge's number for the rollout's final answer. Raises NoScoreError, RewardError naming place and remedy.

        1. Ask. 2. Record what was asked and answered. 3. Take the score from the answer.
        """
        messages = [{"role": "user", "content": self._prompt(rollout)}]
        began_ms = self._recorder.clock()
        answer = await self._ask(messages)
        answer_text = self._hide(answer.text)
        await self._recorder.record(
            Asked(
                judge=self._name,
                model=self._hide(self._config.model),
                data={"input": self._hidden(messages), "output": answer_text},
                metadata={
                    "evaluator": self._name,
                    "temperature": self._config.temperature,
                    "num_tries": answer.num_tries,
                },
                usage=answer.usage,
                began_ms=began_ms,
            )
        )
        return await self._number(answer_text)

    def _prompt(self, rollout: FinishedRollout) -> str:
        """The template with its placeholders filled in; what is filled in is not looked through again."""
        config = self._config

        def filled(match: re.Match[str]) -> str:
            if match[1] == "response":
                return final_answer(self._location, rollout, config.agent)
            field = f"{match[1]}_key"
            return text_of(right_answer(self._location, rollout, getattr(config, field), field))

        return PLACEHOLDER.sub(filled, config.prompt)

    async def _ask(self, messages: list[dict[str, str]]) -> JudgeAnswer:
        config = self._config
        tries, last = config.retries + 1, TryAgainError("was not asked")
        proxy = proxy_of(self._base_url, os.environ)
        server = HttpServer(self._base_url, timeout_s=config.timeout_s, proxy=proxy)
        try:
            for number in range(1, tries + 1):
                try:
                    return self._read(await self._post(server, messages), number)
                except TryAgainError as error:
                    last = error
                    logger.info("%s: try %d of %d: %s", self._location, number, tries, self._hide(str(error)))
                if number < tries:
                    wait_s = max(last.after_s, config.retry_wait_s * 2 ** (number - 1))
                    if time.monotonic() + wait_s >= self._ends:
                        raise self._no_score(
                            f"{last} (try {number} of {tries}); the next in {wait_s:g} s would be after the rollout's "
                            "time; check that it serves, or raise rollout_timeout_s"
                        )
                    await asyncio.sleep(wait_s)
        finally:
            await server.close()
        raise self._no_score(f"{last} ({tries} tries); check that it serves, or raise timeout_s or retries") from last

    async def _post(self, server: HttpServer, messages: list[dict[str, str]]) -> bytes:
        """The body of a 2xx answer. Raises TryAgainError, NoScoreError, RewardError."""
        config = self._config
        request: dict[str, Any] = {
            "model": config.model,
            "messages": messages,
            "temperature": config.temperature,
            **({"max_tokens": config.max_tokens} if config.max_tokens else {}),
        }
        try:
            answered = await server.sent("POST", PATH, request, headers=self._headers(), max_bytes=MAX_ANSWER_BYTES)
        except ModelError as error:
            raise self._no_score(f"answered more than {MAX_ANSWER_BYTES} bytes; set max_tokens") from error
        status, body = answered.status, answered.body
        if status in TRY_AGAIN or status >= 500:
            raise TryAgainError(f"answered {status} {self._shown(body)}", retry_after(answered.headers))
        if not 200 <= status < 300:
            raise self._no_score(f"answered {status} {self._shown(body)}; check base_url, model and api_key")
        return body

    def _headers(self) -> dict[str, str]:
        key = "" if self._config.api_key is None else self._config.api_key.get_secret_value().strip()
        if not key.isprintable():
            raise RewardError(
                f"{self._location}.api_key contains characters that are not allowed in a header; remove them"
            )
        return {"Authorization": f"Bearer {key}"} if key else {}

    def _read(self, body: bytes, num_tries: int) -> JudgeAnswer:
        try:
            content = json.loads(body)
            text = content["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise self._no_score(
                f"its answer has no choices[0].message.content: {self._shown(body)}; base_url must be an "
                f"OpenAI-compatible endpoint"
            ) from error
        if not isinstance(text, str):
            raise self._no_score(f"its answer is not text: {self._shown(body)}; use a model that answers in text")
        return JudgeAnswer(encodable(text), _usage(content.get("usage")), num_tries)

    async def _number(self, text: str) -> float:
        config = self._config
        taken, error = await in_thread(functools.partial(matching.last, self._location, config.pattern, text))
        if error is not None:
            raise error
        try:
            number = float(taken or "")
        except ValueError:
            number = math.nan
        if not config.min <= number <= config.max:
            what = "says no score" if taken is None else f"says {taken!r}"
            raise self._no_score(
                f"its answer {what} ({config.pattern!r} between {config.min:g} and {config.max:g}): "
                f"{self._shown(text)}; describe the answer format in prompt, or change pattern, min or max"
            )
        return number

    def _no_score(self, message: str) -> NoScoreError:
        return NoScoreError(self._hide(f"{self._location}: {self._base_url}{PATH}: {message}"))

    def _shown(self, answer: str | bytes) -> str:
        """A part of the answer; hidden first, so that no cut shows a part of a secret."""
        text = self._hide(answer if isinstance(answer, str) else answer.decode(errors="replace"))
        return repr(one_line(text, SHOWN_CHARS))

    def _hidden(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._hide(value)
        if isinstance(value, list):
            return [self._hidden(item) for item in value]
        return {key: self._hidden(item) for key, item in value.items()}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and -(2**63) <= value < 2**63  # what a record can hold


def _usage(found: Any) -> dict[str, Any] | None:
    """Token counts in the form that a model's own calls have."""
    if not isinstance(found, dict):
        return None
    counts = {encodable(str(key)): value for key, value in found.items() if _is_count(value)}
    return {"token_usage": counts, "num_llm_calls": 1, "seconds_between_calls": 0}
