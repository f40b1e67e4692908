"""The log: topics, codec, Kafka client, in-memory log, embedded broker and artifact store."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.eventlog import (
        artifacts,
        attempts,
        blocking_calls,
        codec,
        dead_letters,
        disk_space,
        failpoints,
        files,
        log,
        private,
        reading,
        recent_set,
        run_offsets,
        terms,
    )

__all__ = [
    "artifacts",
    "attempts",
    "blocking_calls",
    "codec",
    "dead_letters",
    "disk_space",
    "failpoints",
    "files",
    "log",
    "private",
    "reading",
    "recent_set",
    "run_offsets",
    "terms",
]
