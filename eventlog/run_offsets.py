"""The start offsets of runs in the topics; the small topic `jobs` is the index of the others."""

from collections.abc import Iterable, Mapping

from rollstream.eventlog.codec import kind_of
from rollstream.eventlog.log import ReadableLog
from rollstream.eventlog.reading import decode_or_none, read_to_end
from rollstream.schemas import ids
from rollstream.schemas.events import JobSubmitted

TOPICS = ("groups", "batches", "jobs", "weights")
LETTERS = "dlq"
PARTITIONED = ("tasks",)
"""Their offsets are named `topic/partition`, the others' as their topic."""
CHUNK = 2000
"""Records of `jobs` that are looked through first, from its end; then twice as many, and so on."""
_JOB_SUBMITTED = "job_submitted"


async def ends_now(log: ReadableLog) -> dict[str, int]:
    """End offsets for `JobSubmitted.start_offsets`, to be read before a run writes its first event.

    That of `dlq` is read first, so that letters about records after the other offsets come after it.
    """
    return {
        offset_name(topic, partition): end
        for topic in (LETTERS, *TOPICS, *PARTITIONED)
        for partition, end in (await log.end_offsets(topic)).items()
    }


def offset_name(topic: str, partition: int) -> str:
    """Name of a partition's offset."""
    return f"{topic}/{partition}" if topic in PARTITIONED else topic


async def start_offsets_of(log: ReadableLog, run_id: str, topics: Iterable[str] = TOPICS) -> dict[str, int]:
    """Offsets, named as in `ends_now`, before which there are no records of a run.

    Empty if no job of the run has them. Searches `jobs` from its end, so that the newest runs are found first. Offsets
    are at least the oldest retained one.
    """
    begin, end = (await log.begin_offsets("jobs"))[0], (await log.end_offsets("jobs"))[0]
    size = CHUNK
    while end > begin:
        start = max(begin, end - size)
        found = await _newest(log, run_id, start, end)
        if found is not None:
            return await _kept(log, found, topics)
        end, size = start, 2 * size
    return {}


async def _newest(log: ReadableLog, run_id: str, start: int, end: int) -> dict[str, int] | None:
    found: dict[str, int] | None = None
    async for record in read_to_end(log, "jobs", {0: start}, {0: end}):
        if not ids.is_key_of_run(record.key or b"", run_id):
            continue
        if kind_of(record) not in (_JOB_SUBMITTED, None):
            continue
        received = decode_or_none(record)
        event = None if received is None else received.event
        if isinstance(event, JobSubmitted) and event.run_id == run_id:
            found = event.start_offsets or {}
    return found


async def _kept(log: ReadableLog, found: Mapping[str, int], topics: Iterable[str]) -> dict[str, int]:
    kept: dict[str, int] = {}
    for topic in topics:
        begins, ends = await log.begin_offsets(topic), await log.end_offsets(topic)
        for partition, begin in begins.items():
            name = offset_name(topic, partition)
            offset = found.get(name, begin)
            kept[name] = offset if begin <= offset <= ends[partition] else begin
    return kept
