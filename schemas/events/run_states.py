"""The states of runs and jobs by their events: for commands, and the same as in the views `runs` and `jobs`. Pure.

A rule that changes here changes in `metrics/projection/tables.sql`, too; a test compares them.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from rollstream.schemas.events.training import RunEnded
from rollstream.schemas.events.weights import JobCancelled, JobEvent, JobFailed, JobSkipped, JobSucceeded

RunState = Literal["running", "completed", "failed", "stopped", "abandoned"]
JobOutcome = Literal["succeeded", "failed", "cancelled", "skipped"]
JobState = Literal["submitted", "running"] | JobOutcome

OUTCOMES: Mapping[type[JobEvent], JobOutcome] = MappingProxyType(
    {JobSucceeded: "succeeded", JobFailed: "failed", JobCancelled: "cancelled", JobSkipped: "skipped"}
)
"""Outcome of a job by the event that ends it; the first one counts."""


def run_state(ended: RunEnded | None) -> RunState:
    """`running` until the run has ended, then the cause of its end."""
    return "running" if ended is None else ended.cause


def job_state(
    outcome: JobOutcome | None, *, is_started: bool, has_progressed: bool, has_run_ended: bool = False
) -> JobState:
    """The state of a job. One that is left when its run ends is cancelled, also if no learner was left to write that.

    `is_started`: JobStarted is written; `has_progressed`: JobProgressed is.
    """
    if outcome is not None:
        return outcome
    if has_run_ended:
        return "cancelled"
    return "running" if is_started or has_progressed else "submitted"
