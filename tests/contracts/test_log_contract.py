"""The contract of `EventLog`, run on every implementation of it."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable

import pytest

from rollstream.eventlog.codec import decode
from rollstream.eventlog.log import EventLog, GroupReader, LogReader, Position, Record, TopicPartition, partition_of
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.schemas.errors import FencedError, LogError, TopicError, TruncatedError
from rollstream.schemas.events import JobCancelled, TaskCancelled
from rollstream.schemas.kafka import KafkaSettings
from rollstream.schemas.topics import TOPICS

NUM_PARTITIONS = 6
Scenario = Callable[[EventLog], Awaitable[None]]
Run = Callable[[Scenario], None]


def run_on_memory(scenario: Scenario) -> None:
    async def main() -> None:
        log = MemoryLog(num_partitions=NUM_PARTITIONS)
        await log.start()
        try:
            await log.ensure_topics(num_partitions=NUM_PARTITIONS)
            await scenario(log)
        finally:
            await log.close()

    asyncio.run(main())


def run_on_kafka(kafka: KafkaSettings, scenario: Scenario) -> None:
    from rollstream.eventlog.kafka.log import KafkaLog

    async def main() -> None:
        log = KafkaLog(kafka, session_timeout_s=3.0)
        await log.start()
        try:
            await log.ensure_topics(num_partitions=NUM_PARTITIONS)
            await scenario(log)
        finally:
            await log.close()

    asyncio.run(main())


@pytest.fixture(params=["memory", pytest.param("kafka", marks=pytest.mark.kafka)])
def run(request: pytest.FixtureRequest) -> Run:
    if request.param == "memory":
        return run_on_memory
    kafka = request.getfixturevalue("kafka")
    return lambda scenario: run_on_kafka(kafka, scenario)


def cancelled(group: str) -> TaskCancelled:
    return TaskCancelled(run_id=group.split("/")[0], time_ms=1, group_id=group, cause="test")


def fresh(name: str) -> str:
    return f"{name}-{secrets.token_hex(4)}"


async def ends(log: EventLog, topic: str) -> dict[TopicPartition, int]:
    return {TopicPartition(topic, p): offset for p, offset in (await log.end_offsets(topic)).items()}


async def read(reader: LogReader | GroupReader, count: int, timeout_s: float = 10.0) -> list[Record]:
    records: list[Record] = []
    deadline = asyncio.get_running_loop().time() + timeout_s
    while len(records) < count and asyncio.get_running_loop().time() < deadline:
        records += await reader.poll(timeout_s=0.2)
    return records


async def wait_until(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "waited too long"
        await asyncio.sleep(0.02)


def test_sent_events_are_read_in_order_with_key_headers_and_position(run: Run) -> None:
    async def scenario(log: EventLog) -> None:
        name = fresh("r")
        start = await ends(log, "tasks")
        events = [cancelled(f"{name}/g{i}") for i in range(20)]
        positions = [await log.send(events[0]), *await log.send_all(events[1:])]
        for event, position in zip(events, positions, strict=True):
            assert position.partition == partition_of(event.key, NUM_PARTITIONS)
        reader = await log.reader(start)
        records = await read(reader, 20)
        await reader.close()
        assert sorted(record.position for record in records) == sorted(positions)
        by_partition: dict[int, list[int]] = {}
        for record in records:
            by_partition.setdefault(record.partition, []).append(record.offset)
            assert dict(record.headers)["ce_type"] == b"rollstream.task_cancelled.v1"
        assert all(offsets == sorted(offsets) for offsets in by_partition.values())
        assert {decode(record).event.key for record in records} == {event.key for event in events}

    run(scenario)


def test_an_event_goes_to_the_partition_that_is_named(run: Run) -> None:
    async def scenario(log: EventLog) -> None:
        for partition in range(NUM_PARTITIONS):
            assert (await log.send(cancelled(fresh("r")), partition=partition)).partition == partition

    run(scenario)


def test_events_of_several_batches_go_to_the_partition_that_is_named_in_their_order(run: Run) -> None:
    sizes = [10, 150_000, 150_000, 600_000, 10, 10, 300_000, 10]  # a batch of Kafka's holds 256 KiB, or one record

    async def scenario(log: EventLog) -> None:
        name, start = fresh("r"), (await log.end_offsets("tasks"))[2]
        events = [
            TaskCancelled(run_id=name, time_ms=index, group_id=f"{name}/g", cause=secrets.token_hex(size // 2))
            for index, size in enumerate(sizes)
        ]
        positions = await log.send_all(events, partition=2)
        assert positions == [Position("tasks", 2, start + index) for index in range(len(events))]
        reader = await log.reader({TopicPartition("tasks", 2): start})
        records = await read(reader, len(events))
        await reader.close()
        assert [decode(record).event for record in records] == events
        assert [record.position for record in records] == positions
        assert await log.send_all([], partition=2) == []

    run(scenario)


def test_of_events_with_one_that_is_too_large_none_is_sent_to_the_partition_that_is_named(run: Run) -> None:
    async def scenario(log: EventLog) -> None:
        name, before = fresh("r"), await log.end_offsets("tasks")
        cause = "x" * TOPICS["tasks"].max_record_bytes
        large = TaskCancelled(run_id=name, time_ms=1, group_id=f"{name}/g", cause=cause)
        with pytest.raises(LogError, match="more than the limit"):
            await log.send_all([cancelled(name), large], partition=2)
        with pytest.raises(TopicError, match=f"tasks/{NUM_PARTITIONS} does not exist"):
            await log.send_all([cancelled(name)], partition=NUM_PARTITIONS)
        assert await log.end_offsets("tasks") == before

    run(scenario)


def test_a_waiting_reader_gets_a_new_record_at_once(run: Run) -> None:
    async def scenario(log: EventLog) -> None:
        reader = await log.reader(await ends(log, "jobs"))
        await reader.poll(timeout_s=0.1)
        loop = asyncio.get_running_loop()
        waiting = asyncio.create_task(reader.poll(timeout_s=120.0))
        await asyncio.sleep(0.2)
        began = loop.time()
        name = fresh("r")
        await log.send(JobCancelled(run_id=name, time_ms=1, job_id=f"{name}/j", model_group=f"{name}/m"))
        assert len(await waiting) == 1
        assert loop.time() - began < 60
        await reader.close()

    run(scenario)


def test_a_poll_without_records_is_empty_after_its_time(run: Run) -> None:
    async def scenario(log: EventLog) -> None:
        reader = await log.reader(await ends(log, "jobs"))
        began = asyncio.get_running_loop().time()
        assert await reader.poll(timeout_s=0.3) == []
        assert asyncio.get_running_loop().time() - began > 0.2
        await reader.close()

    run(scenario)


def test_a_reader_keeps_its_position_and_seeks(run: Run) -> None:
    async def scenario(log: EventLog) -> None:
        where = TopicPartition("tasks", 1)
        first = (await log.end_offsets("tasks"))[1]
        for _ in range(5):
            await log.send(cancelled(fresh("r")), partition=1)
        reader = await log.reader({where: first})
        assert reader.position(where) == first
        records = await reader.poll(timeout_s=5.0, max_records=2)
        assert [record.offset for record in records] == [first, first + 1]
        assert reader.position(where) == first + 2
        reader.seek(where, first + 4)
        assert [record.offset for record in await read(reader, 1)] == [first + 4]
        reader.seek(where, first)
        assert [record.offset for record in await read(reader, 5)] == list(range(first, first + 5))
        await reader.close()

    run(scenario)


def test_minus_one_reads_from_the_oldest_kept_record(run: Run) -> None:
    async def scenario(log: EventLog) -> None:
        await log.send(cancelled(fresh("r")), partition=0)
        where = TopicPartition("tasks", 0)
        reader = await log.reader({where: -1})
        begin = (await log.begin_offsets("tasks"))[0]
        assert reader.position(where) == begin
        assert (await read(reader, 1))[0].offset == begin
        await reader.close()

    run(scenario)


def test_an_offset_that_is_not_kept_is_an_error_that_names_it(run: Run) -> None:
    async def scenario(log: EventLog) -> None:
        where = TopicPartition("tasks", 0)
        reader = await log.reader({where: 10_000_000})
        with pytest.raises(TruncatedError, match=r"10000000.*tasks.*partition 0"):
            await read(reader, 1)
        await reader.close()
        with pytest.raises(TruncatedError, match=r"10000000.*tasks.*partition 0"):
            await log.fetch([Position("tasks", 0, 10_000_000)])

    run(scenario)


def test_a_partition_that_does_not_exist_is_an_error_that_names_it(run: Run) -> None:
    async def scenario(log: EventLog) -> None:
        named = rf"partition tasks/{NUM_PARTITIONS} does not exist"
        with pytest.raises(TopicError, match=named):
            await log.send(cancelled(fresh("r")), partition=NUM_PARTITIONS)
        with pytest.raises(TopicError, match=named):
            await asyncio.wait_for(log.fetch([Position("tasks", NUM_PARTITIONS, 0)]), 10)
        for offset in (-1, 0):
            with pytest.raises(TopicError, match=named):
                await read(await log.reader({TopicPartition("tasks", NUM_PARTITIONS): offset}), 1)

    run(scenario)


def test_fetch_returns_records_in_the_order_asked_for(run: Run) -> None:
    async def scenario(log: EventLog) -> None:
        positions = await log.send_all([cancelled(fresh("r")) for _ in range(30)])
        asked = [*positions[::-3], positions[4], positions[4]]
        assert [record.position for record in await log.fetch(asked)] == asked
        assert await log.fetch([]) == []

    run(scenario)


def test_a_raw_record_is_kept_as_it_is(run: Run) -> None:
    async def scenario(log: EventLog) -> None:
        raw = {"key": b"\xff\x00", "value": b"\xfe not json", "headers": (("a", b"\x00"), ("a", b"2"))}
        position = await log.send_raw("dlq", **raw)
        (record,) = await log.fetch([position])
        assert (record.key, record.value, record.headers) == (raw["key"], raw["value"], raw["headers"])
        position = await log.send_raw("dlq", key=None, value=None)
        (record,) = await log.fetch([position])
        assert (record.key, record.value, record.headers) == (None, None, ())

    run(scenario)


def test_the_largest_record_passes_and_a_larger_one_is_refused(run: Run) -> None:
    async def scenario(log: EventLog) -> None:
        limit = 8 * 1024 * 1024
        value = secrets.token_bytes(limit - 128)
        position = await log.send_raw("dlq", key=None, value=value)
        (record,) = await log.fetch([position])
        assert record.value == value
        with pytest.raises(LogError, match="dlq"):
            await log.send_raw("dlq", key=None, value=b"x" * limit)

    run(scenario)


def test_partition_counts_are_checked(run: Run) -> None:
    async def scenario(log: EventLog) -> None:
        assert await log.num_partitions("steps") == NUM_PARTITIONS
        assert await log.num_partitions("groups") == 1
        await log.ensure_topics()  # as many as there are
        with pytest.raises(TopicError, match=r"tasks.*6.*7"):
            await log.ensure_topics(num_partitions=7)
        with pytest.raises(TopicError, match="nonsense"):
            await log.num_partitions("nonsense")
        with pytest.raises(TopicError, match="nonsense"):
            await log.group_reader(fresh("group"), ["tasks", "nonsense"])

    run(scenario)


def test_a_group_member_reads_on_from_what_was_committed_with_its_note(run: Run) -> None:
    async def scenario(log: EventLog) -> None:
        where, group = TopicPartition("tasks", 2), fresh("group")
        first = (await log.end_offsets("tasks"))[2]
        await log.send_all([])
        for _ in range(3):
            await log.send(cancelled(fresh("r")), partition=2)
        member = await log.group_reader(group, ["tasks"])
        await wait_until(lambda: len(member.assigned()) == NUM_PARTITIONS)
        assert await member.committed(where) is None
        assert await member.committed_metadata(where) == ""
        await member.commit({where: first + 1}, {where: '{"open": 3}'})
        with pytest.raises(LogError, match="partition 2 of topic tasks has 4098 bytes"):
            await member.commit({where: first}, {where: "é" * 2049})
        assert await member.committed(where) == first + 1
        await member.close()
        again = await log.group_reader(group, ["tasks"])
        records: list[Record] = []
        while not any(record.partition == 2 for record in records):
            records += await read(again, 1)
        assert next(record.offset for record in records if record.partition == 2) == first + 1
        assert await again.committed_metadata(where) == '{"open": 3}'
        await again.close()

    run(scenario)


def test_partitions_move_between_members_and_a_late_commit_is_fenced(run: Run) -> None:
    async def scenario(log: EventLog) -> None:
        group, lines = fresh("group"), []

        async def assigned(share: set[TopicPartition]) -> None:
            lines.append(("assigned", share))

        async def revoked(share: set[TopicPartition]) -> None:
            lines.append(("revoked", share))

        one = await log.group_reader(group, ["tasks", "groups"], on_assigned=assigned, on_revoked=revoked)
        assert lines == []
        await wait_until(lambda: len(one.assigned()) == NUM_PARTITIONS + 1)
        everything = one.assigned()
        two = await log.group_reader(group, ["tasks", "groups"])
        await wait_until(
            lambda: bool(two.assigned()) and bool(one.assigned()) and len(one.assigned()) < len(everything)
        )
        assert one.assigned() | two.assigned() == everything
        assert not one.assigned() & two.assigned()
        assert lines[0] == ("assigned", everything)
        assert lines[1] == ("revoked", everything)
        await wait_until(lambda: lines[-1] == ("assigned", one.assigned()))
        moved = sorted(two.assigned())[0]
        with pytest.raises(FencedError, match="partition"):
            await one.commit({moved: 0})
        await two.commit({moved: 0})
        await one.close()
        await wait_until(lambda: two.assigned() == everything)
        await two.close()

    run(scenario)


def test_a_member_may_seek_when_it_is_assigned_a_partition(run: Run) -> None:
    async def scenario(log: EventLog) -> None:
        positions = [await log.send(cancelled(fresh("r")), partition=3) for _ in range(4)]

        async def assigned(share: set[TopicPartition]) -> None:
            for where in share:
                member.seek(where, positions[2].offset if where.partition == 3 else ends_by[where])

        ends_by = await ends(log, "tasks")
        member = await log.group_reader(fresh("group"), ["tasks"], on_assigned=assigned)
        assert [record.position for record in await read(member, 2)] == positions[2:]
        await member.close()

    run(scenario)


def test_an_exception_in_a_callback_is_raised_by_the_next_poll(run: Run) -> None:
    async def scenario(log: EventLog) -> None:
        async def assigned(_: set[TopicPartition]) -> None:
            raise LogError("planted")

        member = await log.group_reader(fresh("group"), ["tasks"], on_assigned=assigned)
        with pytest.raises(LogError, match="planted"):
            await read(member, 1_000_000)
        await member.close()

    run(scenario)


def test_a_log_has_a_cluster_id(run: Run) -> None:
    async def scenario(log: EventLog) -> None:
        assert await log.cluster_id()

    run(scenario)
