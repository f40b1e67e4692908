"""What `rollstream status` shows: services by their signs of life, lag by topic, newest version by engine."""

from collections.abc import Mapping

from rollstream.eventlog.kafka_log import KafkaLog
from rollstream.eventlog.log import TopicPartition
from rollstream.harness.progress import Progress
from rollstream.harness.runs import read_runs, state_of
from rollstream.harness.services.heartbeat import read_signs
from rollstream.harness.tables import table
from rollstream.harness.workspace import Workspace
from rollstream.schemas.errors import QueryError
from rollstream.schemas.topics import TOPICS

GROUPS = {"rollstream-producers": ("tasks",), "rollstream-processors": ("steps", "groups")}
"""Topics that each consumer group reads."""
PROJECTOR = "metrics projector"


async def read_status(workspace: Workspace, bootstrap_servers: str) -> str:
    """The three tables as text. Raises LogError if the broker does not answer."""
    log = KafkaLog(bootstrap_servers, client_id="rollstream-status")
    try:
        await log.start()
        ends: dict[TopicPartition, int] = {}
        for topic in TOPICS:
            ends |= {TopicPartition(topic, p): end for p, end in (await log.end_offsets(topic)).items()}
        committed = {group: await log.committed_offsets(group) for group in GROUPS}
        runs = await read_runs(log)
    finally:
        await log.close()
    parts = [f"log {bootstrap_servers}", _services(workspace), _lags(workspace, ends, committed), _engines(runs)]
    return "\n\n".join(part for part in parts if part)


def lag(
    topics: tuple[str, ...], ends: Mapping[TopicPartition, int], at: Mapping[TopicPartition, int]
) -> dict[str, int]:
    """Records by topic that are not yet behind a reader; a partition without a position counts whole."""
    found = dict.fromkeys(topics, 0)
    for where, end in ends.items():
        if where.topic in found:
            found[where.topic] += max(0, end - at.get(where, 0))
    return found


def _services(workspace: Workspace) -> str:
    signs = read_signs(workspace.health)
    rows = [(sign.name, "alive" if sign.is_alive else "silent", f"{sign.age_s:.0f} s ago") for sign in signs]
    return table(("service", "state", "last sign"), rows) if rows else "no service runs in this workspace"


def _lags(
    workspace: Workspace,
    ends: Mapping[TopicPartition, int],
    committed: Mapping[str, Mapping[TopicPartition, int]],
) -> str:
    rows: list[tuple[str, str, int | str]] = []
    for group, topics in GROUPS.items():
        rows += [(group, topic, count) for topic, count in lag(topics, ends, committed[group]).items()]
    projected = _projected(workspace)
    if projected is None:
        rows.append((PROJECTOR, "all", "unknown"))
    else:
        rows += [(PROJECTOR, topic, count) for topic, count in lag(tuple(TOPICS), ends, projected).items()]
    return table(("reader", "topic", "lag"), rows)


def _projected(workspace: Workspace) -> dict[TopicPartition, int] | None:
    from rollstream.metrics.client import query

    try:
        found = query(workspace.folder, 'SELECT topic, "partition", next_offset FROM offsets', fresh=False)
    except QueryError:
        return None
    return {TopicPartition(str(topic), int(partition)): int(offset) for topic, partition, offset in found.rows}


def _engines(runs: list[Progress]) -> str:
    rows = [
        (progress.run_id, engine, version, progress.version)
        for progress in runs
        if state_of(progress) == "open"
        for engine, version in progress.loaded.items()
    ]
    return table(("run", "engine", "version", "newest"), rows) if rows else ""
