"""What the harness' components look at while they conduct a run: its progress, closed groups, seals and submissions.

A fold over one run's events; repeats change nothing. Groups of an epoch that is sealed are let go of.
"""

from dataclasses import dataclass, field

from rollstream.harness.progress import Progress
from rollstream.schemas.base import Event
from rollstream.schemas.events import (
    BatchPlanned,
    EpochSealed,
    EpochStarted,
    GroupClosed,
    LearnerClaimed,
    SubmissionReceived,
)

NO_EPOCH = -1


@dataclass(slots=True)
class JobView:
    """One job. Mutable on purpose: the fold is its only writer."""

    started: dict[int, EpochStarted] = field(default_factory=dict[int, EpochStarted])
    """By epoch."""
    closed: dict[str, GroupClosed] = field(default_factory=dict[str, GroupClosed])
    """By group id: what closed in epochs that are not sealed, and all validation."""
    submitted: dict[int, str] = field(default_factory=dict[int, str])
    """Id of the submission that counts, by epoch."""
    seals: dict[int, EpochSealed] = field(default_factory=dict[int, EpochSealed])
    yields: dict[int, int] = field(default_factory=dict[int, int])
    """The version that an epoch's last batch yields."""

    @property
    def last_sealed(self) -> int:
        """The last epoch that is sealed with all before it, -1 before the first."""
        return max(self.seals, default=NO_EPOCH)

    @property
    def num_planned(self) -> int:
        """Batches that sealed epochs have planned."""
        return max((seal.next_batch_index for seal in self.seals.values()), default=0)

    def take(self, event: Event) -> None:
        """Take in one event of the job."""
        match event:
            case EpochStarted():
                self.started.setdefault(event.epoch, event)
            case GroupClosed() if event.purpose == "validation" or event.epoch not in self.seals:
                self.closed.setdefault(event.group_id, event)
            case SubmissionReceived():
                self.submitted.setdefault(event.epoch, event.submission_id)
            case BatchPlanned():
                self.yields[event.epoch] = max(event.yields_version, self.yields.get(event.epoch, 0))
            case EpochSealed():
                self._seal(event)
            case _:
                pass

    def _seal(self, event: EpochSealed) -> None:
        if event.epoch in self.seals:
            return
        self.seals[event.epoch] = event
        self.closed = {
            name: group
            for name, group in self.closed.items()
            if group.purpose == "validation" or group.epoch not in self.seals
        }


@dataclass(slots=True)
class RunView:
    """One run, as far as the log has been read. Mutable on purpose: who follows the log is its only writer."""

    progress: Progress = field(default_factory=lambda: Progress(""))
    jobs: dict[str, JobView] = field(default_factory=dict[str, JobView])
    claimed: set[str] = field(default_factory=set[str])
    """Model groups that a learner has taken."""
    num_events: int = 0

    def job(self, job_id: str) -> JobView:
        """A job; one without events is at its beginning."""
        return self.jobs.setdefault(job_id, JobView())

    def take(self, event: Event) -> None:
        """Take in one event of the run; `progress` is set by who follows the log."""
        self.num_events += 1
        if isinstance(event, LearnerClaimed):
            self.claimed.add(event.model_group)
        job_id: str | None = getattr(event, "job_id", None)
        if job_id is not None:
            self.job(job_id).take(event)
