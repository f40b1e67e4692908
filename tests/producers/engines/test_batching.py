"""How waiting requests become batches: a batch that raises fails its own calls, each with an error of its own."""

import asyncio

import pytest

from rollstream.producers.engines.base import Generation, GenerationRequest
from rollstream.producers.engines.batching import Batcher
from rollstream.schemas.errors import ModelError
from rollstream.schemas.events.rollouts import VersionSpan
from rollstream.schemas.settings import Sampling

GROUP = "run-1/policy"


def run(tickets, answer):
    """Answers with the prompt; has no memory for long ones."""
    if any(len(ticket.request.prompt_ids) > 3 for ticket in tickets):
        raise RuntimeError("CUDA out of memory")
    for ticket in tickets:
        ids = tuple(ticket.request.prompt_ids)
        span = VersionSpan(model_group=GROUP, version=0, length=len(ids))
        answer([(ticket, Generation(ids, (0.0,) * len(ids), (span,), "length"))])


def test_a_batch_that_raises_fails_its_calls_and_not_the_next():
    async def scenario():
        batcher = Batcher(run, max_batch=2, initialize=lambda: None)
        prompts = ([1] * 4, [2], [3], [4])
        asked = [GenerationRequest(GROUP, prompt, Sampling(), 0) for prompt in prompts]
        answers = await asyncio.gather(*map(batcher.submit, asked), return_exceptions=True)
        await batcher.close()
        return answers

    first, second, *others = asyncio.run(scenario())
    assert isinstance(first, BaseException)
    assert isinstance(second, BaseException)
    assert [getattr(other, "token_ids", None) for other in others] == [(3,), (4,)]
    for error in (first, second):
        with pytest.raises(ModelError, match=r"the rollout engine failed: RuntimeError .*CUDA out of memory"):
            raise error
        assert isinstance(error.__cause__, RuntimeError)
    assert first is not second
