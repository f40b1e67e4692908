"""Which topics a workspace's services have worked on: by Kafka's ids, which a topic made again does not keep.

Committed offsets go with a deleted topic, so without this a new one of its name would look like one never read.
"""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from rollstream.schemas.errors import LogError, TruncatedError
from rollstream.schemas.topics import TOPICS

Known = dict[str, dict[str, str]]
"""Topic ids by cluster id and short name."""
Found = tuple[str, dict[str, str]]
"""Cluster id, and topic ids by short name."""
GONE_AFTER = 3
"""So many times in a row a topic is not found until it counts as deleted: a broker that starts may not name it yet."""


def check_topics(folder: Path, cluster_id: str, found: Mapping[str, str]) -> None:
    """Compare topic ids with those seen before from this workspace folder, and remember new ones.

    Raises TruncatedError naming a topic that was deleted and made again.
    """
    path = folder / "topics.json"
    known = _read(path)
    before = known.get(cluster_id, {})
    for topic, topic_id in found.items():
        if before.get(topic, topic_id) != topic_id:
            raise TruncatedError(
                f"topic {TOPICS[topic].name} was deleted and made again (id {before[topic]}, now {topic_id}): the "
                "offsets of all its partitions have begun anew from 0, and what runs need of it is gone; use another "
                f"workspace, or remove {path} to go on with what the log holds now"
            )
    if before.keys() != {**before, **found}.keys():
        _write(path, {**known, cluster_id: {**before, **found}})


async def watch_topics(folder: Path, look_up: Callable[[], Awaitable[Found]], *, every_s: float) -> None:
    """Compare topic ids again and again, for ever. What the log does not answer is asked again the next time.

    Raises TruncatedError naming a topic that was deleted, or deleted and made again.
    """
    missing: dict[str, int] = {}
    while True:
        await asyncio.sleep(every_s)
        try:
            cluster_id, found = await look_up()
        except LogError:
            continue
        check_topics(folder, cluster_id, found)
        if not found:
            continue  # a Kafka that tells no ids
        known = _read(folder / "topics.json").get(cluster_id, {})
        missing = {topic: missing.get(topic, 0) + 1 for topic in known.keys() - found}
        for topic in sorted(topic for topic, times in missing.items() if times >= GONE_AFTER):
            raise TruncatedError(
                f"topic {TOPICS[topic].name} was deleted: the offsets of all its partitions are gone, and what runs "
                f"need of it; use another workspace, or remove {folder / 'topics.json'} to go on without"
            )


def _read(path: Path) -> Known:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}


def _write(path: Path, known: Known) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(known, indent=1), encoding="utf-8")
    aside.replace(path)
