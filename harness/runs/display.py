"""A run's progress for a person: one live line on a terminal, a plain line every ten seconds elsewhere."""

import math
import sys
import time
from collections.abc import Callable
from typing import TextIO

from rollstream.harness.runs.progress import JobProgress, Progress, by_group, rewards_of
from rollstream.harness.services.live_line import LiveLine

REWARDS_SHOWN = 10
"""Epochs whose mean reward is shown."""
UNCLAIMED_S = 60.0
"""Time without a learner after which the remedy is printed."""


class Display:
    """Writes progress to a stream at intervals."""

    def __init__(self, stream: TextIO = sys.stdout, clock: Callable[[], float] = time.monotonic) -> None:
        self._line = LiveLine(stream, clock)
        self._clock = clock
        self._unclaimed: dict[str, float] = {}
        """When to print that no learner has claimed a job, by job; infinite once it is printed."""
        self._rate = Rate(clock)
        self._status = ""

    def update(self, progress: Progress) -> None:
        """Show where the run is, if it is time to."""
        self._rate.update(progress)
        self._warn_unclaimed(progress)
        if self._line.is_due():
            self._line.show(line_of(progress, self._rate.eta_s(progress), self._status))

    def _warn_unclaimed(self, progress: Progress) -> None:
        now = self._clock()
        self._unclaimed = {
            job_id: self._unclaimed.get(job_id, now + UNCLAIMED_S) for job_id in unclaimed_jobs(progress)
        }
        if due := [job_id for job_id, at in self._unclaimed.items() if now >= at]:
            self._unclaimed |= dict.fromkeys(due, math.inf)
            named = f"{'job' if len(due) == 1 else 'jobs'} {', '.join(due)}"
            self.print(
                f"no learner has claimed {named} for {UNCLAIMED_S:.0f} s; with external services, start "
                "`rollstream serve learner`; `rollstream status` lists the services of this workspace"
            )

    def show_status(self, text: str) -> None:
        """Say something at once, and keep saying it with the progress; an empty text ends it."""
        if text and text != self._status:
            self.print(text)
        self._status = text

    def print(self, text: str) -> None:
        """Write a line that stays."""
        self._line.print(text)

    def finish(self, progress: Progress) -> None:
        """Show the last state and leave the line."""
        self._line.show(line_of(progress, None, ""))
        self._line.finish()

    def let_go(self) -> None:
        """Nothing is shown any more: a stream that refused output does not change the exit status."""
        self._line.let_go()


class Rate:
    """Versions a second since this process began to look, for the time that is left."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._job = ""
        self._first: tuple[float, int] = (0.0, 0)
        self._last: tuple[float, int] = (0.0, 0)

    def update(self, progress: Progress) -> None:
        """Take note of the newest epoch."""
        found = current_job(progress)
        if found is None:
            return
        epochs = _epochs_done(found[1])
        if found[0] != self._job:
            self._job, self._first = found[0], (self._clock(), epochs)
            self._last = self._first
        if epochs > self._last[1]:
            self._last = (self._clock(), epochs)

    def eta_s(self, progress: Progress) -> float | None:
        """Seconds until the end of the current job's last epoch, None if it cannot be estimated yet."""
        found = current_job(progress)
        done, took = self._last[1] - self._first[1], self._last[0] - self._first[0]
        if found is None or found[1].started is None or done <= 0 or took <= 0:
            return None
        return (found[1].started.plan.num_epochs - _epochs_done(found[1])) * took / done


def current_job(progress: Progress) -> tuple[str, JobProgress] | None:
    """Id and state of the job that was submitted last."""
    submitted = [(job_id, job) for job_id, job in progress.jobs.items() if job.submitted is not None]
    return submitted[-1] if submitted else None


def unclaimed_jobs(progress: Progress) -> list[str]:
    """Ids of the submitted jobs that wait for a learner while none has claimed their model group."""
    return [
        job_id
        for job_id, job in progress.jobs.items()
        if job.submitted is not None and job.started is None and job.outcome is None
        if job.submitted.model_group not in progress.owners
    ]


def line_of(progress: Progress, eta_s: float | None, status: str) -> str:
    """One line: job, epoch, reward, version, staleness, tokens a second, time left."""
    found = current_job(progress)
    if found is None:
        return "waiting for the log"
    job_id, job = found
    parts = [job_id]
    if job.started is None:
        parts.append("waiting for a learner")
    else:
        parts.append(f"epoch {_epochs_done(job)}/{job.started.plan.num_epochs}")
        parts.append(f"version {progress.version}")
        if rewards := rewards_of(progress, job_id):
            newest = {group: values[-REWARDS_SHOWN:] for group, values in rewards.items()}
            num = max(len(values) for values in newest.values())
            shown = by_group({group: f"{sum(values) / len(values):.3f}" for group, values in newest.items()})
            parts.append(f"reward {shown} ({f'mean of {num} epochs' if num > 1 else 'last epoch'})")
        parts += _trained(job)
    if eta_s is not None and job.outcome is None:
        parts.append(f"{_duration(eta_s)} left")
    if status:
        parts.append(status)
    return " · ".join(parts)


def _trained(job: JobProgress) -> list[str]:
    if job.trained is None:
        return []
    parts: list[str] = []
    staleness = job.trained.metrics.get("staleness/mean")
    if staleness is not None:
        parts.append(f"staleness {staleness:.1f}")
    if job.trained.tokens_per_s:
        parts.append(f"{job.trained.tokens_per_s:,.0f} tokens/s")
    return parts


def _epochs_done(job: JobProgress) -> int:
    return 0 if job.sealed is None else job.sealed.epoch + 1


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes}:{rest:02d} min"
