"""A run with two rollbacks: every stage is equal again, training returns to the same states, and a what-if does too."""

import asyncio

import pytest
import yaml

from rollstream.harness.replays.what_if import what_if
from rollstream.learner.tiny_model import make_tiny_model
from rollstream.replay.source import of_type, read_run
from rollstream.schemas.events import TrajectoryRejected
from tests.rigs.runs.adopting_run import RolledBackRun
from tests.rigs.runs.recorded_run import RUN, batches_of, hashes_of
from tests.rigs.runs.replay_rig import only_difference, tampered, trained, verified


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rollback")
    make_tiny_model(folder / "model", seed=0)
    return asyncio.run(RolledBackRun(folder, folder / "model").record())


@pytest.fixture
def run(recorded):
    """The recorded run, to be tampered with."""
    return tampered(recorded)


def events_of(run, run_id=RUN):
    return asyncio.run(read_run(run.log, run_id))


def test_a_rollback_is_a_version_and_the_epoch_under_way_trains_nothing(run):
    events = events_of(run)
    manifests = [(batch.yields_version, batch.epoch, batch.adopts) for batch in batches_of(events)]
    assert manifests == [(1, 0, None), (2, 1, None), (3, 1, 1), (4, 2, None), (5, 3, None), (6, 4, 3), (7, 5, None)]
    hashes = hashes_of(events)
    assert hashes[2] == hashes[0] == hashes[5]
    assert len(set(hashes)) == 5
    rejected = {(one.epoch, one.cause) for one, _ in of_type(events.by_topic["batches"], TrajectoryRejected)}
    assert rejected == {(4, "stale")}


def test_every_stage_is_equal_again(run):
    report = verified(run)
    assert report.differences == []
    assert report.counts["versions"] == 8


@pytest.mark.parametrize("first", [None, 1, 3, 4, 6, 7])
def test_training_returns_to_the_same_states(run, first):
    report = trained(run, first=first, checkpoints=run.checkpoints)
    assert report.differences == []
    assert report.counts["training steps"] >= 7 - (first or 1) + 1


def test_a_rollback_to_another_version_is_found(run):
    run.change("batches", "batch_planned", b'"adopts":1', b'"adopts":0')
    assert "batch_planned:replayed/rl/b000002: adopts" in only_difference(verified(run))


def test_a_missing_request_is_found(run):
    run.remove("groups", "rollback_requested")
    assert "batch_planned:replayed/rl/b000002" in "".join(map(str, verified(run).differences))


def test_a_what_if_returns_to_its_own_versions(run):
    file = run.folder / "what_if.yaml"
    file.write_text(yaml.safe_dump({"trainer_adapters": {"learner": {"optimizer": {"learning_rate": 1e-3}}}}))

    async def go():
        events = await read_run(run.log, RUN)
        outcome = await what_if(
            run.log, events, run.artifacts, file, checkpoints=run.checkpoints, on_progress=lambda line: None
        )
        return await read_run(run.log, outcome.run_id)

    events = asyncio.run(go())
    assert [batch.adopts for batch in batches_of(events)] == [None, None, 1, None, None, 3, None]
    hashes = hashes_of(events)
    assert hashes[2] == hashes[0] == hashes[5]
    assert not set(hashes) & set(hashes_of(events_of(run)))
