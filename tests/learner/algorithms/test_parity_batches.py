"""Losses of whole mini-batches against numpy float64: divisors, entropy, and the weights that `prepare` gives."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from rollstream.learner.algorithms.base import BatchView, Member, Normaliser, Row
from rollstream.learner.algorithms.builtin.expert_iteration import ExpertIteration
from rollstream.learner.algorithms.builtin.grpo import Grpo
from rollstream.learner.algorithms.builtin.malt import Malt
from rollstream.learner.algorithms.builtin.sft import Sft
from rollstream.learner.algorithms.tokens import Losses, TokenBatch
from rollstream.learner.model.aggregation import aggregated
from rollstream.learner.model.logprobs import Head, selected_logprobs
from rollstream.schemas.algorithms import ExpertIterationSettings, GrpoSettings, MaltSettings, SftSettings
from tests.rigs.parity_log import log_difference

LENGTHS = (3, 1, 4)
ROW_OF = np.repeat(np.arange(3), LENGTHS)
RNG = np.random.default_rng(11)
CURRENT, BEHAVIOUR, PROXIMAL, ENTROPIES = RNG.normal(-2.0, 0.5, (4, 8))
ADVANTAGES = np.array([1.5, -0.5, -1.0])[ROW_OF]
WEIGHTS = np.array([0.5, 2.0, 1.5])[ROW_OF]


def double(values: Any, *, grad: bool = False) -> Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.float64, requires_grad=grad)


def tokens(current: Tensor, entropies: Tensor | None = None, **columns: Any) -> TokenBatch:
    entropies = double(ENTROPIES) if entropies is None else entropies
    made = TokenBatch(current, entropies, double(BEHAVIOUR), double(ADVANTAGES))
    return made._replace(rows_N=torch.tensor(ROW_OF), lengths_B=LENGTHS, **columns)


def divisors(by: str) -> np.ndarray:
    """Divisor of each token's loss, from the papers that docs/algorithms.md names."""
    if by == "tokens":  # DAPO, arXiv 2503.14476, equation 8: 1 / sum |o_i|
        return np.full(8, 8.0)
    if by == "sequences":  # GRPO, arXiv 2402.03300, equation 3: 1 / G, 1 / |o_i|
        return 3.0 * np.array(LENGTHS)[ROW_OF]
    return np.full(8, 3 * 16.0)  # Dr. GRPO, arXiv 2503.20783: 1 / (G max_length)


@pytest.mark.parametrize("by", ["tokens", "sequences", "constant"])
def test_an_aggregation_gives_loss_and_gradient_of_its_equation(by: Literal["tokens", "sequences", "constant"]) -> None:
    values = RNG.normal(0.0, 1.0, 8)
    current = double(values, grad=True)
    count = {"tokens": 8.0, "sequences": 3.0, "constant": 48.0}[by]
    batch = tokens(current, weights_N=double(WEIGHTS))
    loss = aggregated(Losses(current, {}), batch, Normaliser(by), count)
    loss.backward()
    shares = WEIGHTS / divisors(by)
    assert current.grad is not None
    log_difference(f"aggregation {by}", "loss", loss.item(), (values * shares).sum())
    log_difference(f"aggregation {by}", "gradient", current.grad, shares)
    assert loss.item() == pytest.approx(float((values * shares).sum()), rel=1e-12)
    assert current.grad.tolist() == pytest.approx(shares.tolist(), rel=1e-12)


@pytest.mark.parametrize("by", ["tokens", "sequences", "constant"])
def test_grpo_of_a_mini_batch_is_the_papers_equation(by: Literal["tokens", "sequences", "constant"]) -> None:
    options: dict[str, Any] = {"aggregation_length": 16} if by == "constant" else {}
    settings = GrpoSettings(aggregation=by, **options)
    rows = [Row(np.zeros(n + 1, np.int32), np.arange(n + 1) > 0, np.zeros(n + 1, np.float32)) for n in LENGTHS]
    members = [Member(group_id="g", reward=float(n)) for n in LENGTHS]
    normaliser = Grpo().prepare(BatchView(rows, members), settings).normaliser
    count = {"tokens": 8.0, "sequences": 3.0, "row_length": 3 * normaliser.value}[normaliser.by]
    current = double(CURRENT, grad=True)
    loss = aggregated(Grpo().loss(tokens(current), settings), tokens(current), normaliser, count)
    loss.backward()
    ratios = np.exp(CURRENT - BEHAVIOUR)
    free, bounded = ratios * ADVANTAGES, np.clip(ratios, 0.8, 1.28) * ADVANTAGES
    gradient = np.where(free <= bounded, -free, 0.0) / divisors(by)
    assert current.grad is not None
    log_difference(f"grpo batch {by}", "loss", loss.item(), (-np.minimum(free, bounded) / divisors(by)).sum())
    log_difference(f"grpo batch {by}", "gradient", current.grad, gradient)
    assert loss.item() == pytest.approx(float((-np.minimum(free, bounded) / divisors(by)).sum()), rel=1e-12)
    assert current.grad.tolist() == pytest.approx(gradient.tolist(), rel=1e-12)


def test_the_entropy_bonus_has_the_gradient_of_the_softmaxs_entropy() -> None:
    """d H / d z_v = -p_v (log p_v + H), z the logits over the temperature; the loss has -c H."""
    hidden, weight = RNG.normal(0, 1, (8, 5)), RNG.normal(0, 1, (11, 5))
    targets = RNG.integers(0, 11, 8)
    states = double(hidden, grad=True)
    current, entropies = selected_logprobs(
        states, Head(double(weight)), torch.tensor(targets), 0.7, entropy_needs_grad=True
    )
    assert entropies is not None
    batch = tokens(current, entropies)
    settings = GrpoSettings(entropy_coefficient=0.3)
    loss = aggregated(Grpo().loss(batch, settings), batch, Normaliser("tokens"), 8.0)
    loss.backward()
    logits = hidden @ weight.T / 0.7
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    p, at = np.exp(log_p), log_p[np.arange(8), targets]
    entropy = -(p * log_p).sum(axis=1, keepdims=True)
    ratios = np.exp(at - BEHAVIOUR)
    free, bounded = ratios * ADVANTAGES, np.clip(ratios, 0.8, 1.28) * ADVANTAGES
    of_logprob = np.where(free <= bounded, -free, 0.0)[:, None]
    of_logits = of_logprob * (np.eye(11)[targets] - p) + 0.3 * p * (log_p + entropy)
    assert states.grad is not None
    log_difference("entropy bonus", "loss", loss.item(), (-np.minimum(free, bounded) - 0.3 * entropy[:, 0]).mean())
    log_difference("entropy bonus", "gradient", states.grad, of_logits @ weight / 0.7 / 8)
    assert loss.item() == pytest.approx(float((-np.minimum(free, bounded) - 0.3 * entropy[:, 0]).mean()), rel=1e-12)
    assert states.grad.flatten().tolist() == pytest.approx((of_logits @ weight / 0.7 / 8).flatten().tolist(), rel=1e-9)


def imitated(rewards: Sequence[float], settings: ExpertIterationSettings) -> tuple[list[bool], list[float]]:
    """Whether each row is kept, and its weight, according to `prepare`."""
    rows = [
        Row(np.zeros(n + 1, np.int32), np.arange(n + 1) > 0, np.zeros(n + 1, np.float32), member)
        for member, n in enumerate(LENGTHS)
    ]
    members = [Member(agent="v", reward=reward) for reward in rewards]
    found = ExpertIteration().prepare(BatchView(rows, members), settings)
    weights = [float(np.mean(one)) for one in found.weights] or [1.0] * 3
    return [bool(one.all()) for one in found.keep], weights


@pytest.mark.parametrize("selection", ["threshold", "weighted"])
def test_expert_iteration_is_the_weighted_negative_log_likelihood(selection: Literal["threshold", "weighted"]) -> None:
    """-sum f_i log p / sum |o_i| over the kept rollouts; f is 1, or (w + e / n) n / (1 + e), w the share of reward."""
    rewards = np.array([0.2, 0.95, 1.0])
    settings = ExpertIterationSettings(selection=selection)
    if selection == "threshold":
        factors = np.array([0.0, 1.0, 1.0])
    else:
        above = rewards - rewards.min()
        factors = (above / above.sum() + 0.01 / 3) * 3 / 1.01
    keep, weights = imitated(rewards.tolist(), settings)
    chosen = np.array(keep)[ROW_OF]
    assert keep == [factor > 0 for factor in factors]
    current = double(CURRENT[chosen], grad=True)
    parts = double(np.array(weights)[ROW_OF][chosen])
    lengths = tuple(n for n, is_kept in zip(LENGTHS, keep, strict=True) if is_kept)
    batch = TokenBatch(current, torch.zeros_like(current), current.detach(), current.detach(), lengths_B=lengths)
    batch = batch._replace(weights_N=parts)
    loss = aggregated(Sft().loss(batch, SftSettings()), batch, Normaliser(), float(chosen.sum()))
    loss.backward()
    shares = factors[ROW_OF][chosen] / chosen.sum()
    assert current.grad is not None
    log_difference(f"expert_iteration {selection}", "loss", loss.item(), -(shares * CURRENT[chosen]).sum())
    log_difference(f"expert_iteration {selection}", "gradient", current.grad, -shares)
    assert loss.item() == pytest.approx(float(-(shares * CURRENT[chosen]).sum()), rel=1e-12)
    assert current.grad.tolist() == pytest.approx((-shares).tolist(), rel=1e-12)


@pytest.mark.parametrize("reference", ["iteration", "base"])
@pytest.mark.parametrize("average", [False, True])
def test_malt_is_dpo_against_the_policy_of_the_iteration(
    reference: Literal["iteration", "base"], average: bool
) -> None:
    """-log sigmoid(beta h) + c NLL(chosen), h the difference of the answers' log-ratios (arXiv 2305.18290, equation 7).

    Pairs: row 0 above row 1, row 2 above row 0.
    """
    settings = MaltSettings(reference=reference, beta=0.4, sft_weight=0.2, average_logprobs=average)
    current = double(CURRENT, grad=True)
    batch = tokens(current, reference_N=double(BEHAVIOUR), proximal_N=double(PROXIMAL))
    found = Malt().loss(batch._replace(chosen_K=(0, 2), rejected_K=(1, 0)), settings).values
    found.sum().backward()
    other = PROXIMAL if reference == "iteration" else BEHAVIOUR
    lengths = np.array(LENGTHS)
    scale = 1 / lengths if average else np.ones(3)
    log_ratios = scale * np.bincount(ROW_OF, CURRENT - other)
    nll = -np.bincount(ROW_OF, CURRENT) / lengths
    losses, gradient = [], np.zeros(3)
    for chosen, rejected in ((0, 1), (2, 0)):
        p = 1 / (1 + np.exp(-0.4 * (log_ratios[chosen] - log_ratios[rejected])))
        losses.append(-np.log(p) + 0.2 * nll[chosen])
        gradient[chosen] -= 0.4 * (1 - p) * scale[chosen] + 0.2 / lengths[chosen]
        gradient[rejected] += 0.4 * (1 - p) * scale[rejected]
    assert current.grad is not None
    log_difference(f"malt {reference}", "loss", found.tolist(), losses)
    log_difference(f"malt {reference}", "gradient", current.grad, gradient[ROW_OF])
    assert found.tolist() == pytest.approx(losses, rel=1e-12)
    assert current.grad.tolist() == pytest.approx(gradient[ROW_OF].tolist(), rel=1e-12)
