"""Access to the endpoint: callers that have its token and no web pages, and their request rates. Pure.

A page can make a browser send requests to an address of this machine: with an `Origin`, as a form or plain text without
asking first, or under a name of its own that it lets resolve to 127.0.0.1. None of these is answered.
"""

import contextlib
import functools
import hashlib
import hmac
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.message import Message

from rollstream.producers.openai.requests import Refusal
from rollstream.schemas.services import LOOPBACK

FROM_ELSEWHERE = ("cross-site", "same-site")
"""Values of `Sec-Fetch-Site` that a browser sends for a page that is not the endpoint's own."""

BEARER = "bearer"
"""Scheme of the header `Authorization`, of any case (RFC 9110, section 11.1)."""
TOKEN_CALLER = "token"
"""Caller with the service's own token, whatever other keys the request has."""


class Access:
    """The rules of one endpoint."""

    def __init__(
        self, host: str, allowed_hosts: Sequence[str], token: str | None, *, section: str = "endpoint"
    ) -> None:
        """With a `token`, requests must carry it. At an address that others can reach, any host name is allowed by
        default: a token is needed there. `section`: of the settings, for errors.
        """
        self._section = section
        self._token = token.encode() if token else None
        is_checked = host in LOOPBACK or bool(allowed_hosts)
        names = (*LOOPBACK, host, *allowed_hosts)
        self._hosts = frozenset(name.lower() for name in names) if is_checked else None

    def check(self, method: str, headers: Mapping[str, str]) -> str:
        """Returns a name of the caller: the one with the token, or, where none is needed, the one with these keys.

        Raises Refusal: 403 for a page or another host, 401 without the token, 415 for a body that is not JSON.
        """
        self.check_source(headers)
        if self._token is not None and not self.bears_token(headers):
            raise no_key()
        check_is_json(method, headers)
        return TOKEN_CALLER if self._token is not None else "\x1f".join(keys_of(headers))

    def bears_token(self, headers: Mapping[str, str]) -> bool:
        """Whether a request bears the endpoint's own token."""
        token = self._token
        return token is not None and any(
            hmac.compare_digest(key.encode(errors="replace"), token) for key in keys_of(headers)
        )

    def check_source(self, headers: Mapping[str, str]) -> None:
        """Raises Refusal (403) for a page or another host."""
        host = _name_of(headers.get("Host", ""))
        if self._hosts is not None and host not in self._hosts:
            raise Refusal(
                403,
                f"host {host[:100]!r} is not allowed; use 127.0.0.1, or add it to {self._section}.allowed_hosts",
                code="host_not_allowed",
            )
        if "Origin" in headers or headers.get("Sec-Fetch-Site") in FROM_ELSEWHERE:
            raise Refusal(
                403,
                "requests from web pages are not allowed; send them from a program, without the header Origin",
                code="origin_not_allowed",
            )


MAX_KEYS = 10_000
"""Keys whose calls are counted; of more the one that asked least lately is forgotten, if none of its calls is open."""


@dataclass(slots=True)
class _Use:
    """Use of one key."""

    left: float
    """Requests that it may send now."""
    at_s: float
    num_open: int = 0


class KeyLimits:
    """Limits on the requests of a key, per minute and at once. A request for n answers counts as n."""

    def __init__(
        self, per_minute: int | None, at_once: int | None, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """None: no limit. `monotonic` in seconds. A minute's requests may come in one burst (a token bucket)."""
        self._per_minute = per_minute
        self._at_once = at_once
        self._monotonic = monotonic
        self._uses: dict[bytes, _Use] = {}
        """Uses by digest of the caller; bounded by MAX_KEYS."""

    @contextlib.contextmanager
    def call(self, caller: str) -> Iterator["CountedCall"]:
        """One request, until it is answered. `caller`: whose key admitted it. Raises Refusal (429)."""
        if self._per_minute is None and self._at_once is None:
            yield CountedCall(self, None)
            return
        counted = CountedCall(self, self._use(caller))
        counted.raise_to(1)
        try:
            yield counted
        finally:
            counted.close()

    def take(self, use: _Use, num: int, num_before: int) -> None:
        """Count `num` answers of one request, of which `num_before` are counted. Raises Refusal: 429, and 400 for
        more than the limits ever allow.
        """
        for limit, name in ((self._at_once, "calls_per_key"), (self._per_minute, "requests_per_minute")):
            if limit is not None and num > limit:
                raise Refusal(400, f"n: {num} answers are more than {name} ({limit}) allows; ask for fewer", param="n")
        num_others, left = use.num_open - num_before, use.left + num_before
        if self._at_once is not None and num_others + num > self._at_once:
            message = f"this key has {num_others} calls in progress, as many as calls_per_key allows"
            if num > 1:
                message = f"n: {num} answers beside {num_others} calls in progress are more than calls_per_key allows"
            raise _too_many(message, 1)
        if self._per_minute is not None:
            if left < num:
                message = f"this key has sent the {self._per_minute} requests of requests_per_minute"
                if num > 1:
                    message = f"n: {num} answers are more than the {int(left)} requests that requests_per_minute leaves"
                raise _too_many(message, math.ceil((num - left) * 60 / self._per_minute))
            use.left = left - num
        use.num_open = num_others + num

    def _use(self, caller: str) -> _Use:
        """The use of a caller, brought up to date and moved to the newest position."""
        digest, now_s, size = (
            hashlib.sha256(caller.encode(errors="replace")).digest(),
            self._monotonic(),
            self._per_minute,
        )
        use = self._uses.pop(digest, None) or _Use(float(size or 0), now_s)
        use.left = min(float(size or 0), use.left + (now_s - use.at_s) * (size or 0) / 60)
        use.at_s = now_s
        if len(self._uses) >= MAX_KEYS:
            idle = next((one for one, found in self._uses.items() if not found.num_open), None)
            self._uses.pop(idle or next(iter(self._uses)))
        self._uses[digest] = use
        return use


class CountedCall:
    """One request that is being answered, as its key's limits count it."""

    def __init__(self, limits: KeyLimits, use: _Use | None) -> None:
        """`use`: None where nothing is limited."""
        self._limits = limits
        self._use = use
        self._num = 0

    def raise_to(self, num: int) -> None:
        """Count it as so many answers. Raises Refusal as `KeyLimits.take`; then it has cost its key nothing."""
        if self._use is None:
            return
        try:
            self._limits.take(self._use, num, self._num)
        except Refusal:
            self._use.left += self._num
            self.close()
            raise
        self._num = num

    def close(self) -> None:
        """Stop counting it among the open calls."""
        if self._use is not None:
            self._use.num_open -= self._num
        self._num = 0


def _too_many(message: str, retry_after_s: int) -> Refusal:
    text = f"{message}; try again in {retry_after_s} s"
    return Refusal(429, text, code="rate_limit_exceeded", retry_after_s=retry_after_s)


def no_key() -> Refusal:
    """The refusal of a request without a key, or with a wrong one."""
    return Refusal(401, "the API key is missing or wrong; send a valid key", code="invalid_api_key")


def check_is_json(method: str, headers: Mapping[str, str]) -> None:
    """Raises Refusal (415) for a body that is not declared as JSON."""
    if method == "POST" and _kind_of(headers.get("Content-Type", "text/plain")) != "application/json":
        raise Refusal(415, "Content-Type must be application/json", code="unsupported_content_type")


def keys_of(headers: Mapping[str, str]) -> list[str]:
    """The keys that a request bears: as OpenAI's clients send one (`Authorization: Bearer`), and as Anthropic's do."""
    scheme, _, given = headers.get("Authorization", "").partition(" ")
    bearer = given.strip() if scheme.lower() == BEARER else ""
    return [given for given in (bearer, headers.get("X-Api-Key", "")) if given]


def _name_of(host: str) -> str:
    """A `Host` header without its port."""
    name, _, port = host.strip().rpartition(":")
    if not name or not port.isdecimal():
        name = host.strip()
    return name.removeprefix("[").removesuffix("]").rstrip(".").lower()


@functools.lru_cache(maxsize=256)
def _kind_of(content_type: str) -> str:
    """Media type of a `Content-Type` header, without its parameters."""
    parsed = Message()
    parsed["Content-Type"] = content_type
    return parsed.get_content_type()
