"""Which topics a workspace's services have worked on: by Kafka's ids, which a topic made again does not keep.

Committed offsets go with a deleted topic, so without this a new one of its name would look like one never read.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from rollstream.schemas.errors import TruncatedError
from rollstream.schemas.topics import TOPICS

Known = dict[str, dict[str, str]]
"""Topic ids by cluster id and short name."""


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
