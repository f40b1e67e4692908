"""Process supervision: rewards of single steps against numbers worked out by hand, and the tokens that they reach."""

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollstream.learner.algorithms import advantages
from rollstream.learner.algorithms.advantages import SteppedMember
from rollstream.learner.algorithms.base import BatchView
from rollstream.learner.algorithms.builtin.grpo import Grpo
from rollstream.learner.model import collate
from rollstream.learner.trainer import JobTrainer
from rollstream.schemas import tokens
from rollstream.schemas.algorithms import GrpoSettings
from rollstream.schemas.events import JobSucceeded, StepTrained, TrajectoryAssembled
from rollstream.schemas.events.rollouts import Completion, TokenSequence
from rollstream.schemas.policy_gradient import PpoSettings
from tests.rigs.runs.retrained import assert_retrained, steps_of


def member(steps: set[int], rewards: dict[int, float], total: float) -> SteppedMember:
    return SteppedMember(frozenset(steps), rewards, total)


def test_the_final_reward_is_a_reward_of_the_last_step() -> None:
    assert member({0, 2}, {0: 0.25, 2: 0.5}, 1.75).rewards() == {0: 0.25, 2: 1.5}
    assert member({0, 2}, {0: 0.25}, 1.25).rewards() == {0: 0.25, 2: 1.0}
    assert member({0}, {3: 0.5}, 1.0).rewards() == {3: 1.0}, "a tool's step may be the last one"


def test_step_rewards_are_normalised_over_all_steps_of_the_group_and_summed_from_each_step_on() -> None:
    # Rewards by step: (1, 0) and (3, 4); all four: mean 2, deviations -1 -2 1 2, sample variance 10 / 3.
    found = advantages.by_step(
        [member({0, 1}, {0: 1.0, 1: 0.0}, 1.0), member({0, 1}, {0: 3.0}, 7.0)], ["g", "g"], "group_std"
    )
    std = math.sqrt(10 / 3)
    assert found[0] == pytest.approx({0: -3 / std, 1: -2 / std}, rel=1e-5)
    assert found[1] == pytest.approx({0: 3 / std, 1: 2 / std}, rel=1e-5)


def test_each_group_is_normalised_for_itself_and_members_may_have_other_numbers_of_steps() -> None:
    # Group a: rewards 2 | 0, 1, 1 with mean 1; group b: 5 | 7 with mean 6.
    members = [
        member({0}, {}, 2.0),
        member({0}, {}, 5.0),
        member({0, 1, 2}, {0: 0.0, 1: 1.0, 2: 1.0}, 2.0),
        member({4}, {4: 7.0}, 7.0),
    ]
    found = advantages.by_step(members, ["a", "b", "a", "b"], "group_mean")
    assert found == [{0: 1.0}, {0: -1.0}, {0: -1.0, 1: 0.0, 2: 0.0}, {4: 1.0}]


def test_a_step_answers_for_a_later_step_that_has_no_tokens() -> None:
    # Step 1 is a tool's: it has a reward (4) and no tokens. Rewards 4 + final 0 and 0: mean 2.
    found = advantages.by_step([member({0}, {1: 4.0}, 4.0), member({0}, {}, 0.0)], "gg", "group_mean")
    assert found == [{0: 2.0}, {0: -2.0}]


@pytest.mark.parametrize("estimator", ["group_std", "group_mean"])
def test_without_step_rewards_every_step_has_the_advantage_of_the_whole(estimator: Any) -> None:
    totals = [0.3, 0.1, 0.7, 0.1]
    members = [member(set(range(index + 1)), {}, total) for index, total in enumerate(totals)]
    whole = advantages.by_group(totals, "gggg", estimator)
    assert advantages.by_step(members, "gggg", estimator) == [
        dict.fromkeys(range(index + 1), value) for index, value in enumerate(whole)
    ]


@pytest.mark.parametrize(
    ("revision", "expected"),
    [
        (12, {0: 1 + 0.5 * 4 + 0.25 * 8, 3: 4 + 0.5 * 8, 6: 8.0}),
        (11, {0: 0.5 + 4 / 16 + 8 / 128, 3: 4 / 2 + 8 / 16, 6: 4.0}),
    ],
)
def test_only_the_agent_s_own_steps_discount(revision: int, expected: dict[int, float]) -> None:
    """Steps 1, 4 and 7 are a tool's, which have the rewards; 2 is a lost call, and 5 another agent's."""
    by_tool = member({0, 3, 6}, {1: 1.0, 4: 4.0, 7: 8.0}, 13.0)
    (found,) = advantages.by_step([by_tool], "g", "none", 0.5, revision)
    assert found == expected


@pytest.mark.parametrize(("revision", "distance"), [(12, 1), (11, 7)])
def test_the_final_reward_is_as_late_as_the_agent_s_last_step(revision: int, distance: int) -> None:
    (found,) = advantages.by_step([member({2, 9}, {}, 1.0)], "g", "none", 0.5, revision)
    assert found == {2: 0.5**distance, 9: 1.0}


def test_a_reward_before_the_agent_s_first_step_is_that_of_no_step() -> None:
    (found,) = advantages.by_step([member({1, 2}, {0: 5.0, 2: 1.0}, 6.0)], "g", "none", 0.5)
    assert found == {1: 0.5, 2: 1.0}


@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_steps_without_others_in_between_have_the_same_bits_by_either_rule(discount: float) -> None:
    members = [member({0, 1, 2}, {0: 0.1, 2: 0.7}, 1.3), member({0, 1}, {1: 0.3}, 0.9)]
    found = [advantages.by_step(members, "gg", "group_std", discount, revision) for revision in (11, 12)]
    assert found[0] == found[1]


@given(
    st.dictionaries(st.integers(0, 30), st.floats(-10, 10), max_size=8),
    st.frozensets(st.integers(0, 30), min_size=1, max_size=8),
    st.floats(0, 1),
)
def test_returns_do_not_depend_on_how_many_steps_of_others_are_recorded(
    rewards: dict[int, float], steps: frozenset[int], discount: float
) -> None:
    """The same rollout without any other step: each reward is one of the agent's call before it."""
    own = sorted(steps)
    alone: dict[int, float] = {}
    for step, value in rewards.items():
        if step >= own[0]:
            index = sum(one <= step for one in own) - 1
            alone[index] = alone.get(index, 0.0) + value
    wanted = advantages.returns(frozenset(range(len(own))), alone, discount)
    found = advantages.returns(steps, rewards, discount)
    assert [found[step] for step in own] == pytest.approx([wanted[index] for index in range(len(own))], abs=1e-9)


def trajectory(number: int, step_rewards: dict[str, float], reward: float) -> TrajectoryAssembled:
    """Two sequences: steps 0 and 2 in one, step 3 in a branch."""
    names: dict[str, Any] = dict.fromkeys(("run_id", "group_id", "agent", "example_id", "job_id"), "x")
    joined = TokenSequence(
        token_ids=tokens.encode_ids([1, 2, 3, 4, 5, 6]),
        logprobs=tokens.encode_floats([-1.0, -1.0, -1.0]),
        completions=(Completion(start=1, length=2, step_index=0), Completion(start=4, length=1, step_index=2)),
    )
    branch = TokenSequence(
        token_ids=tokens.encode_ids([1, 7]),
        logprobs=tokens.encode_floats([-1.0]),
        completions=(Completion(start=1, length=1, step_index=3),),
    )
    return TrajectoryAssembled(
        **names, time_ms=0, rollout_id=f"x{number}", trajectory_id=f"x{number}/agent", model_group="x/m", member=number,
        attempt=0, epoch=0, reward=reward, step_rewards=step_rewards, sequences=(joined, branch), num_steps=4,
        steps_digest="0" * 64,
    )  # fmt: skip


def test_credit_by_step_reaches_the_tokens_of_the_step_and_of_none_other() -> None:
    good, bad = trajectory(0, {"0": 1.0, "2": 2.0}, 6.0), trajectory(1, {}, 0.0)
    # Rewards 1, 2, 3 (final) | 0: mean 1.5, so 3 after step 2, 1.5 at step 3, 2 at step 2 and 1.5 at step 0 on.
    rows = [row for n, one in enumerate((good, bad)) for row in collate.rows_of(one, needs_logprobs=True, member=n)]
    batch = BatchView(rows, [collate.member_of(good, reward=good.reward), collate.member_of(bad, reward=bad.reward)])
    settings = GrpoSettings(step_rewards="process", advantage="group_mean")
    found = advantages.of_members(batch.members, settings)
    assert found == [{0: 1.5, 2: 2.0, 3: 1.5}, {0: -1.5, 2: -1.5, 3: -1.5}]
    trained, units = collate.prepared_rows(batch, Grpo().prepare(batch, settings))
    padded = collate.pad(trained, units[:2])
    assert padded.advantages.tolist() == [[0, 1.5, 1.5, 0, 2, 0], [0, 1.5, 0, 0, 0, 0]]
    assert padded.advantages[padded.mask].tolist() == [1.5, 1.5, 2.0, 1.5]


def test_the_manifests_reward_takes_precedence() -> None:
    good = trajectory(0, {"0": 1.0}, 1.0)
    assert advantages.stepped(collate.member_of(good, reward=good.reward), 3.0).rewards() == {0: 1.0, 3: 2.0}


def test_comparing_members_and_crediting_steps_exclude_each_other() -> None:
    with pytest.raises(ValidationError, match="leave_one_out compares totals, not steps"):
        GrpoSettings(step_rewards="process", advantage="leave_one_out")


def test_old_settings_are_written_as_they_were() -> None:
    assert "step_rewards" not in GrpoSettings().model_dump()
    assert GrpoSettings(step_rewards="process").model_dump()["step_rewards"] == "process"


def trained(lab: Any, **algorithm: Any) -> list[str]:
    """Weight hashes of a job of three batches."""

    async def run() -> list[str]:
        job = await lab.submit(algorithm=GrpoSettings(**algorithm))
        await lab.plan(job)
        await lab.work(lab.has(StepTrained, "weights", 3))
        return [step.weights_sha256 for step in await lab.events("weights", StepTrained)]

    return asyncio.run(run())


def test_a_job_without_step_rewards_trains_the_same_bits_by_step_as_by_total(lab: Any, tmp_path: Path) -> None:
    other = type(lab)(tmp_path / "process", lab.model)
    assert trained(other, step_rewards="process") == trained(lab)


def test_the_learner_credits_steps_if_the_job_has_process_rewards(lab: Any) -> None:
    async def run() -> None:
        job = await lab.submit(algorithm=GrpoSettings(step_rewards="process", advantage="group_mean"))
        (planned,) = await lab.plan(job, 1)
        trajectories = [
            lab.trajectory(job, 0, index).model_copy(update={"step_rewards": {"0": float(index % 4)}})
            for index in range(8)
        ]
        batch = JobTrainer(job, threads=1, permissions=lab.permissions).batch(planned, trajectories)
        rows, _ = collate.prepared_rows(batch, Grpo().prepare(batch, job.settings.algorithm))
        by_row = [np.unique(np.asarray(row.advantage)[row.mask]) for row in rows]
        assert all(len(values) == 2 for values in by_row), "two steps of every row, credited apart"

    asyncio.run(run())


def with_others_in_between(made: TrajectoryAssembled) -> TrajectoryAssembled:
    """A trajectory whose second step comes after a tool's, which has a reward, and a lost call."""

    def moved(part: Completion) -> Completion:
        return part.model_copy(update={"step_index": 3 * part.step_index})

    sequences = tuple(
        one.model_copy(update={"completions": tuple(map(moved, one.completions))}) for one in made.sequences
    )
    return made.model_copy(update={"sequences": sequences, "step_rewards": {"1": made.reward / 2}, "num_steps": 4})


def test_a_job_is_trained_again_by_the_rule_of_its_revision(lab: Any, tmp_path: Path) -> None:
    async def weights(revision: int) -> list[str]:
        own = type(lab)(tmp_path / str(revision), lab.model)
        plain = own.trajectory
        own.trajectory = lambda *arguments, **options: with_others_in_between(plain(*arguments, **options))
        job = await own.submit(num_versions=2, algorithm=PpoSettings(gamma=0.5), revision=revision)
        await own.plan(job, 2)
        await own.work(own.has(JobSucceeded))
        steps = await steps_of(own)
        await assert_retrained(own, job, steps)
        return [step.weights_sha256 for step in steps.values()]

    async def scenario() -> None:
        before, now = [await weights(revision) for revision in (11, 12)]
        assert not set(before) & set(now)

    asyncio.run(scenario())
