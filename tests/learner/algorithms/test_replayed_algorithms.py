"""Jobs of every built-in algorithm: a learner that was stopped on the way goes on, and a replay gives the same bits."""

import asyncio
from typing import Any

import pytest

from rollstream.eventlog import codec
from rollstream.schemas.algorithm_settings import AlgorithmSettings
from rollstream.schemas.algorithms import (
    CispoSettings,
    DppoSettings,
    ExpertIterationSettings,
    GrpoSettings,
    GspoSettings,
    KtoSettings,
    MixSettings,
    SapoSettings,
    SftSettings,
    VespoSettings,
)
from rollstream.schemas.events import JobSucceeded, StepTrained
from rollstream.schemas.policy_gradient import (
    GdpoSettings,
    MaxRlSettings,
    OffPolicySettings,
    PpoSettings,
    RaeSettings,
    ReinforcePpSettings,
)
from rollstream.schemas.settings import NEWEST_REVISION
from tests.rigs.runs.retrained import assert_retrained, steps_of

ALGORITHMS: list[AlgorithmSettings] = [
    GrpoSettings(advantage="max_rl", mini_batches=2, kl_coefficient=0.1),
    GrpoSettings(advantage="reinforce_pp_baseline", aggregation="sequences", entropy_coefficient=0.01),
    GrpoSettings(off_policy=OffPolicySettings(level="token", mode="truncate"), mini_batches=3),
    GrpoSettings(off_policy=OffPolicySettings(level="token"), num_iterations=2),
    GspoSettings(mini_batches=2, num_iterations=2),
    CispoSettings(off_policy=OffPolicySettings(reject="k3")),
    DppoSettings(divergence="binary_kl"),
    SapoSettings(mini_batches=2),
    VespoSettings(),
    KtoSettings(),
    KtoSettings(reference_point="sampled", mini_batches=2),
    MixSettings(ce=0.5, ce_threshold=0.5, ref_kl=0.1, mini_batches=2),
    PpoSettings(mini_batches=2, gamma=0.9),
    ReinforcePpSettings(kl_coefficient=0.1),
    RaeSettings(mini_batches=2),
    MaxRlSettings(),
    GdpoSettings(num_iterations=2),
    SftSettings(mini_batches=2),
    ExpertIterationSettings(reward_threshold=0.5),
    ExpertIterationSettings(selection="weighted"),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda one: one.name)
def test_a_stopped_job_goes_on_and_is_trained_again_to_the_same_bits(lab: Any, algorithm: AlgorithmSettings) -> None:
    async def scenario() -> None:
        job = await lab.submit(num_versions=5, algorithm=algorithm, checkpoint_every=2, revision=NEWEST_REVISION)
        planned = await lab.plan(job, 3, seal=False)
        await lab.work(lab.has(StepTrained, "weights", 3))
        await lab.plan(job, 2, first=3, previous=codec.content_digest(planned[-1]))
        await lab.work(lab.has(JobSucceeded))
        steps = await steps_of(lab)
        assert len({step.weights_sha256 for step in steps.values()}) == 5
        await assert_retrained(lab, job, steps)
        await assert_retrained(lab, job, steps, first=4)

    asyncio.run(scenario())
