"""Remembers the committed offsets of a workspace's services, because Kafka deletes those of a group that stays empty.

`offsets.retention.minutes` (seven days by default; unlimited in the embedded broker) starts when a group's last member
leaves. A group without offsets would start at the oldest record and send everything again, so the loss is detected at
start-up.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

from rollstream.eventlog.files import read_json, update_json
from rollstream.eventlog.log import TopicPartition
from rollstream.schemas.errors import TruncatedError

Offsets = Mapping[TopicPartition, int]
FILE = "committed.json"
logger = logging.getLogger(__name__)


def check_committed(folder: Path, cluster_id: str, group: str, found: Offsets) -> None:
    """Compare a group's committed offsets with those seen before from this workspace folder, and remember them.

    Raises TruncatedError naming the partitions whose committed offset was deleted, and how to reset it.
    """
    before = read_json(folder / FILE).get(f"{cluster_id} {group}", {})
    lost = [(name, offset) for name, offset in sorted(before.items()) if _partition(name) not in found]
    if lost:
        named = ", ".join(f"{name} to {offset}" for name, offset in lost)
        raise TruncatedError(
            f"consumer group {group} has lost its committed offsets: Kafka drops those of a group without members "
            f"after offsets.retention.minutes; stop the group's services and set topic partition {named} by "
            f"`kafka-consumer-groups --reset-offsets --to-offset`, or remove {folder / FILE} to start from the "
            f"oldest records"
        )
    remember_committed(folder, cluster_id, group, found)


def remember_committed(folder: Path, cluster_id: str, group: str, found: Offsets) -> None:
    """Keep a group's committed offsets; does nothing if it has none. A failed write is only logged."""
    seen = {f"{where.topic}/{where.partition}": offset for where, offset in sorted(found.items()) if offset >= 0}
    key = f"{cluster_id} {group}"
    if not seen:
        return
    try:
        update_json(folder / FILE, lambda known: {**known, key: {**known.get(key, {}), **seen}})
    except OSError as error:
        logger.warning("cannot save the committed offsets of group %s: %s", group, error)


def _partition(name: str) -> TopicPartition:
    topic, _, number = name.rpartition("/")
    return TopicPartition(topic, int(number))
