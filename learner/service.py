"""The learner as a service: connects what the settings name and runs the worker until it is cancelled."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from transformers.utils import logging as transformers_logging

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.learner.model.ranks import Ranks
from rollstream.learner.parallel import process_ranks
from rollstream.learner.parallel.launch import is_started_together
from rollstream.learner.trainer import follow
from rollstream.learner.worker import Worker
from rollstream.schemas.permissions import Permissions
from rollstream.schemas.services import LearnerSettings


async def serve(settings: LearnerSettings) -> None:
    """Serve jobs until cancelled; logs `ready` once the log is read.

    Raises LogError if the log cannot be reached, FencedError if another learner took a model group over,
    VersionDivergedError if training gave other bits than those that were published.
    """
    transformers_logging.disable_progress_bar()
    with _leading() as ranks:
        await _work(settings, ranks)


async def _work(settings: LearnerSettings, ranks: Ranks) -> None:
    async with KafkaLog(settings.connection, client_id=settings.name) as log:
        worker = Worker(
            log,
            ArtifactStore(settings.artifact_uri),
            name=settings.name,
            checkpoints=settings.workspace / "checkpoints",
            model_groups=settings.model_groups,
            threads=settings.threads,
            permissions=Permissions.of(settings.allow, os.environ),
            ranks=ranks,
        )
        await worker.run()


@contextmanager
def _leading() -> Iterator[Ranks]:
    """This process as the first of those that torchrun started; alone without torchrun.

    The others end once this one is stopped in order; on an error of its own it ends, and torchrun all others.
    """
    if not is_started_together():
        yield Ranks()
        return
    with process_ranks.joined() as ranks:
        try:
            yield ranks
        except asyncio.CancelledError:
            with suppress(RuntimeError):  # of a process that is gone
                ranks.send(process_ranks.END)
            raise


def follows(settings: LearnerSettings) -> bool:
    """Whether torchrun started this process as another than the first. Then it has trained with that until its end.

    It reads no log and writes none.
    """
    if not is_started_together() or os.environ.get("RANK", "0") == "0":
        return False
    transformers_logging.disable_progress_bar()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the first process stops in order, and tells this one
    with process_ranks.joined() as ranks:
        follow(ranks, threads=settings.threads, permissions=Permissions.of(settings.allow, os.environ))
    return True
