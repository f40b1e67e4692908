"""Aggregation of token losses to one number: a mini-batch's loss is divided once, by the total of all its
micro-batches. Sums for the metrics.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rollstream.learner.algorithms import off_policy
from rollstream.learner.algorithms.base import Algorithm, Normaliser
from rollstream.learner.algorithms.tokens import Losses, TokenBatch
from rollstream.learner.model.micro_batch import MicroBatch
from rollstream.learner.model.ranks import Ranks
from rollstream.schemas.algorithm_settings import AlgorithmSettings
from rollstream.schemas.errors import RunFailedError, called_at, describe, is_of_device, is_out_of_memory

OF_AUTOGRAD = ("inplace operation", "graph a second time", "returned an invalid gradient")
"""Parts of torch's messages about a loss that has no gradient, raised outside of the code that computed it."""


def backward(share: Tensor, algorithm: str) -> None:
    """Add the gradients of a micro-batch's share of the loss.

    Raises RunFailedError if its algorithm computed it in a way that gives none: any other start would end the same.
    """
    try:
        share.backward()
    except Exception as error:
        is_of_loss = called_at(error) or any(text in str(error) for text in OF_AUTOGRAD)
        if is_out_of_memory(error) or is_of_device(error) or not is_of_loss:
            raise
        raise RunFailedError(
            f"algorithm {algorithm}: the loss has no gradient: {describe(error)}; change no tensor in place, and keep "
            "none from call to call"
        ) from error


def share_of(
    tokens: TokenBatch,
    aged: off_policy.AgedTokens | None,
    algorithm: Algorithm,
    settings: AlgorithmSettings,
    normaliser: Normaliser,
    divided: tuple[float, Mapping[str, float]],
    sums: dict[str, Tensor],
) -> Tensor:
    """The share of a micro-batch in the loss of its mini-batch; what its loss counts is added to `sums`.

    `aged`: how old its tokens are, where they are compared with the policies that sampled them. `divided`: the
    mini-batch's `divisors`.
    """
    device = tokens.logprobs_N.device
    if aged is not None:
        _add(sums, off_policy.compared(tokens, aged), device)
    tokens, seen = off_policy.applied(tokens, settings)
    _add(sums, seen, device)
    found = algorithm.loss(tokens, settings)
    _add(sums, found.sums, device)
    if settings.corrects_off_policy:
        found = corrected_rows(found, tokens)
    return aggregated(found, tokens, normaliser, *divided)


def without_loss(logprobs_N: Tensor) -> Tensor:
    """A share whose gradient is 0, for the backward pass of a process that failed: the others wait for it there."""
    return logprobs_N.sum() * 0.0


def corrected_rows(found: Losses, tokens: TokenBatch) -> Losses:
    """Losses of rows, weighted by the off-policy correction, which is the same for all tokens of a row."""
    if found.per != "row" or tokens.weights_N is None:
        return found
    return found._replace(values=found.values * tokens.mean_by_row(tokens.weights_N))


def aggregated(
    found: Losses, tokens: TokenBatch, normaliser: Normaliser, count: float, counts: Mapping[str, float] = {}
) -> Tensor:
    """The share of a micro-batch in the loss of its mini-batch: one number that carries the gradient.

    `count`: what the mini-batch as a whole is divided by, see `count_of`; `counts`: what its components are, see
    `counts_of`.
    """
    if found.parts:
        weighted = {name: (tokens.components[name] * values).sum() for name, values in found.parts.items()}
        return torch.stack([value / max(1.0, counts[name]) for name, value in weighted.items()]).sum()
    values = found.values
    if found.per == "token" and tokens.weights_N is not None:
        values = values * tokens.weights_N
    if found.per == "token" and normaliser.by == "sequences":
        values = tokens.mean_by_row(values)
    return values.sum() / count


def count_of(micro_batches: Sequence[MicroBatch], normaliser: Normaliser) -> float:
    """The divisor of a mini-batch's losses: its tokens, its rows (or pairs), these times a length, or a constant."""
    if normaliser.by == "constant":
        return normaliser.value
    if normaliser.by == "tokens":
        return sum(sum(one.lengths) for one in micro_batches)
    num_rows = sum(len(one.chosen) or len(one.lengths) for one in micro_batches)
    return num_rows * normaliser.value if normaliser.by == "row_length" else num_rows


def counts_of(micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
    """The divisors of the components of a mini-batch's loss: tokens on which they count."""
    counts: dict[str, float] = defaultdict(float)
    for one in micro_batches:
        for name, counted in one.layout.counted.items():
            counts[name] += float(len(counted))
    return counts


def divisors(
    micro_batches: Sequence[MicroBatch], normaliser: Normaliser, ranks: Ranks
) -> tuple[float, dict[str, float]]:
    """`count_of` and `counts_of` a mini-batch over all ranks. `micro_batches`: those of this one."""
    own = [one for one in micro_batches if not one.is_filler]
    count, counts = count_of(own, normaliser), counts_of(own)
    if ranks.num == 1:
        return count, counts
    parts = ranks.summed({f"of/{name}": value for name, value in counts.items()} | {"all": count})
    total = count if normaliser.by == "constant" else parts["all"]
    return total, {name.removeprefix("of/"): value for name, value in parts.items() if name != "all"}


def _add(sums: dict[str, Tensor], found: Mapping[str, Tensor], device: torch.device) -> None:
    """Add scalars to sums by name, in float64 on the device: reading one would wait for all that it computes."""
    for name, value in found.items():
        fine = value.detach().to(device, torch.float64, non_blocking=True)
        sums[name] = sums[name] + fine if name in sums else fine + 0.0  # makes 0.0 of -0.0, as sums of floats do


def fetched(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Sums as numbers, fetched from their device at once."""
    values: list[float] = torch.stack(list(sums.values())).tolist() if sums else []
    return dict(zip(sums, values, strict=True))
