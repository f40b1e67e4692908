"""An export of a log that others have removed records from or written records into, and of damaged artifacts."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.dead_letters import PREFIX, REFERENCE, WHOLE
from rollstream.eventlog.log import Record, TopicPartition
from rollstream.replay.archive.log import open_export
from rollstream.schemas.errors import ArtifactError, StoreUnavailableError
from rollstream.schemas.settings import ArtifactRef
from tests.metrics.export_rig import export, log_of, records_of, weights_ref


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


def test_weights_that_are_damaged_or_out_of_reach_are_not_taken_for_removed_ones(
    tmp_path: Path, new_run: Any, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, last = log_of(new_run("one")), weights_ref(new_run("one"), 3)
    store.fetch(last).write_bytes(b"weights?3")
    with pytest.raises(ArtifactError, match=r"weights one/policy v3: .*wrong hash.*, or make a partial export"):
        export(log, "one", tmp_path / "export", store, with_weights=True)
    manifest = export(log, "one", tmp_path / "part", store, with_weights=True, is_partial=True)
    (missing,) = [artifact.missing for artifact in manifest.artifacts if artifact.file is None]
    assert "wrong hash" in missing

    def away(ref: ArtifactRef) -> Path:
        raise StoreUnavailableError("the store does not answer") from FileNotFoundError()

    monkeypatch.setattr(store, "fetch", away)
    with pytest.raises(StoreUnavailableError):
        export(log, "one", tmp_path / "export", store, with_weights=True, is_partial=True)


def test_a_dead_letter_that_is_damaged_or_of_another_program_fails_no_export(
    tmp_path: Path, new_run: Any, store: ArtifactStore
) -> None:
    log, damaged = log_of(new_run("one")), store.put_bytes(b"a large record")
    foreign = ArtifactRef(uri="elsewhere/blob.bin", sha256="a" * 64, size_bytes=3)

    async def fill() -> None:
        for ref in (damaged, foreign):
            headers = ((REFERENCE, ref.model_dump_json().encode()),)
            await log.send_raw("dlq", key=b"one/x", value=b"", headers=headers)

    asyncio.run(fill())
    store.fetch(damaged).write_bytes(b"another record")
    manifest = export(log, "one", tmp_path / "export", store)
    first, second = [artifact.missing for artifact in manifest.artifacts if artifact.what == "dead letter"]
    assert "wrong hash" in first
    assert "not named by its sha256" in second
