"""A handle of one run on its log for the harness' components, followed as it goes on. One a workspace in a process.

`rollstream finetune` opens it before it builds components; under another harness our adapter's `initialize` does
(`open_handle`). Constructors of components connect to nothing. Whoever cleans up closes it.
"""

import asyncio
import atexit
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import EventLog
from rollstream.harness.config.dataset import Example
from rollstream.harness.config.file import Loaded
from rollstream.harness.config.resolve import block_of, is_ours
from rollstream.harness.runs.conductor import POLL_S, Conductor, background_work
from rollstream.harness.runs.display import Display
from rollstream.harness.runs.plan import RunPlan
from rollstream.harness.runs.progress import JobProgress
from rollstream.harness.runs.run_context import (
    MIN_FREE_SHARE,
    RunContext,
    RunRequest,
    WorkspaceLease,
    connected,
    folders_of,
    has_free_space,
    held,
)
from rollstream.harness.runs.view import JobView, RunView
from rollstream.processors.curate.tasks import load_dataset
from rollstream.schemas.config import RunConfig
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.settings import JobSpec

_OPEN: dict[Path, "RunHandle"] = {}


class RunHandle(Conductor):
    """A run with its log and its state. Use it as an async context, or `start` and `close` it."""

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
        self.display = display or Display()
        self.view = RunView()
        super().__init__(log, run, self.display.update, on_event=self.view.take)
        self.artifacts = artifacts
        self.config = config
        self.workspace = workspace.absolute()
        self.epoch_offset = 0
        """Number of epochs completed before a foreign trainer, which counts from 0, resumed the run."""
        self.left_out: dict[int, frozenset[str]] = {}
        """Trajectories that the trainer's curriculum has left out, by epoch that is not submitted yet."""
        self.curriculum_percentile: float | None = None
        """Share of examples that the trainer's curriculum admits; sent along with each submission."""
        self.empty_epochs: dict[int, str] = {}
        """Reasons, by epoch, why a trainer submitted nothing (keys of `untrained.EMPTY`) until a submission has it."""
        self.is_own = False
        """Whether the components opened it themselves; then they end the run and close this."""
        self.is_finished = False
        """Whether the conductor has ended the run, or leaves it open for good."""
        self._examples: tuple[Example, ...] | None = None

    @property
    def spec(self) -> JobSpec:
        """The job that components submit to: the run's last."""
        return self.run.jobs[-1]

    @property
    def job(self) -> JobView:
        """The job's groups, seals and submissions."""
        return self.view.job(self.spec.job_id)

    @property
    def job_progress(self) -> JobProgress:
        """Progress of the job."""
        return self.progress.job(self.spec.job_id)

    @property
    def examples(self) -> tuple[Example, ...]:
        """The run's examples, in the order of its dataset. Raises ArtifactError."""
        if self._examples is None:
            rows = load_dataset(self.artifacts, self.run.started)
            self._examples = tuple(Example(example_id, dict(inputs)) for example_id, inputs in rows.items())
        return self._examples

    async def start(self, *background: Coroutine[Any, Any, None]) -> None:
        """Start like a conductor. Raises ConfigError if a run is open in the workspace already."""
        if _OPEN.setdefault(self.workspace, self) is not self:
            for work in background:
                work.close()
            raise ConfigError(
                f"workspace {self.workspace}: a run is conducted there already in this process; "
                "finalize it first, or use another workspace"
            )
        await super().start(*background)

    async def close(self) -> None:
        """Let go of everything, in order. Closing twice changes nothing."""
        if _OPEN.get(self.workspace) is self:
            del _OPEN[self.workspace]
        await super().close()

    async def begin(self) -> None:
        """Write what the log lacks until the job has started; earlier jobs of the run are conducted to their end.

        Raises RunFailedError if one of them cannot be done, or the run is over.
        """
        while self.job_progress.started is None:
            seen = self.num_changes
            await self.announce()
            self.check()
            await self.changed(POLL_S, since=seen)

    async def wait_for_disk(self, min_free_share: float = MIN_FREE_SHARE) -> None:
        """Wait until there is room on the disks for a next epoch. Raises RunFailedError if the run ends before."""
        folders = folders_of(self.config, self.workspace, self.artifacts)
        while not has_free_space(folders, self.display, min_free_share):
            self.check()
            await asyncio.sleep(POLL_S)


async def started_run(run_request: RunRequest, lease: WorkspaceLease, run: RunContext, display: Display) -> RunHandle:
    """The handle of a run that is connected already, its services looked after. Raises ConfigError, LogError."""
    config = run_request.config
    handle = RunHandle(run.log, run.artifacts, run.run, config, workspace=lease.location.workspace, display=display)
    handle.on_activity, handle.on_begun = run.supervisor.progressed, run.begun.set
    await handle.start(*background_work(lease, run, config, display.print))
    return handle


def opened(workspace: Path) -> RunHandle | None:
    """The handle of the run that is open in a workspace, if there is one."""
    return _OPEN.get(workspace.absolute())


def require_opened(workspace: Path, remedy: str) -> RunHandle:
    """The same. Raises ConfigError with this remedy if no run is open there."""
    handle = opened(workspace)
    if handle is None:
        raise ConfigError(f"no run is open in workspace {workspace}; {remedy}")
    return handle


async def open_handle(loaded: Loaded, workspace: Path, name: str, display: Display | None = None) -> RunHandle:
    """Open a run for components that another harness conducts: broker, services, and a new run whose planning is
    `submitted`. Raises RollstreamError.
    """
    display = display or Display()
    run_request = RunRequest(_submitted(loaded), workspace, name)
    async with AsyncExitStack() as stack:
        lease = stack.enter_context(held(run_request, display))
        run = await stack.enter_async_context(connected(run_request, lease, display))
        atexit.register(run.supervisor.kill)  # for whoever never closes
        handle = await started_run(run_request, lease, run, display)
        handle.is_own = True
        handle.hold(stack.pop_all())
        return handle


def _submitted(loaded: Loaded) -> Loaded:
    """The same configuration, conducted by components; what is stored says so too."""
    config, name = loaded.config, loaded.config.finetuning.trainer
    trainer = config.trainer.model_copy(update={"planning": "submitted"})
    written: dict[str, Any] = {**loaded.written}
    blocks: Any = written.get("trainers", {})
    if is_ours(block_of(loaded.finetune, "trainer")) and isinstance(blocks.get(name), dict):
        written["trainers"] = {**blocks, name: {**blocks[name], "planning": "submitted"}}
    return loaded._replace(config=config.model_copy(update={"trainer": trainer}), written=written)
