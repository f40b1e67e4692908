"""The runs that a log holds, each as its progress. Reads the log, writes nothing."""

from rollstream.eventlog.codec import decode
from rollstream.eventlog.log import EventLog, TopicPartition
from rollstream.harness.follower import SKIPPED, TOPICS
from rollstream.harness.progress import Progress, evolve
from rollstream.schemas.errors import DecodeError


async def read_runs(log: EventLog) -> list[Progress]:
    """Every run of a log in order of its first record, as far as the log says now."""
    ends = {TopicPartition(topic, 0): (await log.end_offsets(topic))[0] for topic in TOPICS}
    reader = await log.reader(dict.fromkeys(ends, -1))
    runs: dict[str, Progress] = {}
    try:
        while any(reader.position(where) < end for where, end in ends.items()):
            for record in await reader.poll(timeout_s=1.0):
                if any(name == "ce_type" and kind.startswith(SKIPPED) for name, kind in record.headers):
                    continue
                try:
                    event = decode(record).event
                except DecodeError:
                    continue
                runs[event.run_id] = evolve(runs.get(event.run_id, Progress(event.run_id)), event)
    finally:
        await reader.close()
    return [progress for progress in runs.values() if progress.run is not None]


def state_of(progress: Progress) -> str:
    """`open`, or how the run ended."""
    return "open" if progress.ended is None else progress.ended.cause
