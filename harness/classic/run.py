"""Conducts a run by its three components, epoch by epoch: what is not streamed, and what is not only ours."""

import logging

from rollstream.harness import component_errors, epochs, run_end
from rollstream.harness.backend import Backend, backend_of, minding
from rollstream.harness.component_building import Components, components_of
from rollstream.harness.config.config_file import Loaded
from rollstream.harness.config.finetune_config import block_of, is_ours
from rollstream.harness.display import Display
from rollstream.harness.interfaces import Trainer
from rollstream.harness.progress import Progress
from rollstream.harness.rollstream_trainer import RollstreamTrainer
from rollstream.harness.surroundings import Connected, Held, Opening
from rollstream.schemas.errors import RunFailedError
from rollstream.schemas.finetuning import FinetuneConfig, TrainingJobStatus, TrainingStatusEnum

logger = logging.getLogger(__name__)


def is_classic(loaded: Loaded) -> bool:
    """Whether components conduct the run: one of them is not ours, or ours submit without staleness."""
    blocks = [block_of(loaded.finetune, role) for role in ("trainer", "trajectory_builder", "trainer_adapter")]
    config = loaded.config
    is_on_policy = config.trainer.planning == "submitted" and config.adapter.max_staleness == 0
    return is_on_policy or not all(map(is_ours, blocks))


async def conduct(opening: Opening, around: Held, run: Connected, display: Display) -> Progress:
    """Build the components, let the trainer run to the end, and bring the job to its end; the progress then.

    Raises RollstreamError, ComponentError for what a component raises; the run then stays open, and can be resumed.
    """
    backend = backend_of(opening, around, run, display)
    await backend.start(*minding(backend, around, run))
    try:
        with component_errors.told("components", opening.loaded.finetune):
            async with components_of(opening.loaded.finetune, around.place.workspace) as components:
                return await conduct_components(backend, components, opening.loaded.finetune)
    finally:
        await backend.close()


async def conduct_components(backend: Backend, components: Components, finetune: FinetuneConfig) -> Progress:
    """The same on an open backend, with components that are built."""
    trainer = components.trainer
    try:
        await trainer.bind_components(components.trajectory_builder, components.trainer_adapter)
        await trainer.initialize(finetune)
        statuses = await trainer.run(_num_epochs(backend, components, finetune))
        failed = _failure(statuses)
        await run_end.settle(backend, is_completed=failed is None, message=failed or "")
    except RunFailedError:
        if not _is_over(backend.view.progress):
            raise
    finally:
        await _clean_up(trainer)
    return backend.view.progress


def _is_over(progress: Progress) -> bool:
    """Whether the log itself says why nothing can go on: the run ended, or a job of it cannot be done."""
    return progress.ended is not None or any(job.outcome in ("failed", "cancelled") for job in progress.jobs.values())


async def _clean_up(trainer: Trainer) -> None:
    """Whatever a trainer raises here must not hide what the run ended with."""
    try:
        await trainer.cleanup()
    except Exception:
        logger.exception("the trainer's cleanup failed")


def _num_epochs(backend: Backend, components: Components, finetune: FinetuneConfig) -> int:
    """What the trainer is told. Ours knows where a resumed run goes on; others count from 0."""
    if isinstance(components.trainer, RollstreamTrainer):
        return finetune.num_epochs
    backend.epoch_offset = epochs.next_epoch(backend)
    return finetune.num_epochs - backend.epoch_offset


def _failure(statuses: list[TrainingJobStatus]) -> str | None:
    """Why the run failed, if a job of it did."""
    failed = [one for one in statuses if one.status in (TrainingStatusEnum.FAILED, TrainingStatusEnum.CANCELED)]
    return (failed[0].message or f"a training job {failed[0].status}") if failed else None
