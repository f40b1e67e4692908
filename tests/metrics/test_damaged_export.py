"""An export of a log that others have removed records from, or written records into."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.dead_letters import PREFIX, WHOLE
from rollstream.eventlog.log import Record, TopicPartition
from rollstream.replay.archive.log import open_export
from tests.metrics.export_rig import export, log_of, records_of


@pytest.mark.parametrize("topic", ["steps", "trajectories"])
def test_a_run_is_exported_as_far_as_retention_left_it_on_demand(
    tmp_path: Path, new_run: Any, store: ArtifactStore, topic: str
) -> None:
    log = log_of(new_run("one"))
    ends = asyncio.run(log.end_offsets(topic))
    number = max(ends, key=lambda one: ends[one])
    log.truncate(TopicPartition(topic, number), ends[number] // 2)
    manifest = export(log, "one", tmp_path / "export", store, is_partial=True)
    assert manifest.is_partial
    assert manifest.topics[topic].partitions[number].begin == ends[number] // 2

    async def held() -> list[Record]:
        async with open_export(tmp_path / "export") as (exported, _):
            return await records_of(exported, topic)

    assert asyncio.run(held()) == asyncio.run(records_of(log, topic))


def test_dead_letters_of_other_programs_do_not_end_an_export(
    tmp_path: Path, new_run: Any, store: ArtifactStore
) -> None:
    log = log_of(new_run("one"))
    for topic, offset in (("rollstream.dlq.v1", 0), ("rollstream.groups.v1", 10**60)):
        source = {"topic": topic, "partition": "0", "offset": str(offset)}
        headers = [(PREFIX + name, value.encode()) for name, value in source.items()]
        asyncio.run(log.send_raw("dlq", key=None, value=None, headers=(*headers, (WHOLE, b"{}"))))
    manifest = export(log, "one", tmp_path / "export", store)
    assert (manifest.topics["dlq"].num_records, manifest.num_left_out) == (0, 2)


def test_records_of_a_run_without_a_key_are_exported_and_those_of_others_are_not(
    tmp_path: Path, new_run: Any, store: ArtifactStore
) -> None:
    log = log_of(new_run("one"), new_run("two"))
    whole = export(log, "one", tmp_path / "before", store)
    for kept in log._store._partitions.values():
        kept.records = [replace(record, key=None) for record in kept.records]
    manifest = export(log, "one", tmp_path / "export", store)
    assert {topic: file.num_records for topic, file in manifest.topics.items()} == {
        topic: file.num_records for topic, file in whole.topics.items()
    }
