"""DPO: the loss against numbers worked out by hand, and training that prefers what was chosen."""

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollstream.learner.algorithms.base import BatchView, Counts, Prepared
from rollstream.learner.algorithms.builtin import dpo
from rollstream.learner.algorithms.builtin.dpo import Dpo, PairBatch
from rollstream.learner.algorithms.pairs import Pair, rows_of_pairs
from rollstream.learner.checkpoints.checkpoint import CheckpointFolder
from rollstream.learner.model import collate
from rollstream.learner.model.optimizer import make_optimizer
from rollstream.learner.model.policy import PolicyModel, Reference, make_deterministic
from rollstream.learner.model.step import StepResult, train_batch
from rollstream.schemas.algorithms import DpoSettings, GrpoSettings, SftSettings
from rollstream.schemas.events import (
    JobFailed,
    JobSubmitted,
    JobSucceeded,
    ReferenceScored,
    StepTrained,
    WeightsPublished,
)
from rollstream.schemas.revisions import NEWEST_REVISION
from rollstream.schemas.settings import JobSettings, LoraSettings, ModelSettings, OptimizerSettings
from tests.rigs.pair_items import packed
from tests.rigs.runs.retrained import assert_retrained, steps_of

LORA = LoraSettings(rank=2, alpha=4, target_modules=("q_proj", "v_proj"))


def batch(*pairs: tuple[float, float, float, float, float]) -> PairBatch:
    columns = torch.tensor(pairs, dtype=torch.float64).T
    return PairBatch(columns[0].clone().requires_grad_(), columns[1].clone().requires_grad_(), *columns[2:])


# ---- the loss ----


def test_the_loss_is_minus_the_log_sigmoid_of_beta_times_the_difference_of_log_ratios() -> None:
    given = batch((-1.0, -3.0, -2.0, -2.5, 0.5), (-4.0, -1.0, -3.0, -2.0, 2.0))
    found = dpo.loss_of(given, DpoSettings(beta=0.5))
    margins = [0.5 * (1.0 - (-0.5)), 0.5 * (-1.0 - 1.0)]  # 0.75 and -1
    assert found.values.tolist() == pytest.approx([math.log1p(math.exp(-m)) for m in margins], abs=1e-15)
    assert found.values.tolist() == pytest.approx([0.386871, 1.313262], abs=1e-6)


def test_the_gradient_pulls_a_pair_apart_the_more_the_more_it_is_mistaken() -> None:
    given = batch((-1.0, -3.0, -2.0, -2.5, 0.5), (-4.0, -1.0, -3.0, -2.0, 2.0))
    dpo.loss_of(given, DpoSettings(beta=0.5)).values.sum().backward()
    weights = [0.5 / (1 + math.exp(0.75)), 0.5 / (1 + math.exp(-1.0))]
    assert given.chosen_K.grad is not None
    assert given.rejected_K.grad is not None
    assert given.chosen_K.grad.tolist() == pytest.approx([-weight for weight in weights], abs=1e-15)
    assert given.rejected_K.grad.tolist() == pytest.approx(weights, abs=1e-15)


def test_the_chosen_answer_s_likelihood_is_part_of_the_loss_if_asked_for() -> None:
    given = batch((-1.0, -1.0, -1.0, -1.0, 0.5))
    found = dpo.loss_of(given, DpoSettings(sft_weight=2.0))
    assert found.values.tolist() == pytest.approx([math.log(2) + 2.0 * 0.5])


def test_metrics_are_means_over_the_pairs_and_a_tie_is_half_right() -> None:
    given = batch((-1.0, -3.0, -2.0, -2.5, 0.5), (-4.0, -1.0, -3.0, -2.0, 2.0), (-1.0, -1.0, -1.0, -1.0, 0.1))
    found = dpo.loss_of(given, DpoSettings(beta=0.5))
    sums = {"entropy": 0.0} | {name: float(value) for name, value in found.sums.items()}
    metrics = Dpo().metrics(sums, Counts(9, 6, 3))
    assert metrics["dpo/accuracy"] == pytest.approx((1 + 0 + 0.5) / 3)
    assert metrics["dpo/policy_accuracy"] == pytest.approx((1 + 0 + 0.5) / 3)
    assert metrics["dpo/margin"] == pytest.approx((0.75 - 1.0) / 3)
    assert metrics["dpo/chosen_reward"] == pytest.approx((0.5 - 0.5) / 3)
    assert metrics["dpo/rejected_reward"] == pytest.approx((-0.25 + 0.5) / 3)
    assert metrics["dpo/chosen_logprob"] == pytest.approx(-2.0)
    assert metrics["loss/total"] == pytest.approx(float(found.values.detach().mean()))


# ---- a step ----


PAIRS = [
    Pair(packed(1, 2, 3), packed(7, 8), packed(9), 1.0),
    Pair(packed(1, 2, 3), packed(7, 8), packed(4, 4, 4), 2.0),
    Pair(packed(5, 6), packed(9), packed(7, 8), 1.0),
]
ROWS, SIDES = rows_of_pairs(PAIRS)
BATCH = BatchView(ROWS, (), SIDES, [pair.score_diff for pair in PAIRS])


def make(path: Path, lora: LoraSettings | None = None, **algorithm: Any) -> tuple[PolicyModel, Reference, JobSettings]:
    make_deterministic(1)
    settings = JobSettings(
        kind="dpo",
        model=ModelSettings(path=str(path), device="cpu", lora=lora),
        algorithm=DpoSettings(**algorithm),
        optimizer=OptimizerSettings(learning_rate=1e-2, max_grad_norm=1e9),
    )
    model = PolicyModel(settings.model, seed=0)
    return model, Reference(model, model.weights_bytes(), "the base version"), settings


def steps(model: PolicyModel, reference: Reference, settings: JobSettings, count: int = 1) -> list[StepResult]:
    optimizer = make_optimizer(model.trainable(), settings.optimizer)
    return [
        train_batch(model, optimizer, BATCH, Dpo(), settings, index=n, seed=n, reference=reference)
        for n in range(count)
    ]


def micro_batches(max_tokens: int) -> list[collate.MicroBatch]:
    return collate.micro_batches(*collate.prepared_rows(BATCH, Prepared()), max_tokens)


def answer_logprob(model: PolicyModel, prompt: bytes, answer: bytes) -> float:
    prompt_ids, answer_ids = np.frombuffer(prompt, np.int32), np.frombuffer(answer, np.int32)
    token_ids = torch.from_numpy(np.concatenate((prompt_ids, answer_ids))).long()
    with torch.no_grad():
        table = torch.log_softmax(model.module(input_ids=token_ids[None]).logits[0].double(), dim=-1)
    first = len(prompt_ids)
    return sum(float(table[index - 1, token_ids[index]]) for index in range(first, len(token_ids)))


@pytest.mark.parametrize("average", [False, True], ids=["sum", "mean"])
def test_a_batch_s_loss_is_that_of_plain_forwards_of_every_answer(tiny_model: Path, average: bool) -> None:
    model, _, settings = make(tiny_model, average_logprobs=average, beta=0.7, sft_weight=0.3)
    with torch.no_grad():
        for _, parameter in model.trainable():
            parameter.mul_(1.3)
    base = PolicyModel(settings.model, seed=0)
    reference = Reference(model, base.weights_bytes(), "the base version")
    wanted = []
    for pair in PAIRS:
        lengths = {answer: len(answer) // 4 for answer in (pair.chosen_ids, pair.rejected_ids)}
        ratio = {}
        for answer, length in lengths.items():
            divisor = length if average else 1
            now, then = (answer_logprob(each, pair.prompt_ids, answer) for each in (model, base))
            ratio[answer] = (now - then) / divisor
        margin = 0.7 * (ratio[pair.chosen_ids] - ratio[pair.rejected_ids])
        nll = -answer_logprob(model, pair.prompt_ids, pair.chosen_ids) / lengths[pair.chosen_ids]
        wanted.append(math.log1p(math.exp(-margin)) + 0.3 * nll)
    (found,) = steps(model, reference, settings)
    assert found.metrics["loss/total"] == pytest.approx(sum(wanted) / 3, abs=1e-5)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_training_prefers_what_was_chosen_and_leaves_the_reference_as_it_was(
    tiny_model: Path, lora: LoraSettings | None
) -> None:
    model, reference, settings = make(tiny_model, lora)
    before = model.weights_bytes()
    micro_batch = micro_batches(4096)[0]
    first = reference.logprobs(micro_batch, temperature=1.0)
    results = steps(model, reference, settings, count=12)
    assert results[0].metrics["dpo/accuracy"] == 0.5
    assert results[0].metrics["loss/total"] == pytest.approx(math.log(2))
    assert results[-1].metrics["dpo/accuracy"] == 1.0
    assert results[-1].metrics["dpo/margin"] > 0.03
    assert results[-1].metrics["loss/total"] < results[0].metrics["loss/total"] - 0.01
    assert results[-1].metrics["optimizer/grad_norm"] > 0
    assert model.weights_bytes() != before
    assert reference.logprobs(micro_batch, temperature=1.0).equal(first)
    assert model.module.training


def test_micro_batches_change_no_gradient_and_an_answer_is_computed_once(tiny_model: Path) -> None:
    found = {}
    for name, max_tokens in (("whole", 4096), ("parts", 8)):
        model, reference, settings = make(tiny_model, max_tokens_per_micro_batch=max_tokens)
        (result,) = steps(model, reference, settings)
        found[name] = {key: p.grad for key, p in model.trainable()}, result.metrics
    for name, gradient in found["whole"][0].items():
        assert torch.allclose(gradient, found["parts"][0][name], atol=1e-6), name
    assert found["whole"][1]["tokens/sequences"] == 5
    assert found["parts"][1]["tokens/sequences"] == 6
    for name in ("loss/total", "dpo/accuracy", "dpo/margin", "dpo/pairs", "dpo/score_diff"):
        assert found["parts"][1][name] == pytest.approx(found["whole"][1][name], abs=1e-6)


def test_mini_batches_are_optimizer_steps_on_different_pairs(tiny_model: Path) -> None:
    model, reference, settings = make(tiny_model, mini_batches=3)
    (result,) = steps(model, reference, settings)
    assert result.num_optimizer_steps == 3
    assert result.metrics["dpo/pairs"] == 3


def test_micro_batches_hold_the_budget_and_every_pair_once() -> None:
    batches = micro_batches(12)
    assert [one.token_ids.shape for one in batches] == [(2, 6), (2, 5), (2, 4)]
    assert sum(len(one.chosen) for one in batches) == 3
    assert micro_batches(1)[0].token_ids.shape[0] == 2, "a pair is never parted"


# ---- a job ----


async def outcome(lab: Any) -> list[tuple[int, str, dict[str, float]]]:
    return [(s.version, s.weights_sha256, s.metrics) for s in await lab.events("weights", StepTrained)]


SETTINGS: dict[str, Any] = {"kind": "dpo", "algorithm": DpoSettings(mini_batches=2)}


async def finished(lab: Any, model: ModelSettings, *, is_restarted: bool) -> JobSubmitted:
    """Three manifests, by one learner or by two in turn."""
    job = await lab.submit(model=model, **SETTINGS)
    first = await lab.plan_pairs(job, 2, seal=False)
    if is_restarted:
        await lab.work(lab.has(WeightsPublished, "weights", 3))
    await lab.plan_pairs(job, 1, first=2, previous=first)
    await lab.work(lab.has(JobSucceeded), lab.worker("second"))
    return job


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("keeps_checkpoints", [True, False], ids=["checkpoint", "none"])
def test_a_restart_finds_the_reference_again_and_comes_to_the_same_bits(
    pair_lab: Any, tmp_path: Path, lora: LoraSettings | None, keeps_checkpoints: bool
) -> None:
    async def scenario() -> None:
        model = ModelSettings(path=str(pair_lab.model), lora=lora, device="cpu")
        await finished(pair_lab, model, is_restarted=False)
        expected = await outcome(pair_lab)
        other = type(pair_lab)(tmp_path / "restarted", pair_lab.model)
        job = await other.submit(model=model, **SETTINGS)
        first = await other.plan_pairs(job, 2, seal=False)
        await other.work(other.has(WeightsPublished, "weights", 3))
        if not keeps_checkpoints:
            for path in (other.folder / "checkpoints").rglob("*.safetensors"):
                path.unlink()
        await other.plan_pairs(job, 1, first=2, previous=first)
        await other.work(other.has(JobSucceeded), other.worker("second"))
        assert await outcome(other) == expected
        assert [version for version, _, _ in expected] == [1, 2, 3]
        assert expected[0][2]["dpo/accuracy"] > 0.5, "the second mini-batch follows the first"
        assert expected[2][2]["dpo/margin"] > 0

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lora", "base_version", "revision"),
    [
        # Up to revision 5 a replay finds the base version again and computes the reference; since then it reads scores.
        pytest.param(None, 2, 5, id="full-computed"),
        pytest.param(LORA, 0, 5, id="lora-computed"),
        pytest.param(None, 0, NEWEST_REVISION, id="full"),
        pytest.param(LORA, 2, NEWEST_REVISION, id="lora"),
    ],
)
def test_a_replay_of_the_training_has_the_same_reference(
    pair_lab: Any, lora: LoraSettings | None, base_version: int, revision: int
) -> None:
    async def scenario() -> None:
        model = ModelSettings(path=str(pair_lab.model), lora=lora, device="cpu")
        if base_version:
            sft = await pair_lab.submit("sft", model=model, kind="sft", algorithm=SftSettings())
            await pair_lab.plan(sft, base_version)
            await pair_lab.work(pair_lab.has(JobSucceeded))
        job = await pair_lab.submit("rl", base_version=base_version, model=model, revision=revision, **SETTINGS)
        await pair_lab.plan_pairs(job, 3)
        await pair_lab.work(pair_lab.has(JobSucceeded, count=2 if base_version else 1))
        assert bool(await pair_lab.events("weights", ReferenceScored)) == (revision == NEWEST_REVISION)
        steps = {version: step for version, step in (await steps_of(pair_lab)).items() if step.job_id == job.job_id}
        assert sorted(steps) == [base_version + number for number in (1, 2, 3)]
        await assert_retrained(pair_lab, job, steps, first=base_version + 1)
        await assert_retrained(pair_lab, job, steps, first=base_version + 3)

    asyncio.run(scenario())


def test_a_batch_without_a_pair_yields_the_same_weights_and_a_warning(
    pair_lab: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        job = await pair_lab.submit(**SETTINGS)
        await pair_lab.plan_pairs(job, 1, is_flat=True)
        await pair_lab.work(pair_lab.has(JobSucceeded))
        (step,) = await pair_lab.events("weights", StepTrained)
        first, second = await pair_lab.events("weights", WeightsPublished)
        assert (step.num_optimizer_steps, step.metrics["dpo/pairs"]) == (0, 0.0)
        assert "loss/total" not in step.metrics
        assert first.weights_sha256 == second.weights_sha256
        assert (await pair_lab.events("jobs", JobSucceeded))[0].final_version == 1

    with caplog.at_level("WARNING", "rollstream.learner"):
        asyncio.run(scenario())
    assert "batch=run-1/rl/b000000 has no preference pair: version=1 changes nothing" in caplog.text


@pytest.mark.parametrize(("kind", "algorithm", "of"), [("dpo", "grpo", "rl"), ("rl", "dpo", "dpo")])
def test_a_kind_of_job_and_a_loss_that_do_not_fit_are_refused(
    pair_lab: Any, kind: str, algorithm: str, of: str
) -> None:
    async def scenario() -> None:
        await pair_lab.submit(kind=kind, algorithm={"grpo": GrpoSettings, "dpo": DpoSettings}[algorithm]())
        await pair_lab.work(pair_lab.has(JobFailed))
        (failed,) = await pair_lab.events("jobs", JobFailed)
        assert failed.error == f"job run-1/rl: algorithm {algorithm} is for {of} jobs, not for {kind}; choose another"

    asyncio.run(scenario())


def test_the_checkpoints_of_a_job_hold_no_second_model(pair_lab: Any) -> None:
    async def scenario() -> None:
        job = await finished(pair_lab, ModelSettings(path=str(pair_lab.model), device="cpu"), is_restarted=False)
        folder = CheckpointFolder(pair_lab.folder / "checkpoints", job.model_group)
        newest = folder.newest(job_id=job.job_id, max_version=99)
        assert newest is not None
        assert {name.split("/")[0] for name in newest.tensors} == {"weights", "optimizer", "random"}

    asyncio.run(scenario())
