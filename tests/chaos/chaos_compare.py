"""Comparison of a log with the expectations of its oracle: missing, doubled or different records of a run, by name."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from rollstream.eventlog import codec
from rollstream.eventlog.dead_letters import origin
from rollstream.eventlog.log import EventLog, Position, Received, Record, TopicPartition
from rollstream.schemas.base import Event
from rollstream.schemas.events import (
    BatchPlanned,
    EpochSealed,
    GroupClosed,
    TaskRequested,
    TrajectoryAssembled,
    TrajectoryRejected,
)
from tests.chaos.chaos_oracle import Expected
from tests.chaos.chaos_workload import GROUPS_PER_BATCH, Workload

E = TypeVar("E", bound=Event)


@dataclass
class Comparison:
    """Names of what is not as it should be, and how much was written more than once."""

    missing: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    """Still there twice after repeats of an event id are dropped, or never expected."""
    different: list[str] = field(default_factory=list)
    num_events: int = 0
    """After repeats are dropped."""
    num_repeats: int = 0

    @property
    def problems(self) -> list[str]:
        """All of them, with what is wrong."""
        reported = {"missing": self.missing, "doubled": self.doubled, "different": self.different}
        return [f"{wrong}: {name}" for wrong, names in reported.items() for name in names]

    @property
    def repeats_percent(self) -> float:
        """Share of events in the topics that say again what is there."""
        return 100 * self.num_repeats / max(1, self.num_events + self.num_repeats)


async def compare(log: EventLog, workload: Workload, expected: Expected) -> Comparison:
    """Everything that assembly and curation wrote for the workload's run, beside the oracle's account."""
    result = Comparison()
    found = {topic: await _once(log, topic, workload.run_id, result) for topic in ("trajectories", "groups", "batches")}
    trajectories = _with_digests(TrajectoryAssembled, found["trajectories"])
    _same(result, "trajectory", expected.trajectories, {event.trajectory_id: digest for event, digest in trajectories})
    _same(result, "reward", expected.rewards, {event.trajectory_id: event.reward for event, _ in trajectories})
    closed = _with_digests(GroupClosed, found["groups"])
    _same(result, "group", expected.groups, {event.group_id: digest for event, digest in closed})
    await _compare_locators(log, result, [event for event, _ in closed])
    await _compare_letters(log, result, expected)
    tasks = await _once(log, "tasks", workload.run_id, result)
    asked = Counter(one.event.group_id for one in tasks if isinstance(one.event, TaskRequested))
    _same(result, "task", dict.fromkeys(expected.groups, 1), asked)
    _compare_plans(result, expected, found["batches"])
    return result


async def read_all(log: EventLog, topic: str) -> list[Record]:
    """All records of a topic, partition by partition."""
    begins, ends = await log.begin_offsets(topic), await log.end_offsets(topic)
    start = {TopicPartition(topic, partition): begin for partition, begin in begins.items()}
    records: list[Record] = []
    reader = await log.reader(start)
    try:
        while any(reader.position(where) < ends[where.partition] for where in start):
            records += await reader.poll(timeout_s=0.2)
    finally:
        await reader.close()
    return sorted(records, key=lambda record: (record.partition, record.offset))


async def _once(log: EventLog, topic: str, run_id: str, result: Comparison) -> list[Received]:
    """A run's events of a topic; repeats of an event id are dropped and counted."""
    kept: dict[tuple[int, str], Received] = {}
    for record in await read_all(log, topic):
        if record.topic == "groups" and record.value is not None and record.value.startswith(b"poison"):
            continue
        received = codec.decode(record)
        if received.event.run_id != run_id:
            continue
        first = kept.setdefault((record.partition, received.event.event_id), received)
        result.num_repeats += first is not received
    result.num_events += len(kept)
    return list(kept.values())


def _with_digests(kind: type[E], found: Iterable[Received]) -> list[tuple[E, str]]:
    """Events of one kind, each with its content digest."""
    return [(one.event, one.digest) for one in found if isinstance(one.event, kind)]


def _same(result: Comparison, what: str, wanted: dict, found: dict) -> None:
    result.missing += [f"{what} {key}" for key in wanted.keys() - found.keys()]
    result.doubled += [f"{what} {key}" for key in found.keys() - wanted.keys()]
    result.different += [f"{what} {key}" for key in wanted.keys() & found.keys() if wanted[key] != found[key]]


async def _compare_locators(log: EventLog, result: Comparison, closed: Iterable[GroupClosed]) -> None:
    for event in closed:
        positions = [Position("trajectories", locator.partition, locator.offset) for locator in event.locators]
        lying = [codec.decode(record).digest for record in await log.fetch(positions)]
        if lying != [member.digest for member in event.members]:
            result.different.append(f"locators of {event.group_id}")


async def _compare_letters(log: EventLog, result: Comparison, expected: Expected) -> None:
    letters: dict[tuple[int, int], bytes | None] = {}
    for record in await read_all(log, "dlq"):
        topic, partition, offset = origin(record.headers)
        if topic != "steps":
            continue
        result.num_repeats += (partition, offset) in letters
        letters.setdefault((partition, offset), record.value)
    result.num_events += len(letters)
    _same(result, "dead letter", expected.letters, letters)


def _compare_plans(result: Comparison, expected: Expected, batches: list[Received]) -> None:
    """Every trajectory is decided once, by the cause that its group gives; manifests are a chain without a gap."""
    decided: Counter[str] = Counter()
    verdicts: dict[str, str] = {}
    manifests = _with_digests(BatchPlanned, batches)
    for manifest, _ in manifests:
        verdicts |= dict.fromkeys((member.trajectory_id for member in manifest.members), "")
        decided.update(member.trajectory_id for member in manifest.members)
    for one in batches:
        if isinstance(one.event, TrajectoryRejected):
            verdicts[one.event.trajectory_id] = one.event.cause.removeprefix("left_over")
            decided[one.event.trajectory_id] += 1
    result.doubled += [f"decision on {name}" for name, number in decided.items() if number > 1]
    _same(result, "decision on", expected.verdicts, verdicts)
    previous = codec.EMPTY_SHA256
    for index, (manifest, digest) in enumerate(manifests):
        if (manifest.index, manifest.trains_at_version, manifest.previous_sha256) != (index, index, previous):
            result.different.append(f"manifest {manifest.batch_id} does not follow the one before it")
        previous = digest
    seals = [one.event for one in batches if isinstance(one.event, EpochSealed)]
    trained = len({member.group_id for manifest, _ in manifests for member in manifest.members})
    counts = [(seal.num_groups, seal.num_trained_groups, seal.num_batches) for seal in seals]
    if counts != [(len(expected.groups), trained, trained // GROUPS_PER_BATCH)]:
        result.different.append(f"seal of the epoch {counts}")
