"""A run whose groups closed before their last rollouts ended: verified, trained again, and in a what-if."""

import asyncio

import pytest

from rollstream.learner.tiny_model import make_tiny_model
from rollstream.replay.source import of_type, read_run
from rollstream.replay.training import train
from rollstream.replay.verify import verify
from rollstream.schemas.events import GroupClosed
from tests.rigs.runs.recorded_run import EPOCHS, RecordedRun, batches_of


class OversampledRun(RecordedRun):
    """Its tasks are rolled out once more than is needed; the last rollout of a group ends after the others."""

    def configuration(self):
        written = super().configuration()
        written["trajectory_builders"]["rollouts"] |= {"num_generations": 2, "oversampling": 1}
        return written


@pytest.fixture(scope="module")
def oversampled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("oversampled")
    make_tiny_model(folder / "model", seed=0)
    return asyncio.run(OversampledRun(folder, folder / "model").record())


def test_a_group_has_as_many_rollouts_as_are_trained_on_and_verifies(oversampled):
    events = asyncio.run(read_run(oversampled.log, "replayed"))
    closed = [one for one, _ in of_type(events.by_topic["groups"], GroupClosed)]
    assert {(one.reason, one.size, tuple(member.member for member in one.members)) for one in closed} == {
        ("complete", 3, (0, 1))
    }
    assert {len(batch.members) for batch in batches_of(events)} == {2 * len(closed) // EPOCHS}
    report = asyncio.run(verify(oversampled.log, events, oversampled.artifacts, checkpoints=oversampled.checkpoints))
    assert report.differences == []
    report = asyncio.run(train(oversampled.log, events, oversampled.artifacts))
    assert (report.differences, report.counts) == ([], {"training steps": EPOCHS})
