"""Collection of weights: which may go, that only those go, and that what needs the others goes on as before."""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import Position, Received
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.harness.config import file as config_file
from rollstream.harness.upkeep.collecting import LEFTOVER_S, check_no_open_run, find, remove
from rollstream.learner.retention import WeightNeeds, evolve, removable
from rollstream.learner.tiny_model import make_tiny_model
from rollstream.replay.archive.export import export_run
from rollstream.replay.archive.manifest import read_manifest
from rollstream.replay.fork import check_fork, parse_fork
from rollstream.replay.report import Report, compare_log
from rollstream.replay.source import read_run
from rollstream.replay.training import train
from rollstream.replay.verify import verify
from rollstream.schemas.algorithms import DpoSettings
from rollstream.schemas.base import Event
from rollstream.schemas.errors import ArtifactError, ConfigError, StoreUnavailableError
from rollstream.schemas.events import (
    JobStarted,
    LearnerClaimed,
    RunEnded,
    WeightsLoaded,
    WeightsPublished,
)
from rollstream.schemas.events.training import ForkPoint
from rollstream.schemas.settings import (
    ArtifactRef,
    PlanSettings,
    RolloutSettings,
)
from tests.harness.upkeep.gc_rig import ended, found_in, hash_of, job, log_of, published, run, started
from tests.rigs.runs.recorded_run import EPOCHS, RUN, RecordedRun

# ---- what may go: a table ----


def loaded(run_id: str, version: int, engine: str) -> WeightsLoaded:
    return WeightsLoaded(run_id=run_id, time_ms=3, model_group=f"{run_id}/policy", version=version, engine=engine)


def claimed(run_id: str, term: int) -> LearnerClaimed:
    return LearnerClaimed(run_id=run_id, time_ms=1, model_group=f"{run_id}/policy", term=term, learner="l")


def going(events: list[Event], **checkpoints: set[int]) -> list[str]:
    """`model group@version` of what may go, after these events in their order."""
    needs = WeightNeeds()
    for offset, event in enumerate(events):
        evolve(needs, Received(event, codec.content_digest(event), Position(event.TOPIC, 0, offset), 0))
    at = {f"{run_id}/policy": versions for run_id, versions in checkpoints.items()}
    return [f"{stored.model_group}@{stored.version}" for stored in removable(needs, at)]


DPO = DpoSettings()
FORK = {"run_id": "r", "version": 2}
CASES: dict[str, tuple[list[Event], list[int]]] = {
    "the last two and the base stay": (run("r"), [1, 2, 3]),
    "every third stays": (run("r", job("r", every=3)), [1, 2]),
    "of two jobs whichever keeps more counts": (run("r", job("r", last=1), job("r", 2, last=4)), [1]),
    "a later job's base stays": (run("r", job("r", last=1), job("r", 2, last=1)), [1, 3, 4]),
    "a reference that DPO compares with stays": (run("r", job("r", 3, last=1, algorithm=DPO)), [1, 2, 4]),
    "fewer than are kept all stay": (run("r", job("r", last=8)), []),
    "what a fork began from stays": ([*run("r"), started("f", parent=FORK), job("f", fork=FORK)], [1, 3]),
    "what a fork began from stays before its job is submitted": (
        [*run("r"), started("f", parent=ForkPoint(**FORK))],
        [1, 3],
    ),
    "what an ended fork has as its base stays": (
        [*run("r"), *run("f", versions=0), *published("f", 0, like="r/policy@2/1")],
        [1, 3],
    ),
    "the newest that each engine has stays": (
        [*run("r"), loaded("r", 1, "a"), loaded("r", 3, "a"), loaded("r", 2, "b")],
        [1],
    ),
    "a version under a void term is not among the newest": (
        [*run("r", versions=0), *published("r", 0, 1, 2), claimed("r", 2), *published("r", 3, 4)],
        [3, 4],
    ),
    "a newer term's version counts": (
        [*run("r", versions=3), claimed("r", 2), *published("r", 3, term=2)],
        [1],
    ),
    "weights that a kept version shares stay": ([*run("r"), *published("r", 6, like="r/policy@1/1")], [2, 3, 4]),
    "weights that another run keeps stay": (
        [*run("r"), *run("other", versions=0), *published("other", 0, like="r/policy@1/1")],
        [2, 3],
    ),
    "weights that are somebody's dataset stay": (
        [*run("r"), started("x", dataset=ArtifactRef(uri="/d", sha256=hash_of("r/policy@1/1"), size_bytes=0))],
        [2, 3],
    ),
    "of an open run all stay": ([event for event in run("r") if not isinstance(event, RunEnded)], []),
    "of a run whose beginning is gone all stay": ([job("r"), *published("r", *range(6))], []),
    "of a model group without a job all stay": ([started("r"), ended("r"), *published("r", *range(6))], []),
    "repeats change nothing": ([*run("r"), *run("r")], [1, 2, 3]),
}


@pytest.mark.parametrize(("events", "versions"), CASES.values(), ids=CASES)
def test_only_what_nothing_needs_may_go(events: list[Event], versions: list[int]) -> None:
    assert going(events) == [f"r/policy@{version}" for version in versions]


def test_versions_of_checkpoints_are_kept() -> None:
    assert going(run("r"), r={2}, other={3}) == ["r/policy@1", "r/policy@3"]


def test_a_base_that_only_jobstarted_names_stays() -> None:
    plan, rollout = PlanSettings(), RolloutSettings(environment="e")
    reported = {"job_id": "r/rl", "model_group": "r/policy", "base_version": 2, "plan": plan, "rollout": rollout}
    assert going([*run("r"), JobStarted(run_id="r", time_ms=1, **reported)]) == ["r/policy@1", "r/policy@3"]


def test_each_model_group_of_a_run_is_kept_by_its_own_jobs() -> None:
    events = [started("r"), ended("r"), job("r", last=1), job("r", last=3, name="b")]
    events += [*published("r", 0, 1, 2, 3), *published("r", 0, 1, 2, 3, name="b")]
    assert going(events) == ["r/policy@1", "r/policy@2"]


# ---- what goes: files of a recorded run ----


class BusyStore(ArtifactStore):
    """A store that lets nothing be removed while it is busy."""

    is_busy = True

    def remove(self, ref: ArtifactRef) -> None:
        if self.is_busy:
            raise StoreUnavailableError(f"artifact {ref.uri} cannot be removed: the store is busy")
        super().remove(ref)


class Recorded(RecordedRun):
    """A run that keeps its newest version only: nobody needs 1 and 2. Its learner could not remove them.

    It had said so of 1.
    """

    def __init__(self, folder: Path, model: Path) -> None:
        super().__init__(folder, model)
        self.artifacts = BusyStore(str(folder / "artifacts"))

    def configuration(self) -> dict[str, Any]:
        written = super().configuration()
        written["trainer_adapters"]["learner"] |= {"keep_last": 1, "keep_every": 100}
        return written

    async def collect(self, *, is_dry: bool = False) -> Any:
        unneeded = await find(self.log, self.artifacts, self.checkpoints)
        if not is_dry:
            await remove(self.log, self.artifacts, unneeded)
        return unneeded

    def kept(self) -> list[int]:
        """Versions whose artifacts are there."""
        published = asyncio.run(versions_of(self.log))
        return [version for version, one in published.items() if Path(self.artifacts.uri, one.artifact.uri).exists()]


async def versions_of(log: MemoryLog) -> dict[int, WeightsPublished]:
    events = (await read_run(log, RUN)).by_topic["weights"]
    return {one.event.version: one.event for one in events if isinstance(one.event, WeightsPublished)}


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    make_tiny_model(tmp_path / "model", seed=0)
    found = Recorded(tmp_path, tmp_path / "model")
    asyncio.run(found.record())
    found.artifacts.is_busy = False
    return found


def test_a_run_can_be_replayed_forked_and_exported_after_its_unneeded_weights_are_removed(recorded: Recorded) -> None:
    others = {path for path in recorded.folder.rglob("*") if path.is_file() and path.suffix != ".safetensors"}
    temporary = recorded.folder / "artifacts" / "aa" / "x.aside"
    young = temporary.with_name("y.aside")
    temporary.parent.mkdir(exist_ok=True)
    for path in (temporary, young):
        path.write_bytes(b"half")
    before = time.time() - 2 * LEFTOVER_S
    os.utime(temporary, (before, before))

    found = asyncio.run(recorded.collect(is_dry=True))
    assert sorted(stored.version for stored, _ in found.weights.values()) == [1, 2]
    assert all(size == stored.ref.size_bytes > 0 for stored, size in found.weights.values())
    assert [leftover.path for leftover in found.leftovers] == [temporary]
    assert recorded.kept() == [0, 1, 2, 3]
    assert asyncio.run(recorded.collect()).weights == found.weights
    assert recorded.kept() == [0, 3]
    assert (temporary.exists(), young.exists()) == (False, True)
    assert all(path.exists() for path in others)
    again = asyncio.run(recorded.collect())
    assert (again.weights, again.leftovers, again.num_elsewhere) == ({}, [], 0)

    asyncio.run(assert_replays_are_equal(recorded))
    asyncio.run(assert_only_kept_versions_are_forked(recorded))
    asyncio.run(assert_an_export_lists_missing_artifacts(recorded))


async def assert_replays_are_equal(recorded: Recorded) -> None:
    events = await read_run(recorded.log, RUN)
    report = Report()
    compare_log(events, report)
    report.add(await verify(recorded.log, events, recorded.artifacts, checkpoints=recorded.checkpoints))
    assert report.differences == []
    assert (report.counts["artifacts"], report.counts["artifacts collected"]) == (2, 2)
    report = await train(recorded.log, events, recorded.artifacts)
    assert (report.differences, report.counts) == ([], {"training steps": EPOCHS})


async def assert_only_kept_versions_are_forked(recorded: Recorded) -> None:
    config = config_file.resolve(recorded.configuration()).config
    for version in (0, 3):
        await check_fork(recorded.log, recorded.artifacts, config, parse_fork(f"{RUN}@{version}"))
    for version, by in ((1, "learner"), (2, "gc")):
        with pytest.raises(
            ConfigError, match=rf"--fork {RUN}@{version}: its weights were removed: collected by {by} at 20"
        ):
            await check_fork(recorded.log, recorded.artifacts, config, parse_fork(f"{RUN}@{version}"))


async def assert_an_export_lists_missing_artifacts(recorded: Recorded) -> None:
    folder = recorded.folder / "export"
    manifest = await export_run(recorded.log, RUN, folder, artifacts=recorded.artifacts, with_weights=True)
    gone = [artifact.what for artifact in manifest.artifacts if artifact.file is None]
    assert gone == [f"weights {RUN}/policy v1", f"weights {RUN}/policy v2"]
    missing = [artifact.missing for artifact in manifest.artifacts if artifact.file is None]
    assert [why.split(" at ")[0] for why in missing] == ["collected by learner", "collected by gc"]
    assert read_manifest(folder) == manifest


# ---- what stays: files that are in doubt, or not the store's ----


@pytest.mark.parametrize("scheme", ["", "file://", "memory://"])
def test_any_store_is_collected(scheme: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        store = ArtifactStore(f"{scheme}{tmp_path}/artifacts", cache=tmp_path / "cache")
        log = await log_of(store, run("r"))
        other = store.put_bytes(b"letter")
        unneeded = await find(log, store, tmp_path / "checkpoints")
        assert [stored.version for stored, _ in unneeded.weights.values()] == [1, 2, 3]
        await remove(log, store, unneeded)
        assert len(store.listing()) == 4
        assert store.read(other) == b"letter"

    asyncio.run(scenario())


def test_artifacts_of_another_store_are_kept(tmp_path: Path) -> None:
    other = ArtifactStore(str(tmp_path / "other"))
    log = asyncio.run(log_of(other, run("r")))
    before = other.listing()
    unneeded = found_in(ArtifactStore(str(tmp_path / "artifacts")), log, tmp_path)
    assert unneeded.weights == {}
    assert other.listing() == before


@pytest.mark.parametrize("name", ["aa/../../victim", "{}", "bb/{}", "aa/victim", "aa/x/{}", "../aa/{}"])
def test_no_name_leads_out_of_the_place_where_a_store_puts_a_hash(name: str, tmp_path: Path) -> None:
    store, sha256 = ArtifactStore(str(tmp_path / "artifacts")), "a" * 64
    uri = f"{tmp_path}/artifacts/{name.format(sha256)}"
    ref = ArtifactRef(uri=uri, sha256=sha256, size_bytes=1)
    assert store.name_of(ref) is None
    with pytest.raises(ArtifactError, match="was not removed"):
        store.remove(ref)
    odd = ref.model_copy(update={"sha256": "../" * 3 + "x"})
    assert store.name_of(odd) is None


def test_a_record_that_cannot_be_read_keeps_all_weights_of_its_run(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = ArtifactStore(str(tmp_path / "artifacts"))
        log = await log_of(store, [*run("r"), *run("s")])
        await log.send_raw("jobs", key=b"r/policy", value=b'{"kind": "job_submitted", "v": 2}', partition=0)
        unneeded = await find(log, store, tmp_path / "checkpoints")
        assert {stored.run_id for stored, _ in unneeded.weights.values()} == {"s"}

    asyncio.run(scenario())


def test_a_file_that_is_gone_already_is_not_counted_and_hinders_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = ArtifactStore(str(tmp_path / "artifacts"))
        log = await log_of(store, run("r"))
        unneeded = await find(log, store, tmp_path / "checkpoints")
        Path(next(iter(unneeded.weights))).unlink()  # as after a collection that was killed
        assert len((await find(log, store, tmp_path / "checkpoints")).weights) == 2
        await remove(log, store, unneeded)
        assert (await find(log, store, tmp_path / "checkpoints")).weights == {}

    asyncio.run(scenario())


def test_nothing_goes_if_a_run_begins_while_the_log_is_read(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = ArtifactStore(str(tmp_path / "artifacts"))
        log = await log_of(store, run("r"))
        unneeded = await find(log, store, tmp_path / "checkpoints")
        await log.send(started("new"))
        with pytest.raises(ConfigError, match="nothing was removed"):
            await remove(log, store, unneeded)
        assert len(store.listing()) == 6

    asyncio.run(scenario())


def test_open_runs_are_named(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path / "artifacts"))
    log = asyncio.run(log_of(store, [*run("r"), started("open")]))
    with pytest.raises(ConfigError, match=r"run open is open on kafka:9092 .*rollstream stop open"):
        check_no_open_run(found_in(store, log, tmp_path), "kafka:9092")
    check_no_open_run(found_in(store, asyncio.run(log_of(store, run("r"))), tmp_path), "kafka:9092")


def test_checkpoint_files_are_identified_by_model_group_and_version(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path / "artifacts"))
    folder = tmp_path / "checkpoints" / "r%2Fpolicy"
    folder.mkdir(parents=True)
    for name in (f"v00000002.{'a' * 64}.safetensors", "vx.safetensors", "note.txt"):
        (folder / name).write_bytes(b"")
    log = asyncio.run(log_of(store, run("r")))
    assert [one.version for one, _ in found_in(store, log, tmp_path).weights.values()] == [1, 3]
