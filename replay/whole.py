"""Whether every run of a log is complete, judged by its own records, because there may be no other source."""

from collections.abc import Iterator

from rollstream.eventlog.log import EventLog, TopicPartition, check_kept
from rollstream.eventlog.reading import decoded, read_to_end
from rollstream.replay.completeness import Named, check_whole, gone, unended
from rollstream.replay.source import EFFECTS_FIRST, RunEvents, of_type, read_run
from rollstream.schemas import ids
from rollstream.schemas.base import Locator
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.events import BatchPlanned, GroupClosed


async def check_runs(log: EventLog) -> list[str]:
    """The message about runs whose training is over and whose RunEnded is missing (`unended`).

    Raises TruncatedError naming the first record that is gone though others name it, or the range that is not kept.
    The newest records of an open run are named by nothing. Holds the small
    topics' records of one run at a time, so that it reads them once for every run.
    """
    unended_runs: list[str] = []
    for run_id, event_id in (await _runs(log)).items():
        try:
            events = await read_run(log, run_id)
        except ConfigError as error:
            begin, end = (await log.begin_offsets("groups"))[0], (await log.end_offsets("groups"))[0]
            events = RunEvents(run_id, kept={"groups": {0: (begin, end)}})
            raise gone(events, Named("groups", ids.event_id("run_started", run_id), event_id)) from error
        check_whole(events)
        await _check_ranges(log, events)
        unended_runs += filter(None, [unended(events)])
    return unended_runs


async def _runs(log: EventLog) -> dict[str, str]:
    """Every run that some record is of, with that record's event id."""
    found: dict[str, str] = {}
    for topic in reversed(EFFECTS_FIRST):
        async for record in read_to_end(log, topic):
            if record.key is None or ids.run_of(record.key.decode(errors="replace")) in found:
                continue
            if (received := decoded(record)) is not None:
                found.setdefault(received.event.run_id, received.event.event_id)
    return found


async def _check_ranges(log: EventLog, events: RunEvents) -> None:
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
