"""Detects records that a log has lost: old ones removed by retention, and the end of a partition that was longer
before."""

from collections.abc import Callable
from pathlib import Path

from rollstream.eventlog.kafka.topic_ids import only_cluster
from rollstream.eventlog.log import ReadableLog, TopicPartition, check_kept
from rollstream.schemas.errors import QueryError
from rollstream.schemas.topics import TOPICS

OFFSETS = 'SELECT topic, "partition", next_offset FROM offsets'


async def check_ends(log: ReadableLog, workspace: Path, warn: Callable[[str], None]) -> None:
    """Compare the log's end offsets with those that the workspace's metrics have read.

    Raises TruncatedError naming topic, partition and range of the first partition that was longer then. Does nothing
    without metrics, or if the workspace has used several clusters; warns if the metrics cannot be queried.
    """
    from rollstream.metrics.projection.connection import metrics_file

    if only_cluster(workspace) != await log.cluster_id() or not metrics_file(workspace).exists():
        return
    try:
        known = _known_ends(workspace)
    except QueryError as error:
        warn(
            f"cannot check whether the log has lost its newest records, because the metrics cannot be queried: {error}"
        )
        return
    for where, next_offset in sorted(known.items()):
        begins, ends = await log.begin_offsets(where.topic), await log.end_offsets(where.topic)
        if where.partition in ends and next_offset > ends[where.partition]:
            check_kept(where, next_offset, begins[where.partition], ends[where.partition])


async def removed(log: ReadableLog) -> list[str]:
    """One line per partition whose oldest records were removed."""
    return [
        f"topic {topic} partition {number} no longer has records before offset {begin}"
        for topic in TOPICS
        for number, begin in sorted((await log.begin_offsets(topic)).items())
        if begin
    ]


def _known_ends(workspace: Path) -> dict[TopicPartition, int]:
    """Raises QueryError."""
    from rollstream.metrics.sql.client import query

    rows = query(workspace, OFFSETS, fresh=False, limit=100_000).rows
    return {TopicPartition(str(topic), int(number)): int(offset) for topic, number, offset in rows}
