"""The state of a run that the harness' components read: closed groups, seals and submissions.

A fold over one run's events; repeats change nothing. Groups of an epoch that is sealed are let go of.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rollstream.schemas.base import Event
from rollstream.schemas.events import (
    BatchPlanned,
    EpochSealed,
    EpochStarted,
    GroupClosed,
    LearnerClaimed,
    SubmissionReceived,
    TrajectoryRejected,
)

NO_EPOCH = -1


@dataclass(slots=True)
class JobView:
    """One job. Mutable on purpose: the fold is its only writer."""

    started: dict[int, EpochStarted] = field(default_factory=dict[int, EpochStarted])
    """Epochs that are not sealed, by number."""
    closed: dict[str, GroupClosed] = field(default_factory=dict[str, GroupClosed])
    """Closed groups by id: those of epochs that are not sealed, and those that are awaited."""
    awaited: Counter[str] = field(default_factory=Counter[str])
    """Groups that somebody waits for, whatever becomes of their epoch meanwhile."""
    submitted: dict[int, str] = field(default_factory=dict[int, str])
    """Id of the submission that counts, by epoch."""
    seals: dict[int, EpochSealed] = field(default_factory=dict[int, EpochSealed])
    yields: dict[int, int] = field(default_factory=dict[int, int])
    """The version that an epoch's last batch yields."""
    rejected: dict[int, Counter[str]] = field(default_factory=dict[int, Counter[str]])
    """Rejections by cause, of the newest epoch that is sealed and of those that are not."""

    @property
    def last_sealed(self) -> int:
        """The last epoch that is sealed with all before it, -1 before the first."""
        return max(self.seals, default=NO_EPOCH)

    @property
    def num_planned(self) -> int:
        """Batches that sealed epochs have planned."""
        return max((seal.next_batch_index for seal in self.seals.values()), default=0)

    @contextmanager
    def awaiting(self, group_ids: Sequence[str]) -> Iterator[None]:
        """Keep these groups when they are closed, until it is left."""
        self.awaited.update(group_ids)
        try:
            yield
        finally:
            self.awaited = +(self.awaited - Counter(group_ids))
            self._drop()

    def take(self, event: Event) -> None:
        """Take in one event of the job."""
        match event:
            case EpochStarted() if event.epoch not in self.seals:
                self.started.setdefault(event.epoch, event)
            case GroupClosed() if self._is_kept(event):
                self.closed.setdefault(event.group_id, event)
            case SubmissionReceived() if not event.is_part:
                self.submitted.setdefault(event.epoch, event.submission_id)
            case BatchPlanned():
                self.yields[event.epoch] = max(event.yields_version, self.yields.get(event.epoch, 0))
            case TrajectoryRejected():
                self.rejected.setdefault(event.epoch, Counter())[event.cause] += 1
            case EpochSealed():
                self._seal(event)
            case _:
                pass

    def _seal(self, event: EpochSealed) -> None:
        if event.epoch in self.seals:
            return
        self.seals[event.epoch] = event
        self.started.pop(event.epoch, None)
        self.rejected = {epoch: causes for epoch, causes in self.rejected.items() if epoch >= event.epoch}
        self._drop()

    def _drop(self) -> None:
        self.closed = {name: group for name, group in self.closed.items() if self._is_kept(group)}

    def _is_kept(self, group: GroupClosed) -> bool:
        return group.epoch not in self.seals or group.group_id in self.awaited


@dataclass(slots=True)
class RunView:
    """One run, as far as the log has been read. Mutable on purpose: the reader of the log is its only writer."""

    jobs: dict[str, JobView] = field(default_factory=dict[str, JobView])
    claimed: set[str] = field(default_factory=set[str])
    """Model groups that a learner has taken."""

    def job(self, job_id: str) -> JobView:
        """A job; one without events is at its beginning."""
        return self.jobs.setdefault(job_id, JobView())

    def take(self, event: Event) -> None:
        """Take in one event of the run."""
        if isinstance(event, LearnerClaimed):
            self.claimed.add(event.model_group)
        job_id: str | None = getattr(event, "job_id", None)
        if job_id is not None:
            self.job(job_id).take(event)
