"""Groups waiting requests into batches and runs them, one at a time, in one worker thread. Knows no model.

Whatever else must not run beside a batch (loading weights) takes its turn in the same thread, between batches.
"""

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from rollstream.producers.engines.base import Generation, GenerationRequest
from rollstream.schemas.errors import ModelError, told

MAX_PADDED_TOKENS = 131_072
"""Prompt tokens of one batch, padding included: bounds the memory of a prefill."""

Result = TypeVar("Result")


@dataclass(eq=False, slots=True)
class Ticket:
    """A request and whoever waits for it."""

    request: GenerationRequest
    answer: "asyncio.Future[Generation]" = field(repr=False)

    def is_wanted(self) -> bool:
        """Whether somebody still waits; may be asked from any thread."""
        return not self.answer.done()


Answer = Callable[[list[tuple[Ticket, Generation]]], object]
RunBatch = Callable[[list[Ticket], Answer], None]
"""Generates for tickets of one model group, in the worker thread; answers each as soon as it can."""


class Batcher:
    """Takes requests from the event loop's thread; `run` works them off in the worker thread."""

    def __init__(self, run: RunBatch, *, max_batch: int, initialize: Callable[[], None]) -> None:
        """`initialize` is called once, first, in the worker thread."""
        self._run = run
        self._max_batch = max_batch
        self._thread = ThreadPoolExecutor(1, "rollout-engine", initialize)
        self._waiting: list[Ticket] = []
        self._running: asyncio.Task[None] | None = None
        self._is_closed = False

    async def submit(self, request: GenerationRequest) -> Generation:
        """The generation. Raises ModelError once closed, or if the batch failed."""
        if self._is_closed:
            raise ModelError("the rollout engine is closed")
        ticket = Ticket(request, asyncio.get_running_loop().create_future())
        self._waiting.append(ticket)
        if self._running is None:
            self._running = asyncio.create_task(self._work())
        return await ticket.answer

    async def between_batches(self, work: Callable[[], Result]) -> Result:
        """Run `work` in the worker thread once the batch that is under way is done."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def close(self) -> None:
        """Cancel what waits and what is under way; return once the thread has ended."""
        self._is_closed = True
        for ticket in self._waiting:
            ticket.answer.cancel()
        self._waiting.clear()
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
        await asyncio.to_thread(self._thread.shutdown)

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        answer: Answer = functools.partial(loop.call_soon_threadsafe, _answer)
        try:
            while tickets := self._take():
                batch = loop.run_in_executor(self._thread, self._run, tickets, answer)
                try:
                    await asyncio.wait({batch})
                except asyncio.CancelledError:
                    _cancel(tickets)
                    raise
                _settle(tickets, batch.exception())
                # Answers are on their way to those who asked; what they ask next joins the next batch.
                await asyncio.sleep(0)
        finally:
            self._running = None

    def _take(self) -> list[Ticket]:
        """The next batch: the model group that has waited longest, in order of arrival, as much as is allowed."""
        waiting = [ticket for ticket in self._waiting if ticket.is_wanted()]
        taken: list[Ticket] = []
        width = 0
        for ticket in waiting:
            if ticket.request.model_group != waiting[0].request.model_group:
                continue
            width = max(width, len(ticket.request.prompt_ids))
            if taken and (len(taken) == self._max_batch or width * (len(taken) + 1) > MAX_PADDED_TOKENS):
                break
            taken.append(ticket)
        gone = set(taken)
        self._waiting = [ticket for ticket in waiting if ticket not in gone]
        return taken


def _answer(answers: list[tuple[Ticket, Generation]]) -> None:
    for ticket, generation in answers:
        if not ticket.answer.done():
            ticket.answer.set_result(generation)


def _cancel(tickets: list[Ticket]) -> None:
    for ticket in tickets:
        ticket.answer.cancel()


def _settle(tickets: list[Ticket], error: BaseException | None) -> None:
    for ticket in tickets:
        if not ticket.answer.done():
            ticket.answer.set_exception(_failure(error))


def _failure(error: BaseException | None) -> ModelError:
    """An error of its own for each caller: what is raised collects the frames that it passes."""
    if error is None:
        return ModelError("the rollout engine gave no answer")
    failure = ModelError(str(error) if isinstance(error, ModelError) else f"the rollout engine failed: {told(error)}")
    failure.__cause__ = error
    return failure
