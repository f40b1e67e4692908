"""Training on one batch: rows in, a changed model and metrics out. No files, no log, no clock but for durations."""

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rollstream.learner import collate
from rollstream.learner.collate import MicroBatch, Row
from rollstream.learner.losses import ALGORITHMS, Algorithm
from rollstream.learner.model import PolicyModel
from rollstream.learner.optimizer import learning_rate, set_learning_rate
from rollstream.learner.token_batch import TokenBatch
from rollstream.schemas import ids
from rollstream.schemas.errors import RunFailedError
from rollstream.schemas.settings import JobSettings


@dataclass(frozen=True, slots=True)
class StepResult:
    """What training on a batch came to."""

    num_optimizer_steps: int
    num_tokens: int
    """Unpadded tokens that went through the model."""
    metrics: dict[str, float]
    seconds: dict[str, float]
    """collate, forward_backward, optimizer."""
    threads: int
    """CPU threads that torch computed with: they decide the order of sums, so bits."""


def train_batch(
    model: PolicyModel,
    optimizer: torch.optim.Optimizer,
    rows: Sequence[Row],
    settings: JobSettings,
    *,
    index: int,
    seed: int,
) -> StepResult:
    """Take the optimizer steps of manifest `index`, one a mini-batch. Blocking.

    Every completion token of a mini-batch counts the same in its loss (no mean by sequence). `seed` decides the
    mini-batches and dropout. Raises RunFailedError if loss or gradient is not finite.
    """
    algorithm = ALGORITHMS[settings.algorithm.name]
    seconds: dict[str, float] = dict.fromkeys(("collate", "forward_backward", "optimizer"), 0.0)
    sums: dict[str, float] = defaultdict(float)
    norms: list[float] = []
    num_padded = 0
    rates: list[float] = []
    planned = settings.algorithm.mini_batches
    parts = collate.mini_batches(rows, planned, seed)
    for number, part in enumerate(parts):
        torch.manual_seed(ids.derive_seed(seed, number))
        began = time.monotonic()
        micro_batches = collate.micro_batches(part, settings.algorithm.max_tokens_per_micro_batch)
        num_padded += sum(micro_batch.token_ids.numel() for micro_batch in micro_batches)
        collated = time.monotonic()
        for name, value in _accumulate(model, micro_batches, algorithm, settings).items():
            sums[name] += value
        backed = time.monotonic()
        rate = learning_rate(settings.optimizer, index * planned + number, settings.num_versions * planned)
        norms.append(_optimize(model, optimizer, rate, settings.optimizer.max_grad_norm))
        rates.append(rate)
        seconds["collate"] += collated - began
        seconds["forward_backward"] += backed - collated
        seconds["optimizer"] += time.monotonic() - backed
    num_completion_tokens = collate.num_completion_tokens(rows)
    num_tokens = sum(len(row.token_ids) for row in rows)
    metrics = algorithm.metrics(sums, num_completion_tokens) if parts else {}
    metrics |= _counts(rows, num_tokens, num_completion_tokens, num_padded)
    if parts:
        metrics |= {"optimizer/grad_norm": sum(norms) / len(norms), "optimizer/learning_rate": rates[-1]}
    _check_finite(metrics)
    return StepResult(len(parts), num_tokens, metrics, seconds, torch.get_num_threads())


def _accumulate(
    model: PolicyModel, micro_batches: Sequence[MicroBatch], algorithm: Algorithm, settings: JobSettings
) -> dict[str, float]:
    """Gradients of one mini-batch, summed over its micro-batches; the sums of its loss terms."""
    num_tokens = sum(int(micro_batch.mask.sum()) for micro_batch in micro_batches)
    sums: dict[str, float] = defaultdict(float)
    model.module.zero_grad(set_to_none=True)
    for micro_batch in micro_batches:
        batch = micro_batch.to(model.device)
        logprobs_N, entropies_N = model.completion_terms(
            batch,
            temperature=settings.algorithm.temperature,
            entropy_needs_grad=settings.algorithm.entropy_coefficient > 0,
        )
        advantages_N = batch.advantages[batch.mask]
        tokens = TokenBatch(logprobs_N, entropies_N, batch.logprobs[batch.mask], advantages_N)
        found = algorithm.loss(tokens, settings.algorithm)
        (found.losses_N.sum() / num_tokens).backward()
        names = list(found.sums)
        values: list[float] = torch.stack([found.sums[name].double() for name in names]).tolist()
        for name, value in zip(names, values, strict=True):
            sums[name] += value
    return sums


def _optimize(model: PolicyModel, optimizer: torch.optim.Optimizer, rate: float, max_norm: float) -> float:
    """One optimizer step with clipped gradients; the norm before clipping."""
    parameters = [parameter for _, parameter in model.trainable()]
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))
    if not math.isfinite(norm):
        raise RunFailedError(f"the gradient's norm is {norm}; lower optimizer.learning_rate or max_grad_norm")
    set_learning_rate(optimizer, rate)
    optimizer.step()
    return norm


def _counts(rows: Sequence[Row], num_tokens: int, num_completion_tokens: int, num_padded: int) -> dict[str, float]:
    return {
        "tokens/sequences": float(len(rows)),
        "tokens/total": float(num_tokens),
        "tokens/completion": float(num_completion_tokens),
        "tokens/padding": float(num_padded - num_tokens),
    }


def _check_finite(metrics: dict[str, float]) -> None:
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise RunFailedError(f"{name} is {value}: training has diverged; lower optimizer.learning_rate")
