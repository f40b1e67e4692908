"""Completes a run that components conduct: waits for its trainer, finalizes its job, and exports its model."""

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any

from rollstream.harness.components import epochs
from rollstream.harness.runs import outcome
from rollstream.harness.runs.outcome import Outcome
from rollstream.harness.runs.run_handle import RunHandle
from rollstream.learner.untrained import CURRICULUM, NOTHING_SUBMITTED
from rollstream.schemas.errors import RunFailedError, retrieve_exception
from rollstream.schemas.events import RunEnded
from rollstream.schemas.finetuning import TrainingStatusEnum
from rollstream.schemas.settings import EXTERNAL
from rollstream.schemas.variables import MAX_JOB_ERROR, conceal, recordable

GRACE_S = 30.0
"""Maximum seconds for a trainer to return after the run can no longer continue."""

logger = logging.getLogger(__name__)


async def returned(
    handle: RunHandle, running: Coroutine[Any, Any, list[Any]], *, grace_s: float = GRACE_S
) -> list[Any]:
    """The result of a trainer's `run`. It is cancelled `grace_s` after the run or one of its services is over.

    Components of other packages may then be in the middle of rollouts that take hours, or wait for an event that never
    comes. Raises what `running` raises; RunFailedError, or what the service failed with, where it was cancelled.
    """
    trainer = asyncio.ensure_future(running)
    over = asyncio.ensure_future(handle.wait_for(lambda: None))
    try:
        await asyncio.wait({trainer, over}, return_when=asyncio.FIRST_COMPLETED)
        if not trainer.done():
            await asyncio.wait({trainer}, timeout=grace_s)
        if trainer.done():
            return trainer.result()
        logger.warning("the trainer did not return within %g s of the end of its run; it is cancelled", grace_s)
        return over.result() or []
    finally:
        over.cancel()
        over.add_done_callback(retrieve_exception)
        if not trainer.done():
            trainer.cancel()
            await asyncio.wait({trainer}, timeout=grace_s)
            trainer.add_done_callback(retrieve_exception)


def watch_curriculum(handle: RunHandle, trainer: Any) -> None:
    """Have another package's trainer report what its curriculum leaves out of each epoch; if that is all of it, the
    trainer submits nothing.
    """
    choose = trainer.apply_curriculum_learning

    def chosen(trajectory_collection: Any, epoch: int) -> Any:
        offered = _ids(trajectory_collection)
        kept = choose(trajectory_collection, epoch)
        handle.left_out[epoch + handle.epoch_offset] = offered - _ids(kept)
        if any(trajectory_collection.trajectories) and not any(kept.trajectories):
            handle.empty_epochs[epoch + handle.epoch_offset] = CURRICULUM
        return kept

    trainer.apply_curriculum_learning = chosen


def _ids(collection: Any) -> frozenset[str]:
    """Ids of the trajectories that are on the log already."""
    own = [one.metadata or {} for group in collection.trajectories for one in group]
    return frozenset(str(metadata["trajectory_id"]) for metadata in own if "trajectory_id" in metadata)


async def trained(handle: RunHandle, running: Coroutine[Any, Any, list[Any]]) -> tuple[list[Any], str | None]:
    """The result of a trainer's `run`, and why the run failed if a training job of it did; raises as `returned` does.

    Epochs for which nothing was submitted and nobody said why are remembered.
    """
    statuses = await returned(handle, running)
    num_known = len(handle.job.submitted) + len(handle.empty_epochs)
    handle.empty_epochs |= dict.fromkeys(range(-1, num_known - len(statuses) - 1, -1), NOTHING_SUBMITTED)
    return statuses, failure_of(statuses)


def failure_of(statuses: Iterable[Any]) -> str | None:
    """The reason why a run failed, without secrets, if a training job of it did; None if none did. `statuses`: ours or
    NAT's.
    """
    for one in statuses:
        if one.status in (TrainingStatusEnum.FAILED, TrainingStatusEnum.CANCELED):
            return conceal(one.message or "") or f"a training job {TrainingStatusEnum(one.status).value}"
    return None


async def finalize_run(handle: RunHandle, *, is_completed: bool, message: str = "") -> None:
    """Bring a completed run's job to its end; write that a failed one failed. What is over stays as it is.

    `message` is others' word: it is written without secrets, and as long as an event allows. Raises what a service or
    the log failed with; the run then stays open, so that it can be resumed.
    """
    message = recordable(message, MAX_JOB_ERROR)
    progress = handle.progress
    if progress.ended is not None:
        return
    if is_completed:
        try:
            await epochs.conclude(handle)
        except RunFailedError:
            handle.check_services()
        return
    handle.check_services()
    if progress.run is None:
        await handle.announce()  # a run that failed before its first epoch is listed too
    if handle.spec.job.kind == EXTERNAL:
        await epochs.end_external(handle, message)
    event = RunEnded(run_id=progress.run_id, time_ms=epochs.time_ms(handle), cause="failed", message=message)
    await handle.send([event])
    while handle.progress.ended is None:
        await handle.changed(1.0)


async def finish(handle: RunHandle, *, is_completed: bool, message: str = "", logged: str = "") -> Outcome:
    """Finalize a run, export its newest model if it did not fail, write RunEnded if nobody has.

    `logged`: what others logged meanwhile, for a run that was given nothing to train on.
    """
    handle.is_finished = True
    is_given_nothing = NOTHING_SUBMITTED in handle.empty_epochs.values()
    await finalize_run(handle, is_completed=is_completed, message=message)
    return await outcome.end(
        handle.log,
        handle.artifacts,
        handle.progress,
        handle.run,
        handle.config,
        logged=logged if is_given_nothing else "",
    )
