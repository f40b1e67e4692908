"""How a run ends: its final model, its last event, and what is told about it."""

import asyncio
import logging
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import EventLog
from rollstream.harness.plan import RunPlan
from rollstream.harness.progress import JobProgress, Progress
from rollstream.schemas.errors import RollstreamError
from rollstream.schemas.events import RunEnded

CATCH_UP_TIMEOUT_S = 60.0
RETRY_S = 0.2
SHARE_SHOWN = 10
"""Rewards are compared between the first and the last tenth of the last job's epochs."""

logger = logging.getLogger(__name__)


class Outcome(NamedTuple):
    """What became of a run."""

    run_id: str
    status: Literal["completed", "failed", "stopped", "abandoned"]
    version: int
    message: str = ""
    output_dir: Path | None = None
    """Where the final model lies; none if there is none."""
    num_epochs: int = 0
    first_reward: float | None = None
    last_reward: float | None = None
    seconds: float = 0.0
    restarts: int = 0

    @property
    def exit_code(self) -> int:
        """0 for a run that was completed or stopped by its user."""
        return 0 if self.status in ("completed", "stopped") else 1

    def as_json(self) -> dict[str, Any]:
        """For `--result_json_path`."""
        return {**self._asdict(), "output_dir": None if self.output_dir is None else str(self.output_dir)}

    def summary(self) -> str:
        """A few lines for a person."""
        lines = [f"run {self.run_id} {self.status} at version {self.version} after {self.seconds:.0f} s"]
        if self.message:
            lines[0] += f": {self.message}"
        if self.first_reward is not None and self.last_reward is not None:
            lines.append(f"reward {self.first_reward:.3f} -> {self.last_reward:.3f} in {self.num_epochs} epochs")
        if self.output_dir is not None:
            lines.append(f"model in {self.output_dir}")
        if self.restarts:
            lines.append(f"services restarted {self.restarts} times")
        return "\n".join(lines)


async def end(log: EventLog, artifacts: ArtifactStore, progress: Progress, run: RunPlan, output_dir: Path) -> Outcome:
    """Export the newest version of a run that did not fail, then write RunEnded if nobody has. Idempotent."""
    state, message, time_ms = _state(progress, run)
    exported: Path | None = None
    if state in ("completed", "stopped") and progress.weights is not None:
        await asyncio.to_thread(_export, artifacts, progress, output_dir)
        exported = output_dir.absolute()
    if progress.ended is None:
        cause = "completed" if state == "completed" else "failed"
        await log.send(RunEnded(run_id=progress.run_id, time_ms=time_ms, cause=cause, message=message))
    first, last, num_epochs = _rewards(progress, run)
    return Outcome(progress.run_id, state, progress.version, message, exported, num_epochs, first, last)


async def let_metrics_catch_up(workspace: Path) -> None:
    """Wait until the projector has everything that is in the log now; a failure is only logged.

    A projector that is just being started again is waited for, and the file left to it.
    """
    from rollstream.metrics.client import is_caught_up

    try:
        async with asyncio.timeout(CATCH_UP_TIMEOUT_S):
            while not await asyncio.to_thread(is_caught_up, workspace):
                await asyncio.sleep(RETRY_S)
    except (RollstreamError, TimeoutError) as error:
        logger.warning("the metrics have not caught up: %s", error)


def _state(progress: Progress, run: RunPlan) -> tuple[Literal["completed", "failed", "stopped", "abandoned"], str, int]:
    if progress.ended is not None:
        return progress.ended.cause, progress.ended.message, progress.ended.time_ms
    for spec in run.jobs:
        job = progress.job(spec.job_id)
        if job.outcome != "succeeded":
            return "failed", f"job {spec.job_id} {job.outcome}: {job.error}", job.ended_at_ms
        if job.num_groups and not job.rewards:
            return "failed", f"job {spec.job_id}: {_none_of(job, 'had enough complete rollouts')}", job.ended_at_ms
    last = progress.job(run.jobs[-1].job_id)
    is_trained = last.num_planned > 0 or not last.num_groups
    return "completed", "" if is_trained else f"nothing was trained: {_none_of(last, 'was used')}", last.ended_at_ms


def _none_of(job: JobProgress, what: str) -> str:
    return (
        f"none of its {job.num_groups} groups {what}; "
        'rollstream sql "SELECT outcome, o.cause, message, count(*) FROM outcomes o JOIN rollouts USING (rollout_id) '
        'GROUP BY ALL" tells what became of them'
    )


def _export(artifacts: ArtifactStore, progress: Progress, output_dir: Path) -> None:
    from rollstream.learner.export import export_model

    assert progress.weights is not None
    export_model(progress.weights, artifacts.fetch(progress.weights.artifact), output_dir)


def _rewards(progress: Progress, run: RunPlan) -> tuple[float | None, float | None, int]:
    """Mean reward at the beginning and at the end of the last job, and its epochs."""
    job = progress.job(run.jobs[-1].job_id)
    rewards = [reward for _, reward in job.rewards]
    num_epochs = 0 if job.sealed is None else job.sealed.epoch + 1
    if not rewards:
        return None, None, num_epochs
    count = max(1, len(rewards) // SHARE_SHOWN)
    return sum(rewards[:count]) / count, sum(rewards[-count:]) / count, num_epochs
