"""The command `jobs`: what it lists, shows and cancels, and one clear error for a bad id."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import click
import orjson
import pytest
from click.testing import CliRunner

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import Record, TopicPartition
from rollstream.eventlog.memory.groups import MemoryReader
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.harness.cli.job_commands import ListByDefault
from rollstream.harness.runs.follower import read_runs
from rollstream.harness.runs.plan import check_new, look_up
from rollstream.harness.upkeep.run_control import cancel_job, chosen_runs, find_job
from rollstream.harness.upkeep.run_tables import job_lines, jobs_table
from rollstream.replay.archive.export import export_run
from rollstream.replay.source import read_run
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.events import JobCancelled, JobSubmitted, RunEnded, RunStarted
from tests.rigs.runs.group_rig import GROUP, RUN, GroupRig, chat_rollout

SFT = {"prover": [chat_rollout("1"), chat_rollout("2")]}


@pytest.fixture
def rig(tmp_path) -> GroupRig:
    """A log without services; the model is never loaded."""
    return GroupRig(tmp_path, tmp_path / "model")


def test_a_job_is_listed_by_run_and_by_model_group_and_shown(rig: GroupRig) -> None:
    async def body() -> None:
        async with await rig.open(deadline_s=60.0) as group:
            job_id = await group.create_supervised_fine_tune_job(SFT, job_name="iteration 3")
        for chosen in (None, RUN, GROUP):
            table = jobs_table(await chosen_runs(rig.log, chosen), GROUP if chosen == GROUP else None)
            assert [line.split()[:5] for line in table.splitlines()[1:]] == [
                [RUN, job_id.removeprefix(f"{RUN}/"), "sft", "running", GROUP]
            ]
        reported = dict(line.split(maxsplit=1) for line in job_lines(await find_job(rig.log, job_id)))
        assert reported.pop("data").endswith(".jsonl")
        assert reported == {
            "job": job_id,
            "state": "running",
            "progress": "0 %",
            "model_group": GROUP,
            "kind": "sft",
            "algorithm": "sft",
            "base_version": "0",
            "versions": "1",
            "name": "iteration 3",
            "agents": "prover, verifier",
            "examples": "2",
            "batches": "1",
            "attempt": "0",
            "parent_version": "0",
            "deadline_s": "60.0",
        }

    asyncio.run(body())


class CountingReader(MemoryReader):
    """Counts the records of each topic that it returns."""

    num_read: Counter[str]

    def take(self, limit: int) -> list[Record]:
        records = super().take(limit)
        self.num_read.update(record.topic for record in records)
        return records


class CountingLog(MemoryLog):
    """A log whose readers count together."""

    def __init__(self) -> None:
        super().__init__(num_partitions=2)
        self.num_read = Counter[str]()

    async def reader(self, start: Mapping[TopicPartition, int]) -> MemoryReader:
        found = CountingReader(self._store, start)
        found.num_read = self.num_read
        return found


def test_the_jobs_of_one_run_are_read_from_its_beginning_and_not_from_that_of_the_log(tmp_path: Path) -> None:
    log = CountingLog()
    rig = GroupRig(tmp_path, tmp_path / "model", log)

    async def body() -> None:
        async with await rig.open(run_id="earlier") as group:
            await group.create_supervised_fine_tune_job(SFT)
        (begun,) = await rig.events("groups", RunStarted)
        ended = [RunEnded(run_id=f"e{n}", time_ms=1, cause="stopped") for n in range(200)]
        await log.send_all([begun.model_copy(update={"run_id": event.run_id}) for event in ended] + ended)
        async with await rig.open() as group:
            job_id = await group.create_supervised_fine_tune_job(SFT)
        for work in (chosen_runs(log, RUN), find_job(log, job_id), chosen_runs(log, GROUP)):
            log.num_read.clear()
            await work
            assert 0 < log.num_read["groups"] < 10
        assert [progress.run_id for progress in await chosen_runs(log, None)][-1] == RUN

    asyncio.run(body())


def test_a_new_run_id_is_looked_for_among_jobs_and_starts_alone(tmp_path: Path) -> None:
    log = CountingLog()
    rig = GroupRig(tmp_path, tmp_path / "model", log)

    async def body() -> None:
        async with await rig.open() as group:
            await group.create_supervised_fine_tune_job(SFT)
        async with await rig.open(run_id="without-jobs"):
            pass
        log.num_read.clear()
        with pytest.raises(ConfigError, match=f"--run_id {RUN}: this run already exists; continue it with --resume"):
            await check_new(log, RUN)
        assert set(log.num_read) == {"jobs"}
        await check_new(log, "new")
        assert set(log.num_read) == {"jobs", "groups"}
        with pytest.raises(ConfigError, match="this run already exists"):
            await check_new(log, "without-jobs")

    asyncio.run(body())


def test_a_cancelled_job_is_over_for_its_group_too(rig: GroupRig) -> None:
    async def body() -> None:
        async with await rig.open() as group:
            job_id = await group.create_supervised_fine_tune_job(SFT)
            await cancel_job(rig.log, job_id)
            assert await group.get_fine_tune_job_status() == "cancelled"
            with pytest.raises(ConfigError, match=rf"job {job_id} is over \(cancelled\); only an open job"):
                await cancel_job(rig.log, job_id)
        assert len(await rig.events("jobs", JobCancelled)) == 1
        assert "error           cancelled: cancelled by" in "\n".join(job_lines(await find_job(rig.log, job_id)))

    asyncio.run(body())


def test_a_skipped_job_is_shown_with_the_reason(rig: GroupRig) -> None:
    async def body() -> None:
        async with await rig.open(min_examples=10) as group:
            job_id = await group.create_supervised_fine_tune_job(SFT)
        reported = "\n".join(job_lines(await find_job(rig.log, job_id)))
        assert "state           skipped" in reported
        assert "error           skipped: 2 examples, at least 10 are needed" in reported

    asyncio.run(body())


OF_NEWER = (
    r"run later-1 has records that this version of rollstream cannot read, such as a newer version writes: "
    r"the first is groups/0@1 \(.*field_of_tomorrow.*\); use the version that wrote them"
)


def test_a_job_of_a_newer_version_is_not_called_unknown(rig: GroupRig) -> None:
    async def body() -> None:
        async with await rig.open() as group:
            job_id = await group.create_supervised_fine_tune_job(SFT)
        (submitted,) = await rig.events("jobs", JobSubmitted)
        sent = codec.encode(submitted.model_copy(update={"run_id": "later-1", "job_id": "later-1/sft"}))
        newer = orjson.dumps({**orjson.loads(sent.value), "field_of_tomorrow": 1})
        await rig.log.send_raw("jobs", key=b"later-1", value=newer, headers=sent.headers)
        with pytest.raises(ConfigError, match=r"may have written jobs/0@1 \(.*field_of_tomorrow.*\): use the version"):
            await find_job(rig.log, "later-1/sft")
        assert (await find_job(rig.log, job_id)).job_id == job_id

    asyncio.run(body())


def test_records_of_a_newer_version_are_counted_and_their_run_is_not_called_unknown(
    rig: GroupRig, tmp_path: Path
) -> None:
    async def body() -> None:
        async with await rig.open():
            (started,) = await rig.events("groups", RunStarted)
        sent = codec.encode(started.model_copy(update={"run_id": "later-1"}))
        newer = orjson.dumps({**orjson.loads(sent.value), "field_of_tomorrow": 1})
        await rig.log.send_raw("groups", key=b"later-1", value=newer, headers=sent.headers)
        await rig.log.send_raw("groups", key=b"later-1", value=b"of another program")
        unreadable = Counter[str]()
        assert [progress.run_id for progress in await read_runs(rig.log, unreadable)] == [RUN]
        assert unreadable == {"groups": 1}
        store = ArtifactStore(rig.artifact_uri)
        for work in (
            look_up(rig.log, "later-1"),
            chosen_runs(rig.log, "later-1"),
            chosen_runs(rig.log, "later-1/players"),
            read_run(rig.log, "later-1"),
            export_run(rig.log, "later-1", tmp_path / "export", artifacts=store),
        ):
            with pytest.raises(ConfigError, match=OF_NEWER):
                await work
        with pytest.raises(ConfigError, match="--run_id later-1: this run already exists"):
            await check_new(rig.log, "later-1")

    asyncio.run(body())


@pytest.mark.parametrize("job_id", ["nothing", f"{RUN}/nothing", "run-9/players-sft-0", ""])
def test_an_unknown_id_is_one_clear_error(rig: GroupRig, job_id: str) -> None:
    async def body() -> None:
        async with await rig.open() as group:
            await group.create_supervised_fine_tune_job(SFT)
        for work in (find_job(rig.log, job_id), cancel_job(rig.log, job_id)):
            with pytest.raises(ConfigError, match=f"job {job_id} does not exist; `rollstream jobs` lists all jobs"):
                await work
        with pytest.raises(ConfigError, match="run run-9 does not exist; `rollstream runs` lists all runs"):
            await chosen_runs(rig.log, "run-9")
        with pytest.raises(ConfigError, match=r"run \.\. does not exist"):
            await chosen_runs(rig.log, "../x")
        with pytest.raises(ConfigError, match=f"run-1/judges has no jobs; groups of the run with jobs: {GROUP}"):
            await chosen_runs(rig.log, "run-1/judges")

    asyncio.run(body())


@pytest.mark.parametrize(
    ("written", "reported"),
    [
        ([], "list ()"),
        (["run-1"], "list ('run-1',)"),
        (["run-1/players"], "list ('run-1/players',)"),
        (["list", "show"], "list ('show',)"),
        (["show", "run-1/rl"], "show ('run-1/rl',)"),
    ],
)
def test_an_unknown_command_is_an_argument_of_list(written: list[str], reported: str) -> None:
    @click.group(cls=ListByDefault)
    def group() -> None:
        """A group of two commands."""

    for name in ("list", "show"):
        argument = click.Argument(["given"], nargs=-1)
        group.add_command(click.Command(name, params=[argument], callback=partial(print_call, name)))
    assert CliRunner().invoke(group, written).output.strip() == reported


def print_call(name: str, given: tuple[str, ...]) -> None:
    click.echo(f"{name} {given}")


def test_records_of_a_newer_version_are_counted_for_the_one_run_that_is_listed(tmp_path: Path) -> None:
    rig = GroupRig(tmp_path, tmp_path / "model")

    async def scenario() -> None:
        async with await rig.open() as group:
            await group.create_supervised_fine_tune_job(SFT)
        (submitted,) = await rig.events("jobs", JobSubmitted)
        sent = codec.encode(submitted.model_copy(update={"job_id": f"{RUN}/later"}))
        value = orjson.dumps({**orjson.loads(sent.value), "field_of_tomorrow": 1})
        await rig.log.send_raw("jobs", key=RUN.encode(), value=value, headers=sent.headers)
        unreadable = Counter[str]()
        (run,) = await chosen_runs(rig.log, RUN, unreadable)
        assert (list(run.jobs), unreadable) == ([submitted.job_id], {"jobs": 1})

    asyncio.run(scenario())
