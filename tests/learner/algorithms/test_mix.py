"""Components of a loss: each over its own tokens, with its own denominator, in one batch; against numpy float64."""

import numpy as np
import pytest
import torch

from rollstream.learner.algorithms.base import BatchView, Counts, Member, Normaliser, Row
from rollstream.learner.algorithms.builtin.mix import Mix
from rollstream.learner.algorithms.tokens import TokenBatch
from rollstream.learner.model.aggregation import aggregated, counts_of
from rollstream.learner.model.collate import TrainRow, pad
from rollstream.schemas.algorithm_settings import teacher_of
from rollstream.schemas.algorithms import MixSettings
from rollstream.schemas.events.rollouts import Completion, VersionSpan
from tests.rigs.parity_log import log_difference

RNG = np.random.default_rng(7)
CURRENT, BEHAVIOUR, TEACHER = RNG.normal(-2.0, 0.5, (3, 9))
LENGTHS = (2, 3, 4)
SETTINGS = MixSettings(rl=0.7, ce=0.4, ce_threshold=0.9, ref_kl=0.2, clip_high=0.3, teacher="t", advantage="group_mean")
REWARDS = (1.0, 0.0, 0.5)


def rows() -> list[Row]:
    """A good rollout, a bad one, and one whose last two tokens no version of the policy sampled."""
    found: list[Row] = []
    at = 0
    for member, length in enumerate(LENGTHS):
        mask = np.arange(length + 1) > 0
        values = {
            name: np.concatenate([[0], column[at : at + length]]).astype(np.float32)
            for name, column in (("behaviour", BEHAVIOUR), ("teacher", TEACHER))
        }
        sampled = length - 2 if member == 2 else length
        parts = [
            Completion(
                start=1, length=sampled, step_index=0, spans=(VersionSpan(model_group="g", version=3, length=sampled),)
            )
        ]
        if sampled < length:
            parts.append(Completion(start=1 + sampled, length=length - sampled, step_index=1))
        ids = np.arange(length + 1, dtype=np.int32)
        scores = {"teacher": values["teacher"]}
        found.append(Row(ids, mask, values["behaviour"], member, tuple(parts), scores=scores))
        at += length
    return found


def by_hand() -> tuple[float, np.ndarray]:
    """sum_c w_c / n_c sum of the tokens on which c counts, and its gradient by log p."""
    advantages = (np.array(REWARDS) - np.mean(REWARDS))[np.repeat(np.arange(3), LENGTHS)]
    m = np.minimum(np.exp(CURRENT - BEHAVIOUR), 1.3)
    is_sampled = np.array([True] * 7 + [False] * 2)
    is_good = np.array([True] * 2 + [False] * 5 + [True] * 2)
    parts = ((0.7, is_sampled, m * advantages), (0.4, is_good, np.ones(9)), (0.2, is_sampled, m * (TEACHER - CURRENT)))
    gradient = sum(-w / count.sum() * count * factor for w, count, factor in parts)
    assert isinstance(gradient, np.ndarray)
    return float((gradient * CURRENT).sum()), gradient


@pytest.mark.parametrize("split", [[[0, 1, 2]], [[0], [1, 2]], [[2], [1], [0]]])
def test_loss_and_gradient_are_the_sum_of_means_however_micro_batches_are_divided(split: list[list[int]]) -> None:
    batch = BatchView(rows(), [Member("g", f"r{n}", "a", reward) for n, reward in enumerate(REWARDS)])
    prepared = Mix().prepare(batch, SETTINGS)
    train = [
        TrainRow(
            row,
            row.mask,
            prepared.advantages[index],
            components={name: weights[index] for name, weights in prepared.components.items()},
        )
        for index, row in enumerate(batch.rows)
    ]
    current = torch.tensor(CURRENT, dtype=torch.float32, requires_grad=True)
    own = torch.split(current, list(LENGTHS))
    micro_batches = [pad(train, [(index,) for index in part]) for part in split]
    counts = counts_of(micro_batches)
    assert counts == {"rl": 7, "ce": 4, "ref_kl": 7}
    total, sums = torch.zeros(()), dict[str, float]()
    for part, one in zip(split, micro_batches, strict=True):
        logprobs = torch.cat([own[index] for index in part])
        tokens = TokenBatch(
            logprobs,
            torch.zeros(len(logprobs)),
            one.on_mask(one.logprobs),
            one.on_mask(one.advantages),
            teacher_N=one.on_mask(one.scores["teacher"]),
            components={name: one.on_mask(weights) for name, weights in one.components.items()},
        )
        found = Mix().loss(tokens, SETTINGS)
        total = total + aggregated(found, tokens, Normaliser(), 1.0, counts)
        for name, value in found.sums.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    total.backward()
    loss, gradient = by_hand()
    assert current.grad is not None
    log_difference("mix", "loss", total.item(), loss)
    log_difference("mix", "gradient", current.grad, gradient)
    assert float(total.detach()) == pytest.approx(loss, rel=1e-5)
    assert current.grad.tolist() == pytest.approx(gradient.tolist(), rel=1e-5, abs=1e-9)
    metrics = Mix().metrics(sums, Counts(9, 3, 0))
    assert metrics["loss/total"] == pytest.approx(loss, rel=1e-5)
    assert (metrics["tokens/rl"], metrics["tokens/ce"]) == (7, 4)


def test_a_divergence_needs_a_teacher_or_else_the_reference() -> None:
    alone, taught = MixSettings(ref_kl=0.1), MixSettings(ref_kl=0.1, context="{answer}")
    assert (alone.needs.reference, alone.needs.teacher) == (True, False)
    assert (taught.needs.reference, taught.needs.teacher) == (False, True)
    assert not MixSettings(teacher="t").needs.teacher
    assert MixSettings(rl=0, ce=1, entropy_coefficient=0.1).unused() == {"rl is 0": ("entropy_coefficient",)}
    assert MixSettings(teacher="t", ce_threshold=2).unused() == {
        "ref_kl is 0": ("teacher",),
        "ce is 0": ("ce_threshold",),
    }
    teacher = teacher_of(taught)
    assert teacher is not None
    assert teacher.context == "{answer}"
