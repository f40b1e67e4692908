"""Every built-in algorithm: neither micro-batches nor shared prefixes change a gradient or a metric of the losses."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollstream.learner.algorithms import table
from rollstream.learner.algorithms.base import BatchView, Member, Row
from rollstream.learner.model.optimizer import make_optimizer
from rollstream.learner.model.policy import PolicyModel, make_deterministic
from rollstream.learner.model.step import train_batch
from rollstream.schemas.algorithms import BUILT_IN
from rollstream.schemas.events.rollouts import Completion, VersionSpan
from rollstream.schemas.permissions import NOTHING
from rollstream.schemas.revisions import NEWEST_REVISION
from rollstream.schemas.settings import JobSettings, ModelSettings, OptimizerSettings

ALL_TOKENS, FEW_TOKENS = 100_000, 24
VOCABULARY = 32
OWN: dict[str, dict[str, Any]] = {
    "opd": {"teacher": "of-the-rows"},
    "opsd": {"context": "of-the-rows"},
    "mix": {"teacher": "of-the-rows", "ce": 0.2, "ref_kl": 0.3},
    "malt": {"reference": "base"},
}
"""Settings without a default; for malt the reference that rows have scores of."""
WITH_ADVANTAGES: dict[str, Any] = {
    "entropy_coefficient": 0.05,
    "mask_truncated": True,
    "off_policy": {"level": "sequence", "mode": "truncate", "reject": "k3", "reject_above": 0.05},
}
"""Options whose sums go over rows or tokens, for the algorithms that have them."""
NOT_SUMS = ("tokens/", "policy/entropy")
"""Metrics of what was computed: an answer of several pairs is computed once a micro-batch."""


def variants(name: str) -> list[dict[str, Any]]:
    """Settings of an algorithm as they are by default, and with the options that have sums of their own."""
    fields = BUILT_IN[name].model_fields
    plain = {"name": name, **OWN.get(name, {})}
    options = {key: value for key, value in WITH_ADVANTAGES.items() if key in fields}
    options |= {"kl_coefficient": 0.1} if "kl_coefficient" in fields else {}
    is_divided = "aggregation" in fields and not getattr(BUILT_IN[name], "OWN_AGGREGATION", "")
    options |= {"aggregation": "sequences"} if is_divided else {}
    return [plain, {**plain, **options}] if options else [plain]


def completed(rng: random.Random, prompt: list[int]) -> tuple[list[int], list[bool], list[Completion]]:
    """Token ids, mask and completions of one to three turns, by two weight versions; some end at the token limit."""
    ids, mask, completions = [*prompt], [False] * len(prompt), list[Completion]()
    for step in range(rng.randint(1, 3)):
        length, answer = rng.randint(1, 9), rng.randint(0, 4)
        span = VersionSpan(version=rng.randrange(2), length=length, model_group="own")
        reason = rng.choice(["stop", "stop", "length"])
        part = {"start": len(ids), "length": length, "step_index": step, "finish_reason": reason, "spans": (span,)}
        completions.append(Completion.model_validate(part))
        ids += [rng.randrange(VOCABULARY) for _ in range(length + answer)]
        mask += [True] * length + [False] * answer
    return ids, mask, completions


def grouped(*, of_pairs: bool) -> BatchView:
    """Four groups of four rows over a common prompt; of the last one, all rewards are equal."""
    rng = random.Random(5)
    rows: list[Row] = []
    members: list[Member] = []
    for group in range(4):
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(2, 9))]
        for _ in range(4):
            ids, mask, completions = completed(rng, prompt)
            near = np.where(mask, -3.5 + 0.3 * np.asarray([[rng.random() for _ in ids] for _ in range(3)]), 0.0)
            sampled, reference, teacher = near.astype(np.float32)
            scores = {"reference": reference, "teacher": teacher}
            parts = tuple(completions)
            given = np.asarray(ids, np.int32), np.asarray(mask), sampled
            rows.append(Row(*given, member=len(members), completions=parts, scores=scores, model_group="own"))
            reward, steps = 0.5 if group == 3 else rng.choice([0.0, 1.0]), range(len(parts))
            by_step = {step: rng.random() for step in steps}
            rewards = {"first": rng.random(), "second": float(rng.randrange(2))}
            members.append(
                Member(f"g{group}", f"g{group}/r{len(rows)}", "a", reward, rewards, by_step, frozenset(steps))
            )
    if not of_pairs:
        return BatchView(rows, members)
    pairs = [
        (4 * group + better, 4 * group + worse) for group in range(4) for better, worse in ((0, 1), (2, 1), (3, 0))
    ]
    return BatchView(rows, members, pairs, [0.5] * len(pairs))


def gradient(path: Path, algorithm: dict[str, Any], max_tokens: int, *, shares: bool) -> tuple[Any, dict[str, float]]:
    """The gradient of the last of three mini-batches, and the metrics, of a step too small to change the next one."""
    given = {**algorithm, "max_tokens_per_micro_batch": max_tokens, "mini_batches": 3}
    settings: Any = BUILT_IN[algorithm["name"]].model_validate(given)
    job = JobSettings(
        kind=settings.kind,
        model=ModelSettings(path=str(path), device="cpu"),
        algorithm=settings,
        optimizer=OptimizerSettings(learning_rate=1e-9, max_grad_norm=1e9),
        revision=NEWEST_REVISION,
    )
    model = PolicyModel(job.model, seed=0)
    model.selects_logprobs &= shares
    optimizer = make_optimizer(model.trainable(), job.optimizer)
    chosen = table.algorithm(settings.name, NOTHING)
    batch = grouped(of_pairs=settings.needs.pairs)
    metrics = train_batch(model, optimizer, batch, chosen, job, index=0, seed=1, version=1).metrics
    found = torch.cat([one.grad.flatten() for _, one in model.trainable() if one.grad is not None])
    return found, {name: value for name, value in metrics.items() if not name.startswith(NOT_SUMS)}


@pytest.mark.parametrize("name", BUILT_IN)
def test_micro_batches_and_shared_prefixes_change_no_gradient(name: str, tiny_model: Path) -> None:
    make_deterministic(1)
    for algorithm in variants(name):
        whole, expected = gradient(tiny_model, algorithm, ALL_TOKENS, shares=True)
        assert whole.norm() > 0
        for max_tokens, shares in ((FEW_TOKENS, True), (FEW_TOKENS, False)):
            found, metrics = gradient(tiny_model, algorithm, max_tokens, shares=shares)
            assert (found - whole).norm() < 1e-5 * whole.norm(), algorithm
            assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-5), algorithm
