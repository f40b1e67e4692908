"""Bounds of losses where a single token is far off: what it weighs, and what metrics say of it."""

from typing import Any

import pytest
import torch

from rollstream.learner.algorithms.base import Counts
from rollstream.learner.algorithms.builtin.gspo import Gspo
from rollstream.learner.algorithms.tokens import TokenBatch
from rollstream.schemas.algorithms import GspoSettings


def batch(behaviour: list[float], advantages: list[float], **columns: Any) -> TokenBatch:
    """One row of tokens, each of log-probability -1 under the current policy."""
    count = len(behaviour)
    current = torch.full((count,), -1.0, requires_grad=True)
    others = [torch.zeros(count), torch.tensor(behaviour), torch.tensor(advantages)]
    return TokenBatch(current, *others, rows_N=torch.zeros(count, dtype=torch.int64), lengths_B=(count,), **columns)


def gradient_of(algorithm: Any, tokens: TokenBatch, settings: Any) -> list[float]:
    algorithm.loss(tokens, settings).values.sum().backward()
    assert tokens.logprobs_N.grad is not None
    return tokens.logprobs_N.grad.tolist()


def test_one_token_far_off_outweighs_a_sequence_of_gspo_unless_dual_clip_bounds_it() -> None:
    far = [-101.0, -1.0]
    assert gradient_of(Gspo(), batch(far, [-1.0, -1.0]), GspoSettings())[1] == pytest.approx(11013, rel=1e-4)
    settings = GspoSettings(dual_clip=3.0)
    assert gradient_of(Gspo(), batch(far, [-1.0, -1.0]), settings) == [0.0, 0.0]
    found = Gspo().loss(batch(far, [-1.0, -1.0]), settings)
    assert found.values.tolist() == [3.0]
    metrics = Gspo().metrics({name: float(value) for name, value in found.sums.items()}, Counts(2, 1, 0))
    assert metrics["clip/dual"] == 1.0
    near = [-1.1, -1.0]
    free = gradient_of(Gspo(), batch(near, [-1.0, -1.0]), GspoSettings())
    assert gradient_of(Gspo(), batch(near, [-1.0, -1.0]), settings) == free
