"""Log-probabilities of chosen tokens from hidden states, without the logits of all of them at once.

Knows a head's weight and no model. Logits are made for one chunk of tokens at a time, and again in the backward pass.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollstream.schemas.errors import RunFailedError

CHUNK_ELEMENTS = 1 << 22
"""Logits of a chunk, tokens x vocabulary: 16 MiB in float32. It decides the order of sums, so bits."""
_EXCLUDED = -1e30
"""Logit of a token outside the kept set: its exponential is 0, and 0 times it is no NaN."""


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
) -> tuple[Tensor, Tensor | None]:
    """Log-probability (N,) of each target under softmax(head(hidden) / temperature), and that softmax's entropy (N,).

    Without `entropy` the second is None; without `entropy_needs_grad` it has no gradient. Products are computed in
    `compute_dtype` (the hidden states' own if None), everything after them in float32 or finer. With `kept` the softmax
    is over each token's kept set alone. Memory is that of one chunk of at most `CHUNK_ELEMENTS` logits (or one token's)
    plus, in the backward pass, of the gradients. Raises RunFailedError if a kept set lacks its target.
    """
    dtype = compute_dtype or hidden_N_D.dtype
    with torch.autocast(hidden_N_D.device.type, enabled=False):
        logprobs_N, entropies_N = _Selected.apply(  # pyright: ignore[reportGeneralTypeIssues, reportUnknownVariableType]
            hidden_N_D, head.weight, head.bias, targets_N, temperature, kept, dtype, entropy or entropy_needs_grad
        )
    if not entropy:
        return logprobs_N, None
    return logprobs_N, entropies_N if entropy_needs_grad else entropies_N.detach()


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
        chunks = _Chunks(hidden_N_D, weight_V_D, bias_V, temperature, kept, dtype)
        logprobs_N = hidden_N_D.new_empty(len(targets_N), dtype=chunks.fine)
        totals_N = torch.empty_like(logprobs_N)
        entropies_N = torch.zeros_like(logprobs_N)
        for part in chunks.parts:
            logits_C_V = chunks.logits(part, targets_N[part])
            totals_C = logits_C_V.logsumexp(dim=-1)
            totals_N[part] = totals_C
            logprobs_N[part] = logits_C_V.gather(1, targets_N[part, None])[:, 0] - totals_C
            if with_entropy:
                log_softmax_C_V = logits_C_V.sub_(totals_C[:, None])
                entropies_N[part] = -(log_softmax_C_V.exp() * log_softmax_C_V).sum(dim=-1)
        ctx.save_for_backward(hidden_N_D, weight_V_D, bias_V, targets_N, totals_N, entropies_N, *(kept or ()))
        ctx.options = temperature, dtype
        return logprobs_N, entropies_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_N_D, weight_V_D, bias_V, targets_N, totals_N, entropies_N, *found = ctx.saved_tensors
        temperature, dtype = ctx.options
        kept = KeptSets(*found) if found else None
        of_logprobs_N, of_entropies_N = grads
        if of_logprobs_N is None and of_entropies_N is None:
            return (None,) * 8
        chunks = _Chunks(hidden_N_D, weight_V_D, bias_V, temperature, kept, dtype)
        wants = ctx.needs_input_grad
        grad_hidden_N_D = torch.empty_like(hidden_N_D) if wants[0] else None
        grad_weight_V_D = torch.zeros_like(weight_V_D, dtype=chunks.fine) if wants[1] else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=chunks.fine) if wants[2] else None
        for part in chunks.parts:
            log_softmax_C_V = chunks.logits(part, targets_N[part]).sub_(totals_N[part, None])
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
            low_C_V = grad_C_V.to(dtype)
            if grad_hidden_N_D is not None:
                grad_hidden_N_D[part] = (low_C_V @ chunks.weight_V_D).to(grad_hidden_N_D.dtype)
            if grad_weight_V_D is not None:
                grad_weight_V_D += low_C_V.T @ chunks.hidden(part)
            if grad_bias_V is not None:
                grad_bias_V += grad_C_V.sum(dim=0)
        return grad_hidden_N_D, _as(grad_weight_V_D, weight_V_D), _as(grad_bias_V, bias_V), *[None] * 5


class _Chunks:
    """The logits of some tokens at a time, equal in the forward and the backward pass."""

    def __init__(
        self,
        hidden_N_D: Tensor,
        weight_V_D: Tensor,
        bias_V: Tensor | None,
        temperature: float,
        kept: KeptSets | None,
        dtype: torch.dtype,
    ) -> None:
        self._hidden_N_D, self._bias_V, self._temperature, self._kept = hidden_N_D, bias_V, temperature, kept
        self._dtype = dtype
        self.weight_V_D = weight_V_D.to(dtype)
        self.fine = torch.promote_types(dtype, torch.float32)
        size = max(1, CHUNK_ELEMENTS // len(weight_V_D))
        self.parts = [slice(at, at + size) for at in range(0, len(hidden_N_D), size)]
        self._ends_N = None if kept is None else kept.lengths_N.cumsum(0)

    def hidden(self, part: slice) -> Tensor:
        """(C, D) in the type of products."""
        return self._hidden_N_D[part].to(self._dtype)

    def logits(self, part: slice, targets_C: Tensor) -> Tensor:
        """(C, V), over the temperature. The caller may change them in place."""
        logits_C_V = (self.hidden(part) @ self.weight_V_D.T).to(self.fine)
        if self._bias_V is not None:
            logits_C_V += self._bias_V
        logits_C_V /= self._temperature
        if self._kept is None or self._ends_N is None:
            return logits_C_V
        lengths_C = self._kept.lengths_N[part]
        end = int(self._ends_N[part][-1])
        ids = self._kept.token_ids_M[end - int(lengths_C.sum()) : end]
        return only_kept(logits_C_V, KeptSets(ids, lengths_C), targets_C)


def only_kept(logits_N_V: Tensor, kept: KeptSets, targets_N: Tensor) -> Tensor:
    """Logits without the ids that are not kept, changed in place if they need no gradient.

    Raises RunFailedError if a target is none of them.
    """
    lengths_N = kept.lengths_N
    rows = torch.arange(len(lengths_N), device=lengths_N.device).repeat_interleave(lengths_N)
    is_out_N_V = (lengths_N > 0)[:, None].expand(logits_N_V.shape).contiguous()
    is_out_N_V[rows, kept.token_ids_M] = False
    if is_out_N_V.gather(1, targets_N[:, None]).any():
        raise RunFailedError("a sampled token is not in its recorded kept set; its engine recorded another set")
    if logits_N_V.requires_grad:
        return logits_N_V.masked_fill(is_out_N_V, _EXCLUDED)
    return logits_N_V.masked_fill_(is_out_N_V, _EXCLUDED)


def _as(gradient: Tensor | None, like: Tensor | None) -> Tensor | None:
    return None if gradient is None or like is None else gradient.to(like.dtype)
