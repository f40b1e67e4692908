"""Batches of waiting requests: a batch that raises fails its own calls, each with an error of its own."""

import asyncio
import threading

import pytest

from rollstream.producers.engines.base import DeviceLostError, Generation, GenerationRequest
from rollstream.producers.engines.batching import Batcher, ContinuousBatcher, Outcome
from rollstream.producers.engines.scheduling import JoinLimits, PoolCapacity
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


class FakeRows:
    """Rows with room for any number, none of which has to leave."""

    def __init__(self):
        self.live = []

    @property
    def num_live(self):
        return len(self.live)

    def new_tokens(self):
        return []

    def capacity(self, model_group):
        return PoolCapacity()

    def requeued(self):
        return []

    def drop(self):
        return self.live


class Failing(FakeRows):
    """Rows that answer after one forward; a long prompt fails when it joins, a longer one in its forward."""

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


def test_a_failed_forward_fails_its_own_calls_alone():
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


class Broken(FakeRows):
    """Rows that are generated for two forwards; one of their methods raises as long as they are `broken`."""

    def __init__(self, broken):
        super().__init__()
        self.broken = broken

    def found(self, name, value):
        if self.broken == name:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return value

    def capacity(self, model_group):
        return self.found("capacity", super().capacity(model_group))

    def requeued(self):
        return self.found("requeued", super().requeued())

    def new_tokens(self):
        return self.found("new_tokens", super().new_tokens())

    def join(self, tickets, answer) -> list[Outcome]:
        self.live += [(ticket, 0) for ticket in tickets]
        return self.found("join", [])

    def step(self) -> list[Outcome]:
        found: list[Outcome] = []
        run([ticket for ticket, steps in self.live if steps == 1], found.extend)
        self.live = [(ticket, 1) for ticket, steps in self.live if steps == 0]
        return self.found("step", found)

    def drop(self):
        live, self.live = self.live, []
        return [ticket for ticket, _ in live]


@pytest.mark.timeout(30)
def test_work_that_is_not_ready_holds_up_its_own_model_group_alone():
    async def scenario():
        ready, done = threading.Event(), []
        batcher = ContinuousBatcher(Failing(), JoinLimits(2), initialize=lambda: None)

        def work(name, holds, is_ready=lambda: True):
            return batcher.between_forwards(lambda: done.append(name), is_ready=is_ready, holds=holds)

        held = [asyncio.create_task(work("first", GROUP, ready.is_set)), asyncio.create_task(work("second", GROUP))]
        await asyncio.sleep(0)
        await asyncio.gather(work("other", "run-1/other"), work("adapter", None))
        ready.set()
        await asyncio.gather(*held)
        await batcher.close()
        return done

    assert asyncio.run(scenario()) == ["other", "adapter", "first", "second"]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("broken", ["capacity", "join", "step", "requeued", "new_tokens"])
def test_an_error_between_forwards_fails_calls_and_jobs_and_later_ones_are_served(broken, caplog):
    async def scenario():
        rows = Broken(broken)
        batcher = ContinuousBatcher(rows, JoinLimits(2), initialize=lambda: None)
        asked = [GenerationRequest(GROUP, [number], Sampling(), 0) for number in range(5)]
        job = asyncio.create_task(batcher.between_forwards(lambda: 7, is_ready=lambda: not rows.broken))
        failed: list[object] = [*await asyncio.gather(*map(batcher.submit, asked), return_exceptions=True)]
        failed += await asyncio.gather(job, return_exceptions=True)
        assert not rows.live
        rows.broken = ""
        answers = await asyncio.gather(*map(batcher.submit, asked))
        assert await batcher.between_forwards(lambda: 8) == 8
        await batcher.close()
        return failed, [answer.token_ids for answer in answers]

    failed, served = asyncio.run(scenario())
    assert served == [(0,), (1,), (2,), (3,), (4,)]
    assert len(set(map(id, failed))) == 6
    for error in failed:
        assert isinstance(error, BaseException)
        with pytest.raises(DeviceLostError, match="the rollout engine failed: RuntimeError: CUDA error: device-side"):
            raise error
        assert isinstance(error.__cause__, RuntimeError)
    assert "the rollout engine failed between two forwards" in caplog.text
    assert "in found" in caplog.text, "the traceback"


class Endless(FakeRows):
    """Rows whose forward, in `join` as a static batch or in `step`, lasts until nobody waits for its ticket."""

    def __init__(self, *, is_static):
        super().__init__()
        self.is_static = is_static
        self.begun = threading.Event()

    def compute(self, tickets):
        self.begun.set()
        while any(ticket.is_wanted() for ticket in tickets):
            threading.Event().wait(0.001)

    def join(self, tickets, answer) -> list[Outcome]:
        if self.is_static:
            self.compute(tickets)
            run(tickets, answer)
        else:
            self.live += tickets
        return []

    def step(self) -> list[Outcome]:
        live, self.live = self.live, []
        self.compute(live)
        found: list[Outcome] = []
        run(live, found.extend)
        return found


@pytest.mark.timeout(30)
@pytest.mark.parametrize("is_static", [True, False])
def test_calls_in_progress_end_at_once_when_it_is_closed(is_static):
    async def scenario():
        rows = Endless(is_static=is_static)
        batcher = ContinuousBatcher(rows, JoinLimits(2), initialize=lambda: None)
        calls = [asyncio.create_task(batcher.submit(GenerationRequest(GROUP, [1], Sampling(), 0))) for _ in range(3)]
        await asyncio.to_thread(rows.begun.wait)
        job = asyncio.create_task(batcher.between_forwards(lambda: 7))
        await asyncio.sleep(0)
        async with asyncio.timeout(10):
            await batcher.close()
            await asyncio.wait({*calls, job})
        assert all(call.cancelled() for call in (*calls, job))

    asyncio.run(scenario())


@pytest.mark.timeout(30)
def test_a_job_whose_caller_was_cancelled_before_its_turn_is_left_out():
    async def scenario():
        rows, ran = Endless(is_static=False), []
        batcher = ContinuousBatcher(rows, JoinLimits(2), initialize=lambda: None)
        call = asyncio.create_task(batcher.submit(GenerationRequest(GROUP, [1], Sampling(), 0)))
        await asyncio.to_thread(rows.begun.wait)
        jobs = [
            asyncio.create_task(batcher.between_forwards(lambda: ran.append("never"), is_ready=lambda: False)),
            asyncio.create_task(batcher.between_forwards(lambda: ran.append("cancelled"))),
        ]
        last = asyncio.create_task(batcher.between_forwards(lambda: ran.append("last")))
        await asyncio.sleep(0)
        for one in (*jobs, call):
            one.cancel()
        await last
        await batcher.close()
        assert ran == ["last"]

    asyncio.run(scenario())
