"""A league in a configuration: what tasks and jobs take from it, which versions it keeps, and what is refused."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.files import tokenizer_sha256
from rollstream.eventlog.log import Position, Received
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.harness.config import file as config_file
from rollstream.harness.config.jobs import jobs_of
from rollstream.harness.runs.plan import new_run
from rollstream.harness.runs.preflight import check_names
from rollstream.learner.collection import collected
from rollstream.learner.retention import Stored, WeightNeeds, due, evolve
from rollstream.producers.league.draw import candidates_for
from rollstream.schemas import ids
from rollstream.schemas.base import Event
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.events import JobSubmitted, WeightsPublished
from rollstream.schemas.league import LeagueSettings, OpponentVersions
from rollstream.schemas.settings import ArtifactRef
from tests.harness.conftest import configuration

pytestmark = pytest.mark.usefixtures("registered_alone")
GROUP = "run-1/policy"


def league_run(written: dict[str, Any], **league: Any) -> dict[str, Any]:
    written["workflow"] = {"environment": "tic_tac_toe_self_play"}
    written["trajectory_builders"]["b"] |= {"agents": ["X", "O"], "league": league}
    return written


def published(version: int, group: str = GROUP, *, model: str = "m", tokenizer: str = "") -> WeightsPublished:
    sha256 = codec.canonical_digest([group, version])
    return WeightsPublished(
        run_id=ids.run_of(group),
        time_ms=2,
        model_group=group,
        job_id="j",
        batch_id=None,
        version=version,
        parent=None,
        term=1,
        weights_sha256=sha256,
        weights_format="full",
        base_model=model,
        tokenizer_sha256=tokenizer,
        artifact=ArtifactRef(uri=f"/s/{sha256[:2]}/{sha256}.safetensors", sha256=sha256, size_bytes=1),
    )


def left_of(*events: Event) -> set[int]:
    """Versions of the run's policy that a collection leaves."""
    needs = WeightNeeds()
    for offset, event in enumerate(events):
        evolve(needs, Received(event, codec.content_digest(event), Position(event.TOPIC, 0, offset), 0))
    going = {stored.version for stored in due(needs, GROUP, ())}
    return needs.group(GROUP).hashes.keys() - going


def test_tasks_and_the_job_get_the_league_of_the_file(written: dict[str, Any]) -> None:
    found = config_file.resolve(league_run(written, pool=3, every=4, scripted=["perfect"], frozen=[0, "old@3"])).config
    (spec,) = jobs_of(found, "run-1")
    assert spec.rollout.league == LeagueSettings(pool=3, every=4, scripted=("perfect",), frozen=("0", "old@3"))
    assert spec.job.opponents == OpponentVersions(every=4, last=4, frozen=(f"{GROUP}@0", "old/policy@3"))
    check_names(found)


def test_a_warm_start_keeps_versions_for_the_pool_of_the_training(written: dict[str, Any]) -> None:
    written["trainer_adapters"]["a"]["warm_start"] = {}
    warm, training = jobs_of(config_file.resolve(league_run(written, pool=3)).config, "run-1")
    assert warm.job.opponents == training.job.opponents is not None


def test_every_model_group_of_a_league_keeps_versions_for_its_seat(written: dict[str, Any]) -> None:
    written = league_run(written, pool=3, every=2, frozen=[0])
    written["trajectory_builders"]["b"]["agents"] = {"X": "one", "O": "two"}
    jobs = jobs_of(config_file.resolve(written).config, "run-1")
    kept = {job.model_group: job.job.opponents for job in jobs}
    assert kept.keys() == {"run-1/one", "run-1/two"}
    assert {group: one.frozen for group, one in kept.items() if one} == {group: (f"{group}@0",) for group in kept}
    assert {one.last for one in kept.values() if one} == {4}


def test_without_a_league_a_job_is_recorded_as_before(written: dict[str, Any]) -> None:
    (spec,) = jobs_of(config_file.resolve(written).config, "run-1")
    assert "opponents" not in spec.job.model_dump()
    assert "league" not in spec.rollout.model_dump()


@given(
    newest=st.integers(0, 60),
    pool=st.integers(0, 6),
    every=st.integers(1, 9),
    staleness=st.integers(0, 5),
)
def test_every_version_that_an_open_task_may_draw_is_kept_and_no_more_than_the_pool(
    tmp_path_factory: pytest.TempPathFactory, newest: int, pool: int, every: int, staleness: int
) -> None:
    written = configuration(tmp_path_factory.getbasetemp())
    written["trainer_adapters"]["a"] |= {"max_staleness": staleness, "keep_last": 1, "keep_every": 1000}
    found = config_file.resolve(league_run(written, pool=pool, every=every, scripted=["random"])).config
    (spec,) = jobs_of(found, "run-1")
    job = JobSubmitted(
        run_id="run-1", time_ms=1, job_id=spec.job_id, model_group=GROUP, base_version=0, settings=spec.job
    )
    left = left_of(job, *map(published, range(newest + 1)))
    assert spec.rollout.league is not None
    for version in range(max(0, newest - staleness - 1), newest + 1):
        drawn = map(ids.version_of, candidates_for(spec.rollout.league, GROUP, version))
        assert {one[1] for one in drawn if one is not None} <= left
    assert len(left) <= 2 + (pool + -(-(staleness + 2) // every) if pool else 0)


def test_a_frozen_opponent_of_another_run_is_kept_there(written: dict[str, Any], tmp_path: Path) -> None:
    found = config_file.resolve(league_run(written, pool=0, frozen=["run-1@2"])).config
    (other,) = jobs_of(found, "run-2")
    (own,) = jobs_of(
        config_file.resolve(written | {"trajectory_builders": configuration(tmp_path)["trajectory_builders"]}).config,
        "run-1",
    )
    own_job = own.job.model_copy(update={"keep_last": 1, "keep_every": 1000})
    jobs = [
        JobSubmitted(
            run_id=run, time_ms=1, job_id=f"{run}/rl", model_group=f"{run}/policy", base_version=0, settings=job
        )
        for run, job in (("run-1", own_job), ("run-2", other.job))
    ]
    versions = [published(version) for version in range(6)]
    assert left_of(jobs[0], *versions) == {0, 5}
    assert left_of(*jobs, *versions) == {0, 2, 5}


@pytest.mark.parametrize(
    ("league", "agents", "says"),
    [
        ({"seats": ["Z"]}, ["X", "O"], r"league\.seats: seat 'Z' is unknown; the run's agents are X, O"),
        ({"scripted": ["master"]}, ["X", "O"], r"league\.scripted: the environment has no player 'master'; it has ran"),
        ({"pool": 0}, ["X", "O"], r"league: there is nobody to play against; set pool, scripted or frozen"),
    ],
)
def test_a_league_that_nobody_can_play_is_refused(
    written: dict[str, Any], league: dict[str, Any], agents: list[str], says: str
) -> None:
    written = league_run(written, **league)
    written["trajectory_builders"]["b"]["agents"] = agents
    with pytest.raises(ConfigError, match=says):
        check_names(config_file.resolve(written).config)


@pytest.mark.parametrize("group", [{"endpoint": "http://127.0.0.1:9/v1"}, {"frozen": True}])
def test_a_league_leaves_a_trained_agent_where_others_are_not_trained(
    written: dict[str, Any], group: dict[str, Any]
) -> None:
    written["trainer_adapters"]["a"]["model_groups"] = {"rivals": group}

    def check(**league: Any) -> None:
        run = league_run(written, scripted=["random"], **league)
        run["trajectory_builders"]["b"]["agents"] = {"X": "policy", "O": "rivals"}
        check_names(config_file.resolve(run).config)

    for seats in ({}, {"seats": ["X"]}, {"seats": ["X", "O"]}):
        with pytest.raises(
            ConfigError, match=r"b\.league\.seats: .* all trained agents \(X\), .* \(O\) are not trained; le"
        ):
            check(**seats)
    check(seats=["O"])
    check(latest_ratio=1)


def test_a_league_of_one_agent_or_of_recorded_rollouts_is_refused(written: dict[str, Any]) -> None:
    written["trajectory_builders"]["b"]["league"] = {}
    written["workflow"] = {"environment": "guess_number"}
    with pytest.raises(ConfigError, match=r"trajectory_builders\.b\.league: a league needs at least two agents"):
        check_names(config_file.resolve(written).config)
    written["trajectory_builders"]["b"]["environment"] = "recorded"
    with pytest.raises(ConfigError, match=r"rollouts of recorded are sampled elsewhere; remove it"):
        check_names(config_file.resolve(written).config)


def test_a_frozen_opponent_must_exist_when_the_run_begins(written: dict[str, Any], tmp_path: Path) -> None:
    async def begin(*frozen: Any) -> None:
        log = MemoryLog(num_partitions=2)
        store = ArtifactStore(str(tmp_path))
        model = written["trainer_adapters"]["a"]["model"]["path"]
        (Path(model) / "tokenizer.json").write_text("here")
        for version in range(3):
            await log.send(published(version, model=model, tokenizer=tokenizer_sha256(model)))
        await log.send(published(0, "run-4/policy", model=model, tokenizer="0" * 64))
        await log.send(published(0, "run-5/policy", model="elsewhere/model"))
        gone = published(1)
        await log.send(collected([Stored(GROUP, 1, gone.artifact)], GROUP, time_ms=9, by="gc"))
        await new_run(log, store, config_file.resolve(league_run(written, frozen=list(frozen))), "run")

    asyncio.run(begin("run-1@2", 7))
    for name, why in (
        (
            "run-1@5",
            r"league\.frozen: run-1@5: player run-1/policy@5: this version is unknown; .* the newest .* is 2",
        ),
        ("run-3@0", r"league\.frozen: run-3@0: .*run run-3 is not in this log or export"),
        ("run-1@1", r"league\.frozen: run-1@1: .*its weights are gone: collected by gc at"),
        (
            "run-4@0",
            r"league\.frozen: run-4@0: version 0 of run-4/policy was trained with another tokenizer than that of",
        ),
        (
            "run-5@0",
            r'league\.frozen: run-5@0: base model: "model:elsewhere/model" is not allowed .* the run.s own file names',
        ),
    ):
        with pytest.raises(ConfigError, match=why):
            asyncio.run(begin(name))
