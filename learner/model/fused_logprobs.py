"""Log-probabilities of chosen tokens on a GPU by Triton kernels: no logits are written to its memory.

Imports triton, which torch includes only where there may be a GPU; `logprobs.py` decides who calls it. The kernels use
no atomics and no timing: equal input gives equal bits on equal hardware.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

GRAD_CHUNK = 1 << 26
"""Gradients of logits that the backward pass holds at once, tokens x columns of the vocabulary: 128 MiB in bfloat16."""
_LOWEST = tl.constexpr(-1e30)
"""Logit of a column beyond the vocabulary: its exponential is 0, and 0 times it is not NaN."""


class Tiling(NamedTuple):
    """Sizes of the parts that a program of a kernel computes at a time."""

    tokens: int = 128
    columns: int = 128
    dims: int = 64
    run: int = 8
    """Tiles of the vocabulary that one program of the forward pass sums over."""
    band: int = 8
    """Tiles of tokens that are computed side by side, so that they find each other's operands in the L2 cache."""
    warps: int = 8
    stages: int = 3


def tiling(dtype: torch.dtype) -> Tiling:
    """Tiling for operands of this type that compiles to few or no spilled registers, and fits the shared memory of GPUs
    since compute capability 8.0. Constant, never tuned by timing, which would change the order of sums.
    """
    return Tiling() if dtype.itemsize == 2 else Tiling(tokens=64, dims=32)


class FusedSelected(torch.autograd.Function):
    """Log-probabilities and entropies (N,) of `selected_logprobs` without kept sets, and their gradients.

    The forward pass keeps the logarithm of each softmax's sum, and its entropy. The backward pass computes the logits
    once more, and writes their gradients in the type of products.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        hidden_N_D: Tensor,
        weight_V_D: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        temperature: float,
        dtype: torch.dtype,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        low_N_D, low_V_D = hidden_N_D.to(dtype).contiguous(), weight_V_D.to(dtype).contiguous()
        operands = _Operands(low_N_D, low_V_D, bias_V, targets_N.contiguous(), 1.0 / temperature)
        with torch.cuda.device_of(hidden_N_D):
            chosen_N, totals_N, entropies_N = _forward(operands, with_entropy=with_entropy)
        ctx.save_for_backward(*operands[:4], totals_N, entropies_N)
        ctx.options = operands.scale, hidden_N_D.dtype, weight_V_D.dtype
        return chosen_N - totals_N, entropies_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_N_D, weight_V_D, bias_V, targets_N, totals_N, entropies_N = ctx.saved_tensors
        scale, hidden_dtype, weight_dtype = ctx.options
        operands = _Operands(hidden_N_D, weight_V_D, bias_V, targets_N, scale)
        of_logprobs_N, of_entropies_N = (None if one is None else one.contiguous() for one in grads)
        if of_logprobs_N is None:
            if of_entropies_N is None:
                return (None,) * 7
            of_logprobs_N = torch.zeros_like(of_entropies_N)
        given = _Given(totals_N, entropies_N, of_logprobs_N, of_entropies_N)
        with torch.cuda.device_of(totals_N):
            of_hidden, of_weight, of_bias = _backward(operands, given, ctx.needs_input_grad, weight_dtype)
        return None if of_hidden is None else of_hidden.to(hidden_dtype), of_weight, of_bias, *[None] * 4


class _Operands(NamedTuple):
    hidden_N_D: Tensor
    weight_V_D: Tensor
    bias_V: Tensor | None
    targets_N: Tensor
    scale: float
    """One over the temperature."""

    def options(self, **of_one: Any) -> dict[str, Any]:
        """Options common to both kernels, and those in `of_one`."""
        width, tiles = self.hidden_N_D.shape[1], tiling(self.hidden_N_D.dtype)
        return {
            **of_one,
            "WITH_BIAS": self.bias_V is not None,
            "IS_EVEN": width % tiles.dims == 0,
            "IN_FLOAT32": not self.hidden_N_D.is_cuda,  # Triton's interpreter multiplies the bits of bfloat16 numbers
            "TOKENS": tiles.tokens,
            "COLUMNS": tiles.columns,
            "DIMS": tiles.dims,
            "BAND": tiles.band,
            "num_warps": tiles.warps,
            "num_stages": tiles.stages,
            "enable_fp_fusion": True,  # its default, and so bits, changes with Triton 3.10
        }


class _Given(NamedTuple):
    totals_N: Tensor
    entropies_N: Tensor
    of_logprobs_N: Tensor
    of_entropies_N: Tensor | None


def _forward(operands: _Operands, *, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Logit (over the temperature) of each target, log of the softmax's sum, and entropy, all (N,)."""
    hidden_N_D, weight_V_D, bias_V, targets_N, scale = operands
    (num_tokens, width), vocabulary = hidden_N_D.shape, len(weight_V_D)
    tiles = tiling(hidden_N_D.dtype)
    num_runs = triton.cdiv(vocabulary, tiles.columns * tiles.run)
    highest_R_N, sums_R_N, moments_R_N = hidden_N_D.new_empty((3, num_runs, num_tokens), dtype=torch.float32)
    chosen_N = torch.full_like(targets_N, torch.nan, dtype=torch.float32)
    forward_kernel[(num_runs, triton.cdiv(num_tokens, tiles.tokens))](
        hidden_N_D, weight_V_D, bias_V, targets_N, highest_R_N, sums_R_N, moments_R_N, chosen_N,
        num_tokens, vocabulary, width, scale, **operands.options(WITH_ENTROPY=with_entropy, RUN=tiles.run),
    )  # fmt: skip
    highest_N = highest_R_N.amax(dim=0)
    below_R_N = highest_R_N - highest_N
    shares_R_N = below_R_N.exp()
    sums_N = (sums_R_N * shares_R_N).sum(dim=0)
    logs_N = sums_N.log()
    entropies_N = torch.zeros_like(logs_N)
    if with_entropy:
        entropies_N = logs_N - ((moments_R_N + below_R_N * sums_R_N) * shares_R_N).sum(dim=0) / sums_N
    return chosen_N, highest_N + logs_N, entropies_N


def _backward(
    operands: _Operands, given: _Given, wants: tuple[bool, ...], weight_dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden states (in float32), weight and bias, from the gradients of some columns of the logits at a
    time.
    """
    hidden_N_D, weight_V_D, bias_V, _, _ = operands
    of_hidden_N_D = torch.zeros_like(hidden_N_D, dtype=torch.float32) if wants[0] else None
    of_weight_V_D = torch.empty_like(weight_V_D, dtype=weight_dtype) if wants[1] else None
    of_bias_V = torch.empty_like(bias_V) if bias_V is not None and wants[2] else None
    num_tokens, vocabulary = len(hidden_N_D), len(weight_V_D)
    step = tiling(hidden_N_D.dtype).columns
    step *= max(1, min(GRAD_CHUNK // num_tokens, vocabulary) // step)
    buffer = hidden_N_D.new_empty(num_tokens * min(step, vocabulary))
    for first in range(0, vocabulary, step):
        part = slice(first, min(first + step, vocabulary))
        grad_N_C = buffer[: num_tokens * (part.stop - first)].view(num_tokens, -1)
        _grad_of_logits(operands, given, first, grad_N_C)
        if of_hidden_N_D is not None:
            of_hidden_N_D += grad_N_C @ weight_V_D[part]
        if of_weight_V_D is not None:
            of_weight_V_D[part] = grad_N_C.T @ hidden_N_D
        if of_bias_V is not None:
            of_bias_V[part] = grad_N_C.sum(dim=0, dtype=torch.float32)
    return of_hidden_N_D, of_weight_V_D, of_bias_V


def _grad_of_logits(operands: _Operands, given: _Given, first: int, grad_N_C: Tensor) -> None:
    """Write the gradient of the logits before they are divided, of C columns from `first` on."""
    hidden_N_D, weight_V_D, bias_V, targets_N, scale = operands
    (num_tokens, width), tiles = hidden_N_D.shape, tiling(hidden_N_D.dtype)
    num_columns = grad_N_C.shape[1]
    backward_kernel[(triton.cdiv(num_columns, tiles.columns), triton.cdiv(num_tokens, tiles.tokens))](
        hidden_N_D, weight_V_D, bias_V, targets_N, *given, grad_N_C,
        num_tokens, first, num_columns, width, scale,
        **operands.options(WITH_ENTROPY=given.of_entropies_N is not None),
    )  # fmt: skip


@triton.jit
def _logits(
    hidden, weight, bias, rows, columns, width, scale,
    WITH_BIAS: tl.constexpr, IS_EVEN: tl.constexpr, IN_FLOAT32: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """(TOKENS, COLUMNS) over the temperature, summed in float32."""
    dims = tl.arange(0, DIMS)
    hidden_at = hidden + rows.to(tl.int64)[:, None] * width + dims[None, :]
    weight_at = weight + columns.to(tl.int64)[None, :] * width + dims[:, None]
    logits = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for first in range(0, width, DIMS):
        if IS_EVEN:
            left, right = tl.load(hidden_at), tl.load(weight_at)
        else:
            left = tl.load(hidden_at, mask=dims[None, :] < width - first, other=0.0)
            right = tl.load(weight_at, mask=dims[:, None] < width - first, other=0.0)
        if IN_FLOAT32:
            left, right = left.to(tl.float32), right.to(tl.float32)
        logits = tl.dot(left, right, logits, input_precision="tf32x3")
        hidden_at += DIMS
        weight_at += DIMS
    if WITH_BIAS:
        logits += tl.load(bias + columns).to(tl.float32)[None, :]
    return logits * scale


@triton.jit(do_not_specialize=["num_tokens"])
def forward_kernel(
    hidden, weight, bias, targets, highest, sums, moments, chosen,
    num_tokens, vocabulary, width, scale,
    WITH_BIAS: tl.constexpr, WITH_ENTROPY: tl.constexpr, IS_EVEN: tl.constexpr, IN_FLOAT32: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, DIMS: tl.constexpr, RUN: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """Compute, for some tokens and a run of columns, the highest logit, the sum of exponentials below it, and the sum
    of each of those times its logit below it; also the logit of the target, if it is among them.
    """
    tile, run = tl.swizzle2d(tl.program_id(1), tl.program_id(0), tl.num_programs(1), tl.num_programs(0), BAND)
    rows = tile * TOKENS + tl.arange(0, TOKENS)
    safe_rows = rows % num_tokens
    target = tl.load(targets + safe_rows)
    begin = run * RUN * COLUMNS
    end = tl.minimum(begin + RUN * COLUMNS, vocabulary)
    top = tl.full((TOKENS,), _LOWEST, tl.float32)
    total = tl.zeros((TOKENS,), tl.float32)
    moment = tl.zeros((TOKENS,), tl.float32)
    picked = tl.zeros((TOKENS,), tl.float32)
    for first in range(begin, end, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        logits = _logits(
            hidden, weight, bias, safe_rows, columns % vocabulary, width, scale,
            WITH_BIAS, IS_EVEN, IN_FLOAT32, TOKENS, COLUMNS, DIMS,
        )  # fmt: skip
        logits = tl.where((columns < vocabulary)[None, :], logits, _LOWEST)
        picked += tl.sum(tl.where(columns[None, :] == target[:, None], logits, 0.0), axis=1)
        higher = tl.maximum(top, tl.max(logits, axis=1))
        below = logits - higher[:, None]
        exponentials = tl.exp(below)
        shrink = tl.exp(top - higher)
        if WITH_ENTROPY:
            moment = (moment + (top - higher) * total) * shrink + tl.sum(exponentials * below, axis=1)
        total = total * shrink + tl.sum(exponentials, axis=1)
        top = higher
    is_row = rows < num_tokens
    at = run.to(tl.int64) * num_tokens + rows
    tl.store(highest + at, top, mask=is_row)
    tl.store(sums + at, total, mask=is_row)
    tl.store(moments + at, moment, mask=is_row)
    tl.store(chosen + rows, picked, mask=is_row & (target >= begin) & (target < end))


@triton.jit(do_not_specialize=["num_tokens", "first"])
def backward_kernel(
    hidden, weight, bias, targets, totals, entropies, of_logprobs, of_entropies, grad,
    num_tokens, first, num_columns, width, scale,
    WITH_BIAS: tl.constexpr, WITH_ENTROPY: tl.constexpr, IS_EVEN: tl.constexpr, IN_FLOAT32: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, DIMS: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """Gradient of a tile of logits, which are computed once more."""
    tile, part = tl.swizzle2d(tl.program_id(1), tl.program_id(0), tl.num_programs(1), tl.num_programs(0), BAND)
    rows = tile * TOKENS + tl.arange(0, TOKENS)
    safe_rows = rows % num_tokens
    offsets = part * COLUMNS + tl.arange(0, COLUMNS)
    columns = first + offsets % num_columns
    logits = _logits(
        hidden, weight, bias, safe_rows, columns, width, scale,
        WITH_BIAS, IS_EVEN, IN_FLOAT32, TOKENS, COLUMNS, DIMS,
    )  # fmt: skip
    log_softmax = logits - tl.load(totals + safe_rows)[:, None]
    factor = tl.load(of_logprobs + safe_rows)[:, None]
    is_target = columns[None, :] == tl.load(targets + safe_rows)[:, None]
    found = tl.where(is_target, factor, 0.0)
    if WITH_ENTROPY:
        of_entropy = tl.load(of_entropies + safe_rows)[:, None]
        factor += of_entropy * (log_softmax + tl.load(entropies + safe_rows)[:, None])
    found = (found - factor * tl.exp(log_softmax)) * scale
    at = rows.to(tl.int64)[:, None] * num_columns + offsets[None, :]
    is_within = (rows < num_tokens)[:, None] & (offsets < num_columns)[None, :]
    tl.store(grad + at, found.to(grad.dtype.element_ty), mask=is_within)
