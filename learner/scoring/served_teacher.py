"""A teacher on a server, vLLM or another with completions: its log-probabilities of given token ids.

No model is loaded here.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollstream.eventlog.http.http_json import MAX_ANSWER_BYTES, HttpServer, Limit, TryAgainError, excerpt
from rollstream.learner.scoring.prompt_logprobs import WAYS, OtherTokensError, Way, compared
from rollstream.schemas.errors import ModelError

MAX_REQUESTS = 16
"""Maximum concurrent requests."""
TRIES = 7
"""Number of tries, with pauses of 1 s, 2 s, ...: a minute in which a server may be restarted."""
RETRY_WAIT_S = 1.0
TIMEOUT_S = 600.0
"""Seconds in which a request must be answered: one that is not is not repeated, because all training waits for it."""
REMEDY = "check that it serves, or set algorithm.teacher_url to a server that does"
TOLD_BYTES = 300
"""Room in an answer for a token with its log-probability."""
MAX_PROBED = 256
"""Token ids whose text the server is asked about."""
PROBE = (0, 1)
"""Ids of the prompt that a server is tried with: every model has them."""
NO_LOGPROB = -9000.0
"""vLLM writes -9999 for a token without a log-probability."""


KEY_VARIABLE = "ROLLSTREAM_TEACHER_API_KEY"
"""Environment variable of the learner with the key that requests bear; not set: none. No record names it, because a
record could then have any variable sent to the server."""


class ServedTeacher:
    """Blocking, with an event loop of its own: for the thread that trains."""

    def __init__(self, url: str, path: str, tokenizer: Any, env: Mapping[str, str] = os.environ) -> None:
        """`path`: the model that the server was started with; `tokenizer`: the policy's.

        Raises ModelError if the variable of the key is set to a value that no header can hold.
        """
        self._key = env.get(KEY_VARIABLE, "").strip()
        if not (self._key.isascii() and self._key.isprintable()):
            raise ModelError(f"teacher {url}: the variable {KEY_VARIABLE} holds no key; export one, or unset it")
        self._url = url.rstrip("/")
        self._path = path
        self._tokenizer = tokenizer
        self._found: tuple[str, Way] | None = None
        self.ways: Sequence[Way] = WAYS
        """Ways of requesting log-probabilities, of which the first that the server offers is used."""

    def check(self, timeout_s: float) -> str:
        """Ask once whether the server can teach: "", or why it does not answer. Raises what `logprobs` raises.

        In a thread: the caller may have an event loop of its own.
        """

        async def asked() -> None:
            http = self._http(timeout_s)
            try:
                name, way = await self._checked(http, tries=1)
                await self._row(http, name, way, np.asarray(PROBE, np.int32), tries=1)
            finally:
                await http.close()

        try:
            with ThreadPoolExecutor(1) as thread:
                thread.submit(lambda: asyncio.run(asked())).result()
        except ModelError as error:
            if not isinstance(error.__cause__, TryAgainError):
                raise
            return str(error)
        return ""

    def logprobs(self, rows: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        """(T,) of each row (T,) of token ids, given those before it in the row; 0 for the first.

        Raises ModelError naming the server and a remedy: it does not answer, serves another model, reads text as other
        token ids than the policy, or gives no log-probabilities of prompts.
        """
        return asyncio.run(self._asked(rows))

    def _http(self, timeout_s: float) -> HttpServer:
        http = HttpServer(self._url, timeout_s=timeout_s, key=self._key, key_variable=KEY_VARIABLE)
        http.name, http.limit, http.remedy = f"teacher {self._url}", Limit(timeout_s, setting=""), REMEDY
        return http

    async def _asked(self, rows: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        http = self._http(TIMEOUT_S)
        slots = asyncio.Semaphore(MAX_REQUESTS)

        async def one(name: str, way: Way, row: NDArray[np.int32]) -> NDArray[np.float32]:
            async with slots:
                return await self._row(http, name, way, row)

        try:
            name, way = self._found = self._found or await self._checked(http)
            async with asyncio.TaskGroup() as group:
                calls = [group.create_task(one(name, way, row)) for row in rows]
            return [call.result() for call in calls]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors  # the others were cancelled, or say the same
        finally:
            await http.close()

    async def _checked(self, http: HttpServer, tries: int = TRIES) -> tuple[str, Way]:
        """The server's name for the teacher, and its way to give log-probabilities of prompts."""
        cards = [one for one in await self._listed(http, tries) if not one.get("parent")]
        name = next((str(one["id"]) for one in cards if self._path in (one.get("root"), one.get("id"))), None)
        if name is None:
            served = ", ".join(str(one.get("root") or one.get("id")) for one in cards) or "no model"
            raise http.error(f"serves {served}; algorithm.teacher is {self._path}: start the server with that")
        way = await self._way(http, name, tries)
        if self._tokenizer is not None and way.names_ids:
            await self._check_vocabulary(http, name, tries)
        return name, way

    async def _way(self, http: HttpServer, name: str, tries: int) -> Way:
        """The first way that the server offers."""
        last: Any = None
        for way in self.ways:
            try:
                last = await _ask(http, "POST", "/v1/completions", _body(name, way, PROBE), tries=tries)
                way.read(last, PROBE)
            except ModelError as error:
                if isinstance(error.__cause__, TryAgainError):
                    raise
                last = error  # it refuses what it does not know
            except (LookupError, TypeError, ValueError):
                continue
            else:
                return way
        raise http.error(
            f"gave no log-probabilities of the prompt, by prompt_logprobs or by echo with logprobs: {excerpt(last)}; "
            "set algorithm.teacher_url to a vLLM server"
        )

    async def _listed(self, http: HttpServer, tries: int) -> list[dict[str, Any]]:
        found = await _ask(http, "GET", "/v1/models", tries=tries)
        if not isinstance(found, dict) or not isinstance(found.get("data"), list):
            raise http.error(f"lists no models: {excerpt(found)}; set algorithm.teacher_url to a vLLM server")
        return [one for one in found["data"] if isinstance(one, dict) and "id" in one]

    async def _check_vocabulary(self, http: HttpServer, name: str, tries: int) -> None:
        """Raises ModelError if the server reads a text of many tokens otherwise than the policy's tokenizer."""
        num = len(self._tokenizer)
        text = self._tokenizer.decode(list(range(0, num, max(1, num // MAX_PROBED))))
        mine = list(self._tokenizer.encode(text, add_special_tokens=False))
        body = {"model": name, "prompt": text, "add_special_tokens": False}
        found = await _ask(http, "POST", "/tokenize", body, tries=tries)
        its = found.get("tokens") if isinstance(found, dict) else None
        if its != mine:
            raise http.error(
                f"reads text as other token ids than the policy: {excerpt(its)} for {excerpt(mine)}; give a teacher of "
                "the same model family"
            )

    async def _row(
        self, http: HttpServer, name: str, way: Way, row: NDArray[np.int32], tries: int = TRIES
    ) -> NDArray[np.float32]:
        ids = row.tolist()
        most = MAX_ANSWER_BYTES + TOLD_BYTES * len(ids)
        found = await _ask(http, "POST", "/v1/completions", _body(name, way, ids), tries=tries, max_bytes=most)
        try:
            values = compared(way.read(found, ids), ids, self._tokenizer)
        except OtherTokensError as error:
            raise http.error(str(error)) from error
        except (LookupError, TypeError, ValueError) as error:
            raise http.error(
                f"gave no log-probabilities of the prompt: {excerpt(found)}; set algorithm.teacher_url to a vLLM server"
            ) from error
        if not all(NO_LOGPROB < value <= 1e-6 for value in values):
            odd = next(value for value in values if not NO_LOGPROB < value <= 1e-6)
            raise http.error(f"gave a token the log-probability {odd}; look into its log, and at the teacher's weights")
        return np.asarray([0.0, *values], np.float32)


def _body(name: str, way: Way, ids: Sequence[int]) -> dict[str, Any]:
    return {"model": name, "prompt": [*ids], **way.asks}


async def _ask(
    http: HttpServer,
    method: str,
    path: str,
    body: dict[str, Any] | None = None,
    *,
    tries: int = TRIES,
    max_bytes: int = MAX_ANSWER_BYTES,
) -> Any:
    answered = await http.asked(method, path, body, tries=tries, retry_wait_s=RETRY_WAIT_S, max_bytes=max_bytes)
    return http.parsed(answered)
