"""Offsets that the metrics file has reached and the log does not hold."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollstream.eventlog.log import TopicPartition
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.metrics.projection.projector import project_to_end
from rollstream.schemas.errors import TruncatedError
from tests.metrics.conftest import empty_file


def project(log: MemoryLog, path: Path) -> None:
    asyncio.run(project_to_end(log, path))


def test_rows_that_were_removed_before_they_were_read_stop_the_projector(tmp_path: Path, synthetic: Any) -> None:
    path, events = empty_file(tmp_path), list(synthetic.all_events())
    log = MemoryLog(num_partitions=2)
    asyncio.run(log.send_all(events[:20]))
    project(log, path)
    stood = asyncio.run(log.end_offsets("steps"))
    asyncio.run(log.send_all(events[20:]))
    ends = asyncio.run(log.end_offsets("steps"))
    partition = max(ends, key=lambda partition: ends[partition] - stood[partition])
    log.truncate(TopicPartition("steps", partition), stood[partition] + 1)
    with pytest.raises(TruncatedError) as stopped:
        project(log, path)
    assert str(stopped.value) == (
        f"offset {stood[partition]} of topic steps partition {partition} is not kept: it holds {stood[partition] + 1} "
        f"to {ends[partition] - 1}; move the metrics file {path} away to rebuild it from the retained records"
    )


def test_records_that_were_read_may_be_truncated(tmp_path: Path, synthetic: Any) -> None:
    path = empty_file(tmp_path)
    log = MemoryLog(num_partitions=2)
    asyncio.run(log.send_all(list(synthetic.all_events())))
    project(log, path)
    log.truncate(TopicPartition("groups", 0), asyncio.run(log.end_offsets("groups"))[0])
    project(log, path)


def test_a_log_that_ends_before_the_file_does_is_another_one(tmp_path: Path, synthetic: Any) -> None:
    path = empty_file(tmp_path)
    log = MemoryLog(num_partitions=2)
    asyncio.run(log.send_all(list(synthetic.all_events())))
    project(log, path)
    with pytest.raises(
        TruncatedError, match="is not kept: it is empty at 0; the topic was truncated at its end, or deleted"
    ):
        project(MemoryLog(num_partitions=2), path)
