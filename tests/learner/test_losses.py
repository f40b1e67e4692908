"""Losses and their metrics against numbers worked out by hand."""

import math

import pytest
import torch

from rollstream.learner import grpo, sft
from rollstream.learner.token_batch import TokenBatch
from rollstream.schemas.settings import AlgorithmSettings

SETTINGS = AlgorithmSettings(clip_low=0.2, clip_high=0.3)


def batch(ratios: list[float], advantages: list[float], entropy: float = 1.0) -> TokenBatch:
    behaviour = torch.full((len(ratios),), -2.0)
    current = (behaviour + torch.tensor(ratios).log()).requires_grad_()
    return TokenBatch(current, torch.full((len(ratios),), entropy), behaviour, torch.tensor(advantages))


def test_grpo_clips_each_side_by_its_own_bound() -> None:
    found = grpo.losses(batch([1.0, 2.0, 2.0, 0.5, 0.5], [1.0, 1.0, -1.0, 1.0, -1.0]), SETTINGS)
    assert found.losses_N.tolist() == pytest.approx([-1.0, -1.3, 2.0, -0.5, 0.8])


def test_grpo_gives_no_gradient_where_it_clips() -> None:
    given = batch([1.0, 2.0, 2.0, 0.5, 0.5], [1.0, 1.0, -1.0, 1.0, -1.0])
    grpo.losses(given, SETTINGS).losses_N.sum().backward()
    assert given.logprobs_N.grad is not None
    assert given.logprobs_N.grad.tolist() == pytest.approx([-1.0, 0.0, 2.0, -0.5, 0.0])


def test_grpo_tells_kl_clipping_and_effective_sample_size() -> None:
    found = grpo.losses(batch([1.0, 2.0, 0.5, 0.5], [1.0, 1.0, -1.0, 1.0]), SETTINGS)
    metrics = grpo.metrics({name: float(value) for name, value in found.sums.items()}, 4)
    k3 = [0.0, 1 - math.log(2), -0.5 + math.log(2), -0.5 + math.log(2)]
    assert metrics["policy/kl"] == pytest.approx(sum(k3) / 4, abs=1e-6)
    assert metrics["clip/low"] == 0.25
    assert metrics["clip/high"] == 0.25
    assert metrics["policy/ess"] == pytest.approx(4.0**2 / (4 * 5.5))
    assert metrics["policy/entropy"] == 1.0
    assert metrics["loss/total"] == pytest.approx((-1.0 - 1.3 + 0.8 - 0.5) / 4)


def test_an_on_policy_batch_has_no_kl_and_all_of_its_samples() -> None:
    found = grpo.losses(batch([1.0, 1.0], [1.0, -1.0]), SETTINGS)
    metrics = grpo.metrics({name: float(value) for name, value in found.sums.items()}, 2)
    assert metrics["policy/ess"] == 1.0
    assert metrics["policy/kl"] == 0.0
    assert metrics["loss/total"] == 0.0


@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("behaviour", [-9999.0, -120.0])
def test_a_token_that_was_all_but_impossible_spoils_no_gradient(advantage: float, behaviour: float) -> None:
    given = batch([1.0, 1.0], [advantage, 1.0])._replace(behaviour_N=torch.tensor([behaviour, -2.0]))
    found = grpo.losses(given, SETTINGS)
    found.losses_N.sum().backward()
    assert given.logprobs_N.grad is not None
    assert given.logprobs_N.grad.tolist() == pytest.approx([0.0, -1.0])
    assert all(value.isfinite() for value in found.sums.values())


def test_a_reference_that_is_far_away_spoils_no_gradient() -> None:
    settings = SETTINGS.model_copy(update={"kl_coefficient": 0.5})
    current = torch.tensor([-150.0, -2.0], requires_grad=True)
    given = batch([1.0, 1.0], [1.0, 1.0])._replace(logprobs_N=current, reference_N=torch.tensor([-1.0, -2.0]))
    found = grpo.losses(given, settings)
    found.losses_N.sum().backward()
    assert current.grad is not None
    assert current.grad.isfinite().all()
    assert all(value.isfinite() for value in found.sums.values())


def test_the_entropy_bonus_lowers_the_loss() -> None:
    settings = SETTINGS.model_copy(update={"entropy_coefficient": 0.1})
    assert grpo.losses(batch([1.0], [1.0], entropy=3.0), settings).losses_N.tolist() == pytest.approx([-1.3])


def test_the_penalty_is_the_divergence_from_the_reference_and_has_a_gradient() -> None:
    settings = SETTINGS.model_copy(update={"kl_coefficient": 0.5})
    given = batch([1.0, 1.0], [1.0, 1.0])
    given = given._replace(reference_N=torch.tensor([-2.0, -2.0 + math.log(3)]))
    found = grpo.losses(given, settings)
    k3 = 3 - 1 - math.log(3)
    assert found.losses_N.tolist() == pytest.approx([-1.0, -1.0 + 0.5 * k3])
    found.losses_N.sum().backward()
    assert given.logprobs_N.grad is not None
    assert given.logprobs_N.grad.tolist() == pytest.approx([-1.0, -1.0 + 0.5 * (1 - 3)])
    metrics = grpo.metrics({name: float(value) for name, value in found.sums.items()}, 2)
    assert metrics["policy/kl_reference"] == pytest.approx(k3 / 2)
    assert "kl_reference" not in grpo.losses(given, SETTINGS).sums


def test_sft_is_the_negative_log_likelihood_whatever_the_advantage() -> None:
    found = sft.losses(batch([1.0, 0.5], [7.0, -7.0]), SETTINGS)
    assert found.losses_N.tolist() == pytest.approx([2.0, 2.0 + math.log(2)])
    assert sft.metrics({"loss": 4.0, "entropy": 6.0}, 2) == {"loss/total": 2.0, "policy/entropy": 3.0}
