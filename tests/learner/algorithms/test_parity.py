"""Losses and gradients against numpy float64, written from the papers' equations."""

from typing import Any

import numpy as np
import pytest
import torch

from rollstream.learner.algorithms.cispo import Cispo
from rollstream.learner.algorithms.gspo import Gspo
from rollstream.learner.algorithms.tokens import TokenBatch
from rollstream.schemas.algorithms import CispoSettings, GspoSettings

LENGTHS = (3, 1, 4)
ROW_OF = np.repeat(np.arange(3), LENGTHS)
RNG = np.random.default_rng(4)
CURRENT, BEHAVIOUR = RNG.normal(-2.0, 0.5, 8), RNG.normal(-2.0, 0.5, 8)
ADVANTAGES = np.array([1.5, -0.5, -1.0])[ROW_OF]
RATIOS = np.exp(CURRENT - BEHAVIOUR)


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
        bounded = min(max(s, 0.9), 1.1)
        losses.append(-min(s * a, bounded * a))
        gradient += [-s * a / length if s * a <= bounded * a else 0.0] * length
    return np.array(losses), np.array(gradient)


CASES: dict[str, tuple[Any, Any, Any]] = {
    "cispo": (Cispo(), CispoSettings(clip_high=0.3), cispo),
    "gspo": (Gspo(), GspoSettings(clip_low=0.1, clip_high=0.1), gspo),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_the_papers_equation(name: str) -> None:
    algorithm, settings, wanted = CASES[name]
    current = torch.tensor(CURRENT, dtype=torch.float32, requires_grad=True)
    others = (torch.tensor(values, dtype=torch.float32) for values in (np.ones(8), BEHAVIOUR, ADVANTAGES))
    tokens = TokenBatch(current, *others, rows_N=torch.tensor(ROW_OF), lengths_B=LENGTHS)
    found = algorithm.loss(tokens, settings).values
    found.sum().backward()
    losses, gradient = wanted()
    assert current.grad is not None
    assert found.tolist() == pytest.approx(losses.tolist(), rel=1e-5)
    assert current.grad.tolist() == pytest.approx(gradient.tolist(), rel=1e-5, abs=1e-9)
