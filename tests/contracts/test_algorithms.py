"""Contract of every algorithm: the built-in ones, and two of one file each that the project does not know."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollstream.learner.algorithms import table
from rollstream.learner.algorithms.base import Algorithm, BatchView, Prepared, Row
from rollstream.learner.tiny_model import make_tiny_model
from rollstream.schemas.algorithms import BUILT_IN
from rollstream.schemas.policy_gradient import OffPolicySettings, PolicyGradientSettings
from rollstream.schemas.revisions import NEWEST_REVISION
from tests.contracts.algorithms import OTHERS, TAIL, Case, case_of, close
from tests.rigs.default_type import default_type

JUDGE_ROWS_ALONE = {"expert_iteration", "kto", "ppo", "rae"}
"""They compare a reward with a bound or with earlier batches, not with those of its group."""
WITHOUT_ADVANTAGES = {"dpo", "expert_iteration", "malt", "opd", "opsd", "sft"}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    return make_tiny_model(folder, hidden_size=16, num_layers=1, intermediate_size=32)


@pytest.fixture(params=[*table.names(), *OTHERS])
def case(request: pytest.FixtureRequest, model_folder: Path) -> Case:
    return case_of(request.param, model_folder)


def test_loss_gradient_and_metrics_are_finite_and_the_weights_change(case: Case) -> None:
    grads, result, _ = case.train(case.batch)
    assert result.num_optimizer_steps == 1
    assert "loss/total" in result.metrics
    assert all(np.isfinite(value) for value in result.metrics.values())
    assert all(value.isfinite().all() for value in grads.values())
    assert any(value.abs().max() > 0 for value in grads.values())


def test_masked_tokens_have_no_effect(case: Case) -> None:
    def noisy(row: Row) -> Row:
        ids, logprobs = row.token_ids.copy(), row.logprobs.copy()
        ids[-TAIL:] = 7
        logprobs[~row.mask] = -3.0
        return replace(row, token_ids=ids, logprobs=logprobs)

    batch = case.batch
    grads, result, weights = case.train(batch)
    others, same, equal = case.train(replace(batch, rows=[noisy(row) for row in batch.rows]))
    assert result.metrics == same.metrics
    assert weights == equal
    assert all(value.equal(others[name]) for name, value in grads.items())


def test_tokens_that_prepare_does_not_keep_are_not_trained(case: Case) -> None:
    class Keeping(Algorithm):
        """The algorithm, which keeps all but the last token of each row."""

        def prepare(self, batch: BatchView, settings: Any) -> Prepared:
            return replace(case.algorithm.prepare(batch, settings), keep=[~last_of(row) for row in batch.rows])

        loss: Any = case.algorithm.loss
        metrics: Any = case.algorithm.metrics

    def last_of(row: Row) -> Any:
        found = np.zeros_like(row.mask)
        found[row.mask.nonzero()[0][-1]] = row.mask.sum() > 1
        return found

    batch = case.batch
    shorter = [replace(row, mask=row.mask & ~last_of(row)) for row in batch.rows]
    _, result, weights = case.train(batch, Keeping())
    _, masked, equal = case.train(replace(batch, rows=shorter))
    assert weights == equal
    assert result.metrics == masked.metrics
    assert result.metrics["tokens/completion"] < case.train(batch)[1].metrics["tokens/completion"]


def test_rewards_that_are_equal_give_no_gradient_where_rewards_count(case: Case) -> None:
    batch = case.batch
    flat = replace(batch, members=[replace(member, reward=0.25, rewards={"a": 0.25}) for member in batch.members])
    if batch.pairs is not None:
        _, result, _ = case.train(replace(flat, pairs=[], score_diffs=[]))
        assert (result.num_optimizer_steps, result.num_tokens) == (0, 0)
        return
    grads, _, weights = case.train(flat)
    if case.settings.name in JUDGE_ROWS_ALONE:
        assert any(value.abs().max() > 0 for value in grads.values())
    elif case.settings.needs.rewards:
        assert all(value.abs().max() == 0 for value in grads.values())
    else:
        assert weights == case.train(batch)[2], "rewards play no part"


def test_advantages_of_0_give_no_gradient(case: Case) -> None:
    advantages: list[Any] = []

    class Even(Algorithm):
        """The algorithm with an advantage of 0 for every token."""

        def prepare(self, batch: BatchView, settings: Any) -> Prepared:
            prepared = case.algorithm.prepare(batch, settings)
            advantages.extend(prepared.advantages)
            return replace(prepared, advantages=[np.zeros_like(one) for one in prepared.advantages])

        loss: Any = case.algorithm.loss
        metrics: Any = case.algorithm.metrics

    grads, _, _ = case.train(case.batch, Even())
    has_gradient = any(value.abs().max() > 0 for value in grads.values())
    assert has_gradient == (not advantages), "only losses without advantages have a gradient"
    assert advantages or case.settings.name in WITHOUT_ADVANTAGES


def test_micro_batches_change_no_gradient_and_no_metric(case: Case) -> None:
    grads, whole, _ = case.train(case.batch)
    others, parts, _ = case.train(case.batch, max_tokens_per_micro_batch=1)
    assert close(grads, others)
    counts = ("padding", "sequences", "completion", "total", "computed", "packing_ratio")
    names = whole.metrics.keys() - {f"tokens/{count}" for count in counts}
    if case.settings.needs.pairs:
        names -= {"policy/entropy"}  # of an answer of two pairs it counts once a micro-batch
    assert {name: parts.metrics[name] for name in names} == pytest.approx(
        {name: whole.metrics[name] for name in names}, rel=1e-4, abs=1e-6
    )


def test_the_order_of_the_rows_changes_nothing_but_rounding(case: Case) -> None:
    batch = case.batch
    order = [4, 0, 3, 5, 2, 1]
    new_index = {old: new for new, old in enumerate(order)}
    pairs = (
        None
        if batch.pairs is None
        else [(new_index[better], new_index[worse]) for better, worse in reversed(batch.pairs)]
    )
    shuffled = replace(batch, rows=[batch.rows[old] for old in order], pairs=pairs)
    grads, one, _ = case.train(batch)
    others, other, _ = case.train(shuffled)
    assert close(grads, others)
    assert other.metrics == pytest.approx(one.metrics, rel=1e-4, abs=1e-6)


def test_mini_batches_are_optimizer_steps_and_equal_input_gives_equal_weights(case: Case) -> None:
    _, result, weights = case.train(case.batch, mini_batches=2)
    assert result.num_optimizer_steps == 2
    assert weights == case.train(case.batch, mini_batches=2)[2] != case.train(case.batch)[2]


def test_a_model_that_is_loaded_meanwhile_decides_no_bit(case: Case) -> None:
    """Transformers replaces torch's default type in the whole process while another thread loads a bfloat16 model."""
    odd: dict[str, Any] = {"k_positive": 2.1, "k_negative": 3.1, "lambda_positive": 3.1, "lambda_negative": 2.1}
    changes = odd if case.settings.name == "vespo" else {}  # its own are numbers of bfloat16 too
    _, alone, weights = case.train(case.batch, **changes)
    _, beside, others = replace(case, around=lambda: default_type(torch.bfloat16)).train(case.batch, **changes)
    assert weights == others
    assert alone.metrics == beside.metrics


def test_every_pass_over_a_batch_has_mini_batches_of_its_own(case: Case) -> None:
    _, once, single = case.train(case.batch, mini_batches=2)
    _, result, weights = case.train(case.batch, mini_batches=2, num_iterations=3)
    assert result.num_optimizer_steps == 6
    assert result.num_tokens == 3 * once.num_tokens
    assert weights == case.train(case.batch, mini_batches=2, num_iterations=3)[2] != single
    assert result.metrics["tokens/completion"] == 3 * once.metrics["tokens/completion"]


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_without_the_entropy_the_weights_are_the_same(case: Case, mini_batches: int) -> None:
    _, result, weights = case.train(case.batch, mini_batches=mini_batches)
    _, without, equal = case.train(case.batch, mini_batches=mini_batches, calculate_entropy=False)
    assert equal == weights
    metrics = {name: value for name, value in result.metrics.items() if name != "policy/entropy"}
    assert without.metrics == metrics


@pytest.mark.parametrize("factor", [0.0, 0.5])
def test_weights_are_factors_of_token_losses(model_folder: Path, factor: float) -> None:
    case = case_of(OTHERS[0], model_folder)

    class Weighted(Algorithm):
        def prepare(self, batch: BatchView, settings: Any) -> Prepared:
            return replace(case.algorithm.prepare(batch, settings), weights=[factor] * len(batch.rows))

        loss: Any = case.algorithm.loss
        metrics: Any = case.algorithm.metrics

    grads, _, _ = case.train(case.batch)
    weighted, _, _ = case.train(case.batch, Weighted())
    assert close({key: factor * value for key, value in grads.items()}, weighted)


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_the_host_waits_for_the_device_twice_an_optimizer_step_and_for_no_micro_batch(
    case: Case, mini_batches: int
) -> None:
    """It waits for the sums, because a step without finite ones is skipped, and for the gradient's norm for the same
    reason.
    """
    changes: dict[str, Any] = {"mini_batches": mini_batches, "max_tokens_per_micro_batch": 1}
    if isinstance(case.settings, PolicyGradientSettings):
        level = "sequence" if case.settings.name == "gspo" else "token"
        correction = OffPolicySettings(level=level, reject="k2", reject_above=1.0)
        changes |= {"off_policy": correction, "off_policy_mask_threshold": 1.0}
    case.train(case.batch, revision=NEWEST_REVISION, **changes)
    assert case.waits == {"reads a list": mini_batches, "reads a number": mini_batches}


POLICY_GRADIENTS = [name for name, settings in BUILT_IN.items() if issubclass(settings, PolicyGradientSettings)]


@pytest.mark.parametrize("name", POLICY_GRADIENTS)
def test_every_policy_gradient_masks_bad_sequences_that_the_policy_has_left(model_folder: Path, name: str) -> None:
    case = case_of(name, model_folder)
    if name == "mix":
        case = replace(case, settings=case.settings.model_copy(update={"ce": 0.0, "ref_kl": 0.0}))
    if "clip_low" in type(case.settings).model_fields:  # else what is masked has been clipped before
        case = replace(case, settings=case.settings.model_copy(update={"clip_low": 0.9}))
    rows = [replace(row, logprobs=(row.logprobs + 0.3 * row.mask).astype(np.float32)) for row in case.batch.rows]
    below = 0.0 if name == "max_rl" else 0.5  # some below 0, for ppo and rae
    members = [replace(one, reward=one.reward - below) for one in case.batch.members]
    kept = replace(case.batch, rows=rows, members=members)
    grads, result, _ = case.train(kept, off_policy_mask_threshold=1e9)
    same, plain, _ = case.train(kept)
    assert all(value.equal(same[other]) for other, value in grads.items())
    assert result.metrics == {**plain.metrics, "off_policy/masked": 0.0}
    masked, result, _ = case.train(kept, off_policy_mask_threshold=1e-9)
    assert 0 < result.metrics["off_policy/masked"] < 1
    assert not close(grads, masked)
    with_both, _, _ = case.train(kept, off_policy_mask_threshold=1e-9, off_policy=OffPolicySettings(clip_max=None))
    assert all(value.isfinite().all() for value in with_both.values())


@pytest.mark.parametrize("name", POLICY_GRADIENTS)
def test_every_policy_gradient_can_be_corrected_for_other_policies(model_folder: Path, name: str) -> None:
    case = case_of(name, model_folder)
    level = "sequence" if name == "gspo" else "token"
    correction = OffPolicySettings(level=level, mode="truncate", clip_min=0.8, clip_max=1.2)
    grads, result, weights = case.train(case.batch, off_policy=correction, mini_batches=2)
    assert {"off_policy/ess", "off_policy/kl", "off_policy/clipped"} <= result.metrics.keys()
    assert 0 < result.metrics["off_policy/clipped"] <= 1
    assert weights == case.train(case.batch, off_policy=correction, mini_batches=2)[2]
    assert weights != case.train(case.batch, mini_batches=2)[2]
    whole, _, _ = case.train(case.batch, off_policy=correction)
    parts, _, _ = case.train(case.batch, off_policy=correction, max_tokens_per_micro_batch=1)
    assert close(whole, parts)
    rejecting = correction.model_copy(update={"reject": "k2", "reject_above": 1e-9})
    rejected, _, _ = case.train(case.batch, off_policy=rejecting)
    assert all(not value.any() for value in rejected.values())
    assert not close(grads, rejected)
