"""`rollstream finetune` from beginning to end: broker, services, driver, final model, in order and back again."""

import asyncio
import json
import signal
import time
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import JsonValue

from rollstream.harness import ending
from rollstream.harness.classic import run as classic
from rollstream.harness.config import config_file
from rollstream.harness.display import Display
from rollstream.harness.driver import Watching, conduct
from rollstream.harness.ending import Outcome
from rollstream.harness.preflight import check_result
from rollstream.harness.progress import Progress
from rollstream.harness.services.broker_watch import keep_running
from rollstream.harness.services.supervisor import Supervisor
from rollstream.harness.surroundings import Connected, Held, Opening, connected, has_room, held
from rollstream.harness.validation import Validation, validation_of
from rollstream.schemas.events_training import ForkPoint


class Request(NamedTuple):
    """What the command line asks for."""

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
    """Of a new run."""


class Interrupted(Exception):
    """A signal asked this process to end; the run stays open."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number


def finetune(request: Request, display: Display) -> Outcome:
    """Train, or go on training. Raises RollstreamError for what is wrong, Interrupted after a signal."""
    loaded = config_file.load(request.config_file, request.overrides, options=request.options)
    check_result(request.result_path)
    name = request.name or request.config_file.stem
    opening = Opening(loaded, request.workspace, name, request.resume, request.run_id, request.fork)
    with held(opening, display) as around:
        outcome = asyncio.run(_run(opening, around, display))
        if request.result_path is not None:
            request.result_path.write_text(json.dumps(outcome.as_json(), indent=1) + "\n", encoding="utf-8")
        display.say(outcome.summary())
    return outcome


async def _run(opening: Opening, around: Held, display: Display) -> Outcome:
    began = time.monotonic()
    config = opening.config
    with _signals() as signals:
        async with connected(opening, around.place, display) as run:
            signals.append(run.supervisor)
            if classic.is_classic(opening.loaded):
                progress = await classic.conduct(opening, around, run, display)
            else:
                progress = await _conduct(run, around, display, validation_of(config, run.run))
            display.finish(progress)
            outcome = await ending.end(run.log, run.artifacts, progress, run.run, config.finetuning.output_dir)
            if config.builder.services == "managed":
                await _minded(run.supervisor, ending.let_metrics_catch_up(around.place.workspace))
            return outcome._replace(seconds=time.monotonic() - began, restarts=run.supervisor.total_restarts)


async def _conduct(run: Connected, around: Held, display: Display, validation: Validation | None) -> Progress:
    """Drive the run and look after its services and broker; the first of these to end decides."""
    supervisor, plan = run.supervisor, run.run
    watching = Watching(display.update, supervisor.progressed, lambda: has_room(around.place.workspace, display))
    work = conduct(run.log, plan.started, plan.jobs, watching, is_new=plan.is_new, validation=validation)
    driving = asyncio.create_task(work)
    minding = {asyncio.create_task(supervisor.watch())}
    if around.broker is not None:
        minding.add(asyncio.create_task(keep_running(around.broker, display.say)))
    try:
        done, _ = await asyncio.wait({driving, *minding}, return_when=asyncio.FIRST_COMPLETED)
        for task in done & minding:
            task.result()  # raises: a watch only ends so
        return await driving
    finally:
        for task in (driving, *minding):
            task.cancel()
        await asyncio.gather(driving, *minding, return_exceptions=True)


async def _minded(supervisor: Supervisor, work: Coroutine[Any, Any, None]) -> None:
    """Await `work`; a service that is down meanwhile is still started again."""
    minding = asyncio.create_task(supervisor.watch())
    try:
        await work
    finally:
        minding.cancel()
        await asyncio.gather(minding, return_exceptions=True)


@contextmanager
def _signals() -> Iterator[list[Supervisor]]:
    """SIGINT and SIGTERM cancel the current task, which ends as Interrupted; a second one kills what it holds."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    received: list[int] = []
    supervisors: list[Supervisor] = []

    def receive(number: int) -> None:
        received.append(number)
        if len(received) == 1:
            task.cancel()
        for supervisor in supervisors if len(received) > 1 else ():
            supervisor.kill()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, receive, number)
    try:
        yield supervisors
    except asyncio.CancelledError:
        if received:
            raise Interrupted(received[0]) from None
        raise
