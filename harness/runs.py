"""The runs that a log holds, each as its progress. Reads the log, writes nothing."""

from collections.abc import AsyncIterator, Sequence

from rollstream.eventlog.codec import decode
from rollstream.eventlog.log import EventLog, Received
from rollstream.eventlog.reading import read_to_end
from rollstream.harness.follower import SKIPPED, TOPICS
from rollstream.harness.progress import Progress, evolve
from rollstream.schemas.errors import DecodeError


async def read_events(log: EventLog, topics: Sequence[str] = TOPICS) -> AsyncIterator[Received]:
    """What topics of one partition hold now, without SKIPPED and what is no event; in order within a topic."""
    for topic in topics:
        async for record in read_to_end(log, topic):
            if any(name == "ce_type" and kind.startswith(SKIPPED) for name, kind in record.headers):
                continue
            try:
                yield decode(record)
            except DecodeError:
                continue


async def read_runs(log: EventLog) -> list[Progress]:
    """Every run of a log in order of its first record, as far as the log says now."""
    runs: dict[str, Progress] = {}
    async for received in read_events(log):
        event = received.event
        runs[event.run_id] = evolve(runs.get(event.run_id, Progress(event.run_id)), event)
    return [progress for progress in runs.values() if progress.run is not None]


def state_of(progress: Progress) -> str:
    """`open`, or how the run ended."""
    return "open" if progress.ended is None else progress.ended.cause
