"""Learners of two processes, started by torchrun's agent."""

import asyncio
import contextlib
import os
import runpy
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from rollstream.eventlog import failpoints
from rollstream.harness.services.serving import CLI
from rollstream.schemas.events import StepTrained, WeightsPublished
from rollstream.schemas.kafka import KafkaSettings, with_secrets
from rollstream.schemas.services import LearnerSettings
from tests.rigs.services.failing_algorithm import NAME
from tests.rigs.services.process_group import with_libraries


def slowly(has: Callable[[], Awaitable[bool]]) -> Callable[[], Awaitable[bool]]:
    """A look that leaves the interpreter to the thread that trains in between."""

    async def inspect() -> bool:
        await asyncio.sleep(0.3)
        return await has()

    return inspect


def _be_torchrun(folder: Path, env: Mapping[str, str]) -> None:
    """Have torchrun's agent start and restart the ranks, as forks of this process."""
    os.environ.clear()
    os.environ.update(env)
    failpoints._armed = failpoints.from_environment(env)
    with (folder / "learner.log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        local_addr="127.0.0.1",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        run_id=folder.name,
        max_restarts=3,
        start_method="fork",
    )
    elastic_launch(config, _be_rank)(folder)


def _be_rank(folder: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # not the agent's
    pid_file(folder, int(os.environ["RANK"])).write_text(str(os.getpid()))
    sys.argv = [CLI, "serve", "learner", "--settings", str(folder / "settings.json")]
    runpy.run_module(CLI, run_name="__main__", alter_sys=True)


def pid_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.pid"


@contextlib.contextmanager
def launched(lab: Any, kafka: KafkaSettings, folder: Path) -> Iterator[psutil.Process]:
    """A learner of two processes on a real broker, by torchrun's agent: forks of a process that has the libraries, as
    torchrun's own command would import them in both ranks after each kill.
    """
    settings = LearnerSettings(
        bootstrap_servers=kafka.bootstrap_servers,
        kafka=kafka.section,
        artifact_uri=lab.artifacts.uri,
        workspace=lab.folder,
        name="learner-0",
        num_partitions=6,
        model_groups=("run-1/main",),
        threads=1,
        allow=(f"model:{lab.model}", NAME),
    )
    (folder / "settings.json").write_text(with_secrets(settings))
    started = with_libraries().Process(target=_be_torchrun, args=(folder, dict(os.environ)))
    started.start()
    assert started.pid is not None
    torchrun = psutil.Process(started.pid)
    try:
        yield torchrun
    finally:
        ranks = torchrun.children(recursive=True) if torchrun.is_running() else []
        started.terminate()
        _, left = psutil.wait_procs([torchrun, *ranks], 60)
        for process in left:
            process.kill()
        started.join()


async def wait_until(lab: Any, torchrun: psutil.Process, count: int) -> list[StepTrained]:
    """The steps, once there are `count`, all of them published."""
    async with asyncio.timeout(240):
        while True:
            steps = await lab.events("weights", StepTrained)
            published = await lab.events("weights", WeightsPublished)
            if len(steps) >= count and any(one.version == count for one in published):
                return steps
            assert torchrun.is_running()
            assert torchrun.status() != psutil.STATUS_ZOMBIE
            await asyncio.sleep(0.2)
