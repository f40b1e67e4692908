"""Steps that come to nothing: a loss that is not finite is skipped, memory that runs out halves the micro-batches."""

import asyncio
import json
import logging
import math
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollstream.eventlog import codec
from rollstream.learner.algorithms.base import BatchView, Member, Row
from rollstream.learner.algorithms.builtin.dpo import Dpo
from rollstream.learner.algorithms.builtin.grpo import Grpo
from rollstream.learner.algorithms.tokens import Losses, TokenBatch
from rollstream.learner.model import tree_attention
from rollstream.learner.model.memory import KeptBudget, MemoryHeldError, MicroBatchBudget
from rollstream.learner.model.optimizer import make_optimizer
from rollstream.learner.model.policy import PolicyModel, Reference
from rollstream.learner.model.step import train_batch
from rollstream.schemas.algorithms import CustomSettings, DpoSettings, GrpoSettings
from rollstream.schemas.errors import ModelError, RunFailedError, is_out_of_memory
from rollstream.schemas.events import JobFailed, JobSucceeded, StepTrained, WeightsPublished
from rollstream.schemas.events.rollouts import Completion, VersionSpan
from rollstream.schemas.permissions import Permissions
from rollstream.schemas.policy_gradient import OffPolicySettings
from rollstream.schemas.settings import JobSettings, ModelSettings, OptimizerSettings
from tests.rigs.runs.retrained import assert_retrained, steps_of
from tests.rigs.runs.step_rows import rows
from tests.rigs.services.process_group import with_libraries
from tests.rigs.toy_cispo import Cispo

SKIPPED = "optimizer/skipped_steps"


def odd_loss(monkeypatch: pytest.MonkeyPatch, share: int) -> None:
    """The loss of every mini-batch whose tokens `share` divides becomes NaN: what is odd depends on the data alone."""
    plain = Grpo.loss

    def loss(self: Grpo, tokens: TokenBatch, settings: Any) -> Losses:
        found = plain(self, tokens, settings)
        return found._replace(values=found.values * float("nan")) if len(tokens.logprobs_N) % share == 0 else found

    monkeypatch.setattr(Grpo, "loss", loss)


@pytest.mark.parametrize("first", [1, 4])
def test_a_step_that_is_not_finite_is_skipped_and_replays_so(
    lab: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, first: int
) -> None:
    odd_loss(monkeypatch, 3)

    async def scenario() -> None:
        optimizer = OptimizerSettings(learning_rate=1e-2, max_skipped_steps=50)
        job = await lab.submit(num_versions=6, optimizer=optimizer, algorithm=GrpoSettings(mini_batches=4))
        await lab.plan(job, 6)
        with caplog.at_level(logging.WARNING):
            await lab.work(lab.has(JobSucceeded))
        steps = await steps_of(lab)
        skipped = {version: int(step.metrics.get(SKIPPED, 0)) for version, step in steps.items()}
        assert 0 < sum(skipped.values()) < 24
        for version, step in steps.items():
            assert step.num_optimizer_steps == 4 - skipped[version]
        assert caplog.text.count("optimizer step skipped") == sum(skipped.values())
        await assert_retrained(lab, job, steps, first=first)

    asyncio.run(scenario())


@pytest.mark.parametrize("restarts", [False, True])
def test_too_many_skipped_steps_in_a_row_end_the_job_also_across_a_restart(
    lab: Any, monkeypatch: pytest.MonkeyPatch, restarts: bool
) -> None:
    odd_loss(monkeypatch, 1)

    async def scenario() -> None:
        job = await lab.submit(num_versions=6, optimizer=OptimizerSettings(max_skipped_steps=3))
        planned = await lab.plan(job, 2, seal=False)
        if restarts:
            await lab.work(lab.has(StepTrained, "weights", 2))
        await lab.plan(job, 4, first=2, previous=codec.content_digest(planned[-1]))
        await lab.work(lab.has(JobFailed))
        steps, published = await steps_of(lab), await lab.events("weights", WeightsPublished)
        assert sorted(steps) == [1, 2, 3]
        assert all(step.num_optimizer_steps == 0 for step in steps.values())
        assert len({one.weights_sha256 for one in published}) == 1
        failed = (await lab.events("jobs", JobFailed))[0]
        assert "is nan after 3 skipped steps in a row" in failed.error
        assert "lower optimizer.learning_rate" in failed.error

    asyncio.run(scenario())


@pytest.mark.parametrize(("mini_batches", "limit", "last"), [(1, 40, 32), (4, 20, 16)])
def test_memory_that_runs_out_halves_the_micro_batches_and_replays_so(
    lab: Any, monkeypatch: pytest.MonkeyPatch, mini_batches: int, limit: int, last: int
) -> None:
    """Without and with a pass for the proximal policy, the second version has no more than the first ended with."""
    plain = PolicyModel.completion_terms

    def completion_terms(self: PolicyModel, batch: Any, **options: Any) -> Any:
        if batch.num_computed > limit and len(batch.lengths) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return plain(self, batch, **options)

    async def scenario() -> None:
        off_policy = OffPolicySettings(level="token", mode="truncate")
        algorithm = GrpoSettings(mini_batches=mini_batches, max_tokens_per_micro_batch=256, off_policy=off_policy)
        job = await lab.submit(algorithm=algorithm)
        await lab.plan(job)
        with monkeypatch.context() as patched:
            patched.setattr(PolicyModel, "completion_terms", completion_terms)
            await lab.work(lab.has(JobSucceeded))
        steps = await steps_of(lab)
        assert steps[1].micro_batch_tokens[-1] == last
        assert set(steps[2].micro_batch_tokens) == set(steps[3].micro_batch_tokens) == {last}
        await assert_retrained(lab, job, steps)
        without = {version: step.model_copy(update={"micro_batch_tokens": ()}) for version, step in steps.items()}
        with pytest.raises(AssertionError):  # so the division does decide bits
            await assert_retrained(lab, job, without)

    asyncio.run(scenario())


def test_memory_that_runs_out_in_the_loss_of_a_users_algorithm_halves_the_micro_batches(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Cispo.loss

    def loss(self: Cispo, tokens: TokenBatch, settings: Any) -> Losses:
        if len(tokens.lengths_B) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return plain(self, tokens, settings)

    async def scenario() -> None:
        monkeypatch.setattr(Cispo, "loss", loss)
        name = "python:tests.rigs.toy_cispo.Cispo"
        job = await lab.submit(num_versions=1, algorithm=CustomSettings(name=name))
        await lab.plan(job, 1)
        await lab.work(lab.has(JobSucceeded), lab.worker(permissions=Permissions.of([f"model:{lab.model}", name], {})))
        (step,) = (await steps_of(lab)).values()
        assert step.micro_batch_tokens
        assert step.num_optimizer_steps == 1

    asyncio.run(scenario())


def limited(path: str, length: int, sender: Any) -> None:
    """Train, in a process of its own, far more than its memory holds."""
    torch.set_num_threads(1)
    settings = JobSettings(
        kind="rl",
        model=ModelSettings(path=path, device="cpu"),
        algorithm=GrpoSettings(max_tokens_per_micro_batch=1 << 20),
    )
    model = PolicyModel(settings.model, seed=0)
    mask = np.arange(length) > 1
    made = [
        Row(np.full(length, index % 32, np.int32), mask, np.where(mask, -3.4, 0).astype(np.float32), index)
        for index in range(1024)
    ]
    batch = BatchView(made, [Member(f"g{index // 8}", reward=float(index % 2)) for index in range(1024)])
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (120 << 20), resource.RLIM_INFINITY))
    optimizer = make_optimizer(model.trainable(), settings.optimizer)
    result = train_batch(model, optimizer, batch, Grpo(), settings, index=0, seed=0)
    sender.send((result.num_optimizer_steps, result.micro_batch_tokens))


def test_memory_that_really_runs_out_halves_the_micro_batches(tiny_model: Path) -> None:
    context = with_libraries()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=limited, args=(str(tiny_model), 64, sender))
    process.start()
    sender.close()
    steps, passes = receiver.recv()
    process.join()
    assert steps == 1
    assert 0 < passes[0] < 1 << 20


def test_a_row_that_does_not_fit_ends_the_job_with_the_remedy() -> None:
    def work(tokens: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    with pytest.raises(RunFailedError, match=r"out of memory with one row or pair .*train an adapter"):
        MicroBatchBudget(64).run(work, 1)
    recorded = MicroBatchBudget(64)
    recorded.begin((16,))
    with pytest.raises(RunFailedError, match="micro-batches of 16 tokens, with which the version was trained"):
        recorded.run(work, 8)


def test_a_version_recorded_without_a_budget_uses_the_jobs() -> None:
    def work(tokens: int) -> int:
        if tokens > 32:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return tokens

    budget = MicroBatchBudget(64)
    budget.begin()
    assert budget.run(work, 8) == 32
    assert budget.of_batch() == (32,)
    budget.begin(())
    assert budget.run(lambda tokens: tokens, 8) == 64
    assert budget.of_batch() == ()


def test_of_several_processes_the_one_without_memory_leaves_half_of_the_budget_to_the_next(tmp_path: Path) -> None:
    def work(tokens: int) -> int:
        if tokens > 16:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return tokens

    def begun(recorded: tuple[int, ...] | None = None, given: int = 64, job_id: str = "r/rl") -> MicroBatchBudget:
        first, follower = MicroBatchBudget(given, halves=False), MicroBatchBudget(given, halves=False)
        first.keep(KeptBudget(tmp_path / "tokens.json", job_id))
        first.begin(recorded)
        follower.begin_as(json.loads(json.dumps(first.to_others())))
        return follower

    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            begun().run(work, 8)
    assert begun().run(work, 8) == 16
    for others in (begun(()), begun(given=32), begun(job_id="r/other")):  # no row fits into what is recorded or given
        with pytest.raises(RunFailedError, match="out of memory with"):
            others.run(work, 1)
    assert begun().run(work, 8) == 16


def test_of_several_processes_each_ends_where_a_learner_has_no_memory_for_a_recorded_pass() -> None:
    def work(tokens: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    first, follower = MicroBatchBudget(64, halves=False, restarts=True), MicroBatchBudget(64, halves=False)
    first.begin((16,))
    follower.begin_as(json.loads(json.dumps(first.to_others())))
    for budget in (first, follower):
        with pytest.raises(MemoryHeldError, match="with micro-batches of 16 tokens, where the version"):
            budget.run(work, 1)


def test_memory_that_runs_out_in_the_optimizer_step_ends_the_job_with_the_remedy(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(self: torch.optim.Optimizer, closure: None = None) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    async def scenario() -> None:
        job = await lab.submit()
        await lab.plan(job)
        monkeypatch.setattr(torch.optim.AdamW, "step", step)
        await lab.work(lab.has(JobFailed))
        failed = (await lab.events("jobs", JobFailed))[0]
        assert "out of memory in the optimizer step (CUDA out of memory. Tried to allocate 20.00 MiB)" in failed.error
        assert "set optimizer.kind to adamw_8bit" in failed.error

    asyncio.run(scenario())


def test_memory_that_runs_out_as_a_tree_is_tried_is_not_taken_for_a_model_without_trees(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hidden_states(decoder: Any, tree: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    monkeypatch.setattr(tree_attention, "hidden_states", hidden_states)
    with pytest.raises(ModelError, match=r"does not fit into memory \(CUDA out of memory"):
        PolicyModel(ModelSettings(path=str(tiny_model), device="cpu"), seed=0)


@pytest.mark.parametrize(("revision", "share"), [(6, 0.5), (7, 1.0)])
def test_metrics_of_pairs_leave_out_those_of_a_skipped_step(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, revision: Any, share: float
) -> None:
    plain, seen = Dpo.loss, list[int]()

    def loss(self: Dpo, tokens: TokenBatch, settings: Any) -> Losses:
        seen.append(len(tokens.chosen_K))
        found = plain(self, tokens, settings)
        return found._replace(values=found.values * float("nan")) if len(seen) == 1 else found

    monkeypatch.setattr(Dpo, "loss", loss)
    algorithm, model = DpoSettings(mini_batches=2), ModelSettings(path=str(tiny_model), device="cpu")
    settings = JobSettings(kind="dpo", model=model, algorithm=algorithm, revision=revision)
    policy = PolicyModel(settings.model, seed=0)
    batch = BatchView(rows().rows, rows().members, [(0, 1), (2, 3), (4, 5), (6, 7)], [1.0] * 4)
    options: Any = {"index": 0, "seed": 0, "reference": Reference(policy, policy.weights_bytes(), "the base version")}
    optimizer = make_optimizer(policy.trainable(), settings.optimizer)
    result = train_batch(policy, optimizer, batch, Dpo(), settings, **options)
    assert (seen, result.metrics[SKIPPED]) == ([2, 2], 1.0)
    assert result.metrics["loss/total"] == pytest.approx(share * math.log(2))


def test_other_errors_are_not_taken_for_want_of_memory() -> None:
    def work(tokens: int) -> None:
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        MicroBatchBudget(64).run(work, 8)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError())
    assert not is_out_of_memory(RuntimeError("shape mismatch"))

    class Unreadable(RuntimeError):
        def __str__(self) -> str:
            raise SystemExit(3)

    assert not is_out_of_memory(Unreadable())


class AcceleratorError(RuntimeError):
    """As torch raises it where a call of CUDA's own fails."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported later"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate"), True),
        (AcceleratorError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"), False),
        (RuntimeError("Triton Error [CUDA]: device-side assert triggered"), False),
        (RuntimeError("out of resource: shared memory, Required: 262144"), False),
        (ValueError("the agent's answer: I am out of memory"), False),
    ],
    ids=lambda one: None if isinstance(one, bool) else str(one)[:40],
)
def test_want_of_memory_is_known_by_the_message(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


@pytest.mark.parametrize("revision", [5, 9])
def test_an_engine_that_samples_otherwise_at_the_trained_version_sets_off_the_alarm(
    lab: Any, caplog: pytest.LogCaptureFixture, revision: int
) -> None:
    plain = lab.trajectory

    def sampled(job: Any, index: int, position: int, **options: Any) -> Any:
        """Add the version that sampled each token: for half of them an earlier one."""
        made = plain(job, index, position, **options)
        version = index - position % 2 if index else 0

        def spanned(part: Completion) -> Completion:
            span = VersionSpan(model_group=job.model_group, version=version, length=part.length)
            return part.model_copy(update={"spans": (span,)})

        sequences = tuple(
            one.model_copy(update={"completions": tuple(map(spanned, one.completions))}) for one in made.sequences
        )
        return made.model_copy(update={"sequences": sequences})

    lab.trajectory = sampled

    async def scenario() -> None:
        job = await lab.submit(revision=revision)
        await lab.plan(job)
        with caplog.at_level(logging.WARNING):
            await lab.work(lab.has(JobSucceeded))
        steps = await steps_of(lab)
        assert steps[1].metrics["drift/tokens"] == 0.0
        assert 0 < steps[2].metrics["drift/tokens"] < 1
        assert steps[1].metrics["mismatch/kl_k3"] > 0.01
        ages = {name: value for name, value in steps[2].metrics.items() if name.startswith("staleness/tokens_")}
        assert bool(ages) == (revision >= 9)
        if ages:
            old, num_tokens = ages["staleness/tokens_1"], steps[2].metrics["tokens/completion"]
            assert 0 < old < num_tokens == sum(ages.values()) == ages["staleness/tokens_0"] + old
        assert "engine and learner differ at version=0 of model_group=run-1/main" in caplog.text
        await assert_retrained(lab, job, steps)

    asyncio.run(scenario())
