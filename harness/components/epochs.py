"""Epochs of a run that components conduct: which one is next, what it is submitted with, how the last one ends.

An epoch without a submission is sealed by an empty one, so that nothing waits for it without limit.
"""

import logging
from collections import Counter
from collections.abc import Sequence

from rollstream.harness.components import epoch_events
from rollstream.harness.runs.run_handle import RunHandle
from rollstream.learner.untrained import failure_of
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.events import EpochSealed, GroupClosed, JobFailed, JobSucceeded
from rollstream.schemas.events.training import SubmittedGroup
from rollstream.schemas.settings import EXTERNAL, MAX_TASKS

logger = logging.getLogger(__name__)


def next_epoch(handle: RunHandle) -> int:
    """The epoch after the last one that is sealed."""
    return handle.job.last_sealed + 1


def base_version(handle: RunHandle) -> int:
    """The version that the job begins at; the job has started."""
    started = handle.job_progress.started
    assert started is not None
    return started.base_version


def newest_planned(handle: RunHandle) -> int:
    """The version that the batches which are planned so far yield; it is there, or sure to come."""
    return base_version(handle) + handle.job.num_planned


def time_ms(handle: RunHandle) -> int:
    """Event time of later events: that of the newest seal, or of the job's start before the first seal."""
    started, last = handle.job_progress.started, handle.job.seals.get(handle.job.last_sealed)
    if last is not None:
        return last.time_ms
    return started.time_ms if started is not None else handle.run.started.time_ms


async def closed(handle: RunHandle, group_ids: Sequence[str]) -> list[GroupClosed]:
    """Wait until these groups have closed, and return their GroupClosed. Raises RunFailedError if the run or its
    services are over.
    """
    known = handle.job.closed
    return await handle.wait_for(
        lambda: [known[name] for name in group_ids] if all(name in known for name in group_ids) else None
    )


async def start(handle: RunHandle, epoch: int, num_tasks: int) -> None:
    """Write EpochStarted, once all epochs before it are sealed; one that is there already stays.

    Raises ConfigError for more tasks than an epoch may have.
    """
    if num_tasks > MAX_TASKS:
        raise ConfigError(
            f"epoch {epoch} has {num_tasks} tasks, at most {MAX_TASKS} are possible; use a part of the data"
        )
    await seal_before(handle, epoch)
    if epoch in handle.job.started or epoch in handle.job.seals:
        return
    run_id = handle.run.started.run_id
    await handle.send([epoch_events.epoch_started(handle.spec, run_id, epoch, num_tasks, time_ms(handle))])


async def seal_before(handle: RunHandle, epoch: int) -> None:
    """Seal epochs that were left without a submission; wait for the seals of the others."""
    for earlier in range(next_epoch(handle), epoch):
        if earlier not in handle.job.submitted:
            await submit(handle, earlier, ())
        await sealed(handle, earlier)


async def submit(
    handle: RunHandle,
    epoch: int,
    groups: Sequence[SubmittedGroup],
    *,
    is_last: bool = False,
) -> None:
    """Have an epoch planned from these groups; the first submission of an epoch counts."""
    await start(handle, epoch, 0)
    times = [handle.job.closed[group.group_id].time_ms for group in groups if group.group_id in handle.job.closed]
    num_empty = Counter[str]() if groups else _uncounted(handle, epoch, is_last=is_last)
    records = epoch_events.submission(
        handle.spec,
        handle.run.started.run_id,
        epoch,
        groups,
        time_ms=max([time_ms(handle), *times]),  # event time of a producer that took over may lag behind
        percentile=handle.curriculum_percentile,
        is_last=is_last,
        not_offered=_not_offered(handle, epoch, groups),
        num_empty=num_empty,
    )
    known = handle.job.submitted.get(epoch)
    if known is None:
        await handle.send(records)
    elif known != records[-1].submission_id:
        logger.warning("epoch %s was submitted already with other content, which counts: %s", epoch, known)


def _uncounted(handle: RunHandle, epoch: int, *, is_last: bool) -> Counter[str]:
    """Causes of the epochs without trajectories that are counted with this submission: at the job's end, all others."""
    counted = sorted(handle.empty_epochs) if is_last else [epoch]
    return Counter(handle.empty_epochs.pop(one) for one in counted if one in handle.empty_epochs)


def _not_offered(handle: RunHandle, epoch: int, groups: Sequence[SubmittedGroup]) -> list[str]:
    """The trajectories of an epoch that are not submitted although no curriculum is known to have left them out."""
    left_out = handle.left_out.pop(epoch, frozenset[str]())
    if not handle.spec.plan.curriculum.enabled:
        return []  # so it is with all of them
    known = left_out.union(*(group.trajectory_ids for group in groups))
    return sorted(
        member.trajectory_id
        for group in handle.job.closed.values()
        if group.epoch == epoch and group.purpose == "train"
        for member in group.members
        if member.trajectory_id not in known
    )


async def sealed(handle: RunHandle, epoch: int) -> EpochSealed:
    """The seal of an epoch, once it is there. Raises RunFailedError if the run is over before it."""
    return await handle.wait_for(lambda: handle.job.seals.get(epoch))


async def seal_submitted(handle: RunHandle) -> None:
    """Wait for the seals of epochs that an earlier process submitted, so that no other one begins them again."""
    for epoch in sorted(handle.job.submitted.keys() - handle.job.seals.keys()):
        await sealed(handle, epoch)


async def conclude(handle: RunHandle) -> None:
    """Bring the job to its end: the first epoch without a submission is sealed empty, as the last one.

    Waits for the learner. Raises RunFailedError if the run is over before.
    """
    await handle.begin()
    last = handle.spec.plan.num_epochs - 1
    if not any(seal.is_last for seal in handle.job.seals.values()):
        epoch = min(max(handle.job.submitted, default=-1) + 1, last)
        await seal_before(handle, epoch)
        if epoch not in handle.job.submitted:
            await submit(handle, epoch, (), is_last=True)
        await sealed(handle, epoch)
    if handle.spec.job.kind == EXTERNAL:
        await end_external(handle)
    await handle.wait_for(lambda: handle.job_progress.outcome)


async def end_external(handle: RunHandle, error: str | None = None) -> None:
    """Write how a job that another training backend does has ended, in place of a learner."""
    run_id, time = handle.run.started.run_id, time_ms(handle)
    group, job_id = handle.spec.model_group, handle.spec.job_id
    if error is None and not any(seal.num_trained_groups for seal in handle.job.seals.values()):
        error = await failure_of(handle.log, job_id)
    if error is not None:
        await handle.send([JobFailed(run_id=run_id, time_ms=time, model_group=group, job_id=job_id, error=error)])
        return
    base = base_version(handle)
    await handle.send([JobSucceeded(run_id=run_id, time_ms=time, model_group=group, job_id=job_id, final_version=base)])
