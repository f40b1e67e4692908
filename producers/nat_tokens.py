"""Exact tokens of an LLM step, wherever its framework or gateway has left them. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from rollstream.producers.nat_messages import at, first
from rollstream.producers.recorded_logprobs import Logprobs, read_logprobs
from rollstream.schemas.intermediate_steps import IntermediateStepPayload

_IDS = ("prompt_token_ids", "token_ids", "completion_token_ids")


def logprobs_of(end: IntermediateStepPayload) -> Logprobs:
    """All that the end of a call says of its tokens, from all places together; the first that tells a thing wins."""
    found = Logprobs()
    for place in _places(end):
        told = read_logprobs(place)
        found = replace(
            found,
            values=found.values if found.values is not None else told.values,
            completion_ids=found.completion_ids or told.completion_ids,
            prompt_ids=found.prompt_ids or told.prompt_ids,
            spans=found.spans or told.spans,
        )
    return found


def without_logprobs(raw: Any) -> Any:
    """A copy of a framework's payload less what `logprobs_of` has read from it: the event holds it as tokens."""
    if isinstance(raw, Mapping):
        return {key: without_logprobs(value) for key, value in raw.items() if key != "logprobs" and key not in _IDS}
    return [without_logprobs(value) for value in raw] if isinstance(raw, list) else raw


def _places(end: IntermediateStepPayload) -> Iterator[Any]:
    data = end.data
    payload: Any = data.payload if data is not None else None
    message = at(payload, "message")
    for place in (
        at(message, "response_metadata"),
        at(payload, "generation_info"),
        first(at(payload, "choices")),
        first(at(payload, "raw", "choices")),
        at(message, "additional_kwargs"),
        payload,
        at(payload, "raw"),
        end.metadata,
        data.model_extra if data is not None else None,
        end.model_extra,
    ):
        if isinstance(place, Mapping):
            yield place.get("logprobs")
            yield {key: place[key] for key in (*_IDS, "model_group", "version", "spans") if key in place}
