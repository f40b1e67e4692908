"""A run that asked for further tasks in place of flat groups: the same weights again, and in a what-if."""

import asyncio

import pytest
import yaml

from rollstream.harness.replays.what_if import what_if
from rollstream.learner.tiny_model import make_tiny_model
from rollstream.replay.source import of_type, read_run
from rollstream.replay.training import train
from rollstream.replay.verify import verify
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.events import TaskRequested
from tests.rigs.runs.recorded_run import EPOCHS, RecordedRun, batches_of, hashes_of, rollouts_of

REWARD = """
def by_seed(rollout):
    return float(rollout.seed % 1009)
"""


class RefilledRun(RecordedRun):
    """The first of an epoch's two tasks is flat; so is the first that is requested in its place."""

    def configuration(self):
        written = super().configuration()
        written["trainer_adapters"]["learner"] |= {"max_staleness": 0, "max_refills": 3}
        return written

    async def roll_out(self, task, version):
        is_flat = task.index in (0, 2)
        for event in rollouts_of(task, version, (lambda member: 1.0) if is_flat else float):
            await self.log.send(event)


@pytest.fixture(scope="module")
def refilled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refilled")
    make_tiny_model(folder / "model", seed=0)
    return asyncio.run(RefilledRun(folder, folder / "model").record())


def what_if_events(run, changes):
    """The log's events of a what-if."""
    file = run.folder / "what_if.yaml"
    file.write_text(yaml.safe_dump(changes))

    async def go():
        events = await read_run(run.log, "replayed")
        outcome = await what_if(
            run.log, events, run.artifacts, file, checkpoints=run.checkpoints, on_progress=lambda line: None
        )
        return await read_run(run.log, outcome.run_id)

    return asyncio.run(go())


def groups_of(events):
    return [sorted({member.group_id[-6:] for member in batch.members}) for batch in batches_of(events)]


def test_every_batch_is_full_and_is_trained_again_to_the_same_weights(refilled):
    events = asyncio.run(read_run(refilled.log, "replayed"))
    assert groups_of(events) == [["t00001", "t00003"]] * EPOCHS
    assert len(of_type(events.by_topic["tasks"], TaskRequested)) == 4 * EPOCHS
    report = asyncio.run(verify(refilled.log, events, refilled.artifacts, checkpoints=refilled.checkpoints))
    assert report.differences == []
    report = asyncio.run(train(refilled.log, events, refilled.artifacts))
    assert (report.differences, report.counts) == ([], {"training steps": EPOCHS})


def test_a_what_if_has_the_groups_that_were_played_and_no_others(refilled):
    before = asyncio.run(read_run(refilled.log, "replayed"))
    events = what_if_events(refilled, {})
    assert hashes_of(events) == hashes_of(before)
    assert groups_of(events) == groups_of(before)
    with pytest.raises(ConfigError, match="max_refills cannot change in a what-if"):
        what_if_events(refilled, {"trainer_adapters": {"learner": {"max_refills": 0}}})


def test_a_what_if_whose_rewards_vary_within_flat_groups_trains_no_more_than_a_batch(refilled, tmp_path, monkeypatch):
    (tmp_path / "refill_rewards.py").write_text(REWARD)
    monkeypatch.syspath_prepend(str(tmp_path))
    builder = {"rewards": ["python:refill_rewards.by_seed"], "reward_weights": {"task": 0.0}}
    events = what_if_events(refilled, {"trajectory_builders": {"rollouts": builder}})
    assert groups_of(events) == [["t00000", "t00001"]] * EPOCHS
