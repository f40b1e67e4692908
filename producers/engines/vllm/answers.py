"""A server's answer as a generation: the versions that sampled its tokens, and checks of its completeness."""

from collections.abc import Mapping, Sequence
from typing import Any

from rollstream.eventlog.http.http_json import HttpServer, TryAgainError, shown
from rollstream.producers.engines.base import FinishReason, Generation, GenerationRequest
from rollstream.producers.engines.vllm.asking import AnsweredTokens
from rollstream.producers.engines.vllm.version_files import Version
from rollstream.schemas.events.rollouts import VersionSpan


class LostVersionError(Exception):
    """The server answers, but not with the version that it was given: it was restarted, or somebody else changed it."""


def spans_of(
    http: HttpServer,
    request: GenerationRequest,
    version: Version,
    held: Mapping[str, Version],
    length: int,
    given: Sequence[Mapping[str, Any]] | None,
) -> tuple[VersionSpan, ...]:
    """The versions that sampled an answer's tokens: for an adapter one, for full weights those that the server names
    with each answer.

    `held`: versions that the server may name. Raises LostVersionError, ModelError.
    """
    group = request.model_group
    if version.is_lora or given is None:
        return (VersionSpan(model_group=group, version=version.published.version, length=length),)
    spans, end = [], 0
    for one in given:
        named = held.get(str(one["version"]))
        if named is None:
            raise LostVersionError(f"answers with the weights {one['version']}")
        if one["start"] != end or one["end"] <= end:
            raise http.error(f"gave version spans that do not follow each other: {shown(given)}")
        end = one["end"]
        spans.append(VersionSpan(model_group=group, version=named.published.version, length=end - one["start"]))
    if end != length:
        raise http.error(f"gave version spans over {end} of {length} tokens")
    return tuple(spans)


def generation_of(http: HttpServer, tokens: AnsweredTokens, spans: tuple[VersionSpan, ...], choice: Any) -> Generation:
    """Raises TryAgainError for an answer that was cut off, ModelError for one that cannot be used."""
    reason = choice.get("finish_reason")
    if reason not in ("stop", "length"):
        raise TryAgainError(f"ended a request with {shown(reason)}")
    if not tokens.ids or any(not -9000 < one <= 0 for one in tokens.logprobs):  # NO_LOGPROB, or not a number
        raise http.error("gave a token without a log-probability; look into its log, and at the weights")
    found: FinishReason = "stop" if reason == "stop" else "length"
    return Generation(tokens.ids, tokens.logprobs, spans, found, tokens.kept)
