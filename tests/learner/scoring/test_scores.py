"""Log-probabilities under the reference as events: written once, before the step that uses them, and read then."""

import asyncio
import re
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollstream.eventlog import codec
from rollstream.eventlog.failpoints import Killed, armed
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.learner.model.collate import rows_of
from rollstream.learner.model.policy import Reference
from rollstream.learner.scoring.index import ScoreAsked, ScoreIndex, Wanted
from rollstream.learner.scoring.scores import MAX_TOKENS, by_sequence, events_of, flat
from rollstream.schemas import tokens
from rollstream.schemas.algorithm_settings import AlgorithmSettings
from rollstream.schemas.algorithms import DpoSettings, GrpoSettings, KtoSettings
from rollstream.schemas.events import (
    BatchPlanned,
    JobFailed,
    JobSucceeded,
    ReferenceScored,
    StepTrained,
    TrajectoryAssembled,
)
from rollstream.schemas.events.weights import Scorer
from rollstream.schemas.settings import LoraSettings, ModelSettings
from tests.rigs.runs.retrained import assert_retrained, steps_of

SCORER = Scorer(role="reference", weights_sha256="ab" * 32)


@pytest.mark.parametrize(
    "algorithm", [GrpoSettings(kl_coefficient=0.1), KtoSettings(), DpoSettings()], ids=lambda one: one.name
)
def test_scores_are_on_the_log_before_the_step_and_are_all_that_training_again_needs(
    lab: Any, pair_lab: Any, algorithm: AlgorithmSettings
) -> None:
    lab = pair_lab if algorithm.needs.pairs else lab

    async def scenario() -> None:
        job = await lab.submit(kind=algorithm.kind, num_versions=2, algorithm=algorithm)
        await (lab.plan_pairs if algorithm.needs.pairs else lab.plan)(job, 2)
        await lab.work(lab.has(JobSucceeded))
        events = [one.event for one in await lab.received("weights")]
        scored = [event for event in events if isinstance(event, ReferenceScored)]
        assert {event.scorer.role for event in scored} == {"reference"}
        assert len({(event.trajectory_sha256, event.scorer.sha256) for event in scored}) == len(scored) > 0
        for step in (event for event in events if isinstance(event, StepTrained)):
            of_step = [event for event in scored if event.version == step.version]
            assert step.scores_sha256
            assert events.index(of_step[-1]) < events.index(step)
        await assert_retrained(lab, job, await steps_of(lab))

    asyncio.run(scenario())


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4)])
def test_training_from_events_is_training_beside_the_reference(lab: Any, tmp_path: Any, lora: Any) -> None:
    """The metrics of a job of the earlier rules, which computed them in every micro-batch."""

    async def metrics(revision: int) -> dict[str, float]:
        lab.folder, lab.log = tmp_path / str(revision), MemoryLog(num_partitions=2)
        algorithm = GrpoSettings(kl_coefficient=0.5, mini_batches=2)
        model = ModelSettings(path=str(lab.model), device="cpu", lora=lora)
        job = await lab.submit(num_versions=2, algorithm=algorithm, revision=revision, model=model)
        await lab.plan(job, 2)
        await lab.work(lab.has(JobSucceeded))
        return (await steps_of(lab))[2].metrics

    before, now = (asyncio.run(metrics(revision)) for revision in (5, 6))
    assert now["policy/kl_reference"] > 0
    assert now == pytest.approx(before, rel=1e-4, abs=1e-6)


def test_a_learner_that_is_killed_between_two_groups_scores_the_other_one_alone(lab: Any) -> None:
    async def scenario() -> None:
        job = await lab.submit(num_versions=2, algorithm=KtoSettings())
        await lab.plan(job, 2)
        with armed("learner/between-scores-of-groups"), pytest.raises(Killed):
            await lab.work(lab.has(JobSucceeded))
        first = await lab.events("weights", ReferenceScored)
        assert len({event.trajectory_id for event in first}) == len(first) == 4
        await lab.work(lab.has(JobSucceeded))
        events = await lab.events("weights", ReferenceScored)
        assert len({event.trajectory_id for event in events}) == len(events) == 16
        await assert_retrained(lab, job, await steps_of(lab))

    asyncio.run(scenario())


def test_a_score_that_is_not_finite_fails_its_job_and_is_not_recorded(lab: Any, tmp_path: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(lab.model)
    model.model.norm.weight.data[3] = float("nan")
    model.save_pretrained(tmp_path / "broken")
    lab.model = tmp_path / "broken"

    async def scenario() -> tuple[JobFailed, list[ReferenceScored]]:
        job = await lab.submit(num_versions=2, algorithm=KtoSettings())
        await lab.plan(job, 2)
        await lab.work(lab.has(JobFailed))
        (failed,) = await lab.events("jobs", JobFailed)
        return failed, await lab.events("weights", ReferenceScored)

    failed, scored = asyncio.run(scenario())
    assert scored == []
    assert re.search(
        r"trajectory run-1/rl/\S+: the reference \(version 0 of run-1/main\) .* nan; .*float32", failed.error
    )


def test_scores_lie_on_completion_tokens_and_come_back_as_they_were(lab: Any) -> None:
    async def scenario() -> TrajectoryAssembled:
        job = await lab.submit()
        return lab.trajectory(job, 0, 0, with_logprobs=True)

    trajectory = asyncio.run(scenario())
    num = sum(part.length for sequence in trajectory.sequences for part in sequence.completions)
    logprobs = np.arange(1, num + 1, dtype=np.float32)
    laid = by_sequence(trajectory, logprobs)
    assert np.array_equal(flat(trajectory, laid), logprobs)
    for row in rows_of(trajectory, needs_logprobs=True, scores={"reference": laid}):
        assert ((row.scores["reference"] != 0) == row.mask).all()


def test_scores_too_large_for_a_record_are_several_events(lab: Any) -> None:
    async def scenario() -> BatchPlanned:
        return (await lab.plan(await lab.submit(), 1))[0]

    planned = asyncio.run(scenario())
    logprobs = np.linspace(-9, -1, 2 * MAX_TOKENS + 1, dtype=np.float32)
    asked = ScoreAsked(0, SCORER)
    events = list(events_of(planned, asked, logprobs, run_id="run-1", term=1))
    assert [event.part for event in events] == [0, 1, 2]
    assert len({event.event_id for event in events}) == 3
    assert np.array_equal(np.concatenate([tokens.decode_floats(event.logprobs) for event in events]), logprobs)
    index = ScoreIndex()
    for offset, event in enumerate(events):
        assert index.offsets(asked.wanted(planned)) == ()
        assert len(codec.encode(event).value) < 2**20
        index.take(event, offset)
        index.take(event, 100 + offset)
    assert index.offsets(asked.wanted(planned)) == (0, 1, 2)


def test_a_later_score_of_a_trajectory_changes_nothing_for_an_earlier_step() -> None:
    index = ScoreIndex()
    for offset, version in enumerate((3, 7)):
        index.take(scored(version), offset)
    found = {version: index.offsets(Wanted("cd" * 32, SCORER.sha256, version)) for version in (2, 3, 6, 7, 9)}
    assert found == {2: (), 3: (0,), 6: (0,), 7: (1,), 9: (1,)}
    index.forget(5)
    assert list(index.anchors()) == [1]
    assert index.offsets(Wanted("cd" * 32, SCORER.sha256, 7)) == (1,)


def test_the_index_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollstream.learner.scoring.index.MAX_KEPT", 2)
    index = ScoreIndex()
    for number in range(5):
        index.take(scored(number, f"{number:064d}"), number)
    index.forget(4)
    kept = [number for number in range(5) if index.offsets(Wanted(f"{number:064d}", SCORER.sha256, 9))]
    assert kept == [2, 3, 4]


def scored(version: int, trajectory: str = "cd" * 32) -> ReferenceScored:
    return ReferenceScored(
        run_id="run-1",
        time_ms=1,
        model_group="run-1/main",
        job_id="run-1/rl",
        batch_id="run-1/rl/b000000",
        version=version,
        term=1,
        trajectory_id="t",
        trajectory_sha256=trajectory,
        scorer=SCORER,
        logprobs=tokens.encode_floats([-1.0]),
    )


def test_a_budget_that_was_halved_while_scores_were_computed_stays_so(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, refused = Reference.logprobs, list[int]()

    def logprobs(self: Reference, batch: Any, **options: Any) -> Any:
        if batch.num_computed > 16 and len(batch.lengths) > 1:
            refused.append(batch.num_computed)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return plain(self, batch, **options)

    monkeypatch.setattr(Reference, "logprobs", logprobs)

    async def scenario() -> None:
        algorithm = GrpoSettings(kl_coefficient=0.1, max_tokens_per_micro_batch=256)
        await lab.plan(await lab.submit(algorithm=algorithm))
        await lab.work(lab.has(JobSucceeded))
        assert 0 < len(refused) <= 4  # 256, 128, 64 and 32, once for all six groups

    asyncio.run(scenario())
