"""The learner as a service: connects what the settings name and runs the worker until it is cancelled."""

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import orjson
from transformers.utils import logging as transformers_logging

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.learner.checkpoints.checkpoint import read
from rollstream.learner.checkpoints.faults import Faults
from rollstream.learner.model.ranks import Ranks
from rollstream.learner.parallel.launch import is_started_together
from rollstream.learner.parallel.process_ranks import DROP, END, LOAD, ProcessRanks, joined
from rollstream.learner.scoring import models
from rollstream.learner.scoring.scored_batch import decoded_batch
from rollstream.learner.trainer import JobTrainer
from rollstream.learner.worker import Worker
from rollstream.schemas.errors import ConfigError, RollstreamError
from rollstream.schemas.events import JobSubmitted
from rollstream.schemas.permissions import Permissions
from rollstream.schemas.services import LearnerSettings

logger = logging.getLogger(__name__)


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
    with joined() as ranks:
        try:
            yield ranks
        except asyncio.CancelledError:
            with suppress(RuntimeError):  # of a process that is gone
                if not ranks.is_stuck:
                    ranks.send(END)
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
    with joined() as ranks:
        allowed = Permissions.of(settings.allow, os.environ)
        checkpoints = settings.workspace / "checkpoints"
        follow(ranks, threads=settings.threads, permitted=lambda _: allowed, checkpoints=checkpoints)
    return True


def follow(
    ranks: ProcessRanks,
    *,
    threads: int | None,
    permitted: Callable[[JobSubmitted], Permissions],
    checkpoints: Path | None = None,
) -> None:
    """Do what rank 0 does, until it ends: models and optimizers of its open jobs, of which this process has its shards.

    Errors that rank 0 learns of are for it to record. Any other one ends this process, and all with it; it is kept
    beside the `checkpoints` for the next start. `permitted`: what a job may name. Blocking.
    """
    trainers: dict[str, JobTrainer] = {}
    jobs: dict[str, JobSubmitted] = {}
    while (command := ranks.receive()).name != END:
        try:
            with ranks.together(command.name):
                if command.name in (LOAD, DROP):
                    trainers.pop(command.job_id, None)  # two models of a job need not fit into memory
                    jobs.pop(command.job_id, None)
                if command.name == LOAD:
                    jobs[command.job_id] = job = JobSubmitted.model_validate_json(command.data)
                    trainers[job.job_id] = JobTrainer(job, threads=threads, permissions=permitted(job), ranks=ranks)
                elif command.name != DROP:
                    _WORK[command.name](trainers[command.job_id], command.data)
        except Exception as error:
            if ranks.is_stuck or not isinstance(error, (RollstreamError, OSError)):
                job, trainer = jobs.get(command.job_id), trainers.get(command.job_id)
                if checkpoints is not None and job is not None:
                    index = None if trainer is None else trainer.index
                    Faults(checkpoints, job, ranks.index).keep(error, index, is_certain=ranks.is_stuck)
                raise
            logger.warning("job=%s %s: %s", command.job_id, command.name, error)


def _train(trainer: JobTrainer, data: bytes) -> None:
    planned, trajectories, scores, first = decoded_batch(data)
    trainer.train(planned, trajectories, scores=scores, first=first)


def _resume(trainer: JobTrainer, data: bytes) -> None:
    path = Path(data.decode())
    checkpoint = read(path)
    if checkpoint is None:
        raise ConfigError(f"checkpoint {path} is damaged or not there; all processes need the same workspace")
    trainer.resume(checkpoint)


_WORK: Mapping[str, Callable[[JobTrainer, bytes], object]] = {
    "train": _train,
    "resume": _resume,
    "write_shards": lambda trainer, folder: trainer.write_shards(Path(folder.decode())),
    "reset": lambda trainer, _: trainer.reset(),
    "use_threads": lambda trainer, threads: trainer.use_threads(int(threads)),
    "hold_state": lambda trainer, versions: trainer.hold_state(*orjson.loads(versions)),
    "return_to": lambda trainer, version: trainer.return_to(int(version)),
    "weights": lambda trainer, _: trainer.model.published(),
    "take_weights": lambda trainer, _: trainer.model.take_weights(),
    "score": lambda trainer, asked: trainer.scoring.score(*models.decoded_arguments(asked)),
    "take_base": lambda trainer, _: trainer.scoring.take_base(b"", ""),
    "refer_to": lambda trainer, _: trainer.refer_to(b"", ""),
}
"""The part of a process in each command of rank 0, which alone has the weights that are compared with."""
