"""Reasons why a job trained nothing, counted from the log, and the end of such a job: it fails, unless the curriculum
alone left nothing to train on.

Read only when a job ends like this.
"""

from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from rollstream.eventlog.codec import decode, kind_of
from rollstream.eventlog.log import ReadableLog
from rollstream.eventlog.reading import read_to_end
from rollstream.eventlog.recent_set import RecentSet
from rollstream.eventlog.run_offsets import start_offsets_of
from rollstream.schemas import ids
from rollstream.schemas.base import Event
from rollstream.schemas.errors import DecodeError
from rollstream.schemas.events import (
    EpochSealed,
    GroupClosed,
    JobFailed,
    JobStarted,
    JobSubmitted,
    JobSucceeded,
    SubmissionReceived,
    TrajectoryRejected,
)
from rollstream.schemas.events.recorded import MADE_ELSEWHERE
from rollstream.schemas.settings import FROZEN

KINDS = {
    "groups": {"job_started", "group_closed", "submission_received"},
    "batches": {"trajectory_rejected", "epoch_sealed"},
}
MAX_SEEN = 100_000
"""Event ids that are remembered, to count a repeat once."""
NOTHING_TRAINED = "nothing was trained"
CURRICULUM = "curriculum"
NO_TRAJECTORIES = "no_trajectories"
NOTHING_SUBMITTED = "nothing_submitted"
EMPTY = {
    CURRICULUM: "the curriculum filtered out all groups of {}",
    NO_TRAJECTORIES: "the rollouts of {} produced no trajectories",
    NOTHING_SUBMITTED: "no trajectories were submitted for {}",
}
"""Reasons why an epoch has no group on the log, or nothing of it was submitted."""
REMEDIES = {
    "no_token_ids": "point the llm's base_url at the adapter's `endpoint`, which returns token ids, or set "
    "`retokenise: true`",
    "no_logprobs": "sample with log-probabilities, or choose an algorithm that needs none",
    "zero_variance": "all rewards of a group are equal: raise num_generations or the temperature, or change the reward",
}
"""Remedies for causes that a configuration can remove."""
NO_CALL = "the environment made no model call: let it answer with `session.chat`, or at the gateway of its rollout"
"""Remedy for `no_token_ids` where the producers' own engine samples, so that every call has token ids."""
OUTCOMES = (
    'rollstream sql --format json "SELECT outcome, o.cause, message, count(*) FROM outcomes o '
    "JOIN rollouts USING (rollout_id) WHERE o.run_id = '{}' GROUP BY ALL\""
)
"""Query as JSON, because a table cuts long messages."""


@dataclass
class Untrained:
    """Counts of rollouts and trajectories that a job did not train on."""

    job_id: str
    started: JobStarted | None = None
    rejected: Counter[str] = field(default_factory=Counter[str])
    """Complete trajectories by the cause of their rejection."""
    failed: Counter[str] = field(default_factory=Counter[str])
    """Rollouts of groups with too few complete ones, by cause."""
    epochs: set[int] = field(default_factory=set[int])
    """Epochs that have a group."""
    unsubmitted: Counter[str] = field(default_factory=Counter[str])
    """Epochs without a submission, by the cause that the submitter gave."""
    num_epochs: int = 0
    """Number of epochs that are sealed."""
    num_groups: int = 0
    is_scored: bool = False
    """Whether a group had enough complete rollouts."""

    def concerns(self, event: Event) -> bool:
        """Whether an event is about the job, or a group of the job beside it that asked for its groups."""
        asked_by = self.job_id if self.started is None else self.started.plan.tasks_of or self.job_id
        return getattr(event, "job_id", "") == (asked_by if isinstance(event, GroupClosed) else self.job_id)

    def take(self, event: Event) -> None:
        """Count one event of the job."""
        match event:
            case JobStarted():
                self.started = event
            case GroupClosed() if event.purpose == "train":
                self.epochs.add(event.epoch)
                if event.void_cause is not None:
                    self.failed[event.void_cause] += 1
                elif not event.is_viable:
                    self.failed.update(one.cause or one.outcome for one in event.attempts if one.outcome == "failed")
            case SubmissionReceived():
                self.unsubmitted.update(event.num_empty)
            case TrajectoryRejected() if event.cause != "validation":
                self.rejected[event.cause] += 1
            case EpochSealed():
                self.num_epochs = max(self.num_epochs, event.epoch + 1)
                self.num_groups += event.num_groups
                self.is_scored |= event.avg_reward is not None
            case _:
                pass

    @property
    def empty(self) -> Mapping[str, int]:
        """Epochs that have nothing to train on, by cause (keys of `EMPTY`)."""
        num_empty = max(0, self.num_epochs - len(self.epochs))
        plan = None if self.started is None else self.started.plan
        if plan is not None and plan.planning == "stream" and plan.curriculum.enabled:
            return {CURRICULUM: num_empty} if num_empty else {}
        return self.unsubmitted or ({NOTHING_SUBMITTED: num_empty} if num_empty else {})

    @property
    def reported(self) -> Counter[str]:
        """Rejections that say why nothing was trained. Trajectories of frozen model groups were never to be trained:
        they count only where nothing else does.
        """
        others = Counter({cause: count for cause, count in self.rejected.items() if cause != FROZEN})
        return others if others or self.failed or self.empty else self.rejected

    @property
    def is_curriculum_alone(self) -> bool:
        """Whether the curriculum alone excluded every trainable trajectory."""
        return not self.failed and self.reported.keys() | self.empty.keys() <= {CURRICULUM}

    @property
    def counts(self) -> str:
        """The causes with their counts, the most frequent first."""
        parts = [
            f"{count} {_of(count, 'trajectory')} rejected: {cause}" for cause, count in self.reported.most_common()
        ]
        parts += [f"{count} {_of(count, 'rollout')} failed: {cause}" for cause, count in self.failed.most_common()]
        parts += [EMPTY[cause].format(f"{count} {_of(count, 'epoch')}") for cause, count in self.empty.items()]
        return ", ".join(parts)

    @property
    def reason(self) -> str:
        """Message with the causes, and the remedy for the most frequent one."""
        reason = NOTHING_TRAINED
        if self.num_groups and not self.is_scored:
            reason += f", none of its {self.num_groups} groups had enough complete rollouts"
        reason += f" ({self.counts})" if self.counts else ""
        (cause, _), *_ = [*self.reported.most_common(1), ("", 0)]
        if cause in REMEDIES:
            reason += f"; {NO_CALL if cause == 'no_token_ids' and self._is_sampled_here else REMEDIES[cause]}"
        elif self.failed:
            reason += f"; for details: {OUTCOMES.format(ids.run_of(self.job_id))}"
        return reason

    @property
    def _is_sampled_here(self) -> bool:
        return self.started is not None and self.started.rollout.environment not in MADE_ELSEWHERE


async def end_of(log: ReadableLog, job: JobSubmitted, *, num_trained: int, time_ms: int, finish_s: float) -> Event:
    """The event that ends a job after its last batch. Raises LogError."""
    common = {"run_id": job.run_id, "time_ms": time_ms, "job_id": job.job_id, "model_group": job.model_group}
    failure = None if num_trained else await failure_of(log, job.job_id)
    if failure is not None:
        return JobFailed.model_validate({**common, "error": failure})
    end = {"final_version": job.base_version + num_trained, "finish_s": finish_s}
    return JobSucceeded.model_validate({**common, **end})


async def failure_of(log: ReadableLog, job_id: str) -> str | None:
    """Reason why a job that trained nothing has failed; None if it has not. Raises LogError."""
    found = await read_untrained(log, job_id)
    return None if found.is_curriculum_alone else found.reason


async def read_untrained(log: ReadableLog, job_id: str) -> Untrained:
    """Counts for a job from the log. Raises LogError; TruncatedError if the job's first records were removed."""
    found = Untrained(job_id)
    seen = RecentSet(MAX_SEEN)
    async for event in _events(log, ids.run_of(job_id)):
        if found.concerns(event) and event.event_id not in seen:
            seen.add(event.event_id)
            found.take(event)
    return found


async def _events(log: ReadableLog, run_id: str) -> AsyncIterator[Event]:
    starts = await start_offsets_of(log, run_id)
    for topic, kinds in KINDS.items():
        begin = (await log.begin_offsets(topic))[0]
        async for record in read_to_end(log, topic, {0: starts.get(topic, begin)}):
            if record.key != run_id.encode() or kind_of(record) not in kinds:
                continue
            try:
                yield decode(record).event
            except DecodeError:
                continue  # the processor of the topic sends it to the dead letters


def _of(count: int, noun: str) -> str:
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return noun if count == 1 else plural
