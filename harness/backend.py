"""The backend of the harness' components: one run on its log, followed as it goes on. One a workspace in a process.

`rollstream finetune` opens it before it builds components; under another harness our adapter's `initialize` does
(`open_backend`). Constructors of components connect to nothing. Whoever cleans up closes it.
"""

import asyncio
import atexit
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self, TypeVar

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import EventLog
from rollstream.harness.config.config_file import Loaded
from rollstream.harness.config.finetune_config import block_of, is_ours
from rollstream.harness.config.settings import JobSpec
from rollstream.harness.dataset import Example
from rollstream.harness.display import Display
from rollstream.harness.driver import lacking
from rollstream.harness.follower import Follower, follow
from rollstream.harness.plan import RunPlan
from rollstream.harness.progress import JobProgress
from rollstream.harness.run_view import JobView, RunView
from rollstream.harness.services.broker_watch import keep_running
from rollstream.harness.surroundings import Connected, Held, Opening, connected, has_room, held
from rollstream.processors.dataset import load_dataset
from rollstream.schemas.base import Event
from rollstream.schemas.config import RunConfig
from rollstream.schemas.errors import ConfigError, RunFailedError

POLL_S = 0.5
T = TypeVar("T")
_OPEN: dict[Path, "Backend"] = {}


class Backend:
    """A run, its log, and what both hold. Use it as an async context, or `start` and `close` it."""

    def __init__(
        self,
        log: EventLog,
        artifacts: ArtifactStore,
        run: RunPlan,
        config: RunConfig,
        *,
        workspace: Path,
        display: Display | None = None,
    ) -> None:
        self.log = log
        self.artifacts = artifacts
        self.run = run
        self.config = config
        self.workspace = workspace.absolute()
        self.display = display or Display()
        self.view = RunView()
        self.epoch_offset = 0
        """Epochs that were done before a foreign trainer, which counts from 0, went on with the run."""
        self.curriculum_percentile: float | None = None
        """How far the trainer's curriculum has opened; it rides along with what is submitted."""
        self.is_own = False
        """Opened by the components themselves, which then end the run and close this."""
        self.on_activity: Callable[[], None] = lambda: None
        self._news = asyncio.Event()
        self._sent: set[str] = set()
        self._held = AsyncExitStack()
        self._minding: list[asyncio.Task[None]] = []
        self._examples: tuple[Example, ...] | None = None

    @property
    def spec(self) -> JobSpec:
        """The job that components submit to: the run's last."""
        return self.run.jobs[-1]

    @property
    def job(self) -> JobView:
        """That job's groups, seals and submissions."""
        return self.view.job(self.spec.job_id)

    @property
    def job_progress(self) -> JobProgress:
        """Where that job is."""
        return self.view.progress.job(self.spec.job_id)

    @property
    def examples(self) -> tuple[Example, ...]:
        """The run's examples, in the order of its dataset. Raises ArtifactError."""
        if self._examples is None:
            rows = load_dataset(self.artifacts, self.run.started)
            self._examples = tuple(Example(example_id, dict(inputs)) for example_id, inputs in rows.items())
        return self._examples

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self, *minding: Coroutine[Any, Any, None]) -> None:
        """Begin to follow the log, and to mind what else the run needs. Raises ConfigError if one is open already."""
        if _OPEN.setdefault(self.workspace, self) is not self:
            raise ConfigError(f"workspace {self.workspace}: a run is conducted there already in this process")
        try:
            await self._begin_to_follow()
        except BaseException:
            for work in minding:
                work.close()
            await self.close()
            raise
        for work in minding:
            self._mind(work)

    async def _begin_to_follow(self) -> None:
        run_id = self.run.started.run_id
        follower = await follow(self.log, run_id, from_end=self.run.is_new, on_event=self.view.take)
        self._held.push_async_callback(follower.close)
        self.view.progress = await follower.catch_up()
        self._mind(self._follow(follower))

    def _mind(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._tell())
        self._minding.append(task)

    async def close(self) -> None:
        """Let go of everything, in order. Closing twice changes nothing."""
        _OPEN.pop(self.workspace, None)
        for task in self._minding:
            task.cancel()
        await asyncio.gather(*self._minding, return_exceptions=True)
        self._minding.clear()
        await self._held.aclose()

    def hold(self, stack: AsyncExitStack) -> None:
        """Let go of `stack` too when this is closed."""
        self._held.push_async_callback(stack.aclose)

    async def begin(self) -> None:
        """Write what the log lacks until the job has started; earlier jobs of the run are conducted to their end.

        Raises RunFailedError if one of them cannot be done, or the run is over.
        """
        while self.job_progress.started is None:
            news = self._news
            await self.send(lacking(self.view.progress, self.run.started, self.run.jobs))
            self._check()
            await _wait(news, POLL_S)

    async def send(self, events: Sequence[Event]) -> None:
        """Write events that this process has not written yet, in order; returns when they are acknowledged."""
        fresh = [event for event in events if event.event_id not in self._sent]
        if fresh:
            await self.log.send_all(fresh)
            self._sent.update(event.event_id for event in fresh)

    async def until(self, answer: Callable[[], T | None]) -> T:
        """What `answer` says first that is not None; asked again whenever the run's log has news.

        Raises RunFailedError if the run ends, its job cannot be done or its services fail before there is an answer.
        """
        while True:
            news = self._news
            found = answer()
            if found is not None:
                return found
            self._check()
            await _wait(news, None)

    async def news(self, timeout_s: float) -> None:
        """Wait for the next news, at most `timeout_s`. Raises what a service failed with."""
        news = self._news
        self.check_services()
        await _wait(news, timeout_s)

    async def room(self) -> None:
        """Wait until there is room on the disk for a next epoch."""
        while not has_room(self.workspace, self.display):
            self.check_services()
            await asyncio.sleep(POLL_S)

    def check_services(self) -> None:
        """Raises what a service, the broker or the reading of the log failed with."""
        for task in self._minding:
            if task.done() and not task.cancelled():
                task.result()

    def _check(self) -> None:
        self.check_services()
        progress = self.view.progress
        if progress.ended is not None:
            raise RunFailedError(f"run {progress.run_id} {progress.ended.cause}: {progress.ended.message}".rstrip(": "))
        for job_id, job in progress.jobs.items():
            if job.outcome in ("failed", "cancelled"):
                raise RunFailedError(f"job {job_id} {job.outcome}: {job.error}")

    async def _follow(self, follower: Follower) -> None:
        while True:
            before = self.view.num_events
            self.display.update(self.view.progress)
            self.view.progress = await follower.advance(POLL_S)
            if self.view.num_events > before:
                self.on_activity()
                self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


def backend_of(opening: Opening, around: Held, run: Connected, display: Display) -> Backend:
    """The backend of a run that is connected already."""
    return Backend(run.log, run.artifacts, run.run, opening.config, workspace=around.place.workspace, display=display)


def minding(backend: Backend, around: Held, run: Connected) -> list[Coroutine[Any, Any, None]]:
    """What is to be looked after while the backend is open: services, and a broker of our own."""
    backend.on_activity = run.supervisor.progressed
    work: list[Coroutine[Any, Any, None]] = [run.supervisor.watch()]
    if around.broker is not None:
        work.append(keep_running(around.broker, backend.display.say))
    return work


def opened(workspace: Path) -> Backend | None:
    """The backend that is open in a workspace, if there is one."""
    return _OPEN.get(workspace.absolute())


async def open_backend(loaded: Loaded, workspace: Path, name: str, display: Display | None = None) -> Backend:
    """Open a backend for components that another harness conducts: broker, services, and a new run whose planning is
    `submitted`. Raises RollstreamError.
    """
    display = display or Display()
    opening = Opening(_submitted(loaded), workspace, name)
    async with AsyncExitStack() as stack:
        around = stack.enter_context(held(opening, display))
        run = await stack.enter_async_context(connected(opening, around.place, display))
        backend = backend_of(opening, around, run, display)
        backend.is_own = True
        atexit.register(run.supervisor.kill)  # for whoever never closes
        await backend.start(*minding(backend, around, run))
        backend.hold(stack.pop_all())
        return backend


def _submitted(loaded: Loaded) -> Loaded:
    """The same configuration, conducted by components; what is stored says so too."""
    config, name = loaded.config, loaded.config.finetuning.trainer
    trainer = config.trainer.model_copy(update={"planning": "submitted"})
    written: dict[str, Any] = {**loaded.written}
    blocks: Any = written.get("trainers", {})
    if is_ours(block_of(loaded.finetune, "trainer")) and isinstance(blocks.get(name), dict):
        written["trainers"] = {**blocks, name: {**blocks[name], "planning": "submitted"}}
    return loaded._replace(config=config.model_copy(update={"trainer": trainer}), written=written)


async def _wait(news: asyncio.Event, timeout_s: float | None) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await news.wait()
    except TimeoutError:
        pass
