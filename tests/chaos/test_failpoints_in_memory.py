"""Processors killed twenty times at every failpoint, on a log in memory: what comes out is what the oracle says."""

import asyncio
import random
from functools import partial

import pytest

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.failpoints import FAILPOINTS
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.processors.assemble import fold as assembly
from rollstream.processors.assemble.shell import AssembleShell
from rollstream.processors.curate import fold as curate
from rollstream.processors.curate.known_groups import KnownGroups
from rollstream.processors.curate.shell import CurateShell
from rollstream.schemas.events import RewardRecorded
from tests.chaos import chaos_workload
from tests.chaos.chaos_compare import compare
from tests.chaos.chaos_oracle import expect
from tests.chaos.shells_rig import Processors, write

pytestmark = pytest.mark.slow
STEPS = 3000
KILLS = 20
SEED = 11
POINTS = [name for name in FAILPOINTS if name.startswith(("assemble/", "curate/"))]


@pytest.fixture(scope="module")
def workload():
    return chaos_workload.make(STEPS, SEED)


@pytest.fixture(scope="module")
def expected(workload):
    return expect(workload.partitions)


async def _disturbed(workload, expected, folder, failpoint, **shells):
    """Contents of the log after a run with a kill at every few hits of a failpoint, compared with the oracle's."""
    log, store = MemoryLog(), ArtifactStore(str(folder))
    await write(log, workload, store)
    processors = Processors(log, store, random.Random(SEED), **shells)
    await processors.live_and_die(failpoint, kills=KILLS)
    return processors, await compare(log, workload, expected)


@pytest.mark.parametrize("failpoint", POINTS)
def test_twenty_kills_at_a_failpoint_lose_and_double_nothing(workload, expected, tmp_path, failpoint):
    processors, result = asyncio.run(_disturbed(workload, expected, tmp_path, failpoint))
    assert processors.num_kills == KILLS
    assert result.problems == []
    if failpoint != "curate/after-fold-before-send":
        assert result.num_repeats > 0, "the kills came where something had been sent and was sent again"


# ---- the test can fail: three planted faults ----


def folds_repeats(state, received):
    """No dedup: a repeated reward of an attempt counts again."""
    event = received.event
    group = state.groups.get(getattr(event, "group_id", ""))
    attempt = group.attempts.get(getattr(event, "rollout_id", "")) if group else None
    if attempt and isinstance(event, RewardRecorded) and event.reward_index in attempt.rewards:
        attempt.rewards += [event] if attempt.outcome is None else []
    return assembly.evolve(state, received)


def curates_repeats(state, received, datasets):
    """No dedup: a group that closes again is taken in again."""
    for run in state.runs.values():
        run.groups = KnownGroups(open=run.groups.open)
    return curate.evolve(state, received, datasets)


class PassesOpenGroups(AssembleShell):
    """Its mark is the next record, past the low-water mark of the groups that are open."""

    def commit_offset(self, partition):
        return self.position(partition)


class DoesNotWait(AssembleShell):
    """Its mark moves while what closed is not acknowledged."""

    def commit_offset(self, partition):
        known = self._partitions.get(partition)
        return None if known is None else known.state.low_water


PLANTED = {
    "repeats folded": {"assemble": partial(AssembleShell, evolve=folds_repeats)},
    "repeats curated": {"curate": partial(CurateShell, evolve=curates_repeats)},
    "mark past the low-water mark": {"assemble": PassesOpenGroups},
    "no wait for the acknowledgement": {"assemble": DoesNotWait},
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(workload, expected, tmp_path, fault):
    point = (
        "curate/after-send-before-mark" if fault == "repeats curated" else "assemble/after-trajectories-before-groups"
    )
    _, result = asyncio.run(_disturbed(workload, expected, tmp_path, point, **PLANTED[fault]))
    assert result.problems
    if fault.startswith("repeats"):
        assert result.different or result.doubled
    else:
        assert result.missing
