"""Training on one batch of preference pairs: pairs in, a changed model and metrics out. No files and no log."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from rollstream.learner import collate, dpo, pair_batches
from rollstream.learner.model import PolicyModel
from rollstream.learner.pair_batches import PairMicroBatch
from rollstream.learner.pairs import Pair
from rollstream.learner.reference import Reference
from rollstream.learner.step import StepResult, add_sums, take_steps
from rollstream.schemas.settings import AlgorithmSettings, JobSettings


def train_pairs(
    model: PolicyModel,
    reference: Reference,
    optimizer: torch.optim.Optimizer,
    pairs: Sequence[Pair],
    settings: JobSettings,
    *,
    index: int,
    seed: int,
) -> StepResult:
    """Take the optimizer steps of manifest `index`, one a mini-batch of pairs; none if there are no pairs. Blocking.

    Every pair of a mini-batch counts the same. Raises RunFailedError if loss or gradient is not finite.
    """
    algorithm = settings.algorithm
    parts = collate.mini_batches(pairs, algorithm.mini_batches, seed)
    taken = take_steps(
        model,
        optimizer,
        parts,
        settings,
        index=index,
        seed=seed,
        divide=lambda part: pair_batches.micro_batches(part, algorithm.max_tokens_per_micro_batch),
        accumulate=lambda micro_batches: _accumulate(model, reference, micro_batches, algorithm),
    )
    sums = taken.sums
    metrics = {"dpo/pairs": float(len(pairs))}
    if pairs:
        metrics |= dpo.metrics(sums, len(pairs))
        metrics["dpo/score_diff"] = sum(pair.score_diff for pair in pairs) / len(pairs)
        metrics["policy/entropy"] = sums["entropy"] / sums["completion"]
        metrics |= {f"tokens/{name}": sums[name] for name in ("sequences", "total", "completion")}
        metrics["tokens/padding"] = sums["padded"] - sums["total"]
    return taken.result(metrics, int(sums["total"]))


def _accumulate(
    model: PolicyModel, reference: Reference, micro_batches: Sequence[PairMicroBatch], settings: AlgorithmSettings
) -> dict[str, float]:
    """Gradients of one mini-batch, summed over its micro-batches; sums of its loss terms and tokens."""
    num_pairs = sum(len(micro_batch.chosen_K) for micro_batch in micro_batches)
    sums: dict[str, float] = defaultdict(float)
    for micro_batch in micro_batches:
        rows = micro_batch.rows.to(model.device)
        reference_N = reference.logprobs(rows, temperature=settings.temperature)
        logprobs_N, entropies_N = model.completion_terms(
            rows, temperature=settings.temperature, entropy_needs_grad=False
        )
        batch = _pair_batch(logprobs_N, reference_N, micro_batch, average=settings.average_logprobs)
        found = dpo.losses(batch, settings)
        (found.losses_K.sum() / num_pairs).backward()
        add_sums(sums, {**found.sums, "entropy": entropies_N.sum()})
        sums["sequences"] += len(micro_batch.lengths_B)
        sums["completion"] += sum(micro_batch.lengths_B)
        sums["total"] += micro_batch.num_tokens
        sums["padded"] += rows.token_ids.numel()
    return sums


def _pair_batch(
    logprobs_N: Tensor, reference_N: Tensor, micro_batch: PairMicroBatch, *, average: bool
) -> dpo.PairBatch:
    policy_B, reference_B = (_by_row(values_N, micro_batch.lengths_B) for values_N in (logprobs_N, reference_N))
    lengths_B = torch.tensor(micro_batch.lengths_B, dtype=policy_B.dtype, device=policy_B.device)
    nll_B = -policy_B / lengths_B
    if average:
        policy_B, reference_B = policy_B / lengths_B, reference_B / lengths_B
    chosen_K, rejected_K = (
        torch.tensor(places, device=policy_B.device) for places in (micro_batch.chosen_K, micro_batch.rejected_K)
    )
    return dpo.PairBatch(
        policy_B[chosen_K], policy_B[rejected_K], reference_B[chosen_K], reference_B[rejected_K], nll_B[chosen_K]
    )


def _by_row(values_N: Tensor, lengths_B: Sequence[int]) -> Tensor:
    """Sums (B,) of the rows' consecutive values."""
    return torch.stack([part.sum() for part in values_N.split(list(lengths_B))])
