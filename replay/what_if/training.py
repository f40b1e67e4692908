"""Trains what a what-if has planned: writes its run, and has a learner of this process do its job."""

import asyncio
import logging
from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from pathlib import Path

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import EventLog, TopicPartition
from rollstream.eventlog.reading import decode_or_none
from rollstream.eventlog.run_offsets import ends_now
from rollstream.eventlog.terms import BEFORE_LEARNERS
from rollstream.schemas.base import Event
from rollstream.schemas.errors import FencedError, RunFailedError
from rollstream.schemas.events import (
    BatchPlanned,
    JobCancelled,
    JobFailed,
    JobSubmitted,
    JobSucceeded,
    RunEnded,
    RunStarted,
    WeightsPublished,
)
from rollstream.schemas.permissions import Permissions
from rollstream.schemas.settings import JobSpec

logger = logging.getLogger(__name__)


async def train_planned(
    log: EventLog,
    artifacts: ArtifactStore,
    begun: RunStarted,
    spec: JobSpec,
    base: WeightsPublished,
    planned: Sequence[Event],
    checkpoints: Path,
    on_progress: Callable[[str], None],
    permissions: Permissions,
    scores: AsyncIterable[list[Event]],
) -> None:
    """Write the new run and have a learner of this process train it. The run is ended whatever happens.

    `base`: what the recorded job began with; `scores`: those of the trajectories; `permissions`: what it may name.

    Raises RunFailedError, and what the learner raises.
    """
    from transformers.utils.logging import disable_progress_bar

    from rollstream.learner.worker import Worker

    disable_progress_bar()
    worker = Worker(
        log,
        artifacts,
        name="what-if",
        checkpoints=checkpoints,
        model_groups=(spec.model_group,),
        permissions=permissions,
    )
    job = _submitted(begun, spec, base.version, await ends_now(log))
    ended = RunEnded(run_id=begun.run_id, time_ms=begun.time_ms, cause="failed", message="the what-if was interrupted")
    ends = await log.end_offsets("jobs")
    await log.send(begun)
    training: asyncio.Task[None] | None = None
    try:
        await log.send(_moved(base, begun, spec))  # a learner that sees the job sees what it begins with
        async for some in scores:
            await log.send_all(some)
        await log.send_all([*planned, job])
        on_progress(f"training {sum(isinstance(event, BatchPlanned) for event in planned)} batches")
        training = asyncio.create_task(worker.run())
        closed = await _closed(log, spec.job_id, ends, training)
        outcome = {"cause": "completed", "message": ""}
        if not isinstance(closed, JobSucceeded):
            outcome = {"message": closed.error if isinstance(closed, JobFailed) else "it was cancelled"}
        ended = ended.model_copy(update=outcome)
    except Exception as error:
        reason = permissions.conceal(str(error)) or type(error).__name__
        ended = ended.model_copy(update={"message": reason})
        raise
    finally:
        if training is not None:
            await _stop(training)
        await log.send(ended)
    if ended.cause == "failed":
        raise RunFailedError(f"what-if {begun.run_id}: {ended.message}")


async def _stop(training: "asyncio.Task[None]") -> None:
    """End the learner; what it raises is raised by `_closed`, or comes too late to change the outcome."""
    training.cancel()
    await asyncio.wait({training})
    if not training.cancelled() and (error := training.exception()) is not None:
        logger.info("the learner ended with %s: %s", type(error).__name__, error)


def _submitted(begun: RunStarted, spec: JobSpec, base_version: int, start_offsets: dict[str, int]) -> JobSubmitted:
    return JobSubmitted(
        run_id=begun.run_id,
        time_ms=begun.time_ms,
        job_id=spec.job_id,
        model_group=spec.model_group,
        base_version=base_version,
        settings=spec.job,
        run_sha256=codec.content_digest(begun),
        fork=begun.parent,
        start_offsets=start_offsets,
        is_what_if=True,
    )


def _moved(base: WeightsPublished, begun: RunStarted, spec: JobSpec) -> WeightsPublished:
    """The same weights as the version that the new run's model group begins with."""
    return base.model_copy(
        update={
            "run_id": begun.run_id,
            "time_ms": begun.time_ms,
            "job_id": spec.job_id,
            "model_group": spec.model_group,
            "batch_id": None,
            "parent": None,
            "term": BEFORE_LEARNERS,
        }
    )


async def _closed(
    log: EventLog, job_id: str, ends: Mapping[int, int], training: "asyncio.Task[None]"
) -> JobSucceeded | JobFailed | JobCancelled:
    """The end of a job. Raises what the learner raises; another one that takes the job over may end it too."""
    reader = await log.reader({TopicPartition("jobs", partition): at for partition, at in ends.items()})
    try:
        while True:
            for record in await reader.poll(timeout_s=0.2):
                received = decode_or_none(record)  # of any run, whose own reader sends a bad record to the dead letters
                event = None if received is None else received.event
                if isinstance(event, (JobSucceeded, JobFailed, JobCancelled)) and event.job_id == job_id:
                    return event
            if training.done() and not isinstance(training.exception(), FencedError):
                await training
    finally:
        await reader.close()
