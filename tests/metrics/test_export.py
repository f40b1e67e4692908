"""An export holds a run's raw records, all that folds of it need, and finds every changed byte."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.dead_letters import REFERENCE, send_dead_letter
from rollstream.eventlog.log import Position, ReadableLog, Record, TopicPartition
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.replay.archive.log import ExportLog, open_export
from rollstream.replay.archive.reader import Table
from rollstream.schemas import events, ids
from rollstream.schemas.base import Event
from rollstream.schemas.errors import (
    ArtifactError,
    ConfigError,
    DecodeError,
    LogError,
    TopicError,
    TruncatedError,
)
from rollstream.schemas.topics import TOPICS
from tests.metrics.export_rig import export, log_of, records_of, weights_ref


def test_small_polls_read_no_record_of_a_file_twice(
    tmp_path: Path, new_run: Any, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(log_of(new_run("one")), "one", tmp_path / "export", store)
    read: list[int] = []
    table_read = Table.read

    def counted(table: Table, partition: int, offset: int) -> list[Record]:
        read.append(len(found := table_read(table, partition, offset)))
        return found

    monkeypatch.setattr(Table, "read", counted)

    async def scenario() -> None:
        async with open_export(tmp_path / "export") as (exported, _):
            reader = await exported.reader({TopicPartition("steps", n): -1 for n in range(2)})
            found: list[Record] = []
            while records := await reader.poll(timeout_s=0.01, max_records=3):
                assert len(records) <= 3
                found += records
            assert sum(read) == len(found) > 20
            where = TopicPartition("steps", found[-1].partition)
            reader.seek(where, found[-1].offset)
            assert await reader.poll(max_records=1) == found[-1:]
            reader.seek(where, (await exported.begin_offsets("steps"))[where.partition])
            assert await reader.poll(max_records=2) == [one for one in found if one.partition == where.partition][:2]
            assert sorted(found, key=lambda record: record.position) == await records_of(exported, "steps")

    asyncio.run(scenario())


@pytest.mark.parametrize("folder", ["export", "e[1]", "e*", "offset=7"])
def test_every_record_of_a_run_comes_back_at_its_place_and_no_other(
    tmp_path: Path, new_run: Any, store: ArtifactStore, folder: str
) -> None:
    log = log_of(new_run("one"), new_run("two"), new_run("three"))
    export(log, "one", tmp_path / "e1", store)
    export(log, "two", tmp_path / folder, store)

    async def compare() -> None:
        async with open_export(tmp_path / folder) as (exported, _):
            for topic in set(TOPICS) - {"steps"}:
                records = await records_of(log, topic)
                wanted = [record for record in records if ids.run_of((record.key or b"").decode()) == "two"]
                found = await records_of(exported, topic)
                assert found == wanted, topic
                assert await exported.fetch([record.position for record in reversed(found)]) == found[::-1]
                assert await exported.num_partitions(topic) == await log.num_partitions(topic)
            assert await exported.cluster_id() == "memory"

    asyncio.run(compare())


def test_null_keys_values_and_repeated_headers_come_back_as_they_were(
    tmp_path: Path, new_run: Any, store: ArtifactStore
) -> None:
    log = log_of(new_run("one"))
    group = next(event for event in new_run("one").all_events() if isinstance(event, events.GroupStarted))
    where = TopicPartition("steps", asyncio.run(log.send(group)).partition)
    odd: list[tuple[bytes | None, bytes | None, tuple[tuple[str, bytes], ...]]] = [
        (None, None, ()),
        (None, b"\x00\xff'\n", (("same", b""), ("same", b"\xfe"), ("", b"x"))),
        (b"one/\xff", None, (("größe", "π".encode()),)),
        (b"", b"", ()),
    ]

    async def add() -> None:
        for key, value, headers in odd:
            await log.send_raw("steps", key=key, value=value, headers=headers, partition=where.partition)
        await log.send(group, partition=where.partition)

    asyncio.run(add())
    export(log, "one", tmp_path / "export", store)

    async def compare() -> None:
        async with open_export(tmp_path / "export") as (exported, _):
            assert await records_of(exported, "steps") == await records_of(log, "steps")

    asyncio.run(compare())


def test_large_records_come_back_too(tmp_path: Path, new_run: Any, store: ArtifactStore) -> None:
    log = log_of(new_run("one"))

    async def add() -> None:
        for number in range(6):
            await log.send_raw("trajectories", key=b"one/g", value=bytes([number]) * 7_000_000, partition=number % 2)

    asyncio.run(add())
    export(log, "one", tmp_path / "export", store)

    async def compare() -> None:
        async with open_export(tmp_path / "export") as (exported, _):
            assert await records_of(exported, "trajectories") == await records_of(log, "trajectories")

    asyncio.run(compare())


def test_an_export_that_is_being_read_can_be_closed_at_any_moment(
    tmp_path: Path, new_run: Any, store: ArtifactStore
) -> None:
    log = log_of(new_run("one"))

    async def add() -> None:
        for number in range(20):
            await log.send_raw("trajectories", key=b"one/g", value=bytes([number]) * 1_000_000, partition=number % 2)

    asyncio.run(add())
    export(log, "one", tmp_path / "export", store)

    async def read_on(is_open: asyncio.Event) -> None:
        async with open_export(tmp_path / "export") as (exported, _):
            is_open.set()
            while True:
                await records_of(exported, "trajectories")

    async def break_off(after_s: float) -> None:
        is_open = asyncio.Event()
        reading = asyncio.create_task(read_on(is_open))
        await is_open.wait()
        await asyncio.sleep(after_s)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    for hundredths in range(5):
        asyncio.run(break_off(hundredths / 100))


def test_steps_hold_all_runs_and_ticks_between_the_first_record_and_the_one_that_closed_the_last_group(
    tmp_path: Path, new_run: Any, store: ArtifactStore
) -> None:
    log = MemoryLog(num_partitions=2)
    base = {"run_id": "one", "example_id": "x", "job_id": "one/rl", "epoch": 0, "index": 0, "size": 1}
    group_id = ids.group_id("one", "rl", 0, 0)
    started = events.GroupStarted.model_validate(
        base | {"time_ms": 10, "group_id": group_id, "minimum": 1, "timeout_ms": 5, "seed": 0}
    )
    other = started.model_copy(update={"run_id": "other", "group_id": ids.group_id("other", "rl", 0, 0)})

    def tick(time_ms: int) -> events.Tick:
        return events.Tick(run_id="", time_ms=time_ms, partition=1)

    async def fill() -> None:
        for event in (tick(1), other, started, tick(11), other, tick(15), tick(16), other):
            await log.send(event, partition=1)
        closed = {"reason": "timeout", "is_viable": False, "members": ()}
        at = {"partition": 1, "first_offset": 2, "last_offset": 5}
        await log.send(
            events.GroupClosed.model_validate(base | closed | {"time_ms": 15, "group_id": group_id, "steps_at": at})
        )
        await log.send(next(event for event in new_run("one").all_events()))

    asyncio.run(fill())
    manifest = export(log, "one", tmp_path / "export", store)
    assert [(one.begin, one.end) for one in manifest.topics["steps"].partitions] == [(0, 0), (2, 6)]
    assert manifest.num_left_out == 2

    async def compare() -> None:
        async with open_export(tmp_path / "export") as (exported, _):
            found = await records_of(exported, "steps")
            assert found == (await records_of(log, "steps"))[2:6]
            assert await exported.begin_offsets("steps") == {0: 0, 1: 2}
            assert await exported.end_offsets("steps") == {0: 0, 1: 6}

    asyncio.run(compare())


def test_an_export_has_the_dead_letters_that_came_from_its_run(
    tmp_path: Path, new_run: Any, store: ArtifactStore
) -> None:
    log = log_of(new_run("one"))

    async def fill() -> None:
        end = (await log.end_offsets("steps"))[0]
        partition = 0 if end else 1
        inside = Record("steps", partition, 3, None, b"{", (), 0)
        outside = Record("steps", partition, 10_000, b"other/g", b"{", (), 0)
        large = Record("groups", 0, 2, b"one" * 3_000_000, b"{", (), 0)
        for record in (inside, outside, large, Record("batches", 0, 0, b"one", b"{", (), 0)):
            await send_dead_letter(log, record, service="s", stage="decode", error=DecodeError("no"), artifacts=store)
        await log.send_raw("dlq", key=b"one", value=b"", headers=((REFERENCE, b"of another program"),))

    asyncio.run(fill())
    manifest = export(log, "one", tmp_path / "export", store)
    assert [artifact.what for artifact in manifest.artifacts][-1] == "dead letter"

    async def exported_positions() -> list[Position]:
        async with open_export(tmp_path / "export") as (exported, _):
            return [record.position for record in await records_of(exported, "dlq")]

    assert asyncio.run(exported_positions()) == [Position("dlq", 0, offset) for offset in (0, 2, 3, 4)]


def test_base_weights_are_kept_and_all_weights_when_asked_for(
    tmp_path: Path, new_run: Any, store: ArtifactStore
) -> None:
    log = log_of(new_run("one"))
    assert len(export(log, "one", tmp_path / "few", store).artifacts) == 3  # dataset, the bases of sft and rl
    manifest = export(log, "one", tmp_path / "all", store, with_weights=True)
    assert [artifact.what for artifact in manifest.artifacts] == [
        "dataset", "weights one/policy v0", "weights one/policy v1", "weights one/policy v2", "weights one/policy v3",
    ]  # fmt: skip


def test_a_base_version_that_adopts_an_earlier_one_is_kept(tmp_path: Path, new_run: Any, store: ArtifactStore) -> None:
    run = new_run("one")
    found: list[Event] = list(run.all_events(ended=False))
    adopted = next(one for one in found if isinstance(one, events.WeightsPublished) and one.version == 2)
    found.append(adopted.model_copy(update={"version": 4, "parent": 3, "adopts": 2, "time_ms": run.tick()}))
    run.version = 4
    found += map(run.stored, run.job("late", "rl", 1))
    log = MemoryLog(num_partitions=2)
    asyncio.run(log.send_all(found))
    kept = [artifact.what for artifact in export(log, "one", tmp_path / "export", store).artifacts]
    assert kept == ["dataset", "weights one/policy v0", "weights one/policy v1", "weights one/policy v4"]


def test_artifacts_are_found_by_hash_when_their_store_is_gone(
    tmp_path: Path, new_run: Any, store: ArtifactStore
) -> None:
    run = new_run("one")
    base, last = weights_ref(run, 0), weights_ref(new_run("one"), 3)
    export(log_of(new_run("one")), "one", tmp_path / "export", store)
    store.remove(base)

    async def read() -> None:
        async with open_export(tmp_path / "export") as (_, artifacts):
            assert artifacts.read(base) == b"weights 0"
            assert artifacts.fetch(base).is_relative_to(tmp_path / "export")
            assert store.read(last) == b"weights 3"
            with pytest.raises(ArtifactError, match="does not hold it"):
                artifacts.read(last)
            with pytest.raises(ArtifactError, match="read-only"):
                artifacts.put_bytes(b"new")

    asyncio.run(read())


def test_a_run_without_its_base_weights_cannot_be_exported(tmp_path: Path, new_run: Any, store: ArtifactStore) -> None:
    log = log_of(new_run("one"))
    store.remove(weights_ref(new_run("one"), 3))
    manifest = export(log, "one", tmp_path / "export", store, with_weights=True)
    gone = [(artifact.what, artifact.missing) for artifact in manifest.artifacts if artifact.file is None]
    assert gone == [("weights one/policy v3", "the file is gone, and no collection removed it")]
    store.remove(weights_ref(new_run("one"), 0))
    with pytest.raises(ArtifactError, match="cannot be read"):
        export(log, "one", tmp_path / "again", store)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "store"]


def test_an_unknown_run_leaves_nothing(tmp_path: Path, new_run: Any, store: ArtifactStore) -> None:
    with pytest.raises(ConfigError, match="run on does not exist; `rollstream runs` lists all runs"):
        export(log_of(new_run("one")), "on", tmp_path / "export", store)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_an_existing_folder_is_not_written_into(tmp_path: Path, new_run: Any, store: ArtifactStore) -> None:
    (tmp_path / "export").mkdir()
    with pytest.raises(ConfigError, match="already exists"):
        export(log_of(new_run("one")), "one", tmp_path / "export", store)
    assert list((tmp_path / "export").iterdir()) == []


def test_an_export_names_offsets_removed_by_retention(tmp_path: Path, new_run: Any, store: ArtifactStore) -> None:
    log = log_of(new_run("one"))
    for partition in range(2):
        log.truncate(TopicPartition("trajectories", partition), 2)
    with pytest.raises(TruncatedError, match="offset 0 of topic trajectories partition 0 is not kept"):
        export(log, "one", tmp_path / "export", store)


def flipped(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_changed_byte_in_any_file_is_found_and_the_file_is_named(
    tmp_path: Path, new_run: Any, store: ArtifactStore
) -> None:
    folder = tmp_path / "export"
    export(log_of(new_run("one")), "one", folder, store)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert len(files) == len(TOPICS) + 1 + 3
    for path in files:
        for share in (0.0, 0.4, 0.99):
            at = int(path.stat().st_size * share)
            flipped(path, at)
            with pytest.raises(LogError, match=f"{path.name} was changed since it was exported"):
                asyncio.run(ExportLog(folder).start())
            flipped(path, at)
    asyncio.run(ExportLog(folder).start())
    files[-1].unlink()
    with pytest.raises(LogError, match=f"{files[-1].name} of an export cannot be read"):
        asyncio.run(ExportLog(folder).start())
    with pytest.raises(LogError, match="is not an export of a run"):
        asyncio.run(ExportLog(tmp_path).start())


def test_an_export_refuses_offsets_that_it_does_not_hold(tmp_path: Path, new_run: Any, store: ArtifactStore) -> None:
    export(log_of(new_run("one"), new_run("two")), "two", tmp_path / "export", store)

    async def ask(log: ReadableLog) -> AsyncIterator[Any]:
        yield log.fetch([Position("groups", 0, 0)]), TruncatedError, "offset 0 of topic groups partition 0 is not in"
        yield log.fetch([Position("groups", 7, 0)]), TopicError, "partition groups/7 does not exist"
        yield log.fetch([Position("other", 0, 0)]), TopicError, "topic other"
        reader = await log.reader({TopicPartition("groups", 0): -1})
        assert reader.position(TopicPartition("groups", 0)) == 16  # the first record of the run
        reader.seek(TopicPartition("groups", 0), 99)
        yield reader.poll(), TruncatedError, "offset 99 of topic groups"

    async def refuse() -> None:
        async with open_export(tmp_path / "export") as (log, _):
            async for work, error, message in ask(log):
                with pytest.raises(error, match=message):
                    await work

    asyncio.run(refuse())


def test_the_files_are_plain_parquet(tmp_path: Path, new_run: Any, store: ArtifactStore) -> None:
    export(log_of(new_run("one")), "one", tmp_path / "export", store)
    path = str(tmp_path / "export" / "steps.parquet")
    connection = duckdb.connect()
    found = connection.execute("DESCRIBE SELECT * FROM read_parquet($1)", [path]).fetchall()
    assert [row[:2] for row in found] == [
        ("partition", "BIGINT"), ("offset", "BIGINT"), ("timestamp_ms", "BIGINT"), ("key", "BLOB"), ("value", "BLOB"),
        ("headers", 'STRUCT("name" VARCHAR, "value" BLOB)[]'),
    ]  # fmt: skip
    codecs = connection.execute("SELECT DISTINCT compression FROM parquet_metadata($1)", [path]).fetchall()
    assert codecs == [("ZSTD",)]
