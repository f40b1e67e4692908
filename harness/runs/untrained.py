"""Reasons why a job trained nothing: the outcomes of its rollouts, counted from the log.

Read only when a run ends like this.
"""

from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from rollstream.eventlog.codec import decode, kind_of
from rollstream.eventlog.log import EventLog
from rollstream.eventlog.reading import read_to_end
from rollstream.eventlog.recent_set import RecentSet
from rollstream.eventlog.run_offsets import start_offsets_of
from rollstream.schemas import ids
from rollstream.schemas.base import Event
from rollstream.schemas.errors import DecodeError
from rollstream.schemas.events import GroupClosed, TrajectoryRejected

KINDS = {"groups": "group_closed", "batches": "trajectory_rejected"}
MAX_SEEN = 100_000
"""Event ids that are remembered, to count a repeat once."""
CURRICULUM = "curriculum"
NO_TRAJECTORIES = "no_trajectories"
NOTHING_SUBMITTED = "nothing_submitted"
EMPTY = {
    CURRICULUM: "the curriculum filtered out all groups of {}",
    NO_TRAJECTORIES: "the rollouts of {} produced no trajectories",
    NOTHING_SUBMITTED: "no trajectories were submitted for {}",
}
"""Reasons why an epoch has no group on the log."""
REMEDIES = {
    "no_token_ids": "point the llm's base_url at the adapter's `endpoint`, which returns token ids, or set "
    "`retokenise: true`",
    "no_logprobs": "sample with log-probabilities, or choose an algorithm that needs none",
    "zero_variance": "all rewards of a group are equal: raise num_generations or the temperature, or change the reward",
}
"""Remedies for causes that a configuration can remove."""


@dataclass
class Untrained:
    """Counts of rollouts and trajectories that a job did not train on."""

    rejected: Counter[str] = field(default_factory=Counter[str])
    """Complete trajectories by the cause of their rejection."""
    failed: Counter[str] = field(default_factory=Counter[str])
    """Rollouts of groups with too few complete ones, by cause."""
    epochs: set[int] = field(default_factory=set[int])
    """Those that have a group."""

    def take(self, event: Event) -> None:
        """Count one event of the job."""
        match event:
            case GroupClosed() if event.purpose == "train":
                self.epochs.add(event.epoch)
                if event.void_cause is not None:
                    self.failed[event.void_cause] += 1
                elif not event.is_viable:
                    self.failed.update(one.cause or one.outcome for one in event.attempts if one.outcome == "failed")
            case TrajectoryRejected() if event.cause != "validation":
                self.rejected[event.cause] += 1
            case _:
                pass

    def text(self, empty: Mapping[str, int]) -> str:
        """The causes with their counts, the most frequent first. `empty`: epochs without a group by cause (`EMPTY`)."""
        parts = [
            f"{count} {_of(count, 'trajectory')} rejected: {cause}" for cause, count in self.rejected.most_common()
        ]
        parts += [f"{count} {_of(count, 'rollout')} failed: {cause}" for cause, count in self.failed.most_common()]
        parts += [EMPTY[cause].format(f"{count} {_of(count, 'epoch')}") for cause, count in empty.items()]
        return ", ".join(parts)

    def is_curriculum_alone(self, empty: Mapping[str, int]) -> bool:
        """Whether the curriculum alone excluded every trainable trajectory."""
        return not self.failed and self.rejected.keys() | empty.keys() <= {CURRICULUM}

    @property
    def remedy(self) -> str:
        """The remedy for the most frequent cause; empty if there is none."""
        (cause, _), *_ = [*self.rejected.most_common(1), ("", 0)]
        return REMEDIES.get(cause, "")


async def read_untrained(log: EventLog, job_id: str, planned_by: str) -> Untrained:
    """Counts for a job from the log; `planned_by`: the job that asked for its groups, itself or one beside it.

    Raises LogError; TruncatedError if the job's first records were removed.
    """
    found = Untrained()
    async for event in _events(log, {GroupClosed: planned_by, TrajectoryRejected: job_id}, ids.run_of(job_id)):
        found.take(event)
    return found


async def _events(log: EventLog, jobs: Mapping[type[Event], str], run_id: str) -> AsyncIterator[Event]:
    """Events of the run that name the job of their kind."""
    starts = await start_offsets_of(log, run_id)
    seen = RecentSet(MAX_SEEN)
    for topic, kind in KINDS.items():
        begin = (await log.begin_offsets(topic))[0]
        async for record in read_to_end(log, topic, {0: starts.get(topic, begin)}):
            if record.key != run_id.encode() or kind_of(record) != kind:
                continue
            try:
                event = decode(record).event
            except DecodeError:
                continue  # the processor of the topic sends it to the dead letters
            if getattr(event, "job_id", "") == jobs.get(type(event)) and event.event_id not in seen:
                seen.add(event.event_id)
                yield event


def _of(count: int, noun: str) -> str:
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return noun if count == 1 else plural
