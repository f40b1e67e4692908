"""`rollstream finetune` from beginning to end: broker, services, driver, final model, in order and back again."""

import asyncio
import json
import signal
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import JsonValue

from rollstream.eventlog.blocking_calls import retrying
from rollstream.harness.components.conduct import conduct as conduct_epochs
from rollstream.harness.config import file as config_file
from rollstream.harness.runs.conductor import Conductor, background_work
from rollstream.harness.runs.display import Display
from rollstream.harness.runs.outcome import Outcome, behind_of, end, let_metrics_catch_up, remarks_of
from rollstream.harness.runs.plan import look_up
from rollstream.harness.runs.preflight import check_result
from rollstream.harness.runs.progress import Progress
from rollstream.harness.runs.run_context import (
    RunContext,
    RunRequest,
    WorkspaceLease,
    connected,
    folders_of,
    has_free_space,
    held,
)
from rollstream.harness.runs.validation import validation_of
from rollstream.harness.services.outputs import write_output
from rollstream.harness.services.supervisor import Supervisor
from rollstream.schemas.errors import BrokerLostError, RollstreamError, RunFailedError
from rollstream.schemas.events.training import ForkPoint


class Request(NamedTuple):
    """The options of the command line."""

    config_file: Path
    workspace: Path
    overrides: tuple[tuple[str, str], ...] = ()
    options: Mapping[str, JsonValue] = MappingProxyType({})
    """Those of the command line by the names of `finetuning.run_configuration`: dataset, validation, endpoint."""
    resume: str | None = None
    name: str | None = None
    result_path: Path | None = None
    fork: ForkPoint | None = None
    run_id: str | None = None
    """Id of a new run."""
    trust: bool = False
    """Import and expand what only the stored configuration of the run to resume names."""


class Interrupted(Exception):
    """A signal asked this process to end."""

    def __init__(self, number: int, conducted: "_Conducted") -> None:
        super().__init__(number)
        self.exit_code = 128 + number
        run = conducted.run
        self.run_id = None if run is None else run.run.started.run_id
        """None: the run was not found yet."""
        self.has_begun = run is not None and run.begun.is_set()
        """Whether the log has the run."""
        self.is_open = conducted.is_open
        """Whether the run is still to be ended."""
        self.outcome = conducted.outcome
        """Outcome of a run whose model is saved, as far as it has one; None: this process did not get so far."""


@dataclass
class _Conducted:
    """The run that this process conducts, once it is known."""

    run: RunContext | None = None
    is_open: bool = False
    outcome: Outcome | None = None


def finetune(request: Request, display: Display) -> Outcome:
    """Train, or go on training. Raises RollstreamError for an error, Interrupted after a signal."""
    is_new = request.resume is None
    loaded = config_file.load(request.config_file, request.overrides, options=request.options, is_new=is_new)
    check_result(request.result_path)
    name = request.name or request.config_file.stem
    run_request = RunRequest(
        loaded, request.workspace, name, request.resume, request.run_id, request.fork, request.trust
    )
    with held(run_request, display) as lease:
        outcome = asyncio.run(_run(run_request, lease, display))
        display.print(outcome.summary())
        if request.result_path is not None:
            asyncio.run(write_result(request.result_path, outcome))
    return outcome


async def write_result(path: Path, outcome: Outcome) -> None:
    """Write the outcome as JSON, retrying while the disk is full. Raises OSError of any other cause."""
    text = json.dumps(outcome.as_json(), indent=1) + "\n"

    async def here(call: Callable[[], None]) -> None:
        call()  # a thread that waits for the reader of a pipe could not be interrupted

    await retrying(lambda: write_output(path, text), f"write the result to {path}", in_thread=here)


async def _run(run_request: RunRequest, lease: WorkspaceLease, display: Display) -> Outcome:
    began = time.monotonic()
    config = run_request.config
    with _signals() as conducted:
        async with connected(run_request, lease, display) as run:
            conducted.run, conducted.is_open = run, not run.run.is_over
            with _resumable(run, is_open=not run.run.is_over):
                if run.run.is_over:
                    progress = await look_up(run.log, run.run.started.run_id)
                else:
                    progress = await _trained(run_request, lease, run, display)
            display.finish(progress)
            conducted.is_open = progress.ended is None
            with _resumable(run, is_open=progress.ended is None):
                outcome = await end(run.log, run.artifacts, progress, run.run, config)
                conducted.is_open, conducted.outcome = False, outcome
            if config.builder.services == "managed":
                outcome = await _with_remarks(outcome, run, run_request, lease.location.workspace)
            supervisor = run.supervisor
            return outcome._replace(
                seconds=time.monotonic() - began, restarts=supervisor.total_restarts, logged=supervisor.logged
            )


async def _with_remarks(outcome: Outcome, run: RunContext, run_request: RunRequest, workspace: Path) -> Outcome:
    """The outcome with what the metrics tell of the run, once they have all that is in the log."""
    from rollstream.metrics.projection.connection import metrics_file
    from rollstream.metrics.projection.projector import project_to_end

    behind: tuple[str, ...] = ()
    if run.run.is_over:
        await project_to_end(run.log, metrics_file(workspace))
        behind = behind_of(workspace, outcome.run_id, run_request.config)
    elif not await _watched(run.supervisor, let_metrics_catch_up(workspace)):
        return outcome
    return outcome._replace(remarks=(*await remarks_of(workspace, outcome.run_id, run_request.config), *behind))


async def _trained(run_request: RunRequest, lease: WorkspaceLease, run: RunContext, display: Display) -> Progress:
    """Conduct the run to the end of its training. Returns its progress."""
    if run.run.is_submitted:
        return await conduct_epochs(run_request, lease, run, display)
    config = run_request.config
    folders = folders_of(config, lease.location.workspace, run.artifacts)
    conductor = Conductor(run.log, run.run, display.update, on_activity=run.supervisor.progressed)
    conductor.on_begun = run.begun.set
    validation = validation_of(config, run.run)
    await conductor.start(*background_work(lease, run, config, display.print))
    try:
        return await conductor.conduct(validation, lambda: has_free_space(folders, display))
    finally:
        await conductor.close()


@contextmanager
def _resumable(run: RunContext, *, is_open: bool) -> Iterator[None]:
    """Add to errors before the run's end that the run is still open, and how to continue it, unless its log is lost or
    does not have it.

    `is_open`: its end was not written before.
    """
    try:
        yield
    except (RollstreamError, OSError) as error:
        if not is_open or not run.begun.is_set() or isinstance(error, BrokerLostError):
            raise
        hint = _stays_open(run.run.started.run_id)
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(error.errno, f"{error.strerror}; {hint}", error.filename) from error
        raise type(error)(f"{str(error) or type(error).__name__}; {hint}") from error


def _stays_open(run_id: str) -> str:
    return f"run {run_id} stays open: `rollstream finetune --config_file FILE --resume {run_id}` continues it"


async def _watched(supervisor: Supervisor, work: Coroutine[Any, Any, bool]) -> bool:
    """The result of `work`; a service that is down meanwhile is still started again."""
    watching = asyncio.create_task(supervisor.watch())
    try:
        return await work
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


@contextmanager
def _signals() -> Iterator[_Conducted]:
    """SIGINT and SIGTERM cancel the current task, which ends as Interrupted; a second one kills what it holds, and any
    later one cancels it again: `asyncio.wait_for`, which aiokafka uses, may lose a cancellation (until Python 3.12).

    Raises RunFailedError for a cancellation without a signal: a component or a library has cancelled what it runs in.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    received: list[int] = []
    conducted = _Conducted()

    def receive(number: int) -> None:
        received.append(number)
        if len(received) != 2:
            task.cancel()
        elif conducted.run is not None:
            conducted.run.supervisor.kill()

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        loop.add_signal_handler(number, receive, number)
    try:
        yield conducted
    except asyncio.CancelledError as error:
        if received:
            raise Interrupted(received[0], conducted) from None
        run = conducted.run
        is_resumable = run is not None and run.begun.is_set() and conducted.is_open
        hint = f"; {_stays_open(run.run.started.run_id)}" if run is not None and is_resumable else ""
        raise RunFailedError(
            f"a component, or a library that it uses, cancelled the command; rollstream --debug shows where{hint}"
        ) from error
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)  # nothing is left to cancel: from here on a signal ends the process
            if number == signal.SIGTERM and handler is not None:
                signal.signal(number, handler)
