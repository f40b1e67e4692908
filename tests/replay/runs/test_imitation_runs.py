"""Runs of expert iteration and of MALT from the first sample to the last version, and their replays."""

import asyncio
import random

import pytest

from rollstream.learner.tiny_model import make_tiny_model
from rollstream.replay.source import of_type, read_run
from rollstream.replay.training import train
from rollstream.replay.verify import verify
from rollstream.schemas.events import JobSubmitted, StepTrained, TrajectoryAssembled
from tests.rigs.runs.produced_run import ProducedRun
from tests.rigs.runs.recorded_run import configuration

ALGORITHMS = {
    "expert_iteration": {"name": "expert_iteration", "reward_threshold": 0.5},
    "weighted": {"name": "expert_iteration", "selection": "weighted"},
    "malt": {"name": "malt", "midpoint": 0.5},
}


def random_answer(prompt, rng: random.Random, version):
    return rng.choice("0123YN"), -1.0


def written_for(folder, algorithm):
    """Two epochs of two tasks each, of four rollouts."""
    written = configuration(folder, folder / "model")
    written |= {"workflow": "bit_proof"}
    is_malt = algorithm["name"] == "malt"
    written["trajectory_builders"]["rollouts"] |= {
        "agents": ["prover", "verifier"],
        "num_generations": 4,
        "responses_per_step": 2 if is_malt else 1,
        "environment_config": {
            "protocol": {"name": "adp", "verifier_guess_replacement_proportion": 0.0 if is_malt else 0.5}
        },
        "max_turns": 4,
        "sampling": {"max_new_tokens": 4},
    }
    written["trainer_adapters"]["learner"] |= {"algorithm": {**algorithm, "mini_batches": 2}}
    written["finetuning"] |= {"num_epochs": 2}
    return written


@pytest.fixture(scope="module", params=ALGORITHMS)
def recorded(request, tmp_path_factory):
    """The algorithm's settings, the run, and its events."""
    folder = tmp_path_factory.mktemp("imitation")
    make_tiny_model(folder / "model", seed=0)
    algorithm = ALGORITHMS[request.param]

    async def record():
        run = ProducedRun(folder, folder / "model", written_for(folder, algorithm), [{}, {}], random_answer)
        await run.record()
        return algorithm, run, await read_run(run.log, "replayed")

    return asyncio.run(record())


def test_every_epoch_is_one_version_trained_on_what_was_selected(recorded):
    algorithm, _, events = recorded
    (job,) = [job for job, _ in of_type(events.by_topic["jobs"], JobSubmitted)]
    assert job.settings.algorithm.name == algorithm["name"]
    steps = [step for step, _ in of_type(events.by_topic["weights"], StepTrained)]
    assert [step.version for step in steps] == [1, 2]
    name = "dpo/pairs" if algorithm["name"] == "malt" else "expert_iteration/selected"
    assert all(step.metrics[name] > 0 and step.num_optimizer_steps > 0 for step in steps)
    if algorithm["name"] == "expert_iteration":
        assert any(step.metrics["expert_iteration/relabelled"] > 0 for step in steps)


def test_rollouts_of_a_tree_begin_alike(recorded):
    algorithm, run, _ = recorded
    if algorithm["name"] != "malt":
        pytest.skip("no tree")
    trajectories = asyncio.run(run.events("trajectories", TrajectoryAssembled))
    provers = [one for one in trajectories if one.agent == "prover"]
    for group in {one.group_id for one in provers}:
        first = {one.member: one.sequences[0].token_ids for one in provers if one.group_id == group}
        assert (first[0], first[2]) == (first[1], first[3])


def test_the_run_is_replayed_to_the_same_digests_and_bits(recorded):
    _, run, events = recorded
    assert asyncio.run(verify(run.log, events, run.artifacts, checkpoints=run.checkpoints)).differences == []
    again = asyncio.run(train(run.log, events, run.artifacts))
    assert (again.differences, again.counts) == ([], {"training steps": 2})
