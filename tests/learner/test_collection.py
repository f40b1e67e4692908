"""Weights of a run that goes on: only what nothing needs goes, and the log says so first."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollstream.eventlog import codec
from rollstream.eventlog.log import Encoded, Position, Received, TopicPartition
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.learner.collection import TOPICS, NeedsReader
from rollstream.learner.retention import WeightNeeds, due, evolve, removable, unfinished
from rollstream.learner.trainer import JobTrainer
from rollstream.schemas.base import Event
from rollstream.schemas.errors import FencedError, StoreUnavailableError
from rollstream.schemas.events import (
    JobFailed,
    JobProgressed,
    JobSubmitted,
    JobSucceeded,
    LearnerClaimed,
    RunEnded,
    WeightsCollected,
    WeightsLoaded,
    WeightsPublished,
)
from rollstream.schemas.events.training import ForkPoint
from rollstream.schemas.settings import ArtifactRef, JobSettings, ModelSettings

GROUP = "r/policy"

# ---- which ones: a table ----


def ref(name: str) -> ArtifactRef:
    sha256 = codec.content_digest(RunEnded(run_id=name, time_ms=1, cause="stopped"))
    return ArtifactRef(uri=f"/s/{sha256[:2]}/{sha256}.safetensors", sha256=sha256, size_bytes=1)


def job(base: int = 0, *, last: int = 2, every: int = 100, group: str = GROUP, **reported: Any) -> JobSubmitted:
    settings = JobSettings(kind="rl", model=ModelSettings(path="m"), keep_last=last, keep_every=every)
    reported |= {"job_id": f"{group}-{base}", "model_group": group, "base_version": base, "settings": settings}
    return JobSubmitted(run_id=group.split("/")[0], time_ms=1, **reported)


def published(*versions: int, group: str = GROUP, like: str = "") -> list[Event]:
    found: list[Event] = []
    for version in versions:
        artifact = ref(like or f"{group}@{version}")
        reported = {
            "job_id": "j",
            "batch_id": None,
            "parent": None,
            "term": 1,
            "weights_format": "full",
            "base_model": "m",
        }
        reported |= {"weights_sha256": artifact.sha256, "artifact": artifact, "model_group": group, "version": version}
        found.append(WeightsPublished(run_id=group.split("/")[0], time_ms=2, **reported))
    return found


def collected(*versions: int, group: str = GROUP) -> WeightsCollected:
    refs = tuple(ref(f"{group}@{version}") for version in versions)
    reported = {"weights_sha256": tuple(one.sha256 for one in refs), "artifacts": refs, "by": "l"}
    return WeightsCollected(run_id="r", time_ms=3, model_group=group, versions=versions, **reported)


def loaded(version: int, engine: str) -> WeightsLoaded:
    return WeightsLoaded(run_id="r", time_ms=3, model_group=GROUP, version=version, engine=engine)


def needs_of(events: list[Event]) -> WeightNeeds:
    needs = WeightNeeds()
    for offset, event in enumerate(events):
        evolve(needs, Received(event, codec.content_digest(event), Position(event.TOPIC, 0, offset), 0))
    return needs


def test_due_versions_of_a_model_group_are_found_without_visiting_other_groups():
    class Counted(dict[str, Any]):
        num_walks = 0

        def __iter__(self):
            Counted.num_walks += 1
            return super().__iter__()

        def values(self):
            Counted.num_walks += 1
            return super().values()

        def items(self):
            Counted.num_walks += 1
            return super().items()

    others = [event for number in range(20) for event in published(0, 1, 2, group=f"other-{number}/policy")]
    needs = needs_of([*others, job(), *published(0, 1, 2, 3)])
    needs.stored, needs.groups = Counted(needs.stored), Counted(needs.groups)
    assert [one.version for one in due(needs, GROUP, ())] == [1]
    assert Counted.num_walks == 0


def test_records_that_retention_removes_before_they_are_fetched_are_passed_over():
    class Shrinking(MemoryLog):
        async def fetch(self, positions: Iterable[Position]) -> Any:
            self.truncate(TopicPartition("weights", 0), 3)
            return await super().fetch(positions)

    async def main() -> None:
        log = Shrinking(num_partitions=1)
        for event in [job(), *published(*range(5))]:
            await log.send(event)
        reader = NeedsReader(log)
        await reader.read_on()
        assert {stored.version for stored in reader.needs.stored.values()} == {3, 4}
        log.truncate(TopicPartition("weights", 0), 5)
        await log.send(published(5)[0])
        log.truncate(TopicPartition("weights", 0), 6)
        await log.send(published(6)[0])
        await reader.read_on()
        assert {stored.version for stored in reader.needs.stored.values()} == {3, 4, 6}

    asyncio.run(main())


FORK = job(group="f/policy", fork=ForkPoint(run_id="r", version=2))
CASES: dict[str, tuple[list[Event], list[int]]] = {
    "the last two and the base stay": ([job(), *published(*range(6))], [1, 2, 3]),
    "every third stays": ([job(every=3), *published(*range(6))], [1, 2]),
    "a later job's base, with which it may compare, stays": ([job(), job(2), *published(*range(6))], [1, 3]),
    "what a fork begins from stays": ([job(), *published(*range(6)), FORK], [1, 3]),
    "the newest that each engine has stays": (
        [job(), *published(*range(6)), loaded(1, "a"), loaded(3, "a"), loaded(2, "b")],
        [1],
    ),
    "without a job all stay": (published(*range(6)), []),
    "weights that another run has stay": (
        [job(), *published(*range(6)), *published(3, group="x/policy", like=f"{GROUP}@1")],
        [2, 3],
    ),
    "weights that a run of before has stay": (
        [*published(3, group="x/policy", like=f"{GROUP}@1"), job(), *published(*range(6))],
        [2, 3],
    ),
    "weights that a kept version shares stay": (
        [job(), *published(*range(5)), *published(5, like=f"{GROUP}@1")],
        [2, 3],
    ),
    "versions that share weights go together": (
        [job(), *published(0, 1), *published(2, like=f"{GROUP}@1"), *published(3, 4)],
        [1, 2],
    ),
    "what was collected is not named again": ([job(), *published(*range(6)), collected(1, 2)], [3]),
}


@pytest.mark.parametrize(("events", "versions"), CASES.values(), ids=CASES)
def test_only_what_nothing_needs_is_due(events: list[Event], versions: list[int]) -> None:
    assert [stored.version for stored in due(needs_of(events), GROUP, ())] == versions


def test_versions_of_checkpoints_and_of_doubtful_runs_are_kept() -> None:
    needs = needs_of([job(), *published(*range(6))])
    assert [stored.version for stored in due(needs, GROUP, {1, 3})] == [2]
    needs.doubtful.add("r")
    assert due(needs, GROUP, ()) == []


def test_without_determinism_versions_since_the_newest_checkpoint_stay_while_the_run_goes_on() -> None:
    settings = JobSettings(kind="rl", model=ModelSettings(path="m", deterministic=False), keep_last=2, keep_every=100)
    jobs = [job(), job(3).model_copy(update={"settings": settings})]
    needs = needs_of([*jobs, *published(*range(10))])
    assert [stored.version for stored in due(needs, GROUP, {2, 5})] == [1, 4]
    assert due(needs, GROUP, ()) == []
    needs = needs_of([*jobs, *published(*range(10)), RunEnded(run_id="r", time_ms=9, cause="completed")])
    assert [stored.version for stored in removable(needs, {GROUP: {2, 5}})] == [1, 4, 6, 7]


def test_the_last_collection_is_finished_but_for_what_was_needed_meanwhile() -> None:
    events = [job(), *published(*range(6)), collected(1, 2)]
    assert [stored.version for stored in unfinished(needs_of(events), GROUP, ())] == [1, 2]
    assert [stored.version for stored in unfinished(needs_of([*events, FORK]), GROUP, ())] == [1]
    assert [stored.version for stored in removable(needs_of(events), {})] == [1, 2]


def test_the_state_holds_only_what_was_not_collected() -> None:
    events = [job(), *published(*range(1000)), *(collected(version) for version in range(1, 998))]
    needs = needs_of(events)
    assert sorted(needs.group(GROUP).hashes) == [0, 998, 999]
    assert len(needs.stored) == len(needs.listed) == 3


# ---- a learner ----


def kept(lab: Any, events: list[Any]) -> list[int]:
    """Versions whose artifacts are there."""
    return [event.version for event in events if Path(lab.artifacts.uri, event.artifact.uri).exists()]


@pytest.mark.slow
def test_a_learner_keeps_the_versions_of_its_jobs_retention_and_records_the_collected_ones(lab: Any) -> None:
    async def scenario() -> None:
        job = await lab.submit(num_versions=7, keep_last=2, keep_every=3)
        await lab.plan(job, 7)
        await lab.work(lab.has(JobSucceeded))
        assert kept(lab, await lab.events("weights", WeightsPublished)) == [0, 3, 6, 7]
        reported = await lab.events("weights", WeightsCollected)
        assert [(event.versions, event.by) for event in reported] == [((v,), "learner-0") for v in (1, 2, 4, 5)]
        assert [event.time_ms for event in reported] == [
            12,
            13,
            15,
            16,
        ]  # of the batch that made each of them superfluous

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_store_that_is_busy_ends_nothing_and_is_collected_later(lab: Any) -> None:
    class BusyStore(type(lab.artifacts)):
        num_refused = 0

        def remove(self, ref: ArtifactRef) -> None:
            if self.num_refused < 3:
                self.num_refused += 1
                raise StoreUnavailableError("the store is busy")
            super().remove(ref)

    async def scenario() -> None:
        job = await lab.submit(num_versions=7, keep_last=1)
        await lab.plan(job, 7)
        worker = lab.worker()
        worker._artifacts = BusyStore(lab.artifacts.uri)
        await lab.work(lab.has(JobSucceeded), worker)
        assert await lab.events("jobs", JobFailed) == []
        assert worker._artifacts.num_refused == 3
        assert kept(lab, await lab.events("weights", WeightsPublished)) == [0, 7]

    asyncio.run(scenario())


@pytest.mark.slow
def test_all_model_groups_of_a_learner_share_one_reading_of_the_log(lab: Any) -> None:
    fetched: Counter[Position] = Counter()

    class Fetching(type(lab.log)):
        async def fetch(self, positions: Iterable[Position]) -> Any:
            positions = list(positions)
            fetched.update(one for one in positions if one.topic in TOPICS)
            return await super().fetch(positions)

    async def scenario() -> None:
        lab.log = Fetching(num_partitions=2)
        for event in [*published(*range(50), group="old/policy"), RunEnded(run_id="old", time_ms=2, cause="completed")]:
            await lab.log.send(event)
        job = await lab.submit(num_versions=3, keep_last=1)
        other = job.model_copy(update={"job_id": f"{job.run_id}/other", "model_group": f"{job.run_id}/other"})
        await lab.log.send(other)
        for one in (job, other):
            await lab.plan(one, 3)
        await lab.work(lab.has(JobSucceeded, count=2))
        reported = await lab.events("weights", WeightsCollected)
        assert [
            sum(one.model_group == group for one in reported) for group in (job.model_group, other.model_group)
        ] == [
            2,
            2,
        ]

    asyncio.run(scenario())
    assert max(fetched.values()) == 1
    assert sum(position.topic == "weights" for position in fetched) > 50


class Answering:
    """A log that answers a WeightsCollected with another event, before its writer reads on."""

    def __init__(self, log: Any, answer: Event) -> None:
        self._log = log
        self._answer = answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    async def send(self, event: Event | Encoded, **options: Any) -> Position:
        if isinstance(event, WeightsPublished) and event.version == 2 and isinstance(self._answer, LearnerClaimed):
            await self._log.send(self._answer)
        position = await self._log.send(event, **options)
        if isinstance(event, WeightsCollected) and isinstance(self._answer, JobSubmitted):
            await self._log.send(self._answer)
        return position

    async def send_all(self, events: Sequence[Event | Encoded], *, partition: int | None = None) -> list[Position]:
        return [await self.send(event, partition=partition) for event in events]


@pytest.mark.slow
def test_a_version_that_a_fork_asks_for_during_a_collection_is_kept(lab: Any) -> None:
    async def scenario() -> None:
        job = await lab.submit(num_versions=4, keep_last=1)
        fork = job.model_copy(
            update={
                "run_id": "f",
                "job_id": "f/rl",
                "model_group": "f/main",
                "fork": ForkPoint(run_id=job.run_id, version=1),
            }
        )
        await lab.plan(job, 4)
        worker = lab.worker(log=Answering(lab.log, fork), model_groups=(job.model_group,))
        await lab.work(lab.has(JobSucceeded), worker)
        assert kept(lab, await lab.events("weights", WeightsPublished)) == [0, 1, 4]
        assert [event.versions for event in await lab.events("weights", WeightsCollected)] == [(1,), (2,), (3,)]

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_replaced_learner_removes_nothing(lab: Any) -> None:
    async def scenario() -> None:
        job = await lab.submit(num_versions=4, keep_last=1)
        await lab.plan(job, 4)
        claim = LearnerClaimed(run_id=job.run_id, time_ms=1, model_group=job.model_group, term=2, learner="new")
        with pytest.raises(FencedError):
            await lab.work(lab.has(JobSucceeded), lab.worker(log=Answering(lab.log, claim)))
        assert await lab.events("weights", WeightsCollected) == []
        assert kept(lab, await lab.events("weights", WeightsPublished))[:2] == [0, 1]

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_restart_that_trains_again_brings_nothing_back(lab: Any) -> None:
    async def scenario() -> None:
        job = await lab.submit(num_versions=5, keep_last=1, checkpoint_every=2)
        first = await lab.plan(job, 3, seal=False)
        await lab.work(lab.has(WeightsPublished, "weights", 4))
        for path in (lab.folder / "checkpoints").rglob("*.safetensors"):
            path.unlink()
        await lab.plan(job, 2, first=3, previous=codec.content_digest(first[-1]))
        await lab.work(lab.has(JobSucceeded))
        assert kept(lab, await lab.events("weights", WeightsPublished)) == [0, 5]

    asyncio.run(scenario())


@pytest.mark.slow
def test_without_determinism_versions_that_a_restart_trains_again_to_other_bits_are_there(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        model = ModelSettings(path=str(lab.model), device="cpu", deterministic=False)
        job = await lab.submit(num_versions=8, checkpoint_every=5, keep_last=1, model=model)
        first = await lab.plan(job, 4, seal=False)
        await lab.work(lab.has(JobProgressed, count=4))
        train = JobTrainer.train

        def to_other_bits(trainer: JobTrainer, *given: Any, **options: Any) -> Any:
            result = train(trainer, *given, **options)
            trainer.model.load_weights({n: tensor * 1.0001 for n, tensor in trainer.model.published().items()})
            return result

        monkeypatch.setattr(JobTrainer, "train", to_other_bits)
        await lab.plan(job, 4, first=4, previous=codec.content_digest(first[-1]))
        await lab.work(lab.has(JobSucceeded))
        assert await lab.events("jobs", JobFailed) == []
        assert kept(lab, await lab.events("weights", WeightsPublished)) == [0, 8]

    asyncio.run(scenario())
