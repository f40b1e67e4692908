"""Without a metrics file a cut log is found by what the runs in it name, and an export refuses what is not whole."""

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import orjson
import pytest

from rollstream.eventlog.log import Received, TopicPartition
from rollstream.eventlog.reading import read_to_end
from rollstream.replay import whole as whole_log
from rollstream.replay.completeness import check_whole, compare_named
from rollstream.replay.report import Report
from rollstream.replay.source import EFFECTS_FIRST, read_run
from rollstream.replay.training import recorded_jobs
from rollstream.replay.whole import BUNDLE_BYTES, check_runs
from rollstream.schemas.errors import TruncatedError
from rollstream.schemas.events import JobSubmitted, JobSucceeded
from tests.rigs.runs.recorded_run import EPOCHS, JOB
from tests.rigs.runs.replay_rig import named, tampered, trained, verified

PARTITIONS = [
    *(("steps", 0), ("steps", 1), ("trajectories", 0), ("trajectories", 1)),
    *((topic, 0) for topic in ("groups", "tasks", "batches", "jobs", "weights")),
]


def cut(recorded: Any, topic: str, partition: int, keep: int) -> Any:
    """The run whose log has lost the end of one partition; `keep` as in a slice."""
    run = tampered(recorded)
    kept = run.log._store._partitions[TopicPartition(topic, partition)]
    kept.records = kept.records[:keep]
    return run


def without(recorded: Any, topic: str, kind: str, *numbers: int) -> Any:
    """The run without the records of a kind, all if none is named; records that are not events take their offsets."""
    run = tampered(recorded)
    for where, kept in run.log._store._partitions.items():
        if where.topic == topic:
            found = [n for n, one in enumerate(kept.records) if f'"kind":"{kind}"'.encode() in one.value]
            for number in [found[n] for n in numbers] if numbers else found:
                kept.records[number] = replace(kept.records[number], key=b"x", value=b"{")
    return run


def test_a_whole_log_has_lost_nothing(recorded: Any) -> None:
    assert asyncio.run(check_runs(recorded.log)) == []
    assert verified(recorded).verdict == "equal"


def test_a_run_whose_end_alone_is_gone_is_not_called_equal(recorded: Any) -> None:
    run = cut(recorded, "groups", 0, -1)
    for report in (verified(run), trained(run), named(run)):
        assert (report.verdict, report.differences) == ("not ended", [])
        assert "killed before that (`rollstream finetune --resume` ends it), or the record is gone" in report.unended
    training = without(run, "jobs", "job_succeeded")
    assert named(training).unended == ""


@pytest.mark.parametrize("keep", [-1, 0])
@pytest.mark.parametrize(("topic", "partition"), PARTITIONS)
def test_a_log_that_was_cut_is_found_without_metrics(recorded: Any, topic: str, partition: int, keep: int) -> None:
    run = cut(recorded, topic, partition, keep)
    if (topic, keep) == ("groups", -1):  # only the run's end: it may be about to end
        (reported,) = asyncio.run(check_runs(run.log))
        assert "its training is over and no RunEnded is in topic groups partition 0 (it holds" in reported
        return
    with pytest.raises(TruncatedError, match=rf"topic {topic} partition {partition} .*\bit (holds|is empty)"):
        asyncio.run(check_runs(run.log))


@pytest.mark.parametrize("num_groups", range(1, 12))
def test_an_open_run_does_not_count_as_a_cut_log(recorded: Any, num_groups: int) -> None:
    """The run is as at the time of the first records of `groups`: later records do not exist yet."""
    run = cut(recorded, "groups", 0, num_groups)
    run = cut_later(run, num_groups)
    assert asyncio.run(check_runs(run.log)) == []


def cut_later(run: Any, num_groups: int) -> Any:
    """Without what was written once `groups` had come further: everything of epochs that had not begun or closed."""
    records = run.log._store._partitions[TopicPartition("groups", 0)].records
    closed = sum(b'"kind":"group_closed"' in one.value for one in records)
    begun = sum(b'"kind":"epoch_started"' in one.value for one in records)
    sealed = closed // 2
    for topic, keep in (("tasks", 2 * begun), ("batches", 2 * sealed)):
        run = cut(run, topic, 0, keep) if keep else cut(run, topic, 0, 0)
    weights = run.log._store._partitions[TopicPartition("weights", 0)]
    upto = sealed if sealed < EPOCHS else EPOCHS
    weights.records = [one for one in weights.records if version_of(one) <= upto]
    jobs = run.log._store._partitions[TopicPartition("jobs", 0)]
    jobs.records = [one for one in jobs.records if b"job_succeeded" not in one.value and version_of(one) <= upto]
    return run


def version_of(record: Any) -> int:
    return int(orjson.loads(record.value).get("version", 0))


@pytest.mark.parametrize("keep", [0, 2 * EPOCHS - 2])
def test_manifests_that_are_gone_with_their_seals_are_named_by_steps_and_the_job(recorded: Any, keep: int) -> None:
    run = cut(recorded, "batches", 0, keep)
    with pytest.raises(TruncatedError, match=rf"batch_planned:{JOB}/b00000\d.*topic batches partition 0"):
        asyncio.run(whole(run))
    for text in map(str, (*named(run).differences, *verified(run).differences)):
        assert "batch_planned:" not in text or "topic batches partition 0 (it holds" in text


@pytest.mark.parametrize(
    ("topic", "kind", "numbers", "gone"),
    [
        ("groups", "job_started", (), f"job_started:{JOB}"),
        ("groups", "epoch_started", (), f"epoch_started:{JOB}/e0"),
        ("groups", "epoch_started", (1,), f"epoch_started:{JOB}/e1"),
        ("batches", "epoch_sealed", (), f"epoch_sealed:{JOB}/e0"),
        ("batches", "epoch_sealed", (0,), f"epoch_sealed:{JOB}/e0"),
        ("batches", "epoch_sealed", (-1,), f"epoch_sealed:{JOB}/e{EPOCHS - 1}"),
        ("batches", "batch_planned", (-1,), f"batch_planned:{JOB}/b00000{EPOCHS - 1}"),
    ],
)
def test_starts_and_seals_that_are_gone_are_named(
    recorded: Any, topic: str, kind: str, numbers: tuple[int, ...], gone: str
) -> None:
    run = without(recorded, topic, kind, *numbers)
    assert any(f"{gone} in topic {topic} partition 0" in str(one) for one in named(run).differences)
    with pytest.raises(TruncatedError, match=f"{gone}, named by .*, is missing in topic {topic}"):
        asyncio.run(whole(run))


async def whole(run: Any) -> None:
    check_whole(await read_run(run.log, "replayed"))


class Counted(list[Any]):
    """Records that count how often they are read from the first to the last one."""

    num_reads = 0

    def __iter__(self) -> Any:
        Counted.num_reads += 1
        return super().__iter__()


def num_reads(events: Any, num_jobs: int) -> int:
    """Reads of all records by the checks of a run with so many further jobs."""
    counted, added = replace(events, by_topic={}, by_id=dict(events.by_id)), Counted()
    for received in events.by_topic["jobs"]:
        if isinstance(received.event, JobSubmitted | JobSucceeded):
            for number in range(num_jobs):
                event = received.event.model_copy(update={"job_id": f"{JOB}{number}"})
                added.append(Received(event, received.digest, received.position, received.timestamp_ms))
                counted.by_id[event.event_id] = added[-1]
    counted.by_topic |= {topic: Counted(found) for topic, found in events.by_topic.items()}
    counted.by_topic["jobs"] += added
    Counted.num_reads = 0
    compare_named(counted, Report())
    assert len(recorded_jobs(counted)) == 1
    return Counted.num_reads


def test_the_checks_of_a_run_read_its_records_as_often_for_many_jobs_as_for_few(recorded: Any) -> None:
    events = asyncio.run(read_run(recorded.log, "replayed"))
    assert num_reads(events, 30) == num_reads(events, 1)


@pytest.fixture(scope="module")
def many(recorded: Any) -> Any:
    """The run and copies of it under other names, one behind the other in the small topics."""
    run = tampered(recorded)

    async def copy(number: int) -> None:
        def named_so(data: bytes | None) -> bytes:
            return (data or b"").replace(b"replayed", b"copied%02d" % number)

        for topic in EFFECTS_FIRST:
            for one in [record async for record in read_to_end(recorded.log, topic)]:
                key, value, headers = named_so(one.key), named_so(one.value), [(n, named_so(v)) for n, v in one.headers]
                await run.log.send_raw(topic, key=key, value=value, headers=headers, partition=one.partition)

    for number in range(12):
        asyncio.run(copy(number))
    return run


@pytest.mark.parametrize(("bundle_bytes", "num_readers"), [(BUNDLE_BYTES, 2), (0, 14)])
def test_runs_are_read_together_as_far_as_there_is_room(
    many: Any, monkeypatch: pytest.MonkeyPatch, bundle_bytes: int, num_readers: int
) -> None:
    monkeypatch.setattr(whole_log, "BUNDLE_BYTES", bundle_bytes)
    opened, reader = list[str](), many.log.reader

    async def counted(start: Any) -> Any:
        opened.extend({where.topic for where in start})
        return await reader(start)

    monkeypatch.setattr(many.log, "reader", counted)
    assert asyncio.run(check_runs(many.log)) == []
    assert Counter(opened) == dict.fromkeys(EFFECTS_FIRST, num_readers)


@pytest.mark.parametrize("bundle_bytes", [BUNDLE_BYTES, 0])
def test_the_run_that_lacks_a_record_is_named_among_many(
    many: Any, monkeypatch: pytest.MonkeyPatch, bundle_bytes: int
) -> None:
    monkeypatch.setattr(whole_log, "BUNDLE_BYTES", bundle_bytes)
    run, number = without(many, "batches", "batch_planned", EPOCHS * 8), 7
    with pytest.raises(TruncatedError, match=f"run copied{number:02d} is incomplete: batch_planned:copied{number:02d}"):
        asyncio.run(check_runs(run.log))
