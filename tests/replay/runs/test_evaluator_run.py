"""Runs that are rewarded by evaluators: through the real producers, folds and learner, and graded again afterwards."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollstream.harness.config import file as config_file
from rollstream.harness.config.file import read_yaml
from rollstream.harness.replays.what_if import what_if
from rollstream.harness.runs.plan import examples_of
from rollstream.learner.tiny_model import make_tiny_model
from rollstream.replay.source import of_type, read_run
from rollstream.replay.training import train
from rollstream.replay.verify import verify
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.events import (
    BatchPlanned,
    RewardRecorded,
    RolloutEnded,
    StepRecorded,
    StepTrained,
    TrajectoryAssembled,
)
from tests.rigs.runs.produced_run import ProducedRun
from tests.rigs.runs.recorded_run import configuration
from tests.rigs.services.judge_server import JudgeServer

EXAMPLES = Path(__file__).parents[3] / "examples"
SECRET = "sk-run-secret-4711"


def half_right(prompt, rng, version):
    """The right sum, a wrong one, or once in a while no number at all."""
    a, b = (int(digit) for digit in prompt.partition("<user>")[2][:3].split("+"))
    drawn = rng.random()
    return (str(a + b) if drawn < 0.4 else str((a + b + 1) % 10) if drawn < 0.8 else "?"), math.log(0.4)


def written_for(folder: Path, judge_url: str) -> dict[str, Any]:
    """The example's evaluator and reward choice in a small run, and a judge beside it."""
    example: dict[str, Any] = read_yaml(EXAMPLES / "arithmetic_evaluator.yaml")
    written = configuration(folder, folder / "model")
    written |= {"workflow": "arithmetic", "eval": example["eval"]}
    written["eval"]["general"]["dataset"]["file_path"] = str(EXAMPLES / "data" / "arithmetic.jsonl")
    written["eval"]["evaluators"]["judged"] = {
        "_type": "llm_judge", "base_url": judge_url, "model": "big", "api_key": "${TEST_JUDGE_KEY}", "max": 10,
        "prompt": "{question}{response} is to be {answer}. 0 to 10?",
    }  # fmt: skip
    written["trajectory_builders"]["rollouts"] |= {
        "num_generations": 8, "min_generations": 2, "rewards": ["judged"], "missing_score": "reject",
        "reward_weights": {"reward": 0, "judged": 0.01}, "sampling": {"max_new_tokens": 4},
    }  # fmt: skip
    written["finetuning"] |= {"reward_function": example["finetuning"]["reward_function"], "num_epochs": 2}
    return written


def judge(request):
    """10 for what has a digit; no score for anything else."""
    response = request["messages"][0]["content"].split("=")[1].split(" ")[0]
    return "Full marks: 10" if response.isdigit() else "I cannot say"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run of two epochs, and what its judge was asked; the judge is gone when it is over."""
    folder = tmp_path_factory.mktemp("evaluated")
    make_tiny_model(folder / "model", seed=0)
    patch = pytest.MonkeyPatch()
    patch.setenv("TEST_JUDGE_KEY", SECRET)

    async def record():
        async with JudgeServer(judge) as server:
            written = written_for(folder, server.base_url)
            examples = [example.inputs for example in examples_of(config_file.resolve(written).config)]
            run = await ProducedRun(folder, folder / "model", written, examples, half_right).record()
            return run, server.requests

    yield asyncio.run(record())
    patch.undo()


def all_of(run, topic, kind):
    return asyncio.run(run.events(topic, kind))


@pytest.fixture(scope="module")
def reported(recorded):
    """All that the run's log says of rewards, by kind of event."""
    run, _ = recorded
    kinds = {"steps": (RewardRecorded, StepRecorded, RolloutEnded), "trajectories": (TrajectoryAssembled,)}
    kinds |= {"weights": (StepTrained,), "batches": (BatchPlanned,)}
    run._read_up_to.clear()
    return {kind: all_of(run, topic, kind) for topic, found in kinds.items() for kind in found}


@pytest.mark.slow
def test_two_steps_are_trained_on_the_evaluators_scores(recorded, reported):
    assert len(reported[StepTrained]) == 2
    assert len({step.weights_sha256 for step in reported[StepTrained]}) == 2
    rewards = {}
    for reward in reported[RewardRecorded]:
        rewards.setdefault(reward.rollout_id, {})[reward.name] = reward.value
    for trajectory in reported[TrajectoryAssembled]:
        own = rewards[trajectory.rollout_id]
        assert own["sum"] == own["reward"], "the environment would have said the same"
        assert own["judged"] == 10
        assert trajectory.reward == pytest.approx(own["sum"] + 0.1)
    assert {trajectory.rewards["sum"] for trajectory in reported[TrajectoryAssembled]} == {0.0, 1.0}


def test_rollouts_that_the_judge_could_not_score_are_rejected_with_the_reason(reported):
    missing = [ended.missing_scores for ended in reported[RolloutEnded] if ended.missing_scores]
    assert missing
    assert all(list(found) == ["judged"] and "says no score" in found["judged"] for found in missing)
    assembled = {trajectory.rollout_id for trajectory in reported[TrajectoryAssembled]}
    assert not assembled & {ended.rollout_id for ended in reported[RolloutEnded] if ended.missing_scores}


def test_the_judge_was_asked_once_a_rollout_and_its_secret_is_nowhere(recorded, reported):
    run, requests = recorded
    asked = [step for step in reported[StepRecorded] if step.agent == "judge:judged"]
    assert len(asked) == len(requests) == len(reported[RolloutEnded])
    assert {trajectory.agent for trajectory in reported[TrajectoryAssembled]} == {"agent"}
    records = [record for kept in run.log._store._partitions.values() for record in kept.records]
    assert len(records) > 100
    assert not any(SECRET.encode() in record.value for record in records)
    assert all(headers["Authorization"] == f"Bearer {SECRET}" for headers, _ in requests)


def test_a_replay_folds_and_trains_the_same_and_asks_nobody(recorded):
    run, requests = recorded
    before = len(requests)

    async def replay():
        events = await read_run(run.log, "replayed")
        verified = await verify(run.log, events, run.artifacts, checkpoints=run.checkpoints)
        return verified, await train(run.log, events, run.artifacts)

    verified, trained = asyncio.run(replay())
    assert verified.differences == []
    assert (trained.differences, trained.counts) == ([], {"training steps": 2})
    assert len(requests) == before


def asked(run, changes):
    """Outcome of a what-if and its first batch's rewards."""
    file = run.folder / "what_if.yaml"
    file.write_text(yaml.safe_dump(changes))

    async def go():
        events = await read_run(run.log, "replayed")
        outcome = await what_if(
            run.log, events, run.artifacts, file, checkpoints=run.checkpoints, on_progress=lambda line: None, trust=True
        )
        found = await read_run(run.log, outcome.run_id)
        return outcome, [batch for batch, _ in of_type(found.by_topic["batches"], BatchPlanned)]

    return asyncio.run(go())


def test_a_pure_evaluator_may_grade_again_while_the_judge_keeps_its_word(recorded):
    run, requests = recorded
    before = len(requests)
    evaluators = {"odd": {"_type": "regex", "pattern": "[13579]$"}}
    changes = {"eval": {"evaluators": evaluators}, "finetuning": {"reward_function": {"name": "odd"}}}
    _, batches = asked(run, changes)
    assert {round(member.reward, 6) for batch in batches for member in batch.members} == {0.1, 1.1}
    assert len(requests) == before


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"eval": {"evaluators": {"judged": {"model": "other"}}}}, r"eval\.evaluators\.judged is not pure"),
        (
            {
                "eval": {"evaluators": {"own": {"_type": "python", "function": "math.floor"}}},
                "finetuning": {"reward_function": {"name": "own"}},
            },
            r"eval\.evaluators\.own is not pure.*pure: true",
        ),
        (
            {"trainer_adapters": {"learner": {"algorithm": {"step_rewards": "process"}}}}
            | {"trajectory_builders": {"rollouts": {"reward_weights": {"reward": 0, "judged": 1.0}}}},
            "reward_weights cannot change in a what-if with algorithm.step_rewards",
        ),
    ],
)
def test_a_what_if_that_would_need_a_judge_is_refused(recorded, changes, reported):
    with pytest.raises(ConfigError, match=reported):
        asked(recorded[0], changes)


def test_a_what_if_without_any_reward_is_refused_with_the_reason_of_each_rollout_in_the_log(recorded, caplog):
    run, _ = recorded
    evaluators = {"none": {"_type": "exact_match", "agent": "nobody"}}
    changes = {"eval": {"evaluators": evaluators}, "finetuning": {"reward_function": {"name": "none"}}}
    with (
        caplog.at_level("INFO"),
        pytest.raises(ConfigError, match=r"nothing is left to train \(\d+ no_score\); .*change the rewards"),
    ):
        asked(run, changes)
    assert "eval.evaluators.none: the rollout has no answer by agent nobody" in caplog.text
