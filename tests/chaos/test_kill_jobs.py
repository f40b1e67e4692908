"""A learner that is killed in the middle of SFT, DPO and RL jobs: every job ends once, with the undisturbed weights."""

import asyncio
from pathlib import Path

import pytest

from tests.chaos.kill_jobs import KINDS, report, run


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_a_learner_that_is_killed_twenty_times_in_each_kind_of_job_leaves_the_same_weights(tmp_path: Path) -> None:
    outcomes = asyncio.run(run(tmp_path, KINDS, kills=20, seed=0))
    report(outcomes)
    assert [one.problems for one in outcomes] == [[], [], []]
    assert [one.kills.total() for one in outcomes] == [20, 20, 20]
