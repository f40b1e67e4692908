"""Runs one service in this process: settings, topics, heartbeat, graceful stop. Contains no service logic.

Settings come from the environment (ROLLSTREAM_*), and from a JSON file or standard input, which take precedence.
"""

import asyncio
import importlib
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from rollstream.eventlog.blocking_calls import own_threads_ended
from rollstream.eventlog.broker.broker import own_block
from rollstream.eventlog.kafka.topic_ids import Found, check_topics, watch_topics
from rollstream.eventlog.private import make_private
from rollstream.harness.services.committed_offsets import check_committed, remember_committed
from rollstream.harness.services.live_line import LiveLine
from rollstream.harness.services.liveness import PARENT, beat, die_with_parent, leave_terminal
from rollstream.harness.services.optional_dependencies import skip_unused_libraries
from rollstream.harness.services.sole_use import sole_name
from rollstream.harness.services.workspace import Workspace
from rollstream.learner.parallel.launch import is_started_together, start_processes
from rollstream.schemas.base import check_no_truth_values
from rollstream.schemas.errors import ConfigError, first_invalid
from rollstream.schemas.kafka import expanded, from_environment, merged, with_secrets
from rollstream.schemas.permissions import ALLOW_VARIABLE
from rollstream.schemas.services import (
    EndpointSettings,
    LearnerSettings,
    MetricsSettings,
    ProcessorSettings,
    ProducerSettings,
    ServiceSettings,
    TrackerServiceSettings,
)
from rollstream.schemas.variables import conceal_variables, expand, variables_in

if TYPE_CHECKING:
    from rollstream.eventlog.broker.watch import Broker
    from rollstream.eventlog.kafka.log import KafkaLog

KINDS: dict[str, type[ServiceSettings]] = {
    "producers": ProducerSettings,
    "processors": ProcessorSettings,
    "learner": LearnerSettings,
    "metrics": MetricsSettings,
    "tracker": TrackerServiceSettings,
    "gateway": EndpointSettings,
    "endpoint": EndpointSettings,
}
GATEWAY = "rollstream.producers.openai.service"
MODULES = {"gateway": GATEWAY, "endpoint": GATEWAY, "tracker": "rollstream.metrics.trackers.service"}
"""Modules whose `serve` runs a service that has no package of its own."""
CLI = "rollstream.harness.cli.main"
WITH_MODELS = ("producers", "learner")
"""Services that import transformers."""
LOADED_ONCE = (*(f"rollstream.{service}.service" for service in WITH_MODELS), "peft")
"""Modules that the fork server of a run imports for them."""
FROM_ENVIRONMENT = {
    "bootstrap_servers": "ROLLSTREAM_BOOTSTRAP_SERVERS",
    "artifact_uri": "ROLLSTREAM_ARTIFACT_URI",
    "workspace": "ROLLSTREAM_WORKSPACE",
    "num_partitions": "ROLLSTREAM_NUM_PARTITIONS",
    "allow": ALLOW_VARIABLE,
}
STANDARD_INPUT = "/proc/self/fd/0"
"""Standard input for several processes: each opens it by this name and reads all of it."""
PASSED_ON = ("-", STANDARD_INPUT)
"""Settings that a process got from the one that started it."""
END_TIMEOUT_S = 25.0
"""Maximum seconds for a service to end once it was asked to."""
LEFT_BEHIND_S = 5.0
"""Maximum seconds for tasks that a service leaves behind: an environment may ignore that it is cancelled."""
WATCH_S = 30.0
"""Seconds between two checks of the topics while a service runs."""
Serve = Callable[[Any], Awaitable[None]]

logger = logging.getLogger(__name__)


def settings_of(service: str, name: str | None, given: Mapping[str, Any], env: Mapping[str, str]) -> ServiceSettings:
    """Settings of a service. Raises ConfigError naming the missing or wrong setting."""
    found = {key: env[variable] for key, variable in FROM_ENVIRONMENT.items() if env.get(variable)}
    values: dict[str, Any] = {**found, "workspace": workspace_of(env), **given}
    if not isinstance(values["workspace"], str | os.PathLike) or not str(values["workspace"]):
        raise ConfigError(f"serve {service}: workspace: is {values['workspace']!r}; give the path of a folder")
    own = own_block(Path(values["workspace"]), str(values.get("bootstrap_servers")))
    values["kafka"] = merged(own, expanded(from_environment(env), env), _section(values.get("kafka")))
    values["name"] = name or name_of(service, values)
    values.setdefault("artifact_uri", str(Path(values["workspace"]).absolute() / "artifacts"))
    try:
        settings = KINDS[service].model_validate(values)
        _ = settings.connection
    except ValidationError as error:
        key, message = first_invalid(error, model=KINDS[service])
        remedy = f" (set {FROM_ENVIRONMENT[key]})" if key in FROM_ENVIRONMENT else ""
        raise ConfigError(f"serve {service}: {key}: {message[:1].lower()}{message[1:]}{remedy}") from error
    try:
        check_no_truth_values(values, settings)
    except ConfigError as error:
        raise ConfigError(f"serve {service}: {error}") from error
    return settings


def workspace_of(env: Mapping[str, str]) -> str:
    """The workspace of a service whose settings name none."""
    return env.get(FROM_ENVIRONMENT["workspace"]) or ".rollstream"


def name_of(service: str, given: Mapping[str, Any]) -> str:
    """The name of a process whose command has none."""
    return given.get("name") or f"{service}-1"


def recording(service: str, given: Mapping[str, Any]) -> str:
    """The service that is meant: a gateway with the section `gateway` records rollouts, as producers do.

    Raises ConfigError for settings of which neither kind of gateway could be made.
    """
    if service != "gateway":
        return service
    if "gateway" in given and "model_group" in given:
        raise ConfigError("serve gateway: either model_group, or gateway to record rollouts; remove one of them")
    if "gateway" not in given and "model_group" not in given:
        raise ConfigError(
            "serve gateway: set model_group to answer without recording, or gateway (an object, which may be empty) "
            "to record the rollouts that agents play"
        )
    return "producers" if "gateway" in given else service


def _section(found: Any) -> dict[str, Any]:
    """The `kafka` section of a service's settings. Raises ConfigError if it is not a mapping."""
    if found is not None and not isinstance(found, dict):
        raise ConfigError("--settings: kafka must be a JSON object")
    return {} if found is None else found


def read_settings(source: str | None) -> dict[str, Any]:
    """JSON object in a file, or on standard input if `source` is `-`; `${NAME}` in a file's `kafka` is expanded.

    Settings that another process of rollstream passes on have their secrets in plain text. Raises ConfigError.
    """
    if source is None:
        return {}
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
        found = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--settings {source} cannot be read as JSON: {error}; correct it, or its path") from error
    if not isinstance(found, dict):
        raise ConfigError(f"--settings {source} must be a JSON object")
    if source not in PASSED_ON and "kafka" in found:
        conceal_variables(variables_in(found["kafka"]))
        found["kafka"] = expand(found["kafka"], os.environ, f"--settings {source}: kafka")
    return found


def serve(service: str, settings: ServiceSettings) -> None:
    """Run a service until SIGTERM or SIGINT. Raises what the service raises."""
    die_with_parent(os.environ)
    leave_terminal(os.environ)
    if isinstance(settings, LearnerSettings) and settings.ranks > 1 and not is_started_together():
        _start_ranks(settings)
        return
    if service in WITH_MODELS:
        skip_unused_libraries()
    module = importlib.import_module(MODULES.get(service, f"rollstream.{service}.service"))
    if service == "learner" and module.follows(settings):
        return
    asyncio.run(leaving_nobody(service, run_until_stopped(service, settings, module.serve)))


def variables_of(settings: ServiceSettings) -> frozenset[str]:
    """Variables that a service's settings name; those of an engine or a tracker are expanded where it is built."""
    section = getattr(settings, "engine", None) or getattr(settings, "tracker", None)
    named = variables_in([*settings.allow, settings.artifact_uri])
    return named if section is None else named | variables_in(section.model_dump(mode="json"))


async def keep_broker(broker: "Broker") -> None:
    """Restart a broker that dies, until a signal arrives. Raises BrokerError if it dies too often."""
    from rollstream.eventlog.broker.watch import keep_running

    watching = asyncio.create_task(keep_running(broker, LiveLine(sys.stdout).print))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, watching.cancel)
    with suppress(asyncio.CancelledError):
        await watching


def _start_ranks(settings: LearnerSettings) -> None:
    """Be torchrun for the processes of a learner, which die with this one. Raises RunFailedError if one fails.

    Whoever supervises this process starts all of them again, from their checkpoint.
    """
    os.environ[PARENT] = str(os.getpid())
    with _readable(with_secrets(settings)) as path:
        start_processes(settings.ranks, CLI, ["serve", "learner", "--name", settings.name, "--settings", path])


@contextmanager
def _readable(text: str) -> Iterator[str]:
    """A path by which several child processes can read a text that has secrets: on Linux of a file in memory alone."""
    if sys.platform == "linux":
        with os.fdopen(os.memfd_create("settings"), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.dup2(file.fileno(), 0)
        yield STANDARD_INPUT
        return
    with NamedTemporaryFile("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        yield file.name


async def leaving_nobody(service: str, work: Awaitable[None], *, within_s: float = LEFT_BEHIND_S) -> None:
    """Run `work`, then end the process even if tasks or threads are left. Raises the error of `work`."""
    try:
        await work
    finally:
        asyncio.get_running_loop().call_later(within_s, _leave, service, sys.exception())
        await own_threads_ended()


def _leave(service: str, error: BaseException | None) -> None:
    """End the process from within `asyncio.run`, which would wait for all tasks and threads without limit."""
    level = logging.ERROR if error else logging.WARNING
    logger.log(
        level, "%s: exiting although a task or thread is still running%s", service, f": {error}" if error else ""
    )
    os._exit(1 if error else 0)


async def run_until_stopped(service: str, settings: ServiceSettings, work: Serve, *, watch_s: float = WATCH_S) -> None:
    """Run the service with its topic checks and heartbeat; returns after a signal has stopped it.

    Topics are checked every `watch_s` seconds. Raises TruncatedError if one was deleted, and the errors of `work`.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(_work(service, settings, work, watch_s))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _stop, task, service)
    with suppress(asyncio.CancelledError):
        await task


def _stop(task: "asyncio.Future[None]", service: str) -> None:
    logger.info("%s: stopping", service)
    _cancel(task)


def _cancel(task: "asyncio.Future[None]") -> None:
    """Cancel the work, and end the process if it does not stop in time."""
    task.cancel()
    asyncio.get_running_loop().call_later(END_TIMEOUT_S, os._exit, 1)


async def _work(service: str, settings: ServiceSettings, work: Serve, watch_s: float) -> None:
    make_private(settings.workspace)
    async with sole_name(settings.workspace, settings.name), _administering(settings) as log:
        await log.ensure_topics(num_partitions=settings.num_partitions)
        cluster_id, topic_ids = await _found(log)
        check_topics(settings.workspace, cluster_id, topic_ids)
        group = settings.connection.group(service)
        if service in GROUPS:
            check_committed(settings.workspace, cluster_id, group, await log.committed_offsets(group))
        working = asyncio.current_task()
        assert working is not None
        has_parent = isinstance(settings, LearnerSettings) and settings.ranks > 1
        pid = os.getppid() if has_parent else os.getpid()  # of the process that is supervised
        alive = asyncio.create_task(beat(Workspace(settings.workspace).health, service, settings.name, pid=pid))

        async def find() -> Found:
            if service in GROUPS:
                remember_committed(settings.workspace, cluster_id, group, await log.committed_offsets(group))
            return await _found(log)

        watching = asyncio.create_task(watch_topics(settings.workspace, find, every_s=watch_s))
        watching.add_done_callback(lambda report: None if report.cancelled() else _cancel(working))
        try:
            await work(settings)
        except asyncio.CancelledError:
            if watching.done():
                watching.result()
            raise
        finally:
            alive.cancel()
            watching.cancel()
            await asyncio.gather(alive, watching, return_exceptions=True)


@asynccontextmanager
async def _administering(settings: ServiceSettings) -> "AsyncIterator[KafkaLog]":
    """One client for all topic checks while the service runs."""
    from rollstream.eventlog.kafka.log import KafkaLog

    log = KafkaLog(settings.connection, client_id=settings.name)
    try:
        await log.start_admin()
        yield log
    finally:
        await log.close()


GROUPS = ("producers", "processors")
"""Services that go on from the committed offsets of a consumer group."""


async def _found(log: "KafkaLog") -> Found:
    return await log.cluster_id(), await log.topic_ids()
