"""Draws tokens for a batch of sequences at once, and says how likely each was. Knows logits, not models.

A token is the inverse of its distribution's cumulative sum at one uniform number, which only (seed, token index)
decides: whatever else is in the batch, a sequence meets the same noise. Shapes: B sequences, V vocabulary.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollstream.producers.engines.base import keeps_ids
from rollstream.schemas.settings import Sampling
from rollstream.schemas.tokens import KeptIds

LOWEST_TEMPERATURE = 1e-30
"""Below it a token is the most likely one, as at 0: logits that are divided by less may exceed float32."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_UNIT = 2.0**-40
"""Coarser than float64 on purpose: a uniform number times a sum near one stays below that sum."""


def uniforms(seeds_B: Sequence[int], first: int, count: int) -> Tensor:
    """Numbers in [0, 1) for token indices `first` to `first + count - 1`: float64 (B, count).

    SplitMix64 (Steele, Lea, Flood 2014) as a counter-based hash, applied to the seed and again with the index.
    """
    seeds = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds_B], dtype=np.uint64)[:, None]
    indices = np.arange(first + 1, first + count + 1, dtype=np.uint64)[None, :]
    bits = _mix(_mix(seeds + _GOLDEN) + indices * _GOLDEN)
    return torch.from_numpy((bits >> np.uint64(24)).astype(np.float64) * _UNIT)


def _mix(
    bits: "np.ndarray[tuple[int, ...], np.dtype[np.uint64]]",
) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint64]]":
    bits = (bits ^ (bits >> np.uint64(30))) * _MIX_1
    bits = (bits ^ (bits >> np.uint64(27))) * _MIX_2
    return bits ^ (bits >> np.uint64(31))


@dataclass(frozen=True)
class SamplingBatch:
    """Sampling parameters of each sequence of a batch."""

    temperature: Tensor  # (B, 1)
    top_k: Tensor | None  # (B, 1); None: no sequence has a limit
    top_p: Tensor | None  # (B, 1); None: no sequence has a limit
    greedy: Tensor | None  # (B,) bool; None: none is
    keeps_ids: bool = False
    """Some sequence records the ids that its limits leave."""

    @classmethod
    def of(cls, settings_B: Sequence[Sampling], vocabulary: int, device: torch.device) -> "SamplingBatch":
        """The settings of B sequences as tensors."""
        greedy = [settings.temperature < LOWEST_TEMPERATURE for settings in settings_B]
        temperature = [1.0 if is_greedy else one.temperature for one, is_greedy in zip(settings_B, greedy, strict=True)]
        top_k = [min(settings.top_k or vocabulary, vocabulary) for settings in settings_B]
        top_p = [settings.top_p for settings in settings_B]
        return cls(
            temperature=torch.tensor(temperature, dtype=torch.float32, device=device)[:, None],
            top_k=torch.tensor(top_k, device=device)[:, None] if min(top_k) < vocabulary else None,
            top_p=torch.tensor(top_p, dtype=torch.float32, device=device)[:, None] if min(top_p) < 1 else None,
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            keeps_ids=any(keeps_ids(settings) for settings in settings_B),
        )

    def select(self, rows: Tensor) -> "SamplingBatch":
        """Parameters of some of the sequences."""
        return SamplingBatch(
            temperature=self.temperature[rows],
            top_k=None if self.top_k is None else self.top_k[rows],
            top_p=None if self.top_p is None else self.top_p[rows],
            greedy=None if self.greedy is None else self.greedy[rows],
            keeps_ids=self.keeps_ids,
        )


Ids = np.ndarray[tuple[int, ...], np.dtype[np.int32]]


class SampledTokens(NamedTuple):
    """One token of each sequence."""

    tokens: Tensor
    """(B,) ids."""
    logprobs: Tensor
    """(B,), float32, under the distribution that they were drawn from."""
    kept: Sequence[Ids] = ()
    """With `keeps_ids`: the ids (K,) that each token was drawn from, ascending; none: the whole vocabulary."""


def kept_of(draws: Sequence[Ids]) -> KeptIds:
    """Concatenate the ids that each token of a sequence was drawn from."""
    return KeptIds([len(ids) for ids in draws], array("i", np.concatenate(draws).tobytes()))


def sample(logits_B_V: Tensor, uniforms_B: Tensor, how: SamplingBatch) -> SampledTokens:
    """SampledTokens a token for each sequence.

    The order is temperature, then top-k, then top-p. Temperature 0 takes the likeliest token, at log-probability 0.
    Of a row whose logits are not finite numbers the log-probability is NaN, and no other row suffers from it.
    """
    logprobs_B_V = distribution(logits_B_V, how)
    sums_B_V = cumulative_sums(logprobs_B_V.double().exp_())
    targets_B = uniforms_B * sums_B_V[:, -1]
    tokens_B = torch.searchsorted(sums_B_V, targets_B[:, None], right=True)[:, 0]
    tokens_B = tokens_B.clamp_(max=logits_B_V.shape[-1] - 1)  # beyond the last token lies what NaN leads to
    chosen_B = logprobs_B_V.gather(1, tokens_B[:, None])[:, 0]
    if how.greedy is not None:
        tokens_B = torch.where(how.greedy, logits_B_V.argmax(dim=-1), tokens_B)
        chosen_B = torch.where(how.greedy & ~chosen_B.isnan(), torch.zeros_like(chosen_B), chosen_B)
    return SampledTokens(tokens_B, chosen_B, _kept(logprobs_B_V) if how.keeps_ids else ())


def cumulative_sums(probs_B_V: Tensor) -> Tensor:
    """Cumulative sums of probabilities over the vocabulary.

    On a GPU they are sums of integers, in float64: equal in any order of addition, while torch's sums of floats differ
    from run to run there, and are refused where a learner in this process made torch deterministic. A probability below
    2**-40 counts as 0; so does NaN.
    """
    if not probs_B_V.is_cuda:
        return probs_B_V.cumsum(dim=-1)
    return integer_sums(probs_B_V)


def integer_sums(probs_B_V: Tensor) -> Tensor:
    """See `cumulative_sums`."""
    return (probs_B_V.double() / _UNIT).nan_to_num_(0.0).long().cumsum(dim=-1).double() * _UNIT


def _kept(logprobs_B_V: Tensor) -> list[Ids]:
    is_kept_B_V = logprobs_B_V > -torch.inf
    lengths_B = is_kept_B_V.sum(dim=-1)
    is_kept_B_V &= (lengths_B < logprobs_B_V.shape[-1])[:, None]
    ids_M = is_kept_B_V.nonzero()[:, 1].to(torch.int32).cpu().numpy()
    return np.split(ids_M, is_kept_B_V.sum(dim=-1).cumsum(0)[:-1].tolist())


def distribution(logits_B_V: Tensor, how: SamplingBatch) -> Tensor:
    """Log-probabilities (B, V), float32, that tokens are drawn from; -inf where a limit excludes a token."""
    scaled_B_V = logits_B_V.float() / how.temperature
    if how.top_k is not None or how.top_p is not None:
        scaled_B_V = _limited(scaled_B_V, how)
    return torch.log_softmax(scaled_B_V, dim=-1)


def _limited(scaled_B_V: Tensor, how: SamplingBatch) -> Tensor:
    sorted_B_V, order_B_V = scaled_B_V.sort(dim=-1, descending=True, stable=True)
    if how.top_k is not None:
        ranks_V = torch.arange(scaled_B_V.shape[-1], device=scaled_B_V.device)
        sorted_B_V = sorted_B_V.masked_fill(ranks_V[None, :] >= how.top_k, -torch.inf)
    if how.top_p is not None:
        probs_B_V = sorted_B_V.softmax(dim=-1)
        before_B_V = cumulative_sums(probs_B_V) - probs_B_V
        excluded_B_V = before_B_V >= how.top_p
        excluded_B_V[:, 0] = False
        sorted_B_V = sorted_B_V.masked_fill(excluded_B_V, -torch.inf)
    return torch.empty_like(sorted_B_V).scatter_(1, order_B_V, sorted_B_V)
