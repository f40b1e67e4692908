"""Log-probabilities of an answer as frameworks keep them, read as token ids and numbers. Pure; never guesses an id.

Known shapes: an object or dict of OpenAI's `ChoiceLogprobs` (`content`: entries of `token`, `logprob`), with ids as
extra keys (`prompt_token_ids`, `token_ids`, `model_group`, `version`, `finish_reason`, `kept_ids`) or as vLLM's
`token: "token_id:123"`; a list of such entries; a list of numbers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollstream.schemas import tokens
from rollstream.schemas.errors import DecodeError
from rollstream.schemas.events.recorded import RecordedTokens
from rollstream.schemas.events.rollouts import VersionSpan

TOKEN_ID = "token_id:"
_KEYS = (
    *(
        "content",
        "logprobs",
        "token_ids",
        "completion_token_ids",
        "prompt_token_ids",
        "model_group",
        "version",
        "spans",
        "finish_reason",
        "kept_ids",
    ),
    *("token", "logprob", "token_id", "length"),
)
"""Attributes that are looked for in an object that is not a dict."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Known tokens of an answer; `values` and `completion_ids` are (C,), None if they are incomplete."""

    values: tuple[float, ...] | None = None
    completion_ids: tuple[int, ...] | None = None
    prompt_ids: tuple[int, ...] | None = None
    spans: tuple[VersionSpan, ...] = ()
    finish_reason: str | None = None
    kept_ids: str | None = None
    """Ids that top_p and top_k left, see `RecordedTokens`."""

    def tokens(self, *, finish_reason: str = "stop") -> RecordedTokens | None:
        """Exact tokens, if prompt and completion are known by ids. Log-probabilities stay if their number fits, and
        their kept ids, too. `finish_reason`: where none is known here.
        """
        if not self.prompt_ids or not self.completion_ids:
            return None
        num = len(self.completion_ids)
        values = self.values if self.values is not None and len(self.values) == num else None
        spans = self.spans if sum(span.length for span in self.spans) == num else ()
        kept_ids = self.kept_ids if _are_kept(self.kept_ids, self.completion_ids) else None
        return RecordedTokens.of(
            self.prompt_ids,
            self.completion_ids,
            values if kept_ids == self.kept_ids else None,
            spans=spans,
            finish_reason=self.finish_reason or finish_reason,
            kept_ids=kept_ids,
        )


def read_logprobs(raw: Any) -> Logprobs:
    """All that `raw` says. What is missing, empty or of an unknown shape is None in the answer; nothing is raised."""
    found = _mapping(raw)
    if found is None:
        return _entries(raw) if _is_list(raw) else Logprobs()
    listed = _entries(found.get("content") or found.get("logprobs") or [])
    completion_ids = _ints(found.get("token_ids") or found.get("completion_token_ids")) or listed.completion_ids
    return Logprobs(
        values=listed.values,
        completion_ids=completion_ids,
        prompt_ids=_ints(found.get("prompt_token_ids")),
        spans=_spans(found, len(completion_ids or ())),
        finish_reason=_text(found.get("finish_reason")),
        kept_ids=_text(found.get("kept_ids")),
    )


def _entries(raw: Any) -> Logprobs:
    if not _is_list(raw) or not raw:
        return Logprobs()
    values = [_value(entry) for entry in raw]
    token_ids = [_token_id(entry) for entry in raw]
    return Logprobs(
        values=tuple(value for value in values if value is not None) if None not in values else None,
        completion_ids=tuple(number for number in token_ids if number is not None) if None not in token_ids else None,
    )


def _value(entry: Any) -> float | None:
    if isinstance(entry, bool) or entry is None:
        return None
    if not isinstance(entry, int | float):
        found = _mapping(entry)
        return None if found is None or found.get("logprob") is None else _value(found["logprob"])
    return float(entry) if math.isfinite(entry) else None


def _token_id(entry: Any) -> int | None:
    found = _mapping(entry)
    if found is None:
        return None
    token_id = found.get("token_id")
    if not isinstance(token_id, int) or isinstance(token_id, bool):
        token = found.get("token")
        digits = token.removeprefix(TOKEN_ID) if isinstance(token, str) and token.startswith(TOKEN_ID) else ""
        token_id = int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 20 else -1
    return token_id if 0 <= token_id < 2**31 else None


def _spans(found: Mapping[str, Any], length: int) -> tuple[VersionSpan, ...]:
    spans = found.get("spans")
    if _is_list(spans) and spans:
        read = [_span(_mapping(span) or {}, None) for span in spans]
        return tuple(span for span in read if span is not None) if None not in read else ()
    span = _span(found, length) if length else None
    return () if span is None else (span,)


def _span(found: Mapping[str, Any], length: int | None) -> VersionSpan | None:
    group, version = found.get("model_group"), found.get("version")
    length = found.get("length") if length is None else length
    if not isinstance(group, str) or not _is_count(version) or not _is_count(length):
        return None
    assert isinstance(version, int)
    assert isinstance(length, int)
    return VersionSpan(model_group=group, version=version, length=length)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_kept(kept_ids: str | None, completion_ids: Sequence[int]) -> bool:
    """Whether the tokens are among the ids that were left to sample from."""
    try:
        if kept_ids is not None:
            tokens.check_kept(completion_ids, tokens.decode_kept(kept_ids, len(completion_ids)))
    except DecodeError:
        return False
    return True


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _ints(raw: Any) -> tuple[int, ...] | None:
    if not _is_list(raw) or not raw:
        return None
    return tuple(raw) if all(_is_count(number) and number < 2**31 for number in raw) else None


def _mapping(raw: Any) -> Mapping[str, Any] | None:
    """Its keys, for a dict or an object with such attributes (openai's and pydantic's models keep extra keys so)."""
    if isinstance(raw, Mapping):
        return raw
    if raw is None or isinstance(raw, str | bytes | int | float) or _is_list(raw):
        return None
    found = {name: getattr(raw, name) for name in _KEYS if hasattr(raw, name)}
    return found or None


def _is_list(raw: Any) -> bool:
    return isinstance(raw, Sequence) and not isinstance(raw, str | bytes)
