"""Training on rows: what decides its bits and what does not."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rollstream.learner.algorithms.base import BatchView, Member, Prepared
from rollstream.learner.algorithms.builtin.grpo import Grpo
from rollstream.learner.algorithms.tokens import TokenBatch
from rollstream.learner.model import collate
from rollstream.learner.model.collate import Row
from rollstream.learner.model.optimizer import make_optimizer
from rollstream.learner.model.policy import PolicyModel, Reference, make_deterministic
from rollstream.learner.model.step import train_batch
from rollstream.schemas.algorithms import GrpoSettings
from rollstream.schemas.errors import ModelError
from rollstream.schemas.settings import JobSettings, LoraSettings, ModelSettings, OptimizerSettings


class Given(Grpo):
    """grpo with the rewards of members as advantages."""

    def prepare(self, batch: BatchView, settings: Any) -> Prepared:
        return Prepared(advantages=[batch.members[row.member].reward for row in batch.rows])


def rows(count: int = 8) -> BatchView:
    rng = random.Random(3)
    made: list[Row] = []
    members: list[Member] = []
    for _ in range(count):
        length = rng.randint(4, 12)
        mask = np.asarray([index > 1 and rng.random() < 0.6 for index in range(length)])
        mask[-1] = True
        logprobs = np.where(mask, -3.4 + 0.2 * np.asarray([rng.random() for _ in range(length)]), 0)
        ids = np.asarray([rng.randrange(32) for _ in range(length)], np.int32)
        made.append(Row(ids, mask, logprobs.astype(np.float32), len(members)))
        members.append(Member(reward=rng.choice([-1.0, 1.0])))
    return BatchView(made, members)


def padded() -> collate.MicroBatch:
    """All rows in one forward."""
    trained, units = collate.prepared_rows(rows(), Given().prepare(rows(), GrpoSettings()))
    return collate.pad(trained, units)


def trained(path: Path, *, times: int = 1, **algorithm: Any) -> tuple[PolicyModel, dict[str, float]]:
    """A model trained on the same rows so many times, and the metrics of the last time."""
    make_deterministic(1)
    settings = JobSettings(
        kind="rl",
        model=ModelSettings(path=str(path), device="cpu"),
        algorithm=GrpoSettings(**algorithm),
        optimizer=OptimizerSettings(learning_rate=1e-3, max_grad_norm=1e9),
    )
    model = PolicyModel(settings.model, seed=0)
    optimizer = make_optimizer(model.trainable(), settings.optimizer)
    metrics = dict[str, float]()
    for _ in range(times):
        metrics = train_batch(model, optimizer, rows(), Given(), settings, index=0, seed=1).metrics
    return model, metrics


def test_logprobs_and_entropies_are_those_of_a_plain_forward_of_each_row(tiny_model: Path) -> None:
    model = PolicyModel(ModelSettings(path=str(tiny_model), device="cpu"), seed=0)
    logprobs, entropies = model.completion_terms(padded(), temperature=0.7, entropy_needs_grad=False)
    wanted_logprobs, wanted_entropies = [], []
    for row in rows().rows:
        ids = torch.from_numpy(row.token_ids).long()
        table = torch.log_softmax(model.module(input_ids=ids[None]).logits[0] / 0.7, dim=-1)
        for place in np.flatnonzero(row.mask):
            wanted_logprobs.append(table[place - 1, ids[place]].item())
            wanted_entropies.append(-(table[place - 1].exp() * table[place - 1]).sum().item())
    assert logprobs.tolist() == pytest.approx(wanted_logprobs, abs=1e-5)
    assert entropies.tolist() == pytest.approx(wanted_entropies, abs=1e-5)


def test_micro_batches_change_no_gradient_and_no_metric(tiny_model: Path) -> None:
    whole, in_one = trained(tiny_model, max_tokens_per_micro_batch=4096)
    parts, in_parts = trained(tiny_model, max_tokens_per_micro_batch=24)
    for (name, one), (_, other) in zip(whole.trainable(), parts.trainable(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.allclose(one.grad, other.grad, atol=1e-6), name
    del in_one["tokens/padding"], in_parts["tokens/padding"]
    assert in_parts == pytest.approx(in_one, abs=1e-5)


def test_the_gradient_is_that_of_finite_differences(tiny_model: Path) -> None:
    model, _ = trained(tiny_model)
    settings = GrpoSettings()
    batch = padded()
    model.module.double()
    weight = model.module.model.norm.weight

    def loss() -> torch.Tensor:
        logprobs, entropies = model.completion_terms(batch, temperature=1.0, entropy_needs_grad=False)
        advantages = batch.advantages[batch.mask]
        tokens = TokenBatch(logprobs.double(), entropies, batch.logprobs[batch.mask].double(), advantages.double())
        return Given().loss(tokens, settings).values.mean()

    model.module.zero_grad()
    loss().backward()
    step = 1e-3
    with torch.no_grad():
        weight[3] += step
        above = loss().item()
        weight[3] -= 2 * step
        below = loss().item()
    assert weight.grad[3].item() == pytest.approx((above - below) / (2 * step), rel=2e-2, abs=1e-4)


def test_equal_inputs_give_equal_bytes_and_mini_batches_make_steps(tiny_model: Path) -> None:
    first, metrics = trained(tiny_model, mini_batches=3)
    second, _ = trained(tiny_model, mini_batches=3)
    one, _ = trained(tiny_model)
    assert first.weights_bytes() == second.weights_bytes() != one.weights_bytes()
    assert metrics["tokens/sequences"] == 8


def test_passes_over_a_batch_are_steps_on_its_rows_again(tiny_model: Path) -> None:
    again, last = trained(tiny_model, times=3)
    passes, of_all = trained(tiny_model, num_iterations=3)
    assert passes.weights_bytes() == again.weights_bytes()
    assert of_all["tokens/sequences"] == 3 * last["tokens/sequences"]


def test_grpo_raises_what_was_better_and_lowers_what_was_worse(tiny_model: Path) -> None:
    before = PolicyModel(ModelSettings(path=str(tiny_model), device="cpu"), seed=0)
    after, _ = trained(tiny_model)
    batch = padded()
    advantages = batch.advantages[batch.mask]
    old, _ = before.completion_terms(batch, temperature=1.0, entropy_needs_grad=False)
    new, _ = after.completion_terms(batch, temperature=1.0, entropy_needs_grad=False)
    assert ((new - old) * advantages).sum() > 0


@pytest.mark.parametrize(("revision", "rate"), [(1, 0.0), (2, 0.5)])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_last_step_of_a_schedule_trains(tiny_model: Path, schedule: Any, revision: Any, rate: float) -> None:
    settings = JobSettings(
        kind="rl",
        model=ModelSettings(path=str(tiny_model), device="cpu"),
        optimizer=OptimizerSettings(learning_rate=1.0, schedule=schedule),
        num_versions=2,
        revision=revision,
    )
    model = PolicyModel(settings.model, seed=0)
    optimizer = make_optimizer(model.trainable(), settings.optimizer)
    metrics = train_batch(model, optimizer, rows(), Given(), settings, index=1, seed=1).metrics
    assert metrics["optimizer/learning_rate"] == pytest.approx(rate)


def test_the_penalty_keeps_the_policy_near_its_base_version(tiny_model: Path) -> None:
    def divergence(kl_coefficient: float) -> list[float]:
        make_deterministic(1)
        settings = JobSettings(
            kind="rl",
            model=ModelSettings(path=str(tiny_model), device="cpu"),
            algorithm=GrpoSettings(kl_coefficient=kl_coefficient),
            optimizer=OptimizerSettings(learning_rate=3e-3),
        )
        model = PolicyModel(settings.model, seed=0)
        reference = Reference(model, model.weights_bytes(), "the base version")
        optimizer = make_optimizer(model.trainable(), settings.optimizer)
        steps = [
            train_batch(model, optimizer, rows(), Given(), settings, index=n, seed=n, reference=reference)
            for n in range(6)
        ]
        return [step.metrics["policy/kl_reference"] for step in steps]

    free, held = divergence(1e-9), divergence(10.0)
    assert free[0] == held[0] == pytest.approx(0.0, abs=1e-6)
    assert 0 < held[-1] < free[-1] / 2


def test_tied_weights_are_written_once(tiny_model: Path) -> None:
    model = PolicyModel(ModelSettings(path=str(tiny_model), device="cpu"), seed=0)
    assert "lm_head.weight" not in model.weights()
    assert list(model.weights()) == sorted(model.weights())


def test_adapters_begin_as_their_seed_says(tiny_model: Path) -> None:
    settings = ModelSettings(path=str(tiny_model), device="cpu", lora=LoraSettings(rank=2))
    assert PolicyModel(settings, seed=1).weights_bytes() == PolicyModel(settings, seed=1).weights_bytes()
    assert PolicyModel(settings, seed=1).weights_bytes() != PolicyModel(settings, seed=2).weights_bytes()


def test_adapters_on_modules_that_are_not_there_are_refused(tiny_model: Path) -> None:
    settings = ModelSettings(path=str(tiny_model), device="cpu", lora=LoraSettings(target_modules=("nothing",)))
    with pytest.raises(ModelError, match=r"cannot have the adapter of model\.lora"):
        PolicyModel(settings, seed=0)


def test_weights_of_another_model_are_refused(tiny_model: Path) -> None:
    model = PolicyModel(ModelSettings(path=str(tiny_model), device="cpu"), seed=0)
    with pytest.raises(ModelError, match="weights do not fit"):
        model.load_weights({"x": torch.zeros(1)})


class _Waits(TorchDispatchMode):
    """Counts what makes the host wait for a GPU: scalars that are read, and shapes that depend on values."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket
        is_mask = name is torch.ops.aten.index and any(one is not None and one.dtype == torch.bool for one in args[1])
        reads = (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.masked_select)
        self.count += is_mask or name in reads
        return func(*args, **(kwargs or {}))


def waits_of(tiny_model: Path, rows: int) -> int:
    """Of one step whose micro-batches have a row each."""
    settings = JobSettings(
        kind="rl",
        model=ModelSettings(path=str(tiny_model), device="cpu"),
        algorithm=GrpoSettings(max_tokens_per_micro_batch=1),
        revision=5,
    )
    model = PolicyModel(settings.model, seed=0)
    optimizer = make_optimizer(model.trainable(), settings.optimizer)
    ids = np.arange(8, dtype=np.int32)
    given = [Row(ids + n, ids > 3, np.where(ids > 3, -3.4, 0).astype(np.float32), n) for n in range(rows)]
    batch = BatchView(given, [Member("g", "agent", reward=float(n % 2)) for n in range(rows)])
    with _Waits() as waits:
        train_batch(model, optimizer, batch, Grpo(), settings, index=0, seed=0)
    return waits.count


def test_a_micro_batch_reads_nothing_back_from_the_device(tiny_model: Path) -> None:
    assert waits_of(tiny_model, 8) == waits_of(tiny_model, 4) > 0
