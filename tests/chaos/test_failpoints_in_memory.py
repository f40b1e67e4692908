"""Processors killed twenty times at every failpoint, on a log in memory: what comes out is what the oracle says."""

import asyncio
import random
from functools import partial

import chaos_workload
import pytest
from chaos_compare import compare
from chaos_oracle import expect
from shells_rig import Processors, write

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.failpoints import FAILPOINTS
from rollstream.eventlog.memory_log import MemoryLog
from rollstream.processors import assembly, curate
from rollstream.processors.assemble_shell import AssembleShell
from rollstream.processors.curate_shell import CurateShell
from rollstream.schemas.events import RewardRecorded

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
    """What the log holds after a run with a kill at every few hits of a failpoint, beside the oracle's account."""
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
    if attempt and isinstance(event, RewardRecorded) and event.reward_index in attempt.reward_digests:
        attempt.rewards += [event] if attempt.outcome is None else []
    return assembly.evolve(state, received)


def curates_repeats(state, received, datasets):
    """No dedup: a group that closes again is taken in again."""
    for run in state.runs.values():
        run.seen.clear()
    return curate.evolve(state, received, datasets)


class PassesOpenGroups(AssembleShell):
    """Its mark is the next record, past the low-water mark of the groups that are open."""

    def mark(self, partition):
        return self.position(partition)


class DoesNotWait(AssembleShell):
    """Its mark moves while what closed is not acknowledged."""

    def mark(self, partition):
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
