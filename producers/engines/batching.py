"""Groups waiting requests into batches and runs them in one worker thread. Knows no model.

`Batcher` runs one batch after the other; with `ContinuousBatcher` requests join and leave between two forwards.
Whatever else must not run beside a forward (loading weights) takes its turn in the same thread.
"""

import asyncio
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from rollstream.eventlog.blocking_calls import in_own_thread
from rollstream.producers.engines.base import CLOSED, DeviceLostError, Generation, GenerationRequest
from rollstream.producers.engines.scheduling import MAX_PADDED_TOKENS, JoinLimits, PoolCapacity, WaitingPrompt, joining
from rollstream.schemas.errors import ModelError, describe, is_of_device

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


@dataclass(eq=False, slots=True)
class Ticket:
    """A request and the future of its caller."""

    request: GenerationRequest
    answer: "asyncio.Future[Generation]" = field(repr=False)
    reported: list[int] = field(default_factory=list[int])
    """Tokens that `on_tokens` was given: an answer that is begun again must begin with them."""
    is_requeued: bool = False
    """Whether its row had to leave for lack of memory."""

    def is_wanted(self) -> bool:
        """Whether somebody still waits; may be asked from any thread."""
        return not self.answer.done()


Outcome = tuple[Ticket, Generation | Exception]
Answer = Callable[[list[Outcome]], object]
NewTokens = tuple[Ticket, Sequence[int]]
"""Ids that were sampled since."""
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
            raise ModelError(CLOSED)
        ticket = Ticket(request, asyncio.get_running_loop().create_future())
        self._waiting.append(ticket)
        if self._running is None:
            self._running = asyncio.create_task(self._work())
        return await ticket.answer

    async def between_forwards(
        self, work: Callable[[], Result], *, is_ready: Callable[[], bool] = lambda: True, holds: str | None = None
    ) -> Result:
        """Run `work` in the worker thread once the batch in progress is done, when everything is ready.

        Raises what it raises, and ModelError once closed.
        """
        if self._is_closed:
            raise ModelError(CLOSED)
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
        await in_own_thread(self._thread.shutdown)

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
                _resolve(tickets, batch.exception())
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


class Rows(Protocol):
    """Sequences that are being generated. Called in the worker thread."""

    @property
    def num_live(self) -> int:
        """Number of rows in the next forwards."""
        ...

    def capacity(self, model_group: str) -> PoolCapacity:
        """Memory for further rows of a model group."""
        ...

    def requeued(self) -> list[Ticket]:
        """Tickets since the last call whose rows had to leave for lack of memory; they are to join again."""
        ...

    def join(self, tickets: Sequence[Ticket], answer: Answer) -> list[Outcome]:
        """Take tickets of one model group; returns the outcomes of those that ended at once."""
        ...

    def step(self) -> list[Outcome]:
        """Sample one token for every row; returns the outcomes of rows that ended."""
        ...

    def new_tokens(self) -> list[NewTokens]:
        """Tokens sampled since the last call, for live rows that report them."""
        ...

    def drop(self) -> list[Ticket]:
        """Stop all rows; returns their tickets."""
        ...


@dataclass(eq=False, slots=True)
class ThreadJob:
    """Work between two forwards."""

    work: Callable[[], Any]
    done: "asyncio.Future[Any]" = field(repr=False)
    is_ready: Callable[[], bool]
    """Asked before each forward, in the worker thread."""
    holds: str | None
    """Model group that nothing joins until the work is done."""


class ContinuousBatcher:
    """Takes requests from the event loop's thread; the worker thread lets them join `rows` between two forwards."""

    def __init__(self, rows: Rows, limits: JoinLimits, *, initialize: Callable[[], None]) -> None:
        """`initialize` is called once, first, in the worker thread."""
        self._rows = rows
        self._limits = limits
        self._thread = ThreadPoolExecutor(1, "rollout-engine", initialize)
        self._lock = threading.Lock()
        """Lock of the inboxes and `_is_running`."""
        self._open: set[Ticket] = set()
        """Tickets whose callers wait, wherever they are. Used in the event loop's thread."""
        self._new: list[Ticket] = []
        """Tickets submitted in this turn of the event loop: handed over together, so that they join together."""
        self._inbox: list[Ticket] = []
        self._jobs: list[ThreadJob] = []
        self._is_running = self._is_closed = False
        self._waiting: list[tuple[Ticket, int]] = []
        """Waiting tickets, each with the step of its arrival. Used in the worker thread."""
        self._num_steps = 0

    async def submit(self, request: GenerationRequest) -> Generation:
        """The generation. Raises ModelError once closed, or if its forward failed."""
        if self._is_closed:
            raise ModelError(CLOSED)
        loop = asyncio.get_running_loop()
        ticket = Ticket(request, loop.create_future())
        if not self._new:
            loop.call_soon(self._hand_over, loop)
        self._new.append(ticket)
        self._open.add(ticket)
        try:
            return await ticket.answer
        finally:
            self._open.discard(ticket)

    async def between_forwards(
        self, work: Callable[[], Result], *, is_ready: Callable[[], bool] = lambda: True, holds: str | None = None
    ) -> Result:
        """Run `work` in the worker thread, between two forwards, once `is_ready`.

        Raises what it raises, and ModelError once closed. Work whose caller was cancelled before its turn is left out.
        """
        if self._is_closed:
            raise ModelError(CLOSED)
        loop = asyncio.get_running_loop()
        self._hand_over(loop)
        job = ThreadJob(work, loop.create_future(), is_ready, holds)
        with self._lock:
            self._jobs.append(job)
        self._start(loop)
        return await job.done

    async def close(self) -> None:
        """Cancel what waits and what is in progress; return once the thread has ended.

        Calls are cancelled first, those of the forward in progress too: a static batch ends early when nobody waits.
        """
        self._is_closed = True
        _cancel(self._open)
        with self._lock:
            for job in self._jobs:
                job.done.cancel()
        await in_own_thread(self._thread.shutdown)
        self._rows.drop()
        self._jobs.clear()
        self._new.clear()
        self._inbox.clear()
        self._waiting.clear()

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._new or self._is_closed:
            return
        with self._lock:
            self._inbox += self._new
        self._new = []
        self._start(loop)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            if self._is_running or self._is_closed:
                return
            self._is_running = True
        self._thread.submit(self._work, loop)

    def _answer_all(self, error: Exception) -> None:
        """Answer calls and jobs with an error once the worker thread has stopped, but calls not yet handed over."""
        with self._lock:
            jobs, self._jobs, self._inbox = self._jobs, [], []
            self._is_running = False
        self._waiting.clear()
        _resolve([ticket for ticket in self._open if ticket not in self._new], error)
        for job in jobs:
            _set(job.done, None, _failure(error))

    # ---- in the worker thread ----

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        def answer(outcomes: list[Outcome]) -> None:
            if outcomes and not self._is_closed:
                loop.call_soon_threadsafe(_answer, outcomes)

        try:
            while self._receive():
                held = self._run_jobs(loop)
                joined = self._joining(held)
                if joined:
                    answer(self._rows.join(joined, answer))
                answer(self._rows.step())
                self._waiting[:0] = [(ticket, self._num_steps) for ticket in self._rows.requeued()]
                if new_tokens := self._rows.new_tokens():
                    loop.call_soon_threadsafe(_send_new_tokens, new_tokens)
                self._num_steps += 1
        except Exception as error:  # noqa: BLE001 - drivers raise anything, and each call gets an error of its own
            self._fail(loop, error)

    def _fail(self, loop: asyncio.AbstractEventLoop, error: Exception) -> None:
        """Stop after an error that is not of one forward; what is asked from then on starts the work again."""
        logger.error("the rollout engine failed between two forwards, and with it all calls", exc_info=error)
        try:
            self._rows.drop()
        finally:
            if not self._is_closed:
                # Without its traceback, which holds tensors.
                loop.call_soon_threadsafe(self._answer_all, error.with_traceback(None))

    def _receive(self) -> bool:
        """Whether there is anything to do."""
        with self._lock:
            self._waiting += [(ticket, self._num_steps) for ticket in self._inbox]
            self._inbox = []
            has_work = bool(self._waiting or self._jobs or self._rows.num_live)
            self._is_running = has_work and not self._is_closed
            return self._is_running

    def _run_jobs(self, loop: asyncio.AbstractEventLoop) -> set[str]:
        """Run the jobs that are ready, those that hold one model group in order; returns the groups that are held."""
        waiting: set[str] = set()
        for job in list(self._jobs):
            try:
                is_wanted = not job.done.done()
                if is_wanted and (job.holds in waiting or not job.is_ready()):
                    waiting |= {job.holds} if job.holds is not None else set()
                    continue
                resolve = functools.partial(_set, job.done, job.work() if is_wanted else None, None)
            except Exception as error:  # noqa: BLE001 - of whoever asked
                resolve = functools.partial(_set, job.done, None, error)
            with self._lock:
                self._jobs.remove(job)
            loop.call_soon_threadsafe(resolve)
        return {job.holds for job in self._jobs if job.holds is not None}

    def _joining(self, held: set[str]) -> list[Ticket]:
        self._waiting = [(ticket, since) for ticket, since in self._waiting if ticket.is_wanted()]
        candidates = [
            WaitingPrompt(
                request.model_group,
                len(request.prompt_ids),
                self._num_steps - since,
                len(request.prompt_ids) + request.sampling.max_new_tokens,
            )
            for request, since in ((ticket.request, since) for ticket, since in self._waiting)
        ]
        chosen = joining(
            candidates, num_live=self._rows.num_live, limits=self._limits, held=held, capacity_of=self._rows.capacity
        )
        taken = [self._waiting[index][0] for index in chosen]
        if taken:
            gone = set(chosen)
            self._waiting = [one for index, one in enumerate(self._waiting) if index not in gone]
        return taken


def _set(done: "asyncio.Future[Any]", result: object, error: Exception | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)


def _answer(answers: list[Outcome]) -> None:
    for ticket, outcome in answers:
        if ticket.answer.done():
            continue
        if isinstance(outcome, Generation):
            ticket.answer.set_result(outcome)
        else:
            ticket.answer.set_exception(_failure(outcome))


def _send_new_tokens(new_tokens: list[NewTokens]) -> None:
    for ticket, ids in new_tokens:
        if ticket.request.on_tokens is not None and not ticket.answer.done():
            ticket.request.on_tokens(ids)


def _cancel(tickets: Iterable[Ticket]) -> None:
    for ticket in tickets:
        ticket.answer.cancel()


def _resolve(tickets: list[Ticket], error: BaseException | None) -> None:
    for ticket in tickets:
        if not ticket.answer.done():
            ticket.answer.set_exception(_failure(error))


def _failure(error: BaseException | None) -> ModelError:
    """An error of its own for each caller: what is raised collects the frames that it passes."""
    if error is None:
        return ModelError("the rollout engine gave no answer")
    if isinstance(error, ModelError):
        failure = ModelError(str(error))
    elif is_of_device(error):
        failure = DeviceLostError(
            f"the rollout engine failed: {describe(error)}; only another process may be able to use the GPU: this one "
            "ends; check the GPU if that happens again"
        )
    else:
        failure = ModelError(f"the rollout engine failed: {describe(error)}; its process's log has the traceback")
    failure.__cause__ = error
    return failure
