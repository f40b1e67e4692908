"""Conducts a run by its three components, epoch by epoch: a run that is not streamed, or whose components are not all
ours.
"""

import asyncio
import logging
from typing import Any

from rollstream.harness.components import epochs, run_completion
from rollstream.harness.components.build import Components, as_component_error, components_of
from rollstream.harness.components.external_adapter import recording
from rollstream.harness.components.interfaces import Trainer
from rollstream.harness.components.trainer import RollstreamTrainer
from rollstream.harness.runs.display import Display
from rollstream.harness.runs.progress import Progress
from rollstream.harness.runs.run_context import RunContext, RunRequest, WorkspaceLease
from rollstream.harness.runs.run_handle import RunHandle, started_run
from rollstream.schemas.errors import describe
from rollstream.schemas.finetuning import FinetuneConfig

MAX_METRICS = 10_000
"""Characters of a trainer's metrics in the log."""

logger = logging.getLogger(__name__)


async def conduct(run_request: RunRequest, lease: WorkspaceLease, run: RunContext, display: Display) -> Progress:
    """Build the components, let the trainer run to the end, and bring the job to its end; the progress then.

    Raises RollstreamError, ComponentError for an exception of a component; the run then stays open, and can be resumed.
    """
    handle = await started_run(run_request, lease, run, display)
    try:
        with as_component_error("components", run_request.loaded.finetune):
            async with components_of(run_request.loaded.finetune, lease.location.workspace) as components:
                return await conduct_components(handle, components, run_request.loaded.finetune)
    finally:
        await handle.close()


async def conduct_components(handle: RunHandle, components: Components, finetune: FinetuneConfig) -> Progress:
    """The same on an open run, with components that are built."""
    trainer = components.trainer
    try:
        adapter = recording(components.trainer_adapter, handle, finetune)
        await trainer.bind_components(components.trajectory_builder, adapter)
        await trainer.initialize(finetune)
        if not isinstance(trainer, RollstreamTrainer):
            run_completion.watch_curriculum(handle, trainer)
        statuses, failed = await run_completion.trained(handle, trainer.run(_num_epochs(handle, components, finetune)))
        await run_completion.finalize_run(handle, is_completed=failed is None, message=failed or "")
        await _log_metrics(trainer, statuses)
    except Exception as error:
        if not handle.is_over:
            raise
        logger.info("the trainer ended with an error once its run was over", exc_info=error)
    finally:
        await _clean_up(trainer)
    return handle.progress


async def _log_metrics(trainer: Trainer, statuses: list[Any]) -> None:
    """Log the metrics of the run that the last status names, as NAT does; an error here does not change its outcome."""
    if not statuses:
        return
    run_id = statuses[-1].run_id
    try:
        async with asyncio.timeout(run_completion.GRACE_S):
            text = repr(await trainer.get_metrics(run_id))
    except Exception as error:
        logger.warning("run=%s: the trainer's get_metrics failed: %s", run_id, describe(error))
        logger.info("traceback of get_metrics", exc_info=error)
        return
    omitted = f"... ({len(text) - MAX_METRICS} more characters)" if len(text) > MAX_METRICS else ""
    logger.info("metrics of run %s: %s%s", run_id, text[:MAX_METRICS], omitted)


async def _clean_up(trainer: Trainer) -> None:
    """Clean up; an error of the trainer here must not hide the outcome of the run."""
    try:
        await trainer.cleanup()
    except Exception:
        logger.exception("the trainer's cleanup failed")


def _num_epochs(handle: RunHandle, components: Components, finetune: FinetuneConfig) -> int:
    """The number of epochs passed to the trainer. Ours knows where a resumed run continues; others count from 0."""
    if isinstance(components.trainer, RollstreamTrainer):
        return finetune.num_epochs
    handle.epoch_offset = epochs.next_epoch(handle)
    return finetune.num_epochs - handle.epoch_offset
