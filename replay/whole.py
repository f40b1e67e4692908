"""Whether every run of a log is complete, judged by its own records, because there may be no other source."""

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field

from rollstream.eventlog.log import ReadableLog, Record, TopicPartition, check_kept
from rollstream.eventlog.reading import decode_or_none, read_to_end
from rollstream.replay.completeness import Named, check_whole, gone, unended
from rollstream.replay.source import EFFECTS_FIRST, RunEvents, of_type, take_letters
from rollstream.schemas import ids
from rollstream.schemas.base import Locator
from rollstream.schemas.events import BatchPlanned, GroupClosed

BUNDLE_BYTES = 8 * 2**20
"""Records of several runs that are read and held together, because each reader is a connection with its login."""


class _Spans(dict[TopicPartition, tuple[int, int]]):
    """Offsets of the oldest record of a run, or of several, and behind the newest one, by partition."""

    size_bytes = 0
    """Size of the records."""

    def add(self, record: Record) -> None:
        """Note a record, in the order of its partition."""
        where = TopicPartition(record.topic, record.partition)
        self[where] = (self.get(where, (record.offset, 0))[0], record.offset + 1)
        self.size_bytes += len(record.value or b"")

    def cover(self, other: "_Spans") -> None:
        """Reach over those of another run too."""
        for where, (begin, end) in other.items():
            own = self.get(where, (begin, end))
            self[where] = min(own[0], begin), max(own[1], end)

    async def read(self, log: ReadableLog) -> AsyncIterator[Record]:
        """The records there, other runs' between them too; in the order of `EFFECTS_FIRST`, causes first."""
        for topic in reversed(EFFECTS_FIRST):
            spans = {where.partition: span for where, span in self.items() if where.topic == topic}
            starts, ends = ({number: span[at] for number, span in spans.items()} for at in (0, 1))
            if spans:
                async for record in read_to_end(log, topic, starts, ends):
                    yield record


@dataclass(slots=True)
class _Index:
    """Positions of each run's records, found in one pass over the small topics."""

    common: RunEvents
    """Dead letters and retained offsets, which are of no single run."""
    runs: dict[str, str] = field(default_factory=dict[str, str])
    """Runs that some record is of, with that record's event id."""
    spans: dict[str, _Spans] = field(default_factory=dict[str, _Spans])
    """Those of each run that are read."""
    later: dict[str, _Spans] = field(default_factory=dict[str, _Spans])
    """Those of each run behind them, see `RunEvents.later`."""

    def take(self, record: Record, *, is_later: bool = False) -> None:
        """Take in a record; those of events have a key."""
        if record.key is None:
            return
        run_id = _run_of(record.key)
        (self.later if is_later else self.spans).setdefault(run_id, _Spans()).add(record)
        if run_id not in self.runs and not is_later and (received := decode_or_none(record)) is not None:
            self.runs.setdefault(received.event.run_id, received.event.event_id)

    def bundles(self) -> Iterator[list[str]]:
        """The runs in the order of their first records, as many at a time as `BUNDLE_BYTES` has room for."""
        bundle, size_bytes = list[str](), 0
        for run_id in self.runs:
            size_bytes += self.spans[run_id].size_bytes
            if bundle and size_bytes > BUNDLE_BYTES:
                yield bundle
                bundle, size_bytes = [], self.spans[run_id].size_bytes
            bundle.append(run_id)
        if bundle:
            yield bundle

    async def events_of(self, log: ReadableLog, run_ids: Sequence[str]) -> dict[str, RunEvents]:
        """Records of runs, as `read_run` reads them for checks."""
        of_all = self.common
        found = {
            run_id: RunEvents(
                run_id, dead=of_all.dead, dead_by_fold=of_all.dead_by_fold, kept=of_all.kept, is_for_checks=True
            )
            for run_id in run_ids
        }
        for is_later, spans_of in ((False, self.spans), (True, self.later)):
            covered = _Spans()
            for run_id in run_ids:
                covered.cover(spans_of.get(run_id, _Spans()))
            async for record in covered.read(log):
                if record.key is not None and (events := found.get(_run_of(record.key))) is not None:
                    events.take(record, is_later=is_later)
        return found


def _run_of(key: bytes) -> str:
    return ids.run_of(key.decode(errors="replace"))


async def check_runs(log: ReadableLog) -> list[str]:
    """The message about runs whose training is over and whose RunEnded is missing (`unended`).

    Raises TruncatedError naming the first record that is gone though others name it, or the range that is not kept.
    The newest records of an open run are named by nothing. Reads the small topics once to find where each run's records
    lie, then those of some runs at a time, from their first to their last one, which it holds meanwhile.
    """
    unended_runs: list[str] = []
    index = await _indexed(log)
    for bundle in index.bundles():
        found = await index.events_of(log, bundle)
        for run_id in bundle:
            events = found.pop(run_id)
            if not events.is_begun:
                raise gone(events, Named("groups", ids.event_id("run_started", run_id), index.runs[run_id]))
            check_whole(events)
            await _check_ranges(log, events)
            unended_runs += filter(None, [unended(events)])
    return unended_runs


async def _indexed(log: ReadableLog) -> _Index:
    """The index up to two ends of every topic, which are taken as `read_run` takes them."""
    index = _Index(RunEvents(""))
    await take_letters(log, index.common)
    ends = {topic: await log.end_offsets(topic) for topic in EFFECTS_FIRST}
    for topic in reversed(EFFECTS_FIRST):
        begins = await log.begin_offsets(topic)
        index.common.kept[topic] = {number: (begins[number], end) for number, end in ends[topic].items()}
        async for record in read_to_end(log, topic, None, ends[topic]):
            index.take(record)
    for topic in EFFECTS_FIRST:
        async for record in read_to_end(log, topic, ends[topic], await log.end_offsets(topic)):
            index.take(record, is_later=True)
    return index


async def _check_ranges(log: ReadableLog, events: RunEvents) -> None:
    """Raises TruncatedError if `steps` or `trajectories` lack what groups and manifests name."""
    for topic, positions in (("steps", _steps(events)), ("trajectories", _trajectories(events))):
        begins, ends = await log.begin_offsets(topic), await log.end_offsets(topic)
        for locator in positions:
            where = TopicPartition(topic, locator.partition)
            begin, end = begins.get(locator.partition, 0), ends.get(locator.partition, 0)
            for offset in (locator.offset, locator.offset + 1):  # one that is read, and one to go on from
                check_kept(where, offset, begin, end)


def _steps(events: RunEvents) -> Iterator[Locator]:
    for group, _ in of_type(events.by_topic.get("groups", ()), GroupClosed):
        if group.steps_at is not None:
            for offset in (group.steps_at.first_offset, group.steps_at.last_offset):
                yield Locator(partition=group.steps_at.partition, offset=offset)


def _trajectories(events: RunEvents) -> Iterator[Locator]:
    for group, _ in of_type(events.by_topic.get("groups", ()), GroupClosed):
        yield from group.locators
    for batch, _ in of_type(events.by_topic.get("batches", ()), BatchPlanned):
        yield from batch.locators
