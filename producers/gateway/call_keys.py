"""Identities by which the gateway recognises a repeated call, a rollout and its own address: identities of calls, keys
of rollouts, and the files of a workspace. Pure."""

import asyncio
import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollstream.producers.openai.requests import Refusal
from rollstream.schemas.variables import conceal

KEY_PREFIX = "rs-"
IDEMPOTENCY_KEY = "Idempotency-Key"
RETRY_COUNT = "X-Stainless-Retry-Count"
"""OpenAI's and Anthropic's clients count here how often they have repeated a request."""
MAX_KEY_CHARS = 256
_ENDS_AS_KEY = re.compile(r"(?<![A-Za-z0-9_-])([A-Za-z0-9_-]++)\.[0-9a-f]{8,64}")
"""A word that may end with a rollout's key, whole or cut off within its HMAC. Each word is looked at once."""
_TOKEN = "GATEWAY_TOKEN"
MAX_ERROR_CHARS = 2000
"""Characters that are kept of an agent's report of its error."""
ENDED = "rollout_ended"
"""Error code for requests after a rollout's end."""
MAX_REFUSED = 1000
"""Bodies of one rollout's calls that were refused because of a limit and have not come again."""
LEARNER_BEHIND = "learner_behind"
"""Error code for a claim while rollouts are held back."""


@dataclass(frozen=True, slots=True)
class CallIdentity:
    """Identity of a call, which its repetition shares."""

    body_sha256: str
    key_sha256: str | None
    """Sha256 of the Idempotency-Key."""
    retry_count: int = 0
    """Number of times that the client says it has asked before."""

    @classmethod
    def of(cls, headers: Mapping[str, str], path: str, body: bytes) -> "CallIdentity":
        """Raises Refusal (400) for a key that is too long."""
        key = headers.get(IDEMPOTENCY_KEY)
        if key is not None and not 0 < len(key) <= MAX_KEY_CHARS:
            raise Refusal(400, f"header {IDEMPOTENCY_KEY}: must have 1 to {MAX_KEY_CHARS} characters")
        count = headers.get(RETRY_COUNT, "0")
        digest = hashlib.sha256(path.encode() + b"\x1f" + body).hexdigest()
        key_sha256 = None if key is None else hashlib.sha256(key.encode(errors="replace")).hexdigest()
        return cls(digest, key_sha256, int(count[:9]) if count.isascii() and count.isdecimal() else 0)


@dataclass(eq=False, slots=True)
class _Call:
    answer: "asyncio.Future[Any]"
    last_try: int = 0
    """Highest retry count of the requests for it."""
    is_answered: bool = False
    """Whether this process has given its answer to a client."""


class RememberedCalls:
    """The calls of one rollout by their identity: a repeated call gets the answer that was given, or waits for it.

    A call that fails is forgotten, so they are as many as the rollout has answered calls, which `max_turns` bounds, and
    calls under way.
    """

    def __init__(self) -> None:
        self._by_body: dict[str, list[_Call]] = {}
        """In the order in which they began; equal calls in parallel have equal bodies."""
        self._by_key: dict[str, tuple[str, _Call]] = {}
        self._refused: dict[str, int] = {}
        """Numbers of calls that were refused because of a limit and have not come again, by body; at most MAX_REFUSED.
        """

    def add(self, identity: CallIdentity, answer: "asyncio.Future[Any]") -> None:
        """A call and its answer, maybe still on its way."""
        call = _Call(answer, identity.retry_count)
        self._by_body.setdefault(identity.body_sha256, []).append(call)
        if _is_plain_retry(identity) and identity.body_sha256 in self._refused:
            self._refused[identity.body_sha256] -= 1
            if not self._refused[identity.body_sha256]:
                del self._refused[identity.body_sha256]
        if identity.key_sha256 is not None:
            self._by_key[identity.key_sha256] = identity.body_sha256, call
        answer.add_done_callback(lambda _: self._forget_failed(identity, call))

    def repeated(self, identity: CallIdentity) -> "asyncio.Future[Any] | None":
        """The call that is asked for again. Raises Refusal (422) for another body under its key.

        A key alone names one call. A retry count with an equal body does not, if the agent made equal calls: then it
        is the newest that nobody has an answer of and that was not asked for with this count, so that the retries of
        two calls get both answers. A retry begins a call only if no equal one is known, or one was refused.
        """
        if identity.key_sha256 is not None:
            body_sha256, call = self._by_key.get(identity.key_sha256, (identity.body_sha256, None))
            if body_sha256 != identity.body_sha256:
                raise Refusal(
                    422, f"{IDEMPOTENCY_KEY} was used with another body; give each request a key", code="idempotency"
                )
            return None if call is None or _has_failed(call.answer) else call.answer
        count = identity.retry_count
        equal = [call for call in self._by_body.get(identity.body_sha256, ()) if not _has_failed(call.answer)]
        if count == 0 or not equal or identity.body_sha256 in self._refused:
            return None
        call = max(reversed(equal), key=lambda one: 0 if one.is_answered else 1 + (one.last_try < count))
        call.last_try = max(call.last_try, count)
        return call.answer

    def refuse(self, identity: CallIdentity) -> None:
        """A call was refused because of a limit: one retry of an equal call begins it."""
        if identity.key_sha256 is not None or identity.retry_count:
            return
        count = self._refused.pop(identity.body_sha256, 0) + 1
        if len(self._refused) >= MAX_REFUSED:
            del self._refused[next(iter(self._refused))]
        self._refused[identity.body_sha256] = count

    def mark_answered(self, body_sha256: str, answer: "asyncio.Future[Any]") -> None:
        """Note that a client has been given the answer of a call."""
        for call in self._by_body.get(body_sha256, ()):
            call.is_answered = call.is_answered or call.answer is answer

    def __len__(self) -> int:
        return len(self._by_body) + len(self._by_key)

    def _forget_failed(self, identity: CallIdentity, call: _Call) -> None:
        if not _has_failed(call.answer):
            return
        equal = self._by_body[identity.body_sha256]
        equal.remove(call)
        if not equal:
            del self._by_body[identity.body_sha256]
        key = identity.key_sha256
        if key is not None and self._by_key.get(key) == (identity.body_sha256, call):
            del self._by_key[key]


def _is_plain_retry(identity: CallIdentity) -> bool:
    return identity.key_sha256 is None and identity.retry_count > 0


def _has_failed(answer: "asyncio.Future[Any]") -> bool:
    return answer.done() and (answer.cancelled() or answer.exception() is not None)


class RolloutKeys:
    """Keys of rollouts: whoever bears one may play that rollout and no other.

    A key holds the rollout's id and its HMAC under the gateway's token, so no key is stored anywhere, and it
    stays good when the process that gave it out was killed.
    """

    def __init__(self, secret: str) -> None:
        self._token = {_TOKEN: secret}
        self._secret = hashlib.sha256(f"rollout keys\x1f{secret}".encode()).digest()

    def key_of(self, rollout_id: str) -> str:
        """The key of a rollout; the same at any time."""
        name = base64.urlsafe_b64encode(rollout_id.encode()).decode().rstrip("=")
        return f"{KEY_PREFIX}{name}.{self._mac(rollout_id)}"

    def rollout_of(self, key: str) -> str | None:
        """The rollout that a key is for; None if this gateway did not issue the key."""
        name, dot, mac = key.removeprefix(KEY_PREFIX).rpartition(".")
        if not key.startswith(KEY_PREFIX) or not dot:
            return None
        try:
            rollout_id = base64.urlsafe_b64decode(name + "=" * (-len(name) % 4)).decode()
        except (binascii.Error, ValueError):
            return None
        is_ours = hmac.compare_digest(mac.encode(errors="replace"), self._mac(rollout_id).encode())
        return rollout_id if is_ours else None

    def conceal(self, text: str) -> str:
        """An agent's report for logs and records: without keys of rollouts, the gateway's token and the secrets that
        `variables.conceal` knows.
        """
        return conceal(_ENDS_AS_KEY.sub(_without_key, text), f"${{{_TOKEN}}}", self._token)

    def _mac(self, rollout_id: str) -> str:
        return hmac.new(self._secret, rollout_id.encode(), hashlib.sha256).hexdigest()


def _without_key(word: "re.Match[str]") -> str:
    before, prefix, _ = word[1].partition(KEY_PREFIX)
    return f"{before}${{ROLLOUT_KEY}}" if prefix else word[0]


def token_file(workspace: Path, name: str) -> Path:
    """The file of the token with which programs claim rollouts; keys are made of it."""
    return workspace / f"gateway-{name}.token"


def address_file(workspace: Path, name: str) -> Path:
    """The file with the address of a producers process's gateway."""
    return workspace / f"gateway-{name}.json"
