"""Requests to real vLLM servers, and comparisons of their answers."""

from typing import Any

import torch

from rollstream.eventlog.http.http_json import HttpServer
from rollstream.producers.engines.base import Generation, GenerationRequest
from rollstream.schemas.settings import Sampling
from tests.producers.engines.engine_rig import GROUP

LONG = 300


def request(seed: int = 1, max_new_tokens: int = 8, **sampling: Any) -> GenerationRequest:
    return GenerationRequest(GROUP, [5, 6, 7], Sampling(max_new_tokens=max_new_tokens, **sampling), seed)


async def is_sampling(url: str) -> bool:
    """Whether the server has begun with requests."""
    http = HttpServer(url, timeout_s=10, key="", key_variable=None)
    try:
        text = (await http.sent("GET", "/metrics")).body.decode()
    finally:
        await http.close()
    lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running")]
    return any(float(line.rpartition(" ")[2]) for line in lines)


def check(answers: list[Generation], versions: set[int]) -> None:
    """Spans tile the ids, and are of these versions."""
    for answer in answers:
        assert sum(span.length for span in answer.spans) == len(answer.token_ids) == len(answer.logprobs)
        assert all(span.length > 0 for span in answer.spans)
        assert {span.version for span in answer.spans} <= versions


def is_same(one: Generation, other: Generation) -> bool:
    return one.token_ids == other.token_ids and torch.allclose(
        torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-4
    )
