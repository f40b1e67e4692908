"""A small run of the real chaos: every process is killed once, the oracle finds nothing lost and nothing doubled."""

import asyncio

import pytest

from tests.chaos import chaos_workload
from tests.chaos.run_chaos import RESUME_TIMEOUT_S, report, run, schedule

pytestmark = [pytest.mark.kafka, pytest.mark.slow]


def test_killed_processes_and_a_killed_broker_lose_and_double_nothing(tmp_path):
    seed = 1
    workload = chaos_workload.make(2000, seed)
    faults = schedule(seed, kills=1, workers=1, with_failpoints=False)
    print(f"seed {seed}", *faults, sep="\n")
    outcome = asyncio.run(run(tmp_path / ".rollstream", workload, faults, workers=1))
    report(workload, outcome)
    assert outcome.problems == []
    assert outcome.num_kills == len(faults) == 3
    assert max(one for some in outcome.resume_s.values() for one in some) < RESUME_TIMEOUT_S


def test_a_schedule_is_its_seeds_alone_and_has_every_kill():
    faults = schedule(7, kills=3, workers=2, with_failpoints=True)
    assert faults == schedule(7, kills=3, workers=2, with_failpoints=True)
    assert faults != schedule(8, kills=3, workers=2, with_failpoints=True)
    victims = [fault.victim for fault in faults]
    assert [victims.count(name) for name in ("processors-1", "processors-2", "metrics-1", "broker")] == [3, 3, 3, 1]
    assert sum(fault.hit > 0 for fault in faults) == 7
    assert min(fault.share for fault in faults) >= 0.2
