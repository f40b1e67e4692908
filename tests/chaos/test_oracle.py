"""The workload has in it what it promises, and an undisturbed run comes to what the oracle says."""

import asyncio
import random

import pytest

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.attempts import Cause
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.schemas.events import GroupStarted, RolloutFailed, StepRecorded
from tests.chaos import chaos_workload
from tests.chaos.chaos_compare import compare, read_all
from tests.chaos.chaos_oracle import expect
from tests.chaos.shells_rig import Processors, write

pytestmark = pytest.mark.slow
STEPS = 3000


def test_a_workload_depends_on_its_seed_alone_and_has_the_documented_share_of_faults():
    made = chaos_workload.make(STEPS, seed=5)
    assert made.partitions == chaos_workload.make(STEPS, seed=5).partitions
    assert made.partitions != chaos_workload.make(STEPS, seed=6).partitions
    records = made.num_records
    shares = {name: number / records for name, number in made.counts.items()}
    assert made.counts["step events"] >= STEPS
    assert shares["repeated"] == pytest.approx(0.05, abs=0.01)
    assert shares["out of order"] == pytest.approx(0.05, abs=0.01)
    assert shares["late"] == pytest.approx(0.01, abs=0.004)
    assert shares["poison"] == pytest.approx(0.01, abs=0.004)
    events = [line.event for lines in made.partitions for line in lines]
    assert len(events) == records
    assert any(isinstance(event, RolloutFailed) for event in events)
    assert {event.size for event in events if isinstance(event, GroupStarted)} == {8}
    assert {event.rollout_id.rsplit("/a", 1)[1] for event in events if isinstance(event, StepRecorded)} == {"0", "1"}


@pytest.mark.parametrize("seed", range(3))
def test_an_undisturbed_run_matches_the_oracle(tmp_path, seed):
    async def go():
        workload = chaos_workload.make(STEPS, seed)
        expected = expect(workload.partitions)
        assert set(expected.verdicts.values()) == {"", "zero_variance", "not_viable"}
        log, store = MemoryLog(), ArtifactStore(str(tmp_path))
        await write(log, workload, store)
        await Processors(log, store, random.Random(seed)).live()
        assert any(Cause.OVERSAMPLED.encode() in (record.value or b"") for record in await read_all(log, "groups"))
        result = await compare(log, workload, expected)
        assert result.problems == []
        assert result.num_repeats == 0, "an undisturbed run says everything once"

    asyncio.run(go())
