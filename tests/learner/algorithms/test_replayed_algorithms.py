"""Jobs of every built-in algorithm: a learner that was stopped on the way goes on, and a replay gives the same bits."""

import asyncio
from typing import Any

import pytest

from rollstream.eventlog import codec
from rollstream.learner.tiny_model import make_tiny_model
from rollstream.schemas.algorithm_settings import AlgorithmSettings
from rollstream.schemas.algorithms import (
    BUILT_IN,
    CispoSettings,
    DpoSettings,
    DppoSettings,
    ExpertIterationSettings,
    GrpoSettings,
    GspoSettings,
    KtoSettings,
    MaltSettings,
    MixSettings,
    OpdSettings,
    OpsdSettings,
    SapoSettings,
    SftSettings,
    VespoSettings,
)
from rollstream.schemas.events import BatchPlanned, JobSucceeded, StepTrained
from rollstream.schemas.policy_gradient import (
    GdpoSettings,
    MaxRlSettings,
    OffPolicySettings,
    PpoSettings,
    RaeSettings,
    ReinforcePpSettings,
)
from tests.rigs.runs.retrained import assert_retrained, steps_of

DECAY = 0.75
ALGORITHMS: list[AlgorithmSettings] = [
    GrpoSettings(advantage="max_rl", mini_batches=2, kl_coefficient=0.1),
    GrpoSettings(advantage="group_mean_batch_std"),
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
    DpoSettings(mini_batches=2),
    DpoSettings(loss_type="ipo", average_logprobs=True, num_iterations=2),
    MaltSettings(pair_selection="interval", min_score_diff=0.01, mini_batches=2),
    MaltSettings(midpoint=0.5, reference="base", sft_weight=0.1),
    OpdSettings(teacher="the lab's", mini_batches=2),
    OpsdSettings(context="The answer is {answer}."),
]


def test_every_built_in_algorithm_is_among_them() -> None:
    assert {algorithm.name for algorithm in ALGORITHMS} == BUILT_IN.keys()


async def made_for(lab: Any, algorithm: AlgorithmSettings) -> AlgorithmSettings:
    """Prepare a lab for what the algorithm needs, and give it the teacher that the lab has."""
    if algorithm.needs.pairs:
        lab.answers = "scored"
    if isinstance(algorithm, OpdSettings | OpsdSettings):
        lab.model = make_tiny_model(lab.folder / "policy", seed=0, hidden_size=16, intermediate_size=32)
        await lab.begin({"answer": "42"})
    if isinstance(algorithm, OpdSettings):
        teacher = make_tiny_model(lab.folder / "teacher", seed=1, hidden_size=16, intermediate_size=32)
        return algorithm.model_copy(update={"teacher": str(teacher)})
    return algorithm


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda one: one.name)
def test_a_stopped_job_goes_on_and_is_trained_again_to_the_same_bits(
    pair_lab: Any, algorithm: AlgorithmSettings
) -> None:
    async def scenario() -> None:
        lab, chosen = pair_lab, await made_for(pair_lab, algorithm)
        job = await lab.submit(kind=chosen.kind, num_versions=5, algorithm=chosen, checkpoint_every=2)
        planned = await lab.plan(job, 3, seal=False)
        await lab.work(lab.has(StepTrained, "weights", 3))
        await lab.plan(job, 2, first=3, previous=codec.content_digest(planned[-1]))
        await lab.work(lab.has(JobSucceeded))
        steps = await steps_of(lab)
        assert len({step.weights_sha256 for step in steps.values()}) == 5
        await assert_retrained(lab, job, steps)
        await assert_retrained(lab, job, steps, first=4)

    asyncio.run(scenario())


def averages(batches: list[BatchPlanned]) -> list[float]:
    """The moving average after each batch, by definition."""
    average, found = 0.0, []
    for batch in batches:
        for member in batch.members:
            average = DECAY * average + (1 - DECAY) * member.reward
        found.append(average)
    return found


@pytest.mark.parametrize("checkpoint_every", [1, 2, 10])
def test_a_moving_average_survives_a_restart_and_a_replay_from_a_checkpoint(lab: Any, checkpoint_every: int) -> None:
    async def scenario() -> None:
        algorithm = GrpoSettings(advantage="rae", rae_decay=DECAY)
        job = await lab.submit(num_versions=5, algorithm=algorithm, checkpoint_every=checkpoint_every)
        planned = await lab.plan(job, 3, seal=False)
        await lab.work(lab.has(StepTrained, "weights", 3))
        previous = codec.content_digest(planned[-1])
        planned += await lab.plan(job, 2, first=3, previous=previous)
        await lab.work(lab.has(JobSucceeded))
        steps = await steps_of(lab)
        assert [steps[v].metrics["baseline/agent"] for v in range(1, 6)] == averages(planned)
        await assert_retrained(lab, job, steps, first=4)

    asyncio.run(scenario())
