"""Sampling as a vLLM server is asked for it, and the tokens, log-probabilities and kept ids of its answers. Pure."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollstream.eventlog.http.http_json import MAX_ANSWER_BYTES
from rollstream.producers.engines.base import GenerationRequest, keeps_ids
from rollstream.producers.engines.sampling import kept_of
from rollstream.producers.engines.vllm.base_model import BaseModel
from rollstream.schemas.errors import PromptRefusedError
from rollstream.schemas.settings import Sampling
from rollstream.schemas.tokens import KeptIds

NO_LOGPROB = -9999.0
"""Sent by vLLM for a token without a log-probability, and for one that limits exclude."""
MIN_TEMPERATURE = 0.01
"""vLLM samples at this temperature where a lower one is asked for, except 0, and reports nothing of it."""
MAX_TEMPERATURE = 2.0
"""vLLM refuses requests above it."""
MAX_UNTOLD = 1e-3
"""Probability that may be lacking of ids whose probabilities add up to 1, for rounding."""
TOLD_BYTES = 200
"""Room in an answer for an id with its log-probability."""


def check_temperature(sampling: Sampling) -> None:
    """Raises PromptRefusedError for a temperature that vLLM refuses, or replaces by another one."""
    wrong = ""
    if 0 < sampling.temperature < MIN_TEMPERATURE:
        wrong = f"vLLM samples at {MIN_TEMPERATURE:g} instead; set 0, or {MIN_TEMPERATURE:g} or more"
    elif sampling.temperature > MAX_TEMPERATURE:
        wrong = f"vLLM refuses more than {MAX_TEMPERATURE:g}; set {MAX_TEMPERATURE:g} or less"
    if wrong:
        refused = PromptRefusedError(f"temperature {sampling.temperature:g}: {wrong}")
        refused.param = "temperature"
        raise refused


def asked(request: GenerationRequest, base: BaseModel, max_new_tokens: int, num_told: int) -> dict[str, Any]:
    """Every sampling setting, because a server could have another default. `num_told`: likeliest ids per token."""
    sampling = request.sampling
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "max_tokens": max_new_tokens,
        "seed": request.seed % 2**63,
        "logprobs": num_told,
        "stop_token_ids": list(base.end_ids),
    }


def nums_requested(request: GenerationRequest, base: BaseModel) -> tuple[int, ...]:
    """Numbers of the likeliest ids to request with each token; numbers after the first are for further tries.

    With `processed_logprobs`, ids that top_p and top_k exclude have probability 0, so all others are what is left.
    vLLM keeps every id whose logit equals the k-th largest, and logits in bfloat16 are often equal, so more than top_k
    can be left. vLLM's own sampling mask says the same, and needs its second model runner, which the CPU does not have.
    """
    if not keeps_ids(request.sampling):
        return (0,)
    top_k = request.sampling.top_k or base.num_token_ids
    return tuple(sorted({min(2 * top_k + 16, base.num_token_ids), min(16 * top_k + 16, base.num_token_ids)}))


def max_bytes_of(request: GenerationRequest, num_told: int) -> int:
    """Bytes of the largest answer: each token has an entry of its own, and one for each of `num_told` ids."""
    return MAX_ANSWER_BYTES + TOLD_BYTES * (num_told + 1) * request.sampling.max_new_tokens


class TooFewToldError(ValueError):
    """More ids were left to sample from than the server was asked to report."""


@dataclass(frozen=True, slots=True)
class AnsweredTokens:
    """The sampled tokens of one answer."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    kept: KeptIds | None


def generated(choice: Mapping[str, Any], request: GenerationRequest, base: BaseModel) -> AnsweredTokens:
    """Parse an answer of `/inference/v1/generate`.

    Raises TooFewToldError; LookupError, TypeError or ValueError if the answer has another form.
    """
    content = choice["logprobs"]["content"]
    ids = tuple(choice["token_ids"])
    if ids != tuple(one["token_id"] for one in content):
        raise ValueError("log-probabilities of other tokens than it sampled; report it to vLLM")
    logprobs = _of_sampled(request, (one["logprob"] for one in content))
    return AnsweredTokens(ids, logprobs, kept_ids(request, base, lambda: top_by_id(content)))


def completed(choice: Mapping[str, Any], request: GenerationRequest, base: BaseModel) -> AnsweredTokens:
    """Parse an answer of `/v1/completions`; raises the same errors as `generated`."""
    if "token_ids" not in choice:
        raise ValueError("use a vLLM that knows return_token_ids")
    found = choice["logprobs"]
    logprobs = _of_sampled(request, found["token_logprobs"])
    kept = kept_ids(request, base, lambda: top_by_name(found.get("top_logprobs") or ()))
    return AnsweredTokens(tuple(choice["token_ids"]), logprobs, kept)


def _of_sampled(request: GenerationRequest, reported: Iterable[Any]) -> tuple[float, ...]:
    """Log-probabilities in the distribution sampled from: at temperature 0 the likeliest id has all of it, but vLLM
    reports those of temperature 1.
    """
    found = tuple(map(float, reported))
    return found if request.sampling.temperature else (0.0,) * len(found)


def top_by_id(content: Iterable[Mapping[str, Any]]) -> list[dict[int, float]]:
    """Log-probabilities of the likeliest ids by token, of an answer of `/inference/v1/generate`."""
    return [{top["token_id"]: top["logprob"] for top in one.get("top_logprobs") or ()} for one in content]


def top_by_name(tops: Iterable[Mapping[str, float]]) -> list[dict[int, float]]:
    """The same of `/v1/completions`, where an id is called `token_id:N`."""
    return [{int(name.rpartition(":")[2]): logprob for name, logprob in top.items()} for top in tops]


def kept_ids(
    request: GenerationRequest, base: BaseModel, tops: Callable[[], Sequence[Mapping[int, float]]]
) -> KeptIds | None:
    """The ids that each token was sampled from, where they are wanted. `tops`: (T,), by token.

    Raises TooFewToldError if their probabilities do not add up to 1: then others were left too.
    """
    if not keeps_ids(request.sampling):
        return None
    draws = [[(one, logprob) for one, logprob in sorted(top.items()) if logprob > NO_LOGPROB] for top in tops()]
    for drawn in draws:
        total = math.fsum(math.exp(logprob) for _, logprob in drawn)
        if abs(total - 1) > MAX_UNTOLD:
            raise TooFewToldError(
                f"the {len(drawn)} ids that it reports have a total probability of {total:.6f}; if many logits are "
                "equal in the server's dtype, use dtype float32 or a smaller top_k"
            )
    whole = base.num_token_ids
    return kept_of([np.asarray([one for one, _ in drawn] if len(drawn) < whole else [], np.int32) for drawn in draws])
