"""`rollstream finetune` from beginning to end: broker, services, driver, final model, in order and back again."""

import asyncio
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rollstream.eventlog.broker import EmbeddedBroker
from rollstream.eventlog.log import EventLog
from rollstream.harness import config_file, dataset, ending
from rollstream.harness.broker_watch import keep_running
from rollstream.harness.config_file import Loaded
from rollstream.harness.display import Display
from rollstream.harness.driver import Watching, conduct
from rollstream.harness.ending import Outcome
from rollstream.harness.fork import check_fork, told
from rollstream.harness.heartbeat import read_sign
from rollstream.harness.plan import RunPlan, check_new, new_run, open_run
from rollstream.harness.preflight import check_metrics, check_names, check_places, check_result
from rollstream.harness.progress import Progress
from rollstream.harness.settings import Place, artifact_uri, services_of
from rollstream.harness.supervisor import ChildSpec, Supervisor
from rollstream.harness.topic_identity import check_topics
from rollstream.harness.workspace import EMBEDDED, Workspace, embedded_broker
from rollstream.schemas.config import RunConfig
from rollstream.schemas.events_training import ForkPoint

if TYPE_CHECKING:
    from rollstream.eventlog.artifacts import ArtifactStore

MIN_FREE_SHARE = 0.05
"""Of the workspace's disk; below it no next epoch is started."""


class Request(NamedTuple):
    """What the command line asks for."""

    config_file: Path
    workspace: Path
    overrides: tuple[tuple[str, str], ...] = ()
    dataset: Path | None = None
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
    loaded = _load(request)
    workspace = Workspace(request.workspace)
    workspace.create()
    check_places(loaded.config)
    check_result(request.result_path)
    check_names(loaded.config)
    with ExitStack() as held:
        if _is_exclusive(loaded.config):
            held.enter_context(workspace.in_use(request.resume or request.name or request.config_file.stem))
        check_metrics(loaded.config, workspace.folder)
        address, broker = held.enter_context(_broker(loaded.config, workspace))
        display.say(f"broker {address}, logs in {workspace.logs}")
        workspace.remember_broker(loaded.config.builder.bootstrap_servers)
        place = Place(address, artifact_uri(loaded.config, workspace.folder), workspace.folder)
        outcome = asyncio.run(_run(request, loaded, place, display, broker))
    if request.result_path is not None:
        request.result_path.write_text(json.dumps(outcome.as_json(), indent=1) + "\n", encoding="utf-8")
    return outcome


def _load(request: Request) -> Loaded:
    loaded = config_file.load(request.config_file, request.overrides)
    if request.dataset is None:
        return loaded
    section = dataset.section_of(request.dataset, loaded.config.dataset)
    overrides = (*request.overrides, ("eval.general.dataset", section.model_dump_json(by_alias=True)))
    return config_file.load(request.config_file, overrides)


def _is_exclusive(config: RunConfig) -> bool:
    return config.builder.services == "managed" or config.builder.bootstrap_servers == EMBEDDED


@contextmanager
def _broker(config: RunConfig, workspace: Workspace) -> Iterator[tuple[str, EmbeddedBroker | None]]:
    if config.builder.bootstrap_servers != EMBEDDED:
        yield config.builder.bootstrap_servers, None
        return
    with embedded_broker(workspace) as found:
        yield found


async def _run(
    request: Request, loaded: Loaded, place: Place, display: Display, broker: EmbeddedBroker | None
) -> Outcome:
    from rollstream.eventlog.artifacts import ArtifactStore
    from rollstream.eventlog.kafka_log import KafkaLog

    began = time.monotonic()
    artifacts = ArtifactStore(place.artifact_uri)
    log = KafkaLog(place.bootstrap_servers, client_id="rollstream-finetune")
    async with AsyncExitStack() as held:
        signals = held.enter_context(_signals())
        held.push_async_callback(log.close)
        await log.start()
        await log.ensure_topics(num_partitions=loaded.config.builder.num_partitions)
        check_topics(place.workspace, await log.cluster_id(), await log.topic_ids())
        run = await _plan(request, loaded, log, artifacts)
        parent = run.started.parent
        display.say(f"run {run.started.run_id}" + (f", branched from {told(parent)}" if parent else ""))
        supervisor = _supervisor(loaded.config, place)
        supervisor.start()
        held.push_async_callback(supervisor.stop)
        signals.append(supervisor)
        progress = await _conduct(log, run, supervisor, broker, place, display)
        display.finish(progress)
        outcome = await ending.end(log, artifacts, progress, run, loaded.config.finetuning.output_dir)
        if loaded.config.builder.services == "managed":
            await _minded(supervisor, ending.let_metrics_catch_up(place.workspace))
        return outcome._replace(seconds=time.monotonic() - began, restarts=supervisor.total_restarts)


async def _plan(request: Request, loaded: Loaded, log: EventLog, artifacts: "ArtifactStore") -> RunPlan:
    if request.resume is not None:
        return await open_run(log, loaded, request.resume)
    if request.fork is not None:
        await check_fork(log, artifacts, loaded.config, request.fork)
    if request.run_id is not None:
        await check_new(log, request.run_id)
    name = request.name or request.config_file.stem
    return await new_run(log, artifacts, loaded, name, parent=request.fork, run_id=request.run_id)


async def _conduct(
    log: EventLog, run: RunPlan, supervisor: Supervisor, broker: EmbeddedBroker | None, place: Place, display: Display
) -> Progress:
    """Drive the run and look after its services and broker; the first of these to end decides."""
    watching = Watching(display.update, supervisor.progressed, lambda: _has_room(place.workspace, display))
    driving = asyncio.create_task(conduct(log, run.started, run.jobs, watching, is_new=run.is_new))
    minding = {asyncio.create_task(supervisor.watch())}
    if broker is not None:
        minding.add(asyncio.create_task(keep_running(broker, display.say)))
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


def _supervisor(config: RunConfig, place: Place) -> Supervisor:
    """Services in the order in which they are stopped; none if they are external. Settings go by standard input."""
    if config.builder.services == "external":
        return Supervisor([], place.workspace / "logs")
    specs: list[ChildSpec] = []
    ranks = {"producers": 0, "processors": 1, "learner": 2, "metrics": 3}
    for name, settings in services_of(config, place).items():
        service = name.rsplit("-", 1)[0]
        command = [sys.executable, "-m", "rollstream.harness.cli", "serve", service, "--name", name, "--settings", "-"]
        specs.append(ChildSpec(name, command, settings.model_dump_json().encode(), ranks[service]))
    return Supervisor(specs, place.workspace / "logs", silence_s=_silence(Workspace(place.workspace).health))


def _silence(health: Path) -> Callable[[str, int], float]:
    def silence_s(name: str, pid: int) -> float:
        sign = read_sign(health, name)
        return sign.age_s if sign is not None and sign.pid == pid else 0.0

    return silence_s


def _has_room(folder: Path, display: Display) -> bool:
    usage = shutil.disk_usage(folder)
    is_enough = usage.free >= MIN_FREE_SHARE * usage.total
    display.note("" if is_enough else f"paused: less than {MIN_FREE_SHARE:.0%} of the disk of {folder} is free")
    return is_enough


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
