"""A server's answer as a generation: the versions that sampled its tokens, and checks of its completeness."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rollstream.eventlog.blocking_calls import in_own_thread
from rollstream.eventlog.http.http_json import HttpServer, TryAgainError, excerpt
from rollstream.producers.engines.base import FinishReason, Generation, GenerationRequest, keeps_ids
from rollstream.producers.engines.vllm.asking import AnsweredTokens, TooFewToldError
from rollstream.producers.engines.vllm.base_model import BaseModel
from rollstream.producers.engines.vllm.version_files import Version
from rollstream.schemas.errors import ModelError
from rollstream.schemas.events.rollouts import VersionSpan


class LostVersionError(Exception):
    """The server answers, but not with the version that it was given: it was restarted, or somebody else changed it."""


class RefusedVersionError(ModelError):
    """The server is healthy, and answered each of several tries to load a version with an error."""


class NamedVersions:
    """Full weights that a server was given, by the names that its answers have for them.

    They stay though the server loses them: requests in progress may have tokens of them, and a name is never given to
    other weights. They go once no request is in progress that began under them or under weights before them, so at most
    two are more than were given since the oldest request in progress began.
    """

    def __init__(self) -> None:
        self._given: list[Version] = []
        """The newest is the last. One that was given again after another one is there twice."""

    def add(self, version: Version, num_open: Mapping[str, int]) -> None:
        """The server is being given a version. `num_open`: requests in progress by the name that they began under."""
        while len(self._given) > 1 and not num_open.get(self._given[0].name):
            del self._given[0]
        if self._given[-1:] != [version]:
            self._given.append(version)

    def find(self, name: str) -> Version | None:
        """The version of this name; None: no answer may name it."""
        return next((one for one in self._given if one.name == name), None)


def spans_of(
    http: HttpServer,
    request: GenerationRequest,
    version: Version,
    named: NamedVersions,
    length: int,
    given: Sequence[Mapping[str, Any]] | None,
) -> tuple[VersionSpan, ...]:
    """The versions that sampled an answer's tokens: for an adapter one, for full weights those that the server names
    with each answer.

    `named`: versions that the server may name. Raises LostVersionError, ModelError.
    """
    group = request.model_group
    if version.is_lora or given is None:
        return (VersionSpan(model_group=group, version=version.published.version, length=length),)
    spans, end = [], 0
    for one in given:
        sampled_by = named.find(str(one["version"]))
        if sampled_by is None:
            raise LostVersionError(f"answers with the weights {one['version']}")
        if one["start"] != end or one["end"] <= end:
            raise http.error(f"gave version spans that do not follow each other: {excerpt(given)}; look into its log")
        end = one["end"]
        spans.append(VersionSpan(model_group=group, version=sampled_by.published.version, length=end - one["start"]))
    if end != length:
        raise http.error(f"gave version spans over {end} of {length} tokens; look into its log")
    return tuple(spans)


async def parsed_answer(
    http: HttpServer,
    turn: asyncio.Lock,
    read: Callable[[], Any],
    tokens_of: Callable[[Mapping[str, Any], GenerationRequest, BaseModel], AnsweredTokens],
    request: GenerationRequest,
    base: BaseModel,
) -> tuple[dict[str, Any], AnsweredTokens]:
    """An answer's finish reason and versions, and its tokens.

    With kept ids it is parsed in a thread: this can take seconds, and Kafka's heartbeats run in the event loop. `turn`:
    held meanwhile, as the parsed form takes many times the memory. Raises TooFewToldError, ModelError.
    """

    def parse() -> tuple[dict[str, Any], AnsweredTokens]:
        choice = read()
        with reading(http, choice):
            tokens = tokens_of(choice, request, base)
            return {name: choice.get(name) for name in ("finish_reason", "weight_versions")}, tokens

    if not keeps_ids(request.sampling):
        return parse()
    async with turn:
        return await in_own_thread(parse)


def choice_of(http: HttpServer, body: bytes) -> Any:
    """The only choice of an answer. Raises ModelError."""
    found = http.parsed(body)
    try:
        return found["choices"][0]
    except (LookupError, TypeError) as error:
        raise http.error(f"gave an answer without choices: {excerpt(found)}; look into its log") from error


@contextmanager
def reading(http: HttpServer, choice: Any) -> Iterator[None]:
    """Raises ModelError for an answer that lacks what the block reads from it. TooFewToldError stays what it is."""
    try:
        yield
    except TooFewToldError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise http.error(
            f"gave an answer without token ids or log-probabilities ({error}): {excerpt(choice)}; look into its log"
        ) from error


def generation_of(http: HttpServer, tokens: AnsweredTokens, spans: tuple[VersionSpan, ...], choice: Any) -> Generation:
    """Raises TryAgainError for an answer that was cut off, ModelError for one that cannot be used."""
    reason = choice.get("finish_reason")
    if reason not in ("stop", "length"):
        raise TryAgainError(f"ended a request with {excerpt(reason)}")
    if not tokens.ids or any(not -9000 < one <= 0 for one in tokens.logprobs):  # NO_LOGPROB, or not a number
        raise http.error("gave a token without a log-probability; look into its log, and at the weights")
    found: FinishReason = "stop" if reason == "stop" else "length"
    return Generation(tokens.ids, tokens.logprobs, spans, found, tokens.kept)
