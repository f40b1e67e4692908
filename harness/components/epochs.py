"""Epochs of a run that components conduct: which one is next, what it is submitted with, how the last one ends.

An epoch without a submission is sealed by an empty one, so that nothing waits for it without limit.
"""

import logging
from collections.abc import Sequence

from rollstream.harness.components import epoch_events
from rollstream.harness.runs.backend import Backend
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.events import EpochSealed, GroupClosed, JobFailed, JobSucceeded
from rollstream.schemas.events.training import SubmittedGroup
from rollstream.schemas.settings import EXTERNAL, MAX_TASKS

logger = logging.getLogger(__name__)


def next_epoch(backend: Backend) -> int:
    """The epoch after the last one that is sealed."""
    return backend.job.last_sealed + 1


def base_version(backend: Backend) -> int:
    """The version that the job begins at; the job has started."""
    started = backend.job_progress.started
    assert started is not None
    return started.base_version


def newest_planned(backend: Backend) -> int:
    """The version that the batches which are planned so far yield; it is there, or sure to come."""
    return base_version(backend) + backend.job.num_planned


def time_ms(backend: Backend) -> int:
    """Event time of what follows: that of the newest seal, of the job's start before the first."""
    started, last = backend.job_progress.started, backend.job.seals.get(backend.job.last_sealed)
    if last is not None:
        return last.time_ms
    return started.time_ms if started is not None else backend.run.started.time_ms


async def closed(backend: Backend, group_ids: Sequence[str]) -> list[GroupClosed]:
    """How these groups closed, once all of them have. Raises RunFailedError if the run or its services are over."""
    known = backend.job.closed
    return await backend.wait_for(
        lambda: [known[name] for name in group_ids] if all(name in known for name in group_ids) else None
    )


async def start(backend: Backend, epoch: int, num_tasks: int) -> None:
    """Write EpochStarted, once all epochs before it are sealed; one that is there already stays.

    Raises ConfigError for more tasks than an epoch may have.
    """
    if num_tasks > MAX_TASKS:
        raise ConfigError(
            f"epoch {epoch} has {num_tasks} tasks, at most {MAX_TASKS} are possible; use a part of the data"
        )
    await seal_before(backend, epoch)
    if epoch in backend.job.started or epoch in backend.job.seals:
        return
    run_id = backend.run.started.run_id
    await backend.send([epoch_events.epoch_started(backend.spec, run_id, epoch, num_tasks, time_ms(backend))])


async def seal_before(backend: Backend, epoch: int) -> None:
    """Seal epochs that were left without a submission; wait for the seals of the others."""
    for earlier in range(next_epoch(backend), epoch):
        if earlier not in backend.job.submitted:
            await submit(backend, earlier, ())
        await sealed(backend, earlier)


async def submit(
    backend: Backend,
    epoch: int,
    groups: Sequence[SubmittedGroup],
    *,
    is_last: bool = False,
) -> None:
    """Have an epoch planned from these groups; the first submission of an epoch counts."""
    await start(backend, epoch, 0)
    times = [backend.job.closed[group.group_id].time_ms for group in groups if group.group_id in backend.job.closed]
    records = epoch_events.submission(
        backend.spec,
        backend.run.started.run_id,
        epoch,
        groups,
        time_ms=max([time_ms(backend), *times]),  # event time of a producer that took over may lag behind
        percentile=backend.curriculum_percentile,
        is_last=is_last,
        not_offered=_not_offered(backend, epoch, groups),
    )
    known = backend.job.submitted.get(epoch)
    if known is None:
        await backend.send(records)
    elif known != records[-1].submission_id:
        logger.warning("epoch %s was submitted already with other content, which counts: %s", epoch, known)


def _not_offered(backend: Backend, epoch: int, groups: Sequence[SubmittedGroup]) -> list[str]:
    """The trajectories of an epoch that are not submitted although no curriculum is known to have left them out."""
    left_out = backend.left_out.pop(epoch, frozenset[str]())
    if not backend.spec.plan.curriculum.enabled:
        return []  # so it is with all of them
    known = left_out.union(*(group.trajectory_ids for group in groups))
    return sorted(
        member.trajectory_id
        for group in backend.job.closed.values()
        if group.epoch == epoch and group.purpose == "train"
        for member in group.members
        if member.trajectory_id not in known
    )


async def sealed(backend: Backend, epoch: int) -> EpochSealed:
    """The seal of an epoch, once it is there. Raises RunFailedError if the run is over before it."""
    return await backend.wait_for(lambda: backend.job.seals.get(epoch))


async def conclude(backend: Backend) -> None:
    """Bring the job to its end: the first epoch without a submission is sealed empty, as the last one.

    Waits for the learner. Raises RunFailedError if the run is over before.
    """
    await backend.begin()
    last = backend.spec.plan.num_epochs - 1
    if not any(seal.is_last for seal in backend.job.seals.values()):
        epoch = min(max(backend.job.submitted, default=-1) + 1, last)
        await seal_before(backend, epoch)
        if epoch not in backend.job.submitted:
            await submit(backend, epoch, (), is_last=True)
        await sealed(backend, epoch)
    if backend.spec.job.kind == EXTERNAL:
        await end_external(backend)
    await backend.wait_for(lambda: backend.job_progress.outcome)


async def end_external(backend: Backend, error: str | None = None) -> None:
    """Write how a job that another training backend does has ended, in place of a learner."""
    run_id, time = backend.run.started.run_id, time_ms(backend)
    group, job_id = backend.spec.model_group, backend.spec.job_id
    if error is not None:
        await backend.send([JobFailed(run_id=run_id, time_ms=time, model_group=group, job_id=job_id, error=error)])
        return
    base = base_version(backend)
    await backend.send(
        [JobSucceeded(run_id=run_id, time_ms=time, model_group=group, job_id=job_id, final_version=base)]
    )
