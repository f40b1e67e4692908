"""One server that is asked by HTTP and answers in JSON: bounded answers, errors in one line, repeated tries.

The key that requests bear never appears in an error. Redirects are not followed.
"""

import asyncio
import email.utils
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import proxy_bypass_environment  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]

import aiohttp
import orjson

from rollstream.schemas.errors import ModelError, PromptTooLongError
from rollstream.schemas.services import LOOPBACK
from rollstream.schemas.variables import basic_credentials, one_line, user_info_of

MAX_ANSWER_BYTES = 8 * 1024 * 1024
MAX_RETRY_AFTER_S = 60.0
"""A server that asks for a longer pause is asked again after this one."""
KEPT_ALIVE_S = 2.0
"""An idle connection is used again for so long: servers, such as vLLM after 5 s, end one that the next request may
already be on its way by.
"""
SHOWN_CHARS = 300
"""Maximum characters of an unusable answer that its error shows."""
EVENT_STREAM = "text/event-stream"
TRY_AGAIN = frozenset({408, 409, 425, 429})
_TOO_LONG = ("context_length_exceeded", "maximum context length", "leaves no room")

_ONLY_JSON = orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_DATACLASS

logger = logging.getLogger(__name__)


class TryAgainError(Exception):
    """A try that failed in a way which another one may not; after so many seconds, if the server says."""

    def __init__(self, message: str, after_s: float = 0.0, *, status: int | None = None) -> None:
        """`status`: of the answer; None: there was none."""
        super().__init__(message)
        self.after_s = after_s
        self.status = status

    @property
    def is_busy(self) -> bool:
        """Whether the server answered that it has no room for the request."""
        return self.status is not None and self.status < 500


class UnreachableError(TryAgainError):
    """The connection failed or broke off."""


class NoAnswerError(TryAgainError):
    """There was no whole answer within the time limit."""


class RefusedError(ModelError):
    """The server refused the request, and would refuse it again."""

    def __init__(self, message: str, body: bytes) -> None:
        """`body`: the body of the answer, which may hold the key."""
        super().__init__(message)
        self.body = body


class HttpAnswer(NamedTuple):
    """An answer of the server."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Limit(NamedTuple):
    """Maximum time for an answer, and the setting that it is from.

    Empty: no configuration sets it, and a request that exceeded it is not tried again.
    """

    seconds: float
    setting: str = "timeout_s"


class Proxy(NamedTuple):
    """A proxy: user and password are apart from its URL, because errors of connections show that."""

    url: str
    authorization: str = ""
    """Value of the header `Proxy-Authorization`; empty: it is not sent."""


class HttpServer:
    """A server and how it is asked."""

    def __init__(
        self, url: str, *, timeout_s: float, key: str = "", key_variable: str | None = None, proxy: Proxy | None = None
    ) -> None:
        """`url`: without a slash at its end. `key`: of the variable, borne by every request."""
        self.url = url
        self.name = url
        """Name of the server in errors."""
        self.limit = Limit(timeout_s)
        """Limit of a request that gives none."""
        self.remedy = "check that it serves, or raise timeout_s or retries"
        """Remedy where no try gets an answer."""
        self._key = key
        self._key_variable = key_variable
        self._proxy = proxy.url if proxy else None
        authorization = {"Proxy-Authorization": proxy.authorization} if proxy and proxy.authorization else {}
        is_tunnelled = url.startswith("https:")  # then the proxy sees its own request alone
        self._proxy_headers = authorization if is_tunnelled else {}
        self._bears = {} if is_tunnelled else authorization
        """Headers of every request."""
        if key:
            self._bears = {**self._bears, "Authorization": f"Bearer {key}"}
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """End all connections."""
        if self._session is not None:
            await self._session.close()

    async def asked(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        tries: int,
        retry_wait_s: float,
        max_bytes: int = MAX_ANSWER_BYTES,
    ) -> bytes:
        """The body of a 2xx answer, after so many tries at most. Raises ModelError, PromptTooLongError."""
        last: TryAgainError | None = None
        number = 0
        for number in range(1, tries + 1):
            try:
                return self.checked(await self.sent(method, path, body, max_bytes=max_bytes))
            except TryAgainError as error:
                last = error
                logger.info("try %d of %d: %s", number, tries, self.error(str(error)))
                if isinstance(error, NoAnswerError) and not self.limit.setting:
                    break
            if number < tries:
                await asyncio.sleep(max(last.after_s, retry_wait_s * 2 ** (number - 1)))
        raise self.error(f"{last} ({number} tries); {self.remedy}") from last

    async def sent(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        limit: Limit | None = None,
        max_bytes: int = MAX_ANSWER_BYTES,
        headers: Mapping[str, str] | None = None,
        on_part: Callable[[bytes], None] | None = None,
    ) -> HttpAnswer:
        """An answer of any status. Raises TryAgainError if there is none, ModelError if it is too large.

        `limit`: None: that of a request.
        `on_part`: given the body of an event stream in pieces as they come; what it raises ends the request.
        """
        if self._session is None:
            # The callers bound the number of requests at a time.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_ALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector)
        declared = {} if body is None else {"Content-Type": "application/json"}
        limit = limit or self.limit
        try:
            async with self._session.request(
                method,
                f"{self.url}{path}",
                data=None if body is None else _encoded(body),
                headers={**declared, **self._bears, **(headers or {})},
                allow_redirects=False,
                proxy=self._proxy,
                proxy_headers=self._proxy_headers,
                timeout=aiohttp.ClientTimeout(total=limit.seconds),
            ) as response:
                parts = bytearray()
                async for part in response.content.iter_any():
                    parts += part
                    if len(parts) > max_bytes:
                        raise self.error(
                            f"answered more than {max_bytes} bytes; lower max_new_tokens (a judge's max_tokens)"
                        )
                    if on_part is not None and response.content_type == EVENT_STREAM:
                        on_part(part)
                return HttpAnswer(response.status, response.headers, bytes(parts))
        except TimeoutError as error:
            setting = f" ({limit.setting})" if limit.setting else ""
            raise NoAnswerError(f"gave no answer within {limit.seconds:g} s{setting}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise UnreachableError(f"cannot be reached: {type(error).__name__}: {error}") from error

    def checked(self, answered: HttpAnswer) -> bytes:
        """The body of a 2xx answer. Others raise TryAgainError, PromptTooLongError, RefusedError or ModelError."""
        status, body = answered.status, answered.body
        if 200 <= status < 300:
            return body
        shown_answer = f"answered {status} {excerpt(body)}"
        if status in TRY_AGAIN or status >= 500:
            raise TryAgainError(shown_answer, retry_after(answered.headers), status=status)
        if status in (401, 403):
            variable = self._key_variable
            remedy = f"set the variable {variable} to a valid key" if variable else "set endpoint.api_key_variable"
            raise self.error(f"{shown_answer}; {remedy}")
        if status in (400, 413, 422) and any(words in body.decode(errors="replace") for words in _TOO_LONG):
            raise PromptTooLongError(str(self.error(f"{shown_answer}; make the conversation shorter (max_turns)")))
        raise RefusedError(str(self.error(f"{shown_answer}; check base_url, model and api")), body)

    def parsed(self, body: bytes) -> Any:
        """A body as JSON. Raises ModelError."""
        try:
            return parsed_json(body)
        except (ValueError, RecursionError) as error:
            raise self.error(f"answered with invalid JSON: {excerpt(body)}; check base_url") from error

    def error(self, message: str) -> ModelError:
        """An error of this server. Its message does not show the key, even if the server's answer does."""
        line = f"{self.name} {message}"
        return ModelError(line.replace(self._key, f"${{{self._key_variable}}}") if self._key else line)


def parsed_json(body: bytes) -> Any:
    """A body as JSON, by orjson if it can: it takes a third of the time. Raises ValueError, RecursionError."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:  # NaN, which some servers write
        return json.loads(body)


def _encoded(body: Mapping[str, Any]) -> bytes:
    """Encode with orjson, which writes a prompt of 4,000 ids in 10 microseconds; json takes 250."""
    try:
        return orjson.dumps(body, option=_ONLY_JSON)
    except TypeError:  # such as a lone surrogate, or a key that is not text
        return json.dumps(body).encode()


def retry_after(headers: Mapping[str, str]) -> float:
    """Seconds that a server asks to wait for, bounded; 0 if it does not say (RFC 9110, section 10.2.3)."""
    given = headers.get("Retry-After", "")
    try:
        seconds = float(given)
    except ValueError:
        try:
            date, sent = (email.utils.parsedate_to_datetime(one) for one in (given, headers.get("Date", "")))
            seconds = (date - sent).total_seconds()
        except (TypeError, ValueError):
            return 0.0
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_S) if seconds == seconds else 0.0


def proxy_of(url: str, env: Mapping[str, str]) -> Proxy | None:
    """The proxy that the environment names for a URL; None for addresses of this machine."""
    parts = urlsplit(url)
    scheme, host = parts.scheme, parts.hostname or ""
    found = env.get(f"{scheme}_proxy") or env.get(f"{scheme.upper()}_PROXY") or ""
    excepted = {"no": env.get("no_proxy") or env.get("NO_PROXY", "")}
    if not found or host in LOOPBACK or proxy_bypass_environment(parts.netloc, excepted):
        return None
    user_info, proxy_url = user_info_of(found if "://" in found else f"http://{found}")
    return Proxy(proxy_url, f"Basic {basic_credentials(user_info)}" if user_info else "")


def excerpt(body: object) -> str:
    """Quote a server's answer in one line of bounded length."""
    text = body.decode(errors="replace") if isinstance(body, bytes) else str(body)
    return repr(one_line(text, SHOWN_CHARS))
