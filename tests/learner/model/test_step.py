"""Training on rows: what decides its bits and what does not."""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollstream.learner.algorithms.advantages import normaliser_of
from rollstream.learner.algorithms.base import BatchView, KeptRow, Member, Prepared
from rollstream.learner.algorithms.builtin.grpo import Grpo
from rollstream.learner.algorithms.tokens import TokenBatch
from rollstream.learner.model import collate
from rollstream.learner.model.collate import Row
from rollstream.learner.model.optimizer import make_optimizer
from rollstream.learner.model.policy import PolicyModel, Reference, make_deterministic
from rollstream.learner.model.step import train_batch
from rollstream.schemas.algorithms import GrpoSettings
from rollstream.schemas.errors import ModelError, RunFailedError
from rollstream.schemas.revisions import NEWEST_REVISION
from rollstream.schemas.settings import JobSettings, LoraSettings, ModelSettings, OptimizerSettings
from tests.rigs.runs.step_rows import Given, padded, rows, trained
from tests.rigs.waits import counted_waits


class OfRowLengths(Given):
    """The same, divided as `aggregation` says."""

    def prepare(self, batch: BatchView, settings: Any) -> Prepared:
        return replace(super().prepare(batch, settings), normaliser=normaliser_of(settings, batch))


def test_logprobs_and_entropies_are_those_of_a_plain_forward_of_each_row(tiny_model: Path) -> None:
    model = PolicyModel(ModelSettings(path=str(tiny_model), device="cpu"), seed=0)
    logprobs, entropies = model.completion_terms(padded(), temperature=0.7, entropy_needs_grad=False)
    wanted_logprobs, wanted_entropies = [], []
    for row in rows().rows:
        ids = torch.from_numpy(row.token_ids).long()
        table = torch.log_softmax(model.module(input_ids=ids[None]).logits[0] / 0.7, dim=-1)
        for position in np.flatnonzero(row.mask):
            wanted_logprobs.append(table[position - 1, ids[position]].item())
            wanted_entropies.append(-(table[position - 1].exp() * table[position - 1]).sum().item())
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


@pytest.mark.parametrize(("revision", "factor"), [(9, 2.0), (10, 1.0)])
def test_a_constant_counts_for_the_rows_of_each_mini_batch(tiny_model: Path, revision: Any, factor: float) -> None:
    """Two rows are two mini-batches at most, however many are asked for; a recorded job divides as it did."""

    def norm(mini_batches: int) -> float:
        make_deterministic(1)
        settings = JobSettings(
            kind="rl",
            model=ModelSettings(path=str(tiny_model), device="cpu"),
            algorithm=GrpoSettings(aggregation="constant", aggregation_length=8, mini_batches=mini_batches),
            revision=revision,
        )
        model = PolicyModel(settings.model, seed=0)
        optimizer = make_optimizer(model.trainable(), settings.optimizer)
        result = train_batch(model, optimizer, rows(2), OfRowLengths(), settings, index=0, seed=1)
        return result.metrics["optimizer/grad_norm"]

    assert norm(4) == pytest.approx(factor * norm(2), rel=1e-3)


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


def test_a_job_that_may_vary_leaves_the_process_fit_for_one_that_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    make_deterministic(1, deterministic=False)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8", "torch reads it at the first product on a GPU alone"
    assert not torch.are_deterministic_algorithms_enabled()
    make_deterministic(1)
    assert torch.are_deterministic_algorithms_enabled()


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


def test_adapters_are_initialized_from_their_seed(tiny_model: Path) -> None:
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


KEPT = KeptRow(np.where(np.arange(8) > 3, 2, 0), np.asarray([4, 9, 5, 9, 6, 9, 7, 9], np.int32))


def waits_of(tiny_model: Path, *, by_logits: bool, revision: Any, kept: KeptRow | None) -> Counter[str]:
    """Waits of one step whose micro-batches have a row each."""
    settings = JobSettings(
        kind="rl",
        model=ModelSettings(path=str(tiny_model), device="cpu"),
        algorithm=GrpoSettings(max_tokens_per_micro_batch=1),
        revision=revision,
    )
    model = PolicyModel(settings.model, seed=0)
    model.selects_logprobs &= not by_logits
    optimizer = make_optimizer(model.trainable(), settings.optimizer)
    ids = np.arange(8, dtype=np.int32)
    logprobs = np.where(ids > 3, -3.4, 0).astype(np.float32)
    given = [Row(ids, ids > 3, logprobs, n, kept=kept) for n in range(4)]
    batch = BatchView(given, [Member("g", "agent", reward=float(n % 2)) for n in range(4)])
    with counted_waits(optimizer) as waits:
        train_batch(model, optimizer, batch, Grpo(), settings, index=0, seed=0)
    return waits


@pytest.mark.parametrize("kept", [None, KEPT])
def test_recorded_ids_make_nobody_wait(tiny_model: Path, kept: KeptRow | None) -> None:
    waits = waits_of(tiny_model, by_logits=False, revision=9, kept=kept)
    assert waits == {"reads a list": 1, "reads a number": 1}


@pytest.mark.parametrize("kept", [None, KEPT])
@pytest.mark.parametrize("by_logits", [False, True])
def test_padded_rows_wait_once_a_micro_batch_in_the_masks_of_transformers(
    tiny_model: Path, by_logits: bool, kept: KeptRow | None
) -> None:
    waits = waits_of(tiny_model, by_logits=by_logits, revision=3, kept=kept)
    assert waits == {"reads a list": 1, "reads a number": 1 + 4}


def test_a_micro_batch_moves_whole() -> None:
    """A column that is left behind would be noticed on a GPU alone."""
    train = [
        collate.TrainRow(
            replace(
                one, kept=KeptRow(np.ones(len(one.token_ids), np.int64), one.token_ids), scores={"reference": ones}
            ),
            one.mask,
            weight=0.5,
            components={"rl": 1.0},
        )
        for one in rows(2).rows
        for ones in (np.ones(len(one.token_ids), np.float32),)
    ]
    for shares in (False, True):
        batch = collate.pad(train, [(0, 1)], versions=True, shares=shares)
        assert all(getattr(batch, one.name) is not None for one in fields(batch) if one.name not in ("tree", "columns"))
        found = list(tensors(batch.to(torch.device("meta"))))
        assert len(found) == len(list(tensors(batch))) > 15
        assert all(one.device.type == "meta" for one in found)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """All that a record holds, however deep."""
    if isinstance(value, torch.Tensor):
        yield value
    elif is_dataclass(value):
        for one in fields(value):
            yield from tensors(getattr(value, one.name))
    elif isinstance(value, dict | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from tensors(one)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_rewards_whose_advantages_float32_does_not_hold_fail_the_job_which_an_older_one_skipped(
    tiny_model: Path,
) -> None:
    algorithm, model = GrpoSettings(advantage="group_mean"), ModelSettings(path=str(tiny_model), device="cpu")
    policy = PolicyModel(model, seed=0)
    made = rows()
    batch = replace(made, members=[replace(one, rollout_id="g/m", reward=one.reward * 1e150) for one in made.members])

    def train(revision: Any) -> Any:
        settings = JobSettings(kind="rl", model=model, algorithm=algorithm, revision=revision)
        optimizer = make_optimizer(policy.trainable(), settings.optimizer)
        return train_batch(policy, optimizer, batch, Grpo(), settings, index=0, seed=0)

    assert train(13).metrics["optimizer/skipped_steps"] == 1
    with pytest.raises(
        RunFailedError, match=r"rollout g/m .* the reward -?1e\+150 and the advantage .*scale the rewards"
    ):
        train(NEWEST_REVISION)
