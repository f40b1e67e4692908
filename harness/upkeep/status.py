"""The report of `status`: services with their heartbeats, lag by topic, newest version by model group and engine."""

from collections.abc import Mapping

from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.eventlog.log import TopicPartition
from rollstream.harness.runs.follower import read_runs
from rollstream.harness.runs.progress import Progress
from rollstream.harness.services.liveness import read_signs
from rollstream.harness.services.workspace import Workspace
from rollstream.harness.upkeep.run_tables import as_table
from rollstream.schemas import ids
from rollstream.schemas.errors import QueryError
from rollstream.schemas.kafka import KafkaSettings
from rollstream.schemas.topics import TOPICS

READ_BY = {"producers": ("tasks",), "processors": ("steps", "groups")}
"""Topics that the consumer group of each service reads."""
PROJECTOR = "metrics projector"


async def read_status(workspace: Workspace, kafka: KafkaSettings) -> str:
    """The three tables as text. Raises LogError if the broker does not answer."""
    groups = {kafka.group(service): topics for service, topics in READ_BY.items()}
    async with KafkaLog(kafka, client_id="rollstream-status") as log:
        ends: dict[TopicPartition, int] = {}
        for topic in TOPICS:
            ends |= {TopicPartition(topic, p): end for p, end in (await log.end_offsets(topic)).items()}
        committed = {(group, topics): await log.committed_offsets(group) for group, topics in groups.items()}
        runs = await read_runs(log, topics=("groups", "weights"))
    parts = [
        f"log {kafka.bootstrap_servers}",
        _services(workspace),
        _lags(workspace, ends, committed),
        engines_table(runs),
    ]
    return "\n\n".join(part for part in parts if part)


def lag(
    topics: tuple[str, ...], ends: Mapping[TopicPartition, int], at: Mapping[TopicPartition, int]
) -> dict[str, int]:
    """Lag by topic: records after the reader's committed offset; a partition without an offset counts in full."""
    found = dict.fromkeys(topics, 0)
    for where, end in ends.items():
        if where.topic in found:
            found[where.topic] += max(0, end - at.get(where, 0))
    return found


def _services(workspace: Workspace) -> str:
    signs = read_signs(workspace.health)
    rows = [(sign.name, sign.state, f"{sign.age_s:.0f} s ago") for sign in signs]
    return as_table(("service", "state", "last sign"), rows) if rows else "no services are running in this workspace"


def _lags(
    workspace: Workspace,
    ends: Mapping[TopicPartition, int],
    committed: Mapping[tuple[str, tuple[str, ...]], Mapping[TopicPartition, int]],
) -> str:
    rows: list[tuple[str, str, int | str]] = []
    for (group, topics), at in committed.items():
        rows += [(group, topic, count) for topic, count in lag(topics, ends, at).items()]
    projected = _projected(workspace)
    if projected is None:
        rows.append((PROJECTOR, "all", "unknown"))
    else:
        rows += [(PROJECTOR, topic, count) for topic, count in lag(tuple(TOPICS), ends, projected).items()]
    return as_table(("reader", "topic", "lag"), rows)


def _projected(workspace: Workspace) -> dict[TopicPartition, int] | None:
    from rollstream.metrics.sql.client import query

    try:
        found = query(workspace.folder, 'SELECT topic, "partition", next_offset FROM offsets', fresh=False)
    except QueryError:
        return None
    return {TopicPartition(str(topic), int(partition)): int(offset) for topic, partition, offset in found.rows}


def engines_table(runs: list[Progress]) -> str:
    """Newest version that each engine of an open run has loaded, by model group, and the newest published one."""
    rows = [
        (progress.run_id, ids.name_of(model_group), engine, version, progress.version_of(model_group))
        for progress in runs
        if progress.ended is None
        for (model_group, engine), version in sorted(progress.engines.items())
    ]
    return as_table(("run", "model_group", "engine", "version", "newest"), rows) if rows else ""
