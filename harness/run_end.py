"""How a run that components conduct ends: its job is brought to its end, its model exported, RunEnded written."""

from rollstream.harness import ending, epochs
from rollstream.harness.backend import Backend
from rollstream.harness.ending import Outcome
from rollstream.schemas.errors import RunFailedError
from rollstream.schemas.events import RunEnded


async def settle(backend: Backend, *, is_completed: bool, message: str = "") -> None:
    """Bring a completed run's job to its end; write that a failed one failed. What is over stays as it is.

    Raises what a service or the log failed with.
    """
    progress = backend.view.progress
    if progress.ended is not None:
        return
    if is_completed:
        try:
            await epochs.conclude(backend)
        except RunFailedError:
            backend.check_services()
        return
    event = RunEnded(run_id=progress.run_id, time_ms=epochs.time_ms(backend), cause="failed", message=message)
    await backend.send([event])
    while backend.view.progress.ended is None:
        await backend.news(1.0)


async def finish(backend: Backend, *, is_completed: bool, message: str = "") -> Outcome:
    """Settle a run, export its newest model if it did not fail, write RunEnded if nobody has."""
    await settle(backend, is_completed=is_completed, message=message)
    output_dir = backend.config.finetuning.output_dir
    return await ending.end(backend.log, backend.artifacts, backend.view.progress, backend.run, output_dir)
