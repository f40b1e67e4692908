"""A run of scored candidates from the first sample to the last version, its replays, and its pairs as trajectories."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rollstream.harness.components.pair_builder import DpoTrajectoryBuilder
from rollstream.harness.config import file as config_file
from rollstream.harness.config.jobs import jobs_of
from rollstream.harness.config.nat_aliases import DpoBuilderConfig
from rollstream.harness.recorded.from_trajectories import rollouts_of_items
from rollstream.learner.tiny_model import make_tiny_model
from rollstream.producers.engines.scripted import random_digit
from rollstream.replay.source import of_type, read_run
from rollstream.replay.training import train
from rollstream.replay.verify import verify
from rollstream.schemas import tokens
from rollstream.schemas.events import (
    GroupClosed,
    JobStarted,
    JobSubmitted,
    RewardRecorded,
    StepTrained,
    TrajectoryAssembled,
    TrajectoryRejected,
)
from rollstream.schemas.events.recorded import RecordedRollout, RecordedTokens
from rollstream.schemas.finetuning import DPOItem
from tests.rigs.runs.produced_run import ProducedRun
from tests.rigs.runs.recorded_run import configuration


def written_for(folder: Path) -> dict[str, Any]:
    """Two epochs of two games each, one game a group."""
    written = configuration(folder, folder / "model")
    written |= {"workflow": "tic_tac_toe"}
    written["trajectory_builders"]["rollouts"] |= {
        "num_generations": 1,
        "environment_config": {"candidates": 4},
        "sampling": {"max_new_tokens": 4, "temperature": 0.7},
    }
    written["trainer_adapters"]["learner"] |= {"algorithm": {"name": "dpo", "beta": 0.2, "min_score_diff": 0.5}}
    written["finetuning"] |= {"num_epochs": 2}
    return written


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The run, and its events."""
    folder = tmp_path_factory.mktemp("dpo")
    make_tiny_model(folder / "model", seed=0)

    async def record():
        run = await ProducedRun(folder, folder / "model", written_for(folder), [{}, {}], random_digit).record()
        return run, await read_run(run.log, "replayed")

    return asyncio.run(record())


def test_a_dpo_run_is_planned_for_answers_and_not_for_rollouts(recorded):
    _, events = recorded
    (job,) = [job for job, _ in of_type(events.by_topic["jobs"], JobSubmitted)]
    (started,) = [job for job, _ in of_type(events.by_topic["groups"], JobStarted)]
    assert (job.settings.kind, job.settings.algorithm.name, job.settings.algorithm.temperature) == ("dpo", "dpo", 1.0)
    assert (started.plan.drop_zero_variance, started.plan.needs_logprobs) == (False, False)
    assert started.plan.curriculum.min_reward_diff == 0.0
    assert list(of_type(events.by_topic["batches"], TrajectoryRejected)) == []


def test_every_version_is_trained_on_the_pairs_of_single_rollouts(recorded):
    _, events = recorded
    steps = [step for step, _ in of_type(events.by_topic["weights"], StepTrained)]
    assert [step.version for step in steps] == [1, 2]
    assert all(step.metrics["dpo/pairs"] > 0 and step.num_optimizer_steps == 1 for step in steps)
    assert steps[0].metrics["dpo/margin"] == pytest.approx(0, abs=1e-6), "the policy is the reference"
    assert len({step.weights_sha256 for step in steps}) == 2


def test_scores_of_candidates_are_not_part_of_the_reward(recorded):
    run, _ = recorded
    rewards = asyncio.run(run.events("steps", RewardRecorded))
    trajectories = asyncio.run(run.events("trajectories", TrajectoryAssembled))
    assert len(trajectories) == 4
    for trajectory in trajectories:
        own = [reward for reward in rewards if reward.rollout_id == trajectory.rollout_id]
        assert trajectory.reward == pytest.approx(sum(reward.value for reward in own if not reward.is_score))
        assert len(trajectory.step_scores) == sum(reward.is_score for reward in own) > 0
        assert "score" not in trajectory.rewards


def test_the_run_is_replayed_to_the_same_digests_and_bits(recorded):
    run, events = recorded
    assert asyncio.run(verify(run.log, events, run.artifacts, checkpoints=run.checkpoints)).differences == []
    again = asyncio.run(train(run.log, events, run.artifacts))
    assert (again.differences, again.counts) == ([], {"training steps": 2})
    last = asyncio.run(train(run.log, events, run.artifacts, first=2, last=2, checkpoints=run.checkpoints))
    assert (last.differences, last.counts) == ([], {"training steps": 1})


def tokens_of(rollout: RecordedRollout) -> RecordedTokens:
    found = rollout.steps[0].tokens
    assert found is not None
    return found


def test_the_builder_makes_a_trajectory_per_pair_with_the_sampled_tokens(recorded):
    run, events = recorded
    groups = [group for group, _ in of_type(events.by_topic["groups"], GroupClosed)]
    builder = DpoTrajectoryBuilder(DpoBuilderConfig(max_pairs_per_turn=2))
    made = asyncio.run(builder.trajectories_of(run.log, groups))
    assert len(made) == len(groups)
    assert sum(map(len, made)) > 0
    for group, trajectories in zip(groups, made, strict=True):
        for trajectory in trajectories:
            (item,) = trajectory.episode
            metadata = trajectory.metadata
            assert isinstance(item, DPOItem)
            assert metadata is not None
            assert metadata["example_id"] == group.example_id
            assert trajectory.reward == metadata["score_diff"] > 0
            assert item.chosen_response != item.rejected_response
            ((chosen, rejected),) = rollouts_of_items(trajectory)
            prompts = [tokens.decode_ids(tokens_of(side).prompt_ids).tolist() for side in (chosen, rejected)]
            assert prompts[0] == prompts[1] != []
            assert {span.version for span in tokens_of(chosen).spans} <= {0, 1}
    assert set(builder.dropped) <= {"equal scores", "equal texts", "more than max_pairs_per_turn"}
    json.dumps([trajectory.model_dump(mode="json") for group in made for trajectory in group])


@pytest.mark.parametrize(
    ("builder", "drops"), [({}, False), ({"drop_zero_variance": True}, True), ({"drop_zero_variance": False}, False)]
)
def test_flat_groups_are_dropped_only_if_configured(tmp_path, builder, drops):
    written = written_for(tmp_path)
    written["trajectory_builders"]["rollouts"] |= builder
    (job,) = jobs_of(config_file.resolve(written).config, "r")
    assert job.plan.drop_zero_variance is drops
