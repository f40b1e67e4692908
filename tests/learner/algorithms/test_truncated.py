"""Completions that were cut off at their token limit: masked, or their trajectory's reward lowered."""

import asyncio
from typing import Any

import pytest

from rollstream.learner.algorithms import table
from rollstream.learner.algorithms.base import BatchView, Member
from rollstream.learner.model import collate
from rollstream.schemas import tokens
from rollstream.schemas.algorithms import GrpoSettings, SftSettings
from rollstream.schemas.events import JobSucceeded, StepTrained, TrajectoryAssembled
from rollstream.schemas.events.rollouts import Completion, TokenSequence
from rollstream.schemas.permissions import NOTHING
from tests.learner.conftest import Lab


def cut_off(trajectory: TrajectoryAssembled, *, only_last: bool = True) -> TrajectoryAssembled:
    """The same with its last completion, or all of them, ended by the token limit."""

    def changed(sequence: TokenSequence) -> TokenSequence:
        last = len(sequence.completions) - 1
        completions = tuple(
            part.model_copy(update={"finish_reason": "length"}) if index == last or not only_last else part
            for index, part in enumerate(sequence.completions)
        )
        return sequence.model_copy(update={"completions": completions})

    return trajectory.model_copy(update={"sequences": tuple(map(changed, trajectory.sequences))})


class TruncatedLab(Lab):
    """A lab in which every second member of a group has answers that were cut off."""

    def trajectory(self, *args: Any, **options: Any) -> TrajectoryAssembled:
        made = super().trajectory(*args, **options)
        return cut_off(made, only_last=False) if made.member % 2 else made


def test_masked_are_the_tokens_of_completions_that_were_cut_off() -> None:
    completions = (
        Completion(start=1, length=2, step_index=0),
        Completion(start=4, length=2, step_index=1, finish_reason="length"),
    )
    made = TokenSequence(
        token_ids=tokens.encode_ids(range(6)), logprobs=tokens.encode_floats([-1.0] * 4), completions=completions
    )
    trajectory = TrajectoryAssembled.model_construct(trajectory_id="t", sequences=(made,))
    assert collate.is_truncated(trajectory)
    (row,) = collate.rows_of(trajectory, needs_logprobs=True)
    batch = BatchView([row], [Member()])
    for name, chosen in (("grpo", GrpoSettings), ("sft", SftSettings)):
        for is_masked, last in ((False, True), (True, False)):
            prepared = table.algorithm(name, NOTHING).prepare(batch, chosen(mask_truncated=is_masked))
            (trained,), units = collate.prepared_rows(batch, prepared)
            assert trained.mask.tolist() == [False, True, True, False, last, last]
            assert units == [(0,)]


@pytest.mark.parametrize(
    ("change", "is_smaller"), [({}, False), ({"mask_truncated": True}, True), ({"truncation_penalty": 0.5}, False)]
)
def test_truncated_answers_are_trained_by_the_jobs_settings(
    tmp_path: Any, tiny_model: Any, change: dict[str, Any], is_smaller: bool
) -> None:
    async def steps(name: str, algorithm: GrpoSettings) -> list[StepTrained]:
        lab = TruncatedLab(tmp_path / name, tiny_model)
        job = await lab.submit(algorithm=algorithm)
        await lab.plan(job, 1)
        await lab.work(lab.has(JobSucceeded))
        return await lab.events("weights", StepTrained)

    async def scenario() -> None:
        (plain,) = await steps("plain", GrpoSettings())
        (found,) = await steps("changed", GrpoSettings(**change))
        tokens_of = [step.metrics["tokens/completion"] for step in (plain, found)]
        assert (tokens_of[1] < tokens_of[0]) == is_smaller
        assert (found.weights_sha256 != plain.weights_sha256) == bool(change)

    asyncio.run(scenario())


def test_a_batch_of_which_nothing_is_left_changes_nothing_and_goes_on(tmp_path: Any, tiny_model: Any) -> None:
    class AllTruncated(Lab):
        def trajectory(self, *args: Any, **options: Any) -> TrajectoryAssembled:
            return cut_off(super().trajectory(*args, **options), only_last=False)

    async def scenario() -> None:
        lab = AllTruncated(tmp_path, tiny_model)
        job = await lab.submit(algorithm=GrpoSettings(mask_truncated=True))
        await lab.plan(job, 1)
        await lab.work(lab.has(JobSucceeded))
        (step,) = await lab.events("weights", StepTrained)
        assert (step.num_optimizer_steps, step.metrics["tokens/completion"]) == (0, 0.0)

    asyncio.run(scenario())
