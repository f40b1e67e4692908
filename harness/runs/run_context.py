"""The resources of a run: workspace, broker, log, artifacts, plan, services; opened and closed in order."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rollstream.eventlog.broker.broker import FULL_BYTES, EmbeddedBroker, own_block
from rollstream.eventlog.broker.ports import answers
from rollstream.eventlog.disk_space import disks_of
from rollstream.eventlog.kafka.topic_ids import check_topics
from rollstream.eventlog.log import EventLog
from rollstream.harness.config.checks import warn_meaningless
from rollstream.harness.config.file import Loaded, validation_config
from rollstream.harness.config.jobs import RunLocation, artifact_uri, kafka_block, services_of
from rollstream.harness.config.nat_workflows import check_sampling
from rollstream.harness.config.resolve import block_of
from rollstream.harness.runs.display import Display
from rollstream.harness.runs.driver import give_signs_of_life
from rollstream.harness.runs.earlier_output import take_output_dir
from rollstream.harness.runs.plan import RunPlan, check_id, check_new, checked_examples, new_run, open_run
from rollstream.harness.runs.preflight import (
    access_line,
    check_command,
    check_datasets,
    check_endpoint,
    check_gateway,
    check_metrics,
    check_names,
    check_paths,
    check_workflow,
)
from rollstream.harness.runs.sampling_checks import check_engines, check_groups, check_models
from rollstream.harness.services.fork_server import ForkServer, start_where_possible
from rollstream.harness.services.liveness import read_sign
from rollstream.harness.services.serving import GROUPS, LOADED_ONCE, WITH_MODELS
from rollstream.harness.services.sole_use import check_sole_use, sole_name, sole_output, sole_run
from rollstream.harness.services.supervisor import ChildSpec, Supervisor
from rollstream.harness.services.workspace import EMBEDDED, NAMES, AttachedBroker, Workspace, embedded_broker
from rollstream.replay.fork import check_fork, check_versions, format_fork
from rollstream.schemas import ids
from rollstream.schemas.config import BuilderSection, RunConfig
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.events.training import ForkPoint
from rollstream.schemas.finetuning import FinetuneConfig, builder_path
from rollstream.schemas.kafka import KafkaSettings, connection, given, merged, renamed, with_secrets

if TYPE_CHECKING:
    from rollstream.eventlog.artifacts import ArtifactStore
    from rollstream.eventlog.kafka.log import KafkaLog
    from rollstream.harness.config.dataset import Example

MIN_FREE_SHARE = 0.05
"""Minimum free share of every disk that a run writes to; below it no next epoch is started."""


class RunRequest(NamedTuple):
    """The run to open, and its workspace."""

    loaded: Loaded
    workspace: Path
    name: str
    """Name of a new run."""
    resume: str | None = None
    run_id: str | None = None
    """Id of a new run, in place of its name and six hex digits."""
    fork: ForkPoint | None = None
    trust: bool = False
    """Trust the names in the stored configuration of the run to resume like those of the user's own file."""

    @property
    def config(self) -> RunConfig:
        """The parts of the configuration that the run uses."""
        return self.loaded.config


class WorkspaceLease(NamedTuple):
    """Resources held while a run is open."""

    location: RunLocation
    broker: EmbeddedBroker | AttachedBroker | None
    """The embedded one, which may be another command's; None of a Kafka cluster."""
    examples: "list[Example] | None" = None
    """Examples of a new run; None of one that is resumed."""
    fork_server: ForkServer | None = None
    """The one of managed services with models, where processes can be forked."""


class RunContext(NamedTuple):
    """A run on its log, with its services running."""

    log: EventLog
    artifacts: "ArtifactStore"
    run: RunPlan
    supervisor: Supervisor
    begun: asyncio.Event
    """Set once the log has the run's start."""
    signs: "asyncio.Task[None] | None" = None
    """The writing of its signs of life; none of a run that is over."""


def check_run(run_request: RunRequest) -> "list[Example] | None":
    """All checks of a run that need neither its log nor a service; `rollstream validate` makes them alone.

    Starts and writes nothing. Returns the examples of a new run, None for one that is resumed. Raises ConfigError.
    """
    config, is_new = run_request.config, run_request.resume is None
    if run_request.run_id is not None:
        check_id(run_request.run_id)
    warn_other_workspaces(run_request.loaded.finetune, run_request.workspace)
    check_paths(config)
    if is_new:
        check_command(run_request.loaded)
    check_names(config, is_new=is_new)
    check_engines(config)
    if is_new:
        check_sampling(config, run_request.loaded.finetune)
        check_groups(config, run_request.loaded.finetune, is_fork=run_request.fork is not None)
        check_models(config)
    examples = check_datasets(config, is_new=is_new)
    check_endpoint(config, is_new=is_new)
    check_gateway(config)
    check_workflow(config)
    check_connection(config, Workspace(run_request.workspace))
    if not is_new:
        return None
    run_id = run_request.run_id or ids.new_run_id(run_request.name)
    return checked_examples(run_request.loaded, run_id, examples, is_fork=run_request.fork is not None)


@contextmanager
def held(run_request: RunRequest, display: Display) -> Iterator[WorkspaceLease]:
    """Workspace and broker, after all checks that need neither. Raises ConfigError, BrokerError."""
    config, workspace = run_request.config, Workspace(run_request.workspace)
    workspace.create()
    examples = check_run(run_request)
    with ExitStack() as stack:
        is_managed = config.builder.services == "managed"
        if is_managed or config.builder.bootstrap_servers == EMBEDDED:
            # any number of runs share external services
            name = run_request.resume or run_request.name
            stack.enter_context(workspace.in_use(f"finetune {name}", is_shared=not is_managed))
        check_metrics(config, workspace.folder)
        fork_server = None
        if is_managed:  # before the broker: both take seconds to start
            fork_server = start_where_possible(LOADED_ONCE, workspace.logs, environment_of_services(config, os.environ))
        if fork_server is not None:
            stack.callback(fork_server.close)
        kafka, broker = stack.enter_context(broker_of_run(config, workspace))
        display.print(f"broker {kafka.bootstrap_servers}, logs in {workspace.logs}")
        yield WorkspaceLease(
            RunLocation(kafka, artifact_uri(config, workspace.folder), workspace.folder), broker, examples, fork_server
        )


@asynccontextmanager
async def connected(run_request: RunRequest, lease: WorkspaceLease, display: Display) -> AsyncIterator[RunContext]:
    """The new or resumed run on its log, with its services started.

    On exit the services are stopped, then the log is closed.
    """
    from rollstream.eventlog.artifacts import ArtifactStore
    from rollstream.eventlog.kafka.log import KafkaLog

    location = lease.location
    artifacts = ArtifactStore(location.artifact_uri)
    async with AsyncExitStack() as stack:
        log = await stack.enter_async_context(KafkaLog(location.kafka, client_id="rollstream-finetune"))
        wanted = run_request.config.builder.num_partitions
        await log.ensure_topics(num_partitions=wanted if run_request.resume is None else None)
        check_topics(location.workspace, await log.cluster_id(), await log.topic_ids())
        await asyncio.to_thread(check_metrics, run_request.config, location.workspace, await log.cluster_id())
        run = await plan(run_request, log, artifacts, lease.examples)
        if not run.is_new:  # after its own count was compared: no count in the file continues it on altered topics
            await log.ensure_topics(num_partitions=wanted)
        workspace = Workspace(location.workspace)
        workspace.remember_broker(
            run_request.config.builder.bootstrap_servers,
            block_of_run(run_request.config, workspace),
            artifact_uri=run_request.config.adapter.artifact_uri,
        )
        parent = run.started.parent
        display.print(f"run {run.started.run_id}" + (f", branched from {format_fork(parent)}" if parent else ""))
        supervisor, signs, begun = Supervisor([], location.workspace / "logs"), None, asyncio.Event()
        if not run.is_over:
            await stack.enter_async_context(sole_run(location.workspace, run.started.run_id))
            await _check_sole_use(run_request.config, lease, log, display)
            if line := access_line(run_request.config, location.workspace, os.environ):
                display.print(line)
            signs = asyncio.create_task(give_signs_of_life(log, run.started, is_new=run.is_new))
            stack.push_async_callback(_cancel, signs)
            supervisor = _supervisor(run_request.config, lease, run.started.run_id, artifacts)
            for spec in supervisor.specs:
                async with sole_name(location.workspace, spec.name):
                    pass  # each service takes its own when it starts; here it would be refused again and again
            if run_request.config.builder.services == "managed":
                workspace.remember_trained(run.started.run_id)
        output_dir = run_request.config.finetuning.output_dir
        await stack.enter_async_context(sole_output(output_dir))
        # Last: a run that fails a check must not move files.
        if earlier := take_output_dir(run_request.config, run.started.run_id, is_new=run.is_new):
            display.print(f"files of an earlier run in {output_dir} were moved to {earlier}")
        stack.push_async_callback(supervisor.stop)
        supervisor.start()
        if not run.is_new:
            begun.set()
        yield RunContext(log, artifacts, run, supervisor, begun, signs)


async def plan(
    run_request: RunRequest, log: EventLog, artifacts: "ArtifactStore", examples: "list[Example] | None"
) -> RunPlan:
    """The requested run, new or resumed. Raises ConfigError, TruncatedError."""
    if run_request.resume is not None:
        return await open_run(log, artifacts, run_request.loaded, run_request.resume, trust=run_request.trust)
    if run_request.fork is not None:
        await check_fork(log, artifacts, run_request.config, run_request.fork)
    await check_versions(log, artifacts, run_request.config)
    if run_request.run_id is not None:
        await check_new(log, run_request.run_id)
    return await new_run(
        log,
        artifacts,
        run_request.loaded,
        run_request.name,
        parent=run_request.fork,
        run_id=run_request.run_id,
        examples=examples,
    )


def folders_of(config: RunConfig, workspace: Path, artifacts: "ArtifactStore") -> list[Path]:
    """The local folders that a run writes to. Each may be on a different disk."""
    folders = [workspace, *(workspace / name for name in ("broker", "checkpoints", "logs"))]
    stored = artifacts.folder
    return [*folders, *([stored] if stored else []), config.finetuning.output_dir]


def has_free_space(folders: Iterable[Path], display: Display, min_free_share: float = MIN_FREE_SHARE) -> bool:
    """Whether the next epoch may start: every folder's disk has enough free space. Displays which one has not."""
    short = [disk for disk in disks_of(folders) if disk.free_bytes < min_free_share * disk.total_bytes]
    display.show_status(
        f"paused: less than {min_free_share:.0%} of the disk of {short[0].folder} is free; free some space"
        if short
        else ""
    )
    return not short


async def _cancel(task: "asyncio.Task[None]") -> None:
    """Cancel a task; raises the exception that it failed with."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()


def block_of_run(config: RunConfig, workspace: Workspace) -> dict[str, Any]:
    """The `kafka:` block that a run connects with.

    Managed services on a shared Kafka cluster get topics and consumer groups of their own workspace, unless the block
    or ROLLSTREAM_KAFKA_* set others: two sets of services on the same topics would fence each other.
    """
    builder = config.builder
    block = kafka_block(builder, os.environ)
    if builder.services == "managed" and builder.bootstrap_servers != EMBEDDED and not block.keys() & set(NAMES):
        return {**block, **workspace.own_names(builder.bootstrap_servers)}
    return block


@contextmanager
def broker_of_run(
    config: RunConfig, workspace: Workspace
) -> Iterator[tuple[KafkaSettings, EmbeddedBroker | AttachedBroker | None]]:
    """The connection settings of the configured broker, and the broker itself if it is the workspace's own.

    Raises ConfigError, BrokerError.
    """
    builder, location = config.builder, builder_path(config.finetuning, "kafka")
    block = block_of_run(config, workspace)
    if builder.bootstrap_servers != EMBEDDED:
        yield _connection(config, workspace, block), None
        return
    check_embedded(builder, location)
    with embedded_broker(workspace) as (kafka, broker):
        yield renamed(kafka, block), broker


def check_connection(config: RunConfig, workspace: Workspace) -> None:
    """Raises ConfigError for a `kafka:` block that does not fit together, or that the embedded broker does not accept.

    Connects to no broker.
    """
    builder, block = config.builder, kafka_block(config.builder, os.environ)
    if builder.bootstrap_servers == EMBEDDED:
        check_embedded(builder, builder_path(config.finetuning, "kafka"))
    else:
        _connection(config, workspace, block)


def _connection(config: RunConfig, workspace: Workspace, block: dict[str, Any]) -> KafkaSettings:
    servers, location = config.builder.bootstrap_servers, builder_path(config.finetuning)
    return connection(
        servers, merged(own_block(workspace.folder, servers), block), os.environ, location=f"{location}.kafka"
    )


def check_embedded(builder: BuilderSection, location: str) -> None:
    """Raises ConfigError for settings of a `kafka:` block that the embedded broker does not accept."""
    if unneeded := sorted(given(builder.kafka).keys() - {"topic_prefix", "group_prefix"}):
        raise ConfigError(
            f"{location}.{unneeded[0]}: not used with the embedded broker; remove it, or set bootstrap_servers"
        )


async def _check_sole_use(config: RunConfig, lease: WorkspaceLease, log: "KafkaLog", display: Display) -> None:
    """Raises ConfigError if other services are members of our consumer groups.

    A broker that was started here has no others.
    """
    builder = config.builder
    if builder.services == "managed" and not isinstance(lease.broker, EmbeddedBroker):
        location = builder_path(config.finetuning, "kafka.group_prefix")
        groups = [log.kafka.group(service) for service in GROUPS]
        await check_sole_use(log, groups, location, session_timeout_s=builder.session_timeout_s, notify=display.print)


def _supervisor(config: RunConfig, lease: WorkspaceLease, run_id: str, artifacts: "ArtifactStore") -> Supervisor:
    """Services in the order in which they are stopped; none if they are external.

    Settings are passed on standard input.
    """
    location = lease.location
    if config.builder.services == "external":
        return Supervisor([], location.workspace / "logs")
    specs: list[ChildSpec] = []
    ranks = {"producers": 0, "endpoint": 0, "processors": 1, "learner": 2, "tracker": 3, "metrics": 4}
    for name, settings in services_of(config, location, run_id, validation=validation_config(config)).items():
        service = name.rsplit("-", 1)[0]
        serve = [sys.executable, "-m", "rollstream.harness.cli.main", "serve", service]
        command = [*serve, "--name", name, "--settings", "-"]
        stdin = with_secrets(settings).encode()
        specs.append(ChildSpec(name, command, stdin, ranks[service], service in WITH_MODELS, service != "tracker"))
    return Supervisor(
        specs,
        location.workspace / "logs",
        environment_of_services(config, os.environ),
        silence_s=_silence(Workspace(location.workspace).health),
        waits_for=lambda: _missing(config, location, folders_of(config, location.workspace, artifacts)),
        has_log=lambda: not _is_broker_down(config, location),
        fork_server=lease.fork_server,
    )


def environment_of_services(config: RunConfig, env: Mapping[str, str]) -> dict[str, str]:
    """Variables of the managed services of a run whose own process has those in `env`.

    Where two services compute at the same time, each with as many threads as the machine has cores, a thread of torch
    that waits for others must not spin: it would keep the core from the other service. Where they take turns, a thread
    that sleeps would begin its next part late.
    """
    compute_together = config.adapter.max_staleness > 0 or config.builder.num_producers > 1
    return {"OMP_WAIT_POLICY": "PASSIVE", **env} if compute_together else dict(env)


def _missing(config: RunConfig, location: RunLocation, folders: Iterable[Path]) -> str:
    """The missing precondition of the services, if any: free disk space, or our own broker being up."""
    for disk in disks_of(folders):
        if disk.free_bytes < FULL_BYTES:
            return f"the disk of {disk.folder} is full"
    return "the broker is down" if _is_broker_down(config, location) else ""


def _is_broker_down(config: RunConfig, location: RunLocation) -> bool:
    """Whether our own broker does not answer. Nothing is known of others."""
    is_ours = config.builder.bootstrap_servers == EMBEDDED
    return is_ours and not answers(int(location.kafka.bootstrap_servers.rpartition(":")[2]))


def _silence(health: Path) -> Callable[[str, int], float]:
    def silence_s(name: str, pid: int) -> float:
        sign = read_sign(health, name)
        return sign.age_s if sign is not None and sign.pid == pid else 0.0

    return silence_s


def warn_other_workspaces(finetune: FinetuneConfig, workspace: Path) -> None:
    """Warn about blocks that name a workspace other than the run's."""
    for role in ("trajectory_builder", "trainer_adapter"):
        block = block_of(finetune, role)
        named: Path | None = getattr(block, "workspace", None)
        if named is not None and "workspace" in block.model_fields_set and named.absolute() != workspace.absolute():
            warn_meaningless(
                f"{role}s.{getattr(finetune, role)}", ("workspace",), f"this run uses {workspace}, given by --workspace"
            )
