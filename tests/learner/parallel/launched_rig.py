"""Learners of two processes, started by torchrun."""

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from rollstream.schemas.events import (
    StepTrained,
    WeightsPublished,
)
from rollstream.schemas.kafka import KafkaSettings, with_secrets
from rollstream.schemas.services import LearnerSettings
from tests.rigs.services.failing_algorithm import NAME


def slowly(has: Callable[[], Awaitable[bool]]) -> Callable[[], Awaitable[bool]]:
    """A look that leaves the interpreter to the thread that trains in between."""

    async def inspect() -> bool:
        await asyncio.sleep(0.3)
        return await has()

    return inspect


@contextlib.contextmanager
def launched(lab: Any, kafka: KafkaSettings, folder: Path) -> Iterator[psutil.Process]:
    """A learner of two processes on a real broker, by torchrun."""
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
    file = folder / "settings.json"
    file.write_text(with_secrets(settings))
    program = Path(sys.executable).with_name("rollstream")
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "3", "--monitor-interval", "0.1"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--no-python", str(program)]
    with (folder / "learner.log").open("wb") as log:
        torchrun = psutil.Popen([*command, "serve", "learner", "--settings", str(file)], stdout=log, stderr=log)
    try:
        yield torchrun
    finally:
        ranks = torchrun.children(recursive=True) if torchrun.is_running() else []
        torchrun.terminate()
        _, left = psutil.wait_procs([torchrun, *ranks], 60)
        for process in left:
            process.kill()


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
