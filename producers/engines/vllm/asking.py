"""The sampling parameters of a request to a vLLM server, and how long its answer may get."""

from typing import Any

from rollstream.eventlog.http.http_json import MAX_ANSWER_BYTES
from rollstream.producers.engines.base import GenerationRequest, keeps_ids
from rollstream.producers.engines.vllm.base_model import BaseModel

TOLD_BYTES = 200
"""Room in an answer for an id with its log-probability."""


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


def nums_told(request: GenerationRequest, base: BaseModel) -> tuple[int, ...]:
    """How many of the likeliest ids to ask for with each token; a number after the first is for a further try.

    With `processed_logprobs`, ids that top_p and top_k exclude have probability 0, so all others are what is left.
    vLLM keeps every id whose logit equals the k-th largest, and logits in bfloat16 are often equal, so more than top_k
    can be left. vLLM's own sampling mask says the same, and needs its second model runner, which the CPU does not have.
    """
    if not keeps_ids(request.sampling):
        return (0,)
    top_k = request.sampling.top_k or base.num_token_ids
    return tuple(sorted({min(2 * top_k + 16, base.num_token_ids), min(16 * top_k + 16, base.num_token_ids)}))


def max_bytes_of(request: GenerationRequest, num_told: int) -> int:
    """Bytes of the largest answer."""
    return MAX_ANSWER_BYTES + TOLD_BYTES * num_told * request.sampling.max_new_tokens
