"""Batches of waiting requests: a batch that raises fails its own calls, each with an error of its own."""

import asyncio

import pytest

from rollstream.producers.engines.base import Generation, GenerationRequest
from rollstream.producers.engines.batching import Batcher, ContinuousBatcher, Outcome
from rollstream.producers.engines.scheduling import JoinLimits
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
        with pytest.raises(ModelError, match="closed"):
            await batcher.between_forwards(lambda: 7)
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


class Failing:
    """Rows that answer after one forward; a long prompt fails when it joins, a longer one in its forward."""

    def __init__(self):
        self.live = []

    @property
    def num_live(self):
        return len(self.live)

    def join(self, tickets, answer) -> list[Outcome]:
        if any(len(ticket.request.prompt_ids) == 4 for ticket in tickets):
            return [(ticket, RuntimeError("CUDA out of memory")) for ticket in tickets]
        self.live += tickets
        return []

    def step(self) -> list[Outcome]:
        live, self.live = self.live, []
        if any(len(ticket.request.prompt_ids) == 5 for ticket in live):
            return [(ticket, RuntimeError("CUDA out of memory")) for ticket in live]
        found: list[Outcome] = []
        run(live, found.extend)
        return found

    def new_tokens(self):
        return []

    def drop(self):
        return self.live


def test_what_fails_in_a_forward_fails_alone_and_jobs_and_later_calls_go_on():
    async def scenario():
        batcher = ContinuousBatcher(Failing(), JoinLimits(2), initialize=lambda: None)
        prompts = ([1] * 4, [2], [3], [4], [1] * 5, [6], [7])
        asked = [GenerationRequest(GROUP, prompt, Sampling(), 0) for prompt in prompts]
        answers = await asyncio.gather(*map(batcher.submit, asked), return_exceptions=True)
        with pytest.raises(ModelError, match="no such file"):
            await batcher.between_forwards(fail)
        assert await batcher.between_forwards(lambda: 7) == 7
        last = await batcher.submit(asked[1])
        await batcher.close()
        for call in (batcher.submit(asked[1]), batcher.between_forwards(lambda: 7)):
            with pytest.raises(ModelError, match="closed"):
                await call
        return answers, last

    def fail():
        raise ModelError("no such file")

    answers, last = asyncio.run(scenario())
    assert [getattr(answer, "token_ids", None) for answer in answers] == [None, None, (3,), (4,), None, None, (7,)]
    for error in (answers[0], answers[4]):
        assert isinstance(error, BaseException)
        with pytest.raises(ModelError, match=r"the rollout engine failed: RuntimeError: CUDA out of memory"):
            raise error
    assert last.token_ids == (2,)
