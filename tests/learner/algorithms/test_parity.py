"""Losses and gradients against numpy float64, written from the papers' equations."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rollstream.learner.algorithms import table
from rollstream.learner.algorithms.base import BatchView, Member, Row
from rollstream.learner.algorithms.builtin.cispo import Cispo
from rollstream.learner.algorithms.builtin.dpo import PairBatch, loss_of
from rollstream.learner.algorithms.builtin.dppo import Dppo
from rollstream.learner.algorithms.builtin.grpo import Grpo
from rollstream.learner.algorithms.builtin.gspo import Gspo
from rollstream.learner.algorithms.builtin.kto import Kto
from rollstream.learner.algorithms.builtin.opd import Opd
from rollstream.learner.algorithms.builtin.opsd import Opsd
from rollstream.learner.algorithms.builtin.sapo import Sapo
from rollstream.learner.algorithms.builtin.sft import Sft
from rollstream.learner.algorithms.builtin.vespo import Vespo
from rollstream.learner.algorithms.tokens import TokenBatch
from rollstream.schemas.algorithms import (
    CispoSettings,
    DpoSettings,
    DppoSettings,
    GrpoSettings,
    GspoSettings,
    KtoSettings,
    OpdSettings,
    OpsdSettings,
    SapoSettings,
    SftSettings,
    VespoSettings,
)
from rollstream.schemas.errors import RunFailedError
from rollstream.schemas.events.rollouts import Completion
from rollstream.schemas.permissions import Permissions
from rollstream.schemas.policy_gradient import (
    ClippedSettings,
    GdpoSettings,
    MaxRlSettings,
    PpoSettings,
    RaeSettings,
    ReinforcePpSettings,
)
from tests.rigs.parity_log import log_difference

LENGTHS = (3, 1, 4)
ROW_OF = np.repeat(np.arange(3), LENGTHS)
RNG = np.random.default_rng(4)
CURRENT, BEHAVIOUR = RNG.normal(-2.0, 0.5, 8), RNG.normal(-2.0, 0.5, 8)
ADVANTAGES = np.array([1.5, -0.5, -1.0])[ROW_OF]
TEACHER = RNG.normal(-2.0, 0.5, 8)
RATIOS = np.exp(CURRENT - BEHAVIOUR)
Wanted = Callable[[], tuple[np.ndarray, np.ndarray]]


def grpo() -> tuple[np.ndarray, np.ndarray]:
    """J = min(r A, clip(r, 0.8, 1.28) A) (arXiv 2402.03300, equation 3, with the bounds of arXiv 2503.14476)."""
    free, bounded = RATIOS * ADVANTAGES, np.clip(RATIOS, 0.8, 1.28) * ADVANTAGES
    is_free = free <= bounded
    assert 0 < is_free.sum() < 8
    return -np.minimum(free, bounded), np.where(is_free, -free, 0.0)


def grpo_dual_clip() -> tuple[np.ndarray, np.ndarray]:
    """max(J, 1.1 A) where A < 0 (arXiv 1912.09729, equation 5)."""
    losses, gradient = grpo()
    is_bounded = (ADVANTAGES < 0) & (losses > -1.1 * ADVANTAGES)
    assert is_bounded.any()
    return np.where(is_bounded, -1.1 * ADVANTAGES, losses), np.where(is_bounded, 0.0, gradient)


def with_kl(plain: Wanted, *, by_row: bool = False) -> Wanted:
    """J - 0.2 (q / p - log(q / p) - 1) (arXiv 2402.03300, equation 4); here q is the behaviour policy as well."""
    odds = 1 / RATIOS
    return penalised(plain, 0.2 * (odds - np.log(odds) - 1), 0.2 * (1 - odds), by_row=by_row)


def with_unbiased_kl(plain: Wanted, *, by_row: bool = False) -> Wanted:
    """The same estimate weighted by the ratio (arXiv 2512.02556, section 3.1), whose gradient is that of r log r."""
    slopes = RATIOS * np.log(RATIOS)
    return penalised(plain, 0.2 * (1 + slopes - RATIOS), 0.2 * slopes, by_row=by_row)


def penalised(plain: Wanted, penalties: np.ndarray, slopes: np.ndarray, *, by_row: bool) -> Wanted:
    """Added by token, or as means over the tokens of a sequence."""

    def wanted() -> tuple[np.ndarray, np.ndarray]:
        losses, gradient = plain()
        if not by_row:
            return losses + penalties, gradient + slopes
        means = np.array([penalties[row == ROW_OF].mean() for row in range(len(LENGTHS))])
        return losses + means, gradient + slopes / np.array(LENGTHS)[ROW_OF]

    return wanted


def sft() -> tuple[np.ndarray, np.ndarray]:
    """-log p."""
    return -CURRENT, -np.ones(8)


def cispo() -> tuple[np.ndarray, np.ndarray]:
    """J = 1 / sum |o_i| * sum sg(min(r, 1 + high)) A log p (arXiv 2506.13585, equation 4), high = 0.3."""
    weights = np.minimum(RATIOS, 1.3) * ADVANTAGES
    return -weights * CURRENT, -weights


def gspo() -> tuple[np.ndarray, np.ndarray]:
    """J_i = min(s_i A_i, clip(s_i) A_i), s_i = (p / p_old)^(1 / |y_i|) (arXiv 2507.18071, equations 5 and 7)."""
    losses, gradient = [], []
    for row, length in enumerate(LENGTHS):
        is_own = row == ROW_OF
        s = np.prod(RATIOS[is_own]) ** (1 / length)
        a = ADVANTAGES[is_own][0]
        bounded = min(max(s, 0.63), 1.3)
        losses.append(-min(s * a, bounded * a))
        gradient += [-s * a / length if s * a <= bounded * a else 0.0] * length
    assert [any(gradient[:3]), any(gradient[3:4]), any(gradient[4:])] == [False, True, False], "above, within, below"
    return np.array(losses), np.array(gradient)


def dppo_tv() -> tuple[np.ndarray, np.ndarray]:
    """J = sum M min(r, 2) A (arXiv 2602.04879, equation 12), |p - q| > 0.03 where A moves p away from q; C = 2."""
    p, q = np.exp(CURRENT), np.exp(BEHAVIOUR)
    return of_mask((np.abs(p - q) > 0.03) & ((p > q) == (ADVANTAGES > 0)))


def dppo_kl() -> tuple[np.ndarray, np.ndarray]:
    """The same, with q log(q / p) + (1 - q) log((1 - q) / (1 - p)) > 0.005."""
    p, q = np.exp(CURRENT), np.exp(BEHAVIOUR)
    divergence = q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))
    return of_mask((divergence > 0.005) & ((p > q) == (ADVANTAGES > 0)))


def of_mask(is_masked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    assert 0 < is_masked.sum() < 8
    weights = np.where(is_masked, 0, np.minimum(RATIOS, 2.0)) * ADVANTAGES
    return -weights * CURRENT, -weights


def sapo() -> tuple[np.ndarray, np.ndarray]:
    """J = sum f(r) A, f(r) = sigmoid(t (r - 1)) 4 / t (arXiv 2511.20347)."""
    t = np.where(ADVANTAGES > 0, 1.0, 1.5)
    gate = 1 / (1 + np.exp(-t * (RATIOS - 1)))
    return -gate * 4 / t * ADVANTAGES, -4 * gate * (1 - gate) * RATIOS * ADVANTAGES


def vespo() -> tuple[np.ndarray, np.ndarray]:
    """J = sum sg(w^k exp(l (1 - w))) A log p, w the product of the sequence's ratios (TRL, `loss_type: vespo`)."""
    w = np.array([np.prod(RATIOS[row == ROW_OF]) for row in range(3)])[ROW_OF]
    k, lam = (np.where(ADVANTAGES >= 0, *both) for both in ((2.0, 3.0), (3.0, 2.0)))
    weights = w**k * np.exp(lam * (1 - w)) * ADVANTAGES
    return -weights * CURRENT, -weights


def kto() -> tuple[np.ndarray, np.ndarray]:
    """1 - sigmoid(beta log-ratio) of a desirable sequence, 1 - sigmoid(-beta log-ratio) of another (arXiv 2402.01306,
    equation 8, reference point 0); here the advantages are the weights, the behaviour policy is the reference.
    """
    losses, gradient = [], []
    for row, length in enumerate(LENGTHS):
        is_own = row == ROW_OF
        weight, sign = abs(ADVANTAGES[is_own][0]), np.sign(ADVANTAGES[is_own][0])
        value = 1 / (1 + np.exp(-sign * 0.3 * np.sum((CURRENT - BEHAVIOUR)[is_own])))
        losses.append(weight * (1 - value))
        gradient += [-weight * value * (1 - value) * sign * 0.3] * length
    return np.array(losses), np.array(gradient)


def opd() -> tuple[np.ndarray, np.ndarray]:
    """-sg(min(r, 1.2) (log q - log p)) log p, whose gradient at r = 1 is that of the reverse KL divergence."""
    weights = np.minimum(RATIOS, 1.2) * (TEACHER - CURRENT)
    assert 0 < (RATIOS > 1.2).sum() < 8
    return -weights * CURRENT, -weights


GSPO: Any = {"clip_low": 0.37, "clip_high": 0.3}
KL: Any = {"kl_coefficient": 0.2}
UNBIASED: Any = {**KL, "unbiased_kl": True}
CASES: dict[str, tuple[Any, Any, Any]] = {
    "grpo": (Grpo(), GrpoSettings(), grpo),
    "grpo-dual-clip": (Grpo(), GrpoSettings(dual_clip=1.1), grpo_dual_clip),
    "grpo-kl": (Grpo(), GrpoSettings(**KL), with_kl(grpo)),
    "grpo-unbiased-kl": (Grpo(), GrpoSettings(**UNBIASED), with_unbiased_kl(grpo)),
    "sft": (Sft(), SftSettings(), sft),
    "cispo": (Cispo(), CispoSettings(clip_high=0.3), cispo),
    "gspo": (Gspo(), GspoSettings(**GSPO), gspo),
    "cispo-kl": (Cispo(), CispoSettings(clip_high=0.3, **KL), with_kl(cispo)),
    "gspo-kl": (Gspo(), GspoSettings(**GSPO, **KL), with_kl(gspo, by_row=True)),
    "gspo-unbiased-kl": (Gspo(), GspoSettings(**GSPO, **UNBIASED), with_unbiased_kl(gspo, by_row=True)),
    "dppo-kl-penalty": (Dppo(), DppoSettings(delta=0.03, ratio_max=2.0, **KL), with_kl(dppo_tv)),
    "sapo-kl": (Sapo(), SapoSettings(temperature_negative=1.5, **KL), with_kl(sapo)),
    "vespo-unbiased-kl": (Vespo(), VespoSettings(**UNBIASED), with_unbiased_kl(vespo)),
    "dppo-tv": (Dppo(), DppoSettings(delta=0.03, ratio_max=2.0), dppo_tv),
    "dppo-kl": (Dppo(), DppoSettings(divergence="binary_kl", delta=0.005, ratio_max=2.0), dppo_kl),
    "sapo": (Sapo(), SapoSettings(temperature_negative=1.5), sapo),
    "vespo": (Vespo(), VespoSettings(), vespo),
    "kto": (Kto(), KtoSettings(beta=0.3), kto),
    "opd": (Opd(), OpdSettings(teacher="t", ratio_max=1.2), opd),
    "opsd": (Opsd(), OpsdSettings(context="c", ratio_max=1.2), opd),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_the_papers_equation(name: str) -> None:
    algorithm, settings, wanted = CASES[name]
    current = torch.tensor(CURRENT, dtype=torch.float32, requires_grad=True)
    ones, behaviour, advantages = (torch.tensor(c, dtype=torch.float32) for c in (np.ones(8), BEHAVIOUR, ADVANTAGES))
    tokens = TokenBatch(current, ones, behaviour, advantages, rows_N=torch.tensor(ROW_OF), lengths_B=LENGTHS)
    teacher = torch.tensor(TEACHER, dtype=torch.float32)
    tokens = tokens._replace(reference_N=tokens.behaviour_N, teacher_N=teacher)
    found = algorithm.loss(tokens, settings).values
    found.sum().backward()
    losses, gradient = wanted()
    assert current.grad is not None
    log_difference(name, "loss", found.tolist(), losses)
    log_difference(name, "gradient", current.grad, gradient)
    assert found.tolist() == pytest.approx(losses.tolist(), rel=1e-5)
    assert current.grad.tolist() == pytest.approx(gradient.tolist(), rel=1e-5, abs=1e-9)


def test_the_reference_point_of_kto_is_the_divergence_of_the_sampling_policy() -> None:
    """z = max(0, mean of log q - log p_ref over sequences); sigmoid(s beta (log-ratio - z)) in equation 8."""
    bounds = np.cumsum([0, *LENGTHS])
    rows = [
        Row(np.arange(n + 1, dtype=np.int32), np.arange(n + 1) > 0, padded(BEHAVIOUR, at, n), member)
        for member, (at, n) in enumerate(zip(bounds, LENGTHS, strict=False))
    ]
    reference = BEHAVIOUR - 0.3
    scored = [
        replace(row, scores={"reference": padded(reference, at, n)})
        for row, at, n in zip(rows, bounds, LENGTHS, strict=False)
    ]
    members = [Member("g", f"r{n}", "a", reward) for n, reward in enumerate((1.0, 0.0, 0.0))]
    settings = KtoSettings(beta=0.3, reference_point="sampled")
    prepared = Kto().prepare(BatchView(scored, members), settings)
    z = 0.3 * sum(LENGTHS) / 3
    assert prepared.metrics["kto/reference_point"] == pytest.approx(z, rel=1e-5)
    current = torch.tensor(CURRENT, dtype=torch.float32, requires_grad=True)
    tokens = TokenBatch(
        current,
        torch.ones(8),
        torch.tensor(BEHAVIOUR),
        torch.tensor(np.array(prepared.advantages)[ROW_OF]),
        torch.tensor(reference, dtype=torch.float32),
        components={"reference_point": torch.full((8,), z)},
        rows_N=torch.tensor(ROW_OF),
        lengths_B=LENGTHS,
    )
    found = Kto().loss(tokens, settings).values
    found.sum().backward()
    for row, sign in enumerate((1, -1, -1)):
        value = 1 / (1 + np.exp(-sign * 0.3 * (np.sum((CURRENT - reference)[row == ROW_OF]) - z)))
        log_difference(f"kto-sampled row {row}", "loss", found[row].item(), 1 - value)
        assert float(found[row].detach()) == pytest.approx(1 - value, rel=1e-5)
        assert current.grad is not None
        wanted = [-value * (1 - value) * sign * 0.3] * LENGTHS[row]
        log_difference(f"kto-sampled row {row}", "gradient", current.grad[torch.tensor(row == ROW_OF)], wanted)
        assert current.grad[torch.tensor(row == ROW_OF)].tolist() == pytest.approx(wanted, rel=1e-5)
    with pytest.raises(RunFailedError, match="needs recorded scores"):
        Kto().prepare(BatchView(rows, members), settings)


def padded(column: np.ndarray, at: int, length: int) -> np.ndarray:
    """A row's values behind those of a prompt of one token."""
    return np.concatenate([[0.0], column[at : at + length]]).astype(np.float32)


def test_the_expected_gradient_of_opd_is_that_of_the_reverse_kl_divergence() -> None:
    """Over all tokens of a vocabulary, sum p grad(loss) = grad sum p (log p - log q)."""
    logits, teacher = RNG.normal(0, 1, (2, 7))
    own = torch.tensor(logits, requires_grad=True)
    logprobs = torch.log_softmax(own, 0)
    theirs = torch.log_softmax(torch.tensor(teacher), 0)
    tokens = TokenBatch(logprobs, torch.zeros(7), logprobs.detach(), torch.zeros(7), teacher_N=theirs)
    (Opd().loss(tokens, OpdSettings(teacher="t")).values * logprobs.detach().exp()).sum().backward()
    p = np.exp(logits) / np.exp(logits).sum()
    q = np.exp(teacher) / np.exp(teacher).sum()
    odds = np.log(p / q)
    assert own.grad is not None
    assert own.grad.tolist() == pytest.approx((p * (odds - (p * odds).sum())).tolist(), rel=1e-9)


@pytest.mark.parametrize("name", ["sigmoid", "smoothed", "ipo"])
def test_losses_of_pairs_are_those_of_the_papers_equations(name: str) -> None:
    """DPO (arXiv 2305.18290, equation 7), conservative DPO, IPO (arXiv 2310.12036, equation 17)."""
    options: dict[str, Any] = {"smoothed": {"label_smoothing": 0.2}, "ipo": {"loss_type": "ipo"}}
    settings = DpoSettings(beta=0.4, **options.get(name, {}))
    chosen, rejected, reference_chosen, reference_rejected = RNG.normal(-9.0, 2.0, (4, 5))
    h = chosen - reference_chosen - rejected + reference_rejected
    p = 1 / (1 + np.exp(-0.4 * h))
    share = 0.2 if name == "smoothed" else 0.0
    losses = -(1 - share) * np.log(p) - share * np.log(1 - p)
    gradient = 0.4 * (-(1 - share) * (1 - p) + share * p)
    if name == "ipo":
        losses, gradient = (h - 1 / 0.8) ** 2, 2 * (h - 1 / 0.8)
    columns = [torch.tensor(one, requires_grad=True) for one in (chosen, rejected)]
    others = [torch.tensor(one) for one in (reference_chosen, reference_rejected, np.zeros(5))]
    found = loss_of(PairBatch(*columns, *others), settings).values
    found.sum().backward()
    log_difference(f"dpo-{name}", "loss", found.tolist(), losses)
    assert found.tolist() == pytest.approx(losses.tolist(), rel=1e-9)
    for column, sign in zip(columns, (1, -1), strict=True):
        assert column.grad is not None
        log_difference(f"dpo-{name}", "gradient", column.grad, sign * gradient)
        assert column.grad.tolist() == pytest.approx((sign * gradient).tolist(), rel=1e-9)


RATES = np.array([0.9, 0.2, 0.4])
"""Rewards of three rollouts of one task; their second reward, by name, is `SECOND`."""
SECOND = np.array([0.0, 1.0, 0.5])
STEPS = {0: {0: 0.3, 1: 0.6}, 1: {0: 0.2}, 2: {1: 0.1}}
"""Recorded rewards of steps, by rollout; what is left of its reward is one of its last step."""
STEP_OF = np.array([0, 0, 1, 0, 0, 1, 1, 1])


def standard(values: np.ndarray) -> np.ndarray:
    return (values - values.mean()) / (values.std(ddof=1) + 1e-6)


def of_ppo() -> np.ndarray:
    """A_t = sum (gamma lambda)^(l - t) r_l (arXiv 1506.02438, equation 16, every V = 0), 0.8 times 0.5."""
    by_step = np.array([[0.3, 0.6], [0.2, 0.0], [0.0, 0.4]])
    ahead = np.stack([by_step[:, 0] + 0.8 * 0.5 * by_step[:, 1], by_step[:, 1]], axis=1)
    return ahead[ROW_OF, STEP_OF]


def of_reinforce_pp() -> np.ndarray:
    """A_t = r - 0.3 sum_{i >= t} log q_i / p_ref,i, normalised over the batch (arXiv 2501.03262)."""
    log_ratio = BEHAVIOUR - TEACHER
    ahead = np.array([log_ratio[(ROW_OF[t] == ROW_OF) & (np.arange(8) >= t)].sum() for t in range(8)])
    values = RATES[ROW_OF] - 0.3 * ahead
    return (values - values.mean()) / (values.std() + 1e-6)


def of_rae() -> np.ndarray:
    """b = 0.95 b + 0.05 r from b = 0, A = r - b (SPIRAL, arXiv 2506.24119)."""
    found, average = [], 0.0
    for rate in RATES:
        average = 0.95 * average + 0.05 * rate
        found.append(rate - average)
    return np.array(found)[ROW_OF]


ADVANTAGES_OF: dict[str, tuple[ClippedSettings, np.ndarray]] = {
    "ppo": (PpoSettings(gamma=0.8, gae_lambda=0.5), of_ppo()),
    "reinforce_pp": (ReinforcePpSettings(), standard(RATES)[ROW_OF]),
    "reinforce_pp with a KL penalty": (ReinforcePpSettings(kl_coefficient=0.3), of_reinforce_pp()),
    "rae": (RaeSettings(), of_rae()),
    "max_rl": (MaxRlSettings(), ((RATES - RATES.mean()) / RATES.mean())[ROW_OF]),
    "gdpo": (
        GdpoSettings(reward_weights={"b": 2.0}),
        standard(standard(RATES) + 2 * standard(SECOND))[ROW_OF],
    ),
}


@pytest.mark.parametrize("name", ADVANTAGES_OF)
def test_algorithms_that_share_the_clipped_objective_have_the_advantages_of_their_papers(name: str) -> None:
    """A of each equation, in -min(r A, clip(r) A) and at most -3 A where A < 0."""
    settings, wanted = ADVANTAGES_OF[name]
    settings = settings.for_run(num_generations=3, temperature=1.0)
    bounds = np.cumsum([0, *LENGTHS])
    rows, members = [], []
    for number, (at, length) in enumerate(zip(bounds, LENGTHS, strict=False)):
        steps = STEP_OF[at : at + length]
        parts = tuple(
            Completion(start=1 + int((steps < step).sum()), length=int((steps == step).sum()), step_index=int(step))
            for step in sorted(set(steps))
        )
        columns = (np.arange(length + 1) > 0, padded(BEHAVIOUR, at, length), number, parts)
        scores = {"reference": padded(TEACHER, at, length)}
        rows.append(Row(np.zeros(length + 1, np.int32), *columns, scores=scores))
        reward, trained = float(RATES[number]), frozenset(int(step) for step in steps)
        members.append(
            Member("g", f"r{number}", "a", reward, {"a": reward, "b": float(SECOND[number])}, STEPS[number], trained)
        )
    algorithm = table.algorithm(settings.name, Permissions())
    prepared = algorithm.prepare(BatchView(rows, members), settings)
    flat = [np.broadcast_to(a, len(row.mask))[row.mask] for a, row in zip(prepared.advantages, rows, strict=True)]
    advantages = np.concatenate(flat)
    assert advantages.tolist() == pytest.approx(wanted.tolist(), rel=1e-5, abs=1e-7)
    current = torch.tensor(CURRENT, dtype=torch.float32, requires_grad=True)
    others = [torch.tensor(one, dtype=torch.float32) for one in (np.ones(8), BEHAVIOUR, advantages, TEACHER)]
    found = algorithm.loss(TokenBatch(current, *others, rows_N=torch.tensor(ROW_OF), lengths_B=LENGTHS), settings)
    found.values.sum().backward()
    free, bounded = RATIOS * wanted, np.clip(RATIOS, 1 - settings.clip_low, 1 + settings.clip_high) * wanted
    objective = np.where(wanted < 0, np.maximum(np.minimum(free, bounded), 3 * wanted), np.minimum(free, bounded))
    assert current.grad is not None
    is_free = objective == free
    log_difference(name, "advantage", advantages, wanted)
    log_difference(name, "loss", found.values.tolist(), -objective)
    log_difference(name, "gradient", current.grad, np.where(is_free, -free, 0.0))
    assert found.values.tolist() == pytest.approx((-objective).tolist(), rel=1e-5, abs=1e-7)
    assert current.grad.tolist() == pytest.approx(np.where(is_free, -free, 0.0).tolist(), rel=1e-5, abs=1e-7)
