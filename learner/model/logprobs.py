"""Log-probabilities of chosen tokens from hidden states, without the logits of all of them at once.

Knows a head's weight and no model. Logits are made for one chunk of tokens at a time, and again in the backward pass;
the kernels for a GPU are in `fused_logprobs.py`.
"""

import logging
import math
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollstream.schemas.errors import RunFailedError, is_out_of_memory
from rollstream.schemas.variables import one_line

logger = logging.getLogger(__name__)

CPU_CHUNK, GPU_CHUNK = 1 << 22, 1 << 28
"""Logits of a chunk, tokens x vocabulary: 16 MiB and 1 GiB in float32. A CPU's caches want few, a GPU is only filled by
products of thousands of tokens. It decides the order of sums, so bits.
"""
_EXCLUDED = -1e30
"""Logit of a token outside the kept set: its exponential is 0, and 0 times it is not NaN."""

_NOT_KEPT = (
    "a sampled token is not in its recorded kept set; its engine recorded another set: correct that, or set "
    "sampling.record_kept_ids: false"
)


class Head(NamedTuple):
    """A linear map from hidden states to logits."""

    weight: Tensor  # (V, D)
    bias: Tensor | None = None  # (V,)


class KeptSets(NamedTuple):
    """The token ids that top-k and top-p left to sample from, of N tokens."""

    token_ids_M: Tensor
    """int64, of all tokens one after another; the sampled one is among them."""
    lengths_N: Tensor
    """int64, how many of them each token has; 0: all of the vocabulary."""
    begins_N: NDArray[np.int64] | None = None
    """Start of each token's ids, in main memory, if every set is known to contain its target: then the host need not
    wait for a GPU."""


def selected_logprobs(
    hidden_N_D: Tensor,
    head: Head,
    targets_N: Tensor,
    temperature: float,
    kept: KeptSets | None = None,
    *,
    compute_dtype: torch.dtype | None = None,
    entropy: bool = True,
    entropy_needs_grad: bool = False,
    fused: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability (N,) of each target under softmax(head(hidden) / temperature), and that softmax's entropy (N,).

    Without `entropy` the second is None; without `entropy_needs_grad` it has no gradient. Products are computed in
    `compute_dtype` (the hidden states' own if None), everything after them in float32 or finer. With `kept` the softmax
    is over each token's kept set alone. Memory is that of one chunk of `chunk_tokens`, a few times over, plus, in
    the backward pass, of the gradients. `fused`: by Triton's kernels, where `fuses` says so and no set is kept.
    Raises RunFailedError if a kept set lacks its target.
    """
    dtype = compute_dtype or hidden_N_D.dtype
    given = hidden_N_D, head.weight, head.bias, targets_N, temperature
    with torch.autocast(hidden_N_D.device.type, enabled=False):
        if fused and kept is None and len(targets_N):
            from rollstream.learner.model.fused_logprobs import FusedSelected

            found: Any = FusedSelected.apply(*given, dtype, entropy or entropy_needs_grad)
        else:
            found = _Selected.apply(*given, kept, dtype, entropy or entropy_needs_grad)
    logprobs_N, entropies_N = found
    if not entropy:
        return logprobs_N, None
    return logprobs_N, entropies_N if entropy_needs_grad else entropies_N.detach()


@lru_cache(maxsize=64)
def fuses(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `selected_logprobs` may be `fused` with products in this type on this device. Logs once why not."""
    if device.type != "cuda" or dtype.itemsize > 4 or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    why = why_not_fused(device, dtype)
    if why:
        logger.warning("device=%s makes logits in chunks, without the fused kernels: %s", device, why)
    return not why


def why_not_fused(device: torch.device, dtype: torch.dtype) -> str:
    """Empty if the kernels give what exact products give of a few tokens, with gradients. Found by trying."""
    if find_spec("triton") is None:
        return "triton is not installed"
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 128, generator=generator).to(device, dtype) for size in (200, 3008))
    weight, targets = weight / 4, torch.arange(200, device=device) * 15

    def terms(fused: bool) -> list[Tensor]:
        own = [one.detach().to(dtype if fused else torch.float64).requires_grad_() for one in (hidden, weight)]
        with torch.enable_grad():
            one, entropy = selected_logprobs(own[0], Head(own[1]), targets, 0.7, entropy_needs_grad=True, fused=fused)
            assert entropy is not None
            found = one, entropy, *torch.autograd.grad((one - entropy / 4).sum(), own)
        return [one.detach() for one in found]

    try:
        pairs = list(zip(terms(True), terms(False), strict=True))
        far = [float(((one - other).abs().max() / other.abs().max()).nan_to_num(math.inf)) for one, other in pairs]
    except Exception as error:  # compilers and drivers raise anything
        if is_out_of_memory(error):
            raise
        return f"{type(error).__name__}: {one_line(error)}"
    limits = [1e-4, 1e-4, *[1e-3 if dtype == torch.float32 else 2e-2] * 2]
    is_equal = all(one <= limit for one, limit in zip(far, limits, strict=True))
    return "" if is_equal else f"their values are off by {far} of the largest"


class _Selected(torch.autograd.Function):
    """d log p_t / d logit_v = 1[v = t] - p_v, and d H / d logit_v = -p_v (log p_v + H), both over the temperature."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        hidden_N_D: Tensor,
        weight_V_D: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        temperature: float,
        kept: KeptSets | None,
        dtype: torch.dtype,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        weight_low_V_D = weight_V_D.to(dtype)  # also for the backward pass
        offsets = kept_offsets(kept, targets_N, chunk_tokens(hidden_N_D.device, len(weight_V_D))) if kept else []
        chunks = _Chunks(hidden_N_D, weight_low_V_D, bias_V, temperature, kept, offsets)
        logprobs_N = hidden_N_D.new_empty(len(targets_N), dtype=chunks.fine)
        totals_N = torch.empty_like(logprobs_N)
        entropies_N = torch.zeros_like(logprobs_N)
        for number, part in enumerate(chunks.parts):
            logits_C_V = chunks.logits(number)
            totals_C = logits_C_V.logsumexp(dim=-1)
            totals_N[part] = totals_C
            logprobs_N[part] = logits_C_V.gather(1, targets_N[part, None])[:, 0] - totals_C
            if with_entropy:
                log_softmax_C_V = logits_C_V.sub_(totals_C[:, None])
                entropies_N[part] = -(log_softmax_C_V.exp() * log_softmax_C_V).sum(dim=-1)
        ctx.save_for_backward(
            hidden_N_D, weight_low_V_D, bias_V, targets_N, totals_N, entropies_N, *(kept[:2] if kept else ())
        )
        ctx.options = temperature, weight_V_D.dtype, offsets
        return logprobs_N, entropies_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_N_D, weight_low_V_D, bias_V, targets_N, totals_N, entropies_N, *found = ctx.saved_tensors
        temperature, weight_dtype, offsets = ctx.options
        kept = KeptSets(*found) if found else None
        of_logprobs_N, of_entropies_N = grads
        if of_logprobs_N is None and of_entropies_N is None:
            return (None,) * 8
        chunks = _Chunks(hidden_N_D, weight_low_V_D, bias_V, temperature, kept, offsets)
        wants = ctx.needs_input_grad
        grad_hidden_N_D = torch.empty_like(hidden_N_D) if wants[0] else None
        grad_weight_V_D = torch.zeros_like(weight_low_V_D, dtype=chunks.fine) if wants[1] else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=chunks.fine) if wants[2] else None
        for number, part in enumerate(chunks.parts):
            log_softmax_C_V = chunks.logits(number).sub_(totals_N[part, None])
            grad_C_V = log_softmax_C_V.exp()
            if of_entropies_N is not None:
                above_C_V = log_softmax_C_V.add_(entropies_N[part, None]).mul_(of_entropies_N[part, None])
                factor_C_V = above_C_V if of_logprobs_N is None else above_C_V.add_(of_logprobs_N[part, None])
                grad_C_V.mul_(factor_C_V).neg_()
            elif of_logprobs_N is not None:
                grad_C_V.mul_(-of_logprobs_N[part, None])
            if of_logprobs_N is not None:
                grad_C_V.scatter_add_(1, targets_N[part, None], of_logprobs_N[part, None])
            grad_C_V = grad_C_V.div_(temperature)
            low_C_V = grad_C_V.to(weight_low_V_D.dtype)
            if grad_hidden_N_D is not None:
                grad_hidden_N_D[part] = (low_C_V @ weight_low_V_D).to(grad_hidden_N_D.dtype)
            if grad_weight_V_D is not None:
                grad_weight_V_D += low_C_V.T @ chunks.hidden(part)
            if grad_bias_V is not None:
                grad_bias_V += grad_C_V.sum(dim=0)
        of_weight_V_D = None if grad_weight_V_D is None else grad_weight_V_D.to(weight_dtype)
        of_bias_V = None if grad_bias_V is None or bias_V is None else grad_bias_V.to(bias_V.dtype)
        return grad_hidden_N_D, of_weight_V_D, of_bias_V, *[None] * 5


class _Chunks:
    """The logits of some tokens at a time, equal in the forward and the backward pass."""

    def __init__(
        self,
        hidden_N_D: Tensor,
        weight_V_D: Tensor,
        bias_V: Tensor | None,
        temperature: float,
        kept: KeptSets | None,
        offsets: Sequence[int],
    ) -> None:
        """`weight_V_D`: in the type of products; `offsets`: of the parts in the ids of `kept`, see `kept_offsets`."""
        self._hidden_N_D, self._weight_V_D, self._bias_V = hidden_N_D, weight_V_D, bias_V
        self._temperature, self._kept, self._offsets = temperature, kept, offsets
        self.fine = torch.promote_types(weight_V_D.dtype, torch.float32)
        size = chunk_tokens(hidden_N_D.device, len(weight_V_D))
        self.parts = [slice(at, at + size) for at in range(0, len(hidden_N_D), size)]

    def hidden(self, part: slice) -> Tensor:
        """(C, D) in the type of products."""
        return self._hidden_N_D[part].to(self._weight_V_D.dtype)

    def logits(self, number: int) -> Tensor:
        """(C, V) of a part, over the temperature. The caller may change them in place."""
        part = self.parts[number]
        logits_C_V = (self.hidden(part) @ self._weight_V_D.T).to(self.fine)
        if self._bias_V is not None:
            logits_C_V += self._bias_V
        logits_C_V /= self._temperature
        if self._kept is None:
            return logits_C_V
        ids = self._kept.token_ids_M[self._offsets[number] : self._offsets[number + 1]]
        return only_kept(logits_C_V, KeptSets(ids, self._kept.lengths_N[part]))


def chunk_tokens(device: torch.device, vocabulary: int) -> int:
    """Tokens whose logits are made at once."""
    return max(1, (CPU_CHUNK if device.type == "cpu" else GPU_CHUNK) // vocabulary)


def kept_offsets(kept: KeptSets, targets_N: Tensor, size: int) -> list[int]:
    """Start of the ids of each chunk of `size` tokens, and the end of the last one.

    The host waits for them once, unless `begins_N` are given. Raises RunFailedError if a target is not in its kept set.
    """
    lengths_N, num_ids = kept.lengths_N, len(kept.token_ids_M)
    if kept.begins_N is not None:
        return [*kept.begins_N[::size].tolist(), num_ids]
    rows_M = _rows_of(kept)
    hits_N = torch.zeros_like(lengths_N).index_add_(0, rows_M, (kept.token_ids_M == targets_N[rows_M]).long())
    is_odd = ((lengths_N > 0) & (hits_N == 0)).any()
    begins = (lengths_N.cumsum(0) - lengths_N)[::size]
    odd, *offsets = torch.cat([is_odd.long()[None], begins]).tolist()
    if odd:
        raise RunFailedError(_NOT_KEPT)
    return [*offsets, num_ids]


def kept_sets(ids_M: NDArray[np.int64], lengths_N: NDArray[np.int64], targets_N: NDArray[np.int64]) -> KeptSets:
    """Build in main memory, with `begins_N`. Raises RunFailedError if a target is not in its kept set."""
    rows_M = np.repeat(np.arange(len(lengths_N)), lengths_N)
    hits_N = np.bincount(rows_M[ids_M == targets_N[rows_M]], minlength=len(lengths_N))
    if ((lengths_N > 0) & (hits_N == 0)).any():
        raise RunFailedError(_NOT_KEPT)
    return KeptSets(torch.from_numpy(ids_M), torch.from_numpy(lengths_N), np.cumsum(lengths_N) - lengths_N)


def only_kept(logits_N_V: Tensor, kept: KeptSets) -> Tensor:
    """Logits without the ids that are not kept, changed in place if they need no gradient. See `kept_offsets`."""
    is_out_N_V = (kept.lengths_N > 0)[:, None].expand(logits_N_V.shape).contiguous()
    is_out_N_V[_rows_of(kept), kept.token_ids_M] = False
    if logits_N_V.requires_grad:
        return logits_N_V.masked_fill(is_out_N_V, _EXCLUDED)
    return logits_N_V.masked_fill_(is_out_N_V, _EXCLUDED)


def _rows_of(kept: KeptSets) -> Tensor:
    """(M,): the token of each id. Its size is given, because it would have to be waited for."""
    rows_N = torch.arange(len(kept.lengths_N), device=kept.lengths_N.device)
    return rows_N.repeat_interleave(kept.lengths_N, output_size=len(kept.token_ids_M))
