"""Training on one batch: rows in, a changed model and metrics out. No files, no log, no clock but for durations."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from rollstream.learner import collate
from rollstream.learner.collate import MicroBatch, Row
from rollstream.learner.losses import ALGORITHMS, Algorithm
from rollstream.learner.model import PolicyModel
from rollstream.learner.optimizer import learning_rate, set_learning_rate
from rollstream.learner.reference import Reference
from rollstream.learner.token_batch import TokenBatch
from rollstream.schemas import ids
from rollstream.schemas.errors import RunFailedError
from rollstream.schemas.settings import JobSettings

Unit = TypeVar("Unit")
Micro = TypeVar("Micro")


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
    reference: Reference | None = None,
) -> StepResult:
    """Take the optimizer steps of manifest `index`, one a mini-batch. Blocking.

    Every completion token of a mini-batch counts the same in its loss (no mean by sequence). `seed` decides the
    mini-batches and dropout. `reference`: what the loss compares with, if it does.
    Raises RunFailedError if loss or gradient is not finite.
    """
    algorithm = ALGORITHMS[settings.algorithm.name]
    parts = collate.mini_batches(rows, settings.algorithm.mini_batches, seed)
    taken = take_steps(
        model,
        optimizer,
        parts,
        settings,
        index=index,
        seed=seed,
        divide=lambda part: collate.micro_batches(part, settings.algorithm.max_tokens_per_micro_batch),
        accumulate=lambda micro_batches: _accumulate(model, micro_batches, algorithm, settings, reference),
    )
    num_completion_tokens = collate.num_completion_tokens(rows)
    num_tokens = sum(len(row.token_ids) for row in rows)
    metrics = algorithm.metrics(taken.sums, num_completion_tokens) if parts else {}
    metrics |= {
        "tokens/sequences": float(len(rows)),
        "tokens/total": float(num_tokens),
        "tokens/completion": float(num_completion_tokens),
        "tokens/padding": float(taken.sums["padded"] - num_tokens),
    }
    return taken.result(metrics, num_tokens)


@dataclass(slots=True)
class TakenSteps:
    """The optimizer steps of a batch."""

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Of all its micro-batches."""
    norms: list[float] = field(default_factory=list[float])
    rates: list[float] = field(default_factory=list[float])
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("collate", "forward_backward", "optimizer"), 0.0)
    )

    def result(self, metrics: Mapping[str, float], num_tokens: int) -> StepResult:
        """With the optimizer's metrics. Raises RunFailedError if one is not finite."""
        told = dict(metrics)
        if self.norms:
            told |= {
                "optimizer/grad_norm": sum(self.norms) / len(self.norms),
                "optimizer/learning_rate": self.rates[-1],
            }
        for name, value in told.items():
            if not math.isfinite(value):
                raise RunFailedError(f"{name} is {value}: training has diverged; lower optimizer.learning_rate")
        return StepResult(len(self.norms), num_tokens, told, self.seconds, torch.get_num_threads())


def take_steps(
    model: PolicyModel,
    optimizer: torch.optim.Optimizer,
    parts: Sequence[Sequence[Unit]],
    settings: JobSettings,
    *,
    index: int,
    seed: int,
    divide: Callable[[Sequence[Unit]], Sequence[Micro]],
    accumulate: Callable[[Sequence[Micro]], Mapping[str, float]],
) -> TakenSteps:
    """One optimizer step a part (mini-batch) of manifest `index`.

    `divide` makes micro-batches of a part; `accumulate` adds up their gradients and gives sums, the padded tokens
    (`padded`) among them. Raises RunFailedError if a gradient is not finite.
    """
    taken = TakenSteps()
    planned = settings.algorithm.mini_batches
    for number, part in enumerate(parts):
        torch.manual_seed(ids.derive_seed(seed, number))
        began = time.monotonic()
        micro_batches = divide(part)
        collated = time.monotonic()
        model.module.zero_grad(set_to_none=True)
        for name, value in accumulate(micro_batches).items():
            taken.sums[name] += value
        backed = time.monotonic()
        rate = learning_rate(settings.optimizer, index * planned + number, settings.num_versions * planned)
        taken.norms.append(_optimize(model, optimizer, rate, settings.optimizer.max_grad_norm))
        taken.rates.append(rate)
        taken.seconds["collate"] += collated - began
        taken.seconds["forward_backward"] += backed - collated
        taken.seconds["optimizer"] += time.monotonic() - backed
    return taken


def _accumulate(
    model: PolicyModel,
    micro_batches: Sequence[MicroBatch],
    algorithm: Algorithm,
    settings: JobSettings,
    reference: Reference | None,
) -> dict[str, float]:
    """Gradients of one mini-batch, summed over its micro-batches; the sums of its loss terms."""
    num_tokens = sum(int(micro_batch.mask.sum()) for micro_batch in micro_batches)
    sums: dict[str, float] = defaultdict(float)
    for micro_batch in micro_batches:
        batch = micro_batch.to(model.device)
        temperature = settings.algorithm.temperature
        reference_N = None if reference is None else reference.logprobs(batch, temperature=temperature)
        logprobs_N, entropies_N = model.completion_terms(
            batch,
            temperature=temperature,
            entropy_needs_grad=settings.algorithm.entropy_coefficient > 0,
        )
        advantages_N = batch.advantages[batch.mask]
        tokens = TokenBatch(logprobs_N, entropies_N, batch.logprobs[batch.mask], advantages_N, reference_N)
        found = algorithm.loss(tokens, settings.algorithm)
        (found.losses_N.sum() / num_tokens).backward()
        add_sums(sums, found.sums)
        sums["padded"] += batch.token_ids.numel()
    return sums


def add_sums(sums: dict[str, float], found: Mapping[str, Tensor]) -> None:
    """Add scalar tensors to sums by name, fetched from their device at once."""
    values: list[float] = torch.stack([value.double() for value in found.values()]).tolist()
    for name, value in zip(found, values, strict=True):
        sums[name] = sums.get(name, 0.0) + value


def _optimize(model: PolicyModel, optimizer: torch.optim.Optimizer, rate: float, max_norm: float) -> float:
    """One optimizer step with clipped gradients; the norm before clipping."""
    parameters = [parameter for _, parameter in model.trainable()]
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))
    if not math.isfinite(norm):
        raise RunFailedError(f"the gradient's norm is {norm}; lower optimizer.learning_rate or max_grad_norm")
    set_learning_rate(optimizer, rate)
    optimizer.step()
    return norm
