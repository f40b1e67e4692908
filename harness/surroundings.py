"""What a run needs around it: workspace, broker, log, artifacts, plan, services; held open, let go of in order."""

import shutil
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rollstream.eventlog.broker import EmbeddedBroker
from rollstream.eventlog.log import EventLog
from rollstream.harness.config.config_file import Loaded
from rollstream.harness.config.settings import Place, artifact_uri, services_of
from rollstream.harness.display import Display
from rollstream.harness.endpoint import check_endpoint
from rollstream.harness.fork import check_fork, told
from rollstream.harness.plan import RunPlan, check_new, new_run, open_run
from rollstream.harness.preflight import check_datasets, check_metrics, check_names, check_places
from rollstream.harness.services.heartbeat import read_sign
from rollstream.harness.services.supervisor import ChildSpec, Supervisor
from rollstream.harness.topic_identity import check_topics
from rollstream.harness.workspace import EMBEDDED, Workspace, embedded_broker
from rollstream.schemas.config import RunConfig
from rollstream.schemas.events_training import ForkPoint

if TYPE_CHECKING:
    from rollstream.eventlog.artifacts import ArtifactStore

MIN_FREE_SHARE = 0.05
"""Of the workspace's disk; below it no next epoch is started."""


class Opening(NamedTuple):
    """Which run is to be opened, and where."""

    loaded: Loaded
    workspace: Path
    name: str
    """Of a new run."""
    resume: str | None = None
    run_id: str | None = None
    """Of a new run, in place of a name and six digits."""
    fork: ForkPoint | None = None

    @property
    def config(self) -> RunConfig:
        """The parts of the configuration that the run uses."""
        return self.loaded.config


class Held(NamedTuple):
    """What is held while a run is open."""

    place: Place
    broker: EmbeddedBroker | None
    """The embedded one, if it was started here."""


class Connected(NamedTuple):
    """A run on its log, with its services under way."""

    log: EventLog
    artifacts: "ArtifactStore"
    run: RunPlan
    supervisor: Supervisor


@contextmanager
def held(opening: Opening, display: Display) -> Iterator[Held]:
    """Workspace and broker, after all that can be known to be wrong. Raises ConfigError, BrokerError."""
    config, workspace = opening.config, Workspace(opening.workspace)
    workspace.create()
    check_places(config)
    check_names(config)
    check_datasets(config, is_new=opening.resume is None)
    check_endpoint(config)
    with ExitStack() as stack:
        if config.builder.services == "managed" or config.builder.bootstrap_servers == EMBEDDED:
            stack.enter_context(workspace.in_use(f"finetune {opening.resume or opening.name}"))
        check_metrics(config, workspace.folder)
        address, broker = stack.enter_context(_broker(config, workspace))
        display.say(f"broker {address}, logs in {workspace.logs}")
        yield Held(Place(address, artifact_uri(config, workspace.folder), workspace.folder), broker)


@asynccontextmanager
async def connected(opening: Opening, place: Place, display: Display) -> AsyncIterator[Connected]:
    """The run, new or old, on its log, with services started; they are stopped, then the log is closed."""
    from rollstream.eventlog.artifacts import ArtifactStore
    from rollstream.eventlog.kafka_log import KafkaLog

    artifacts = ArtifactStore(place.artifact_uri)
    log = KafkaLog(place.bootstrap_servers, client_id="rollstream-finetune")
    async with AsyncExitStack() as stack:
        stack.push_async_callback(log.close)
        await log.start()
        await log.ensure_topics(num_partitions=opening.config.builder.num_partitions)
        check_topics(place.workspace, await log.cluster_id(), await log.topic_ids())
        run = await plan(opening, log, artifacts)
        Workspace(place.workspace).remember_broker(opening.config.builder.bootstrap_servers)
        parent = run.started.parent
        display.say(f"run {run.started.run_id}" + (f", branched from {told(parent)}" if parent else ""))
        supervisor = _supervisor(opening.config, place, run.started.run_id)
        supervisor.start()
        stack.push_async_callback(supervisor.stop)
        yield Connected(log, artifacts, run, supervisor)


async def plan(opening: Opening, log: EventLog, artifacts: "ArtifactStore") -> RunPlan:
    """The run that is asked for, a new one or one that goes on. Raises ConfigError, TruncatedError."""
    if opening.resume is not None:
        return await open_run(log, opening.loaded, opening.resume)
    if opening.fork is not None:
        await check_fork(log, artifacts, opening.config, opening.fork)
    if opening.run_id is not None:
        await check_new(log, opening.run_id)
    return await new_run(log, artifacts, opening.loaded, opening.name, parent=opening.fork, run_id=opening.run_id)


def has_room(folder: Path, display: Display, min_free_share: float = MIN_FREE_SHARE) -> bool:
    """Whether a next epoch may be started: there is room on the disk. Says so when there is none."""
    usage = shutil.disk_usage(folder)
    is_enough = usage.free >= min_free_share * usage.total
    display.note("" if is_enough else f"paused: less than {min_free_share:.0%} of the disk of {folder} is free")
    return is_enough


@contextmanager
def _broker(config: RunConfig, workspace: Workspace) -> Iterator[tuple[str, EmbeddedBroker | None]]:
    if config.builder.bootstrap_servers != EMBEDDED:
        yield config.builder.bootstrap_servers, None
        return
    with embedded_broker(workspace) as found:
        yield found


def _supervisor(config: RunConfig, place: Place, run_id: str) -> Supervisor:
    """Services in the order in which they are stopped; none if they are external. Settings go by standard input."""
    if config.builder.services == "external":
        return Supervisor([], place.workspace / "logs")
    specs: list[ChildSpec] = []
    ranks = {"producers": 0, "endpoint": 0, "processors": 1, "learner": 2, "metrics": 3}
    for name, settings in services_of(config, place, run_id).items():
        service = name.rsplit("-", 1)[0]
        command = [sys.executable, "-m", "rollstream.harness.cli", "serve", service, "--name", name, "--settings", "-"]
        specs.append(ChildSpec(name, command, settings.model_dump_json().encode(), ranks[service]))
    return Supervisor(specs, place.workspace / "logs", silence_s=_silence(Workspace(place.workspace).health))


def _silence(health: Path) -> Callable[[str, int], float]:
    def silence_s(name: str, pid: int) -> float:
        sign = read_sign(health, name)
        return sign.age_s if sign is not None and sign.pid == pid else 0.0

    return silence_s
