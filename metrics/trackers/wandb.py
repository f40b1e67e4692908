"""Runs of Weights & Biases."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollstream.metrics.trackers.points import Point, TrackedJob
from rollstream.schemas.trackers import WandbSettings

AXES = {"training": "version", "epoch": "epoch", "validation": "epoch"}
"""The x-axis of each series."""


class WandbRun:
    """A job's run. A point's number is its step there, so that points that are logged again are ignored."""

    def __init__(self, settings: WandbSettings, job: TrackedJob, folder: Path) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            id=hashlib.sha256(job.job_id.encode()).hexdigest()[:16],
            name=job.job_id,
            group=job.run_id,
            job_type=job.kind,
            tags=settings.tags,
            config={"algorithm": job.algorithm, "model": job.model, **job.settings},
            mode=settings.mode,
            dir=str(folder),
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        for series, axis in AXES.items():
            self._run.define_metric(axis)
            self._run.define_metric(f"{series}/*", step_metric=axis)

    def log(self, points: Sequence[Point], first: int) -> Mapping[str, Any]:
        """Log one step a point. wandb keeps it in a file until its server has it."""
        for number, point in enumerate(points, first):
            self._run.log({AXES[point.series]: point.step, **point.values}, step=number, commit=True)
        return {}

    def close(self, state: str | None) -> None:
        """Finish the run; it goes on if it is opened again."""
        self._run.finish(exit_code=1 if state == "failed" else 0)
