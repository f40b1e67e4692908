"""Losses and their metrics against numbers worked out by hand."""

import math

import pytest
import torch

from rollstream.learner.algorithms.base import Counts
from rollstream.learner.algorithms.builtin.grpo import Grpo
from rollstream.learner.algorithms.builtin.sft import Sft
from rollstream.learner.algorithms.tokens import TokenBatch
from rollstream.schemas.algorithms import GrpoSettings, SftSettings

SETTINGS = GrpoSettings(clip_low=0.2, clip_high=0.3)


def batch(ratios: list[float], advantages: list[float], entropy: float = 1.0) -> TokenBatch:
    behaviour = torch.full((len(ratios),), -2.0)
    current = (behaviour + torch.tensor(ratios).log()).requires_grad_()
    return TokenBatch(current, torch.full((len(ratios),), entropy), behaviour, torch.tensor(advantages))


def test_grpo_clips_each_side_by_its_own_bound() -> None:
    found = Grpo().loss(batch([1.0, 2.0, 2.0, 0.5, 0.5], [1.0, 1.0, -1.0, 1.0, -1.0]), SETTINGS)
    assert found.values.tolist() == pytest.approx([-1.0, -1.3, 2.0, -0.5, 0.8])


def test_grpo_gives_no_gradient_where_it_clips() -> None:
    given = batch([1.0, 2.0, 2.0, 0.5, 0.5], [1.0, 1.0, -1.0, 1.0, -1.0])
    Grpo().loss(given, SETTINGS).values.sum().backward()
    assert given.logprobs_N.grad is not None
    assert given.logprobs_N.grad.tolist() == pytest.approx([-1.0, 0.0, 2.0, -0.5, 0.0])


def test_grpo_reports_kl_clipping_and_effective_sample_size() -> None:
    found = Grpo().loss(batch([1.0, 2.0, 0.5, 0.5], [1.0, 1.0, -1.0, 1.0]), SETTINGS)
    metrics = Grpo().metrics({name: float(value) for name, value in found.sums.items()}, Counts(4, 1, 0))
    k3 = [0.0, 1 - math.log(2), -0.5 + math.log(2), -0.5 + math.log(2)]
    assert metrics["policy/kl"] == pytest.approx(sum(k3) / 4, abs=1e-6)
    assert metrics["clip/low"] == 0.25
    assert metrics["clip/high"] == 0.25
    assert metrics["policy/ess"] == pytest.approx(4.0**2 / (4 * 5.5))
    assert metrics["policy/entropy"] == 1.0
    assert metrics["loss/total"] == pytest.approx((-1.0 - 1.3 + 0.8 - 0.5) / 4)


def test_an_on_policy_batch_has_no_kl_and_all_of_its_samples() -> None:
    found = Grpo().loss(batch([1.0, 1.0], [1.0, -1.0]), SETTINGS)
    metrics = Grpo().metrics({name: float(value) for name, value in found.sums.items()}, Counts(2, 1, 0))
    assert metrics["policy/ess"] == 1.0
    assert metrics["policy/kl"] == 0.0
    assert metrics["loss/total"] == 0.0


@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("behaviour", [-9999.0, -120.0])
def test_a_token_that_was_all_but_impossible_spoils_no_gradient(advantage: float, behaviour: float) -> None:
    given = batch([1.0, 1.0], [advantage, 1.0])._replace(behaviour_N=torch.tensor([behaviour, -2.0]))
    found = Grpo().loss(given, SETTINGS)
    found.values.sum().backward()
    assert given.logprobs_N.grad is not None
    assert given.logprobs_N.grad.tolist() == pytest.approx([0.0, -1.0])
    assert all(value.isfinite() for value in found.sums.values())


def test_a_reference_that_is_far_away_spoils_no_gradient() -> None:
    settings = SETTINGS.model_copy(update={"kl_coefficient": 0.5})
    current = torch.tensor([-150.0, -2.0], requires_grad=True)
    given = batch([1.0, 1.0], [1.0, 1.0])._replace(logprobs_N=current, reference_N=torch.tensor([-1.0, -2.0]))
    found = Grpo().loss(given, settings)
    found.values.sum().backward()
    assert current.grad is not None
    assert current.grad.isfinite().all()
    assert all(value.isfinite() for value in found.sums.values())


def test_the_entropy_bonus_lowers_the_loss() -> None:
    settings = SETTINGS.model_copy(update={"entropy_coefficient": 0.1})
    assert Grpo().loss(batch([1.0], [1.0], entropy=3.0), settings).values.tolist() == pytest.approx([-1.3])


def test_the_penalty_is_the_divergence_from_the_reference_and_has_a_gradient() -> None:
    settings = SETTINGS.model_copy(update={"kl_coefficient": 0.5})
    given = batch([1.0, 1.0], [1.0, 1.0])
    given = given._replace(reference_N=torch.tensor([-2.0, -2.0 + math.log(3)]))
    found = Grpo().loss(given, settings)
    k3 = 3 - 1 - math.log(3)
    assert found.values.tolist() == pytest.approx([-1.0, -1.0 + 0.5 * k3])
    found.values.sum().backward()
    assert given.logprobs_N.grad is not None
    assert given.logprobs_N.grad.tolist() == pytest.approx([-1.0, -1.0 + 0.5 * (1 - 3)])
    metrics = Grpo().metrics({name: float(value) for name, value in found.sums.items()}, Counts(2, 1, 0))
    assert metrics["policy/kl_reference"] == pytest.approx(k3 / 2)
    assert "kl_reference" not in Grpo().loss(given, SETTINGS).sums


DUAL = SETTINGS.model_copy(update={"dual_clip": 3.0})


def test_dual_clip_bounds_the_loss_of_negative_advantages_and_reports_its_share() -> None:
    given = batch([2.0, 4.0, 4.0, 1.0], [-1.0, -0.5, 1.0, -1.0])
    found = Grpo().loss(given, DUAL)
    assert found.values.tolist() == pytest.approx([2.0, 1.5, -1.3, 1.0])
    found.values.sum().backward()
    assert given.logprobs_N.grad is not None
    assert given.logprobs_N.grad.tolist() == pytest.approx([2.0, 0.0, 0.0, 1.0])
    metrics = Grpo().metrics({name: float(value) for name, value in found.sums.items()}, Counts(4, 1, 0))
    assert metrics["clip/dual"] == 0.25
    assert "clip_dual" not in Grpo().loss(batch([4.0], [-1.0]), SETTINGS).sums


@pytest.mark.parametrize("log_ratio", [4.0, 6.0, 8.0])
def test_one_token_far_off_the_behaviour_policy_does_not_rule_the_gradient(log_ratio: float) -> None:
    def share(settings: GrpoSettings) -> float:
        given = batch([1.0] * 8191 + [math.exp(log_ratio)], [1.0, -1.0] * 4096)
        Grpo().loss(given, settings).values.sum().backward()
        assert given.logprobs_N.grad is not None
        weights = given.logprobs_N.grad.abs()
        return float(weights[-1] / weights[:64].sum())

    assert share(SETTINGS) > 0.8
    assert share(DUAL) == 0.0


@pytest.mark.parametrize("is_unbiased", [True, False])
def test_the_gradient_of_the_penalty_is_that_of_the_divergence_only_with_its_ratio(is_unbiased: bool) -> None:
    logits = torch.tensor([0.3, -0.2, 0.9], requires_grad=True)
    behaviour = torch.tensor([0.5, 0.3, 0.2]).log()
    reference = torch.tensor([0.2, 0.2, 0.6]).log()
    settings = GrpoSettings(kl_coefficient=1.0, unbiased_kl=is_unbiased)
    current = torch.log_softmax(logits, dim=0)
    given = TokenBatch(current, torch.zeros(3), behaviour, torch.zeros(3), reference)
    expected_loss = (behaviour.exp() * Grpo().loss(given, settings).values).sum()  # over the behaviour policy
    (estimated,) = torch.autograd.grad(expected_loss, logits, retain_graph=True)
    (exact,) = torch.autograd.grad((current.exp() * (current - reference)).sum(), logits)
    assert torch.allclose(estimated, exact, atol=1e-6) == is_unbiased


def test_sft_is_the_negative_log_likelihood_whatever_the_advantage() -> None:
    found = Sft().loss(batch([1.0, 0.5], [7.0, -7.0]), SftSettings())
    assert found.values.tolist() == pytest.approx([2.0, 2.0 + math.log(2)])
    assert Sft().metrics({"loss": 4.0, "entropy": 6.0}, Counts(2, 1, 0)) == {"loss/total": 2.0, "policy/entropy": 3.0}
