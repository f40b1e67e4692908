"""Kernels of the learner on one GPU: log-probabilities of a head, and kinds of attention, forward and backward.

    python -m benchmarks.bench_gpu_kernels --output benchmarks/results/bench_gpu_kernels.json

`head`: 8,192 tokens, 151,936 columns, width 896, by the fused kernels and in chunks of logits. `attention`: causal, 4
rows of 8,192 tokens, 14 heads of 64 numbers in bfloat16, by the FlashAttention that torch includes and by
flex_attention; `repeats` says whether a second backward pass gives equal bits. `tflops` count the products alone, once.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.bench_gpu import DEVICE, measure_all, measured, timed
from rollstream.learner.model.logprobs import Head, selected_logprobs
from rollstream.learner.model.policy import make_deterministic

TOKENS, COLUMNS, WIDTH = 8192, 151936, 896
ROWS, LENGTH, HEADS, HEAD_WIDTH = 4, 8192, 14, 64


def head(dtype: torch.dtype, *, fused: bool) -> dict[str, Any]:
    """Forward and backward of the head alone."""
    make_deterministic(None)
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, device=DEVICE, dtype=dtype, requires_grad=True)
    weight = (torch.randn(COLUMNS, WIDTH, device=DEVICE) / WIDTH**0.5).requires_grad_()
    targets = torch.randint(COLUMNS, (TOKENS,), device=DEVICE)
    found: dict[str, Any] = {}

    def step(_: int) -> None:
        hidden.grad = weight.grad = None
        selected_logprobs(hidden, Head(weight), targets, 1.0, compute_dtype=dtype, fused=fused)[0].sum().backward()

    with measured(found):
        found["step_s"] = timed(step)
    found["tflops"] = 3 * 2 * TOKENS * COLUMNS * WIDTH / found["step_s"] / 1e12
    return found


def flash() -> Callable[..., Tensor]:
    """Attention over rows one after another, (N, H, D)."""
    bounds = torch.arange(0, ROWS * LENGTH + 1, LENGTH, device=DEVICE, dtype=torch.int32)
    of_keys = bounds.clone()  # torch would prefer cuDNN to FlashAttention if they were one tensor

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        found: Any = varlen.varlen_attn(query, key, value, bounds, of_keys, LENGTH, LENGTH, window_size=(-1, 0))
        return found

    return attend


def flex() -> Callable[..., Tensor]:
    """The same, compiled."""
    row_of = torch.arange(ROWS * LENGTH, device=DEVICE) // LENGTH
    total = ROWS * LENGTH
    mask = torch.compile(create_block_mask)(
        lambda b, h, i, j: (i >= j) & (row_of[i] == row_of[j]), None, None, total, total, device=DEVICE
    )
    compiled: Any = torch.compile(flex_attention, dynamic=False)

    def attend(*qkv: Tensor) -> Tensor:
        return compiled(*(one.transpose(0, 1)[None] for one in qkv), block_mask=mask)[0].transpose(0, 1)

    return attend


def attention(make: Callable[[], Callable[..., Tensor]], *, deterministic: bool) -> dict[str, Any]:
    """Forward, and backward for all three."""
    make_deterministic(None, deterministic=deterministic)
    torch.manual_seed(0)
    shape = ROWS * LENGTH, HEADS, HEAD_WIDTH
    *qkv, grad = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(4))
    for one in qkv:
        one.requires_grad_()
    began, attend = time.perf_counter(), make()
    output = attend(*qkv)

    def back(_: int = 0) -> tuple[Tensor, ...]:
        return torch.autograd.grad(output, qkv, grad, retain_graph=True)

    first = back()
    found: dict[str, Any] = {"first_s": time.perf_counter() - began}
    flops = 4 * HEADS * HEAD_WIDTH * ROWS * LENGTH**2 / 2
    found["forward_tflops"] = flops / timed(lambda _: attend(*qkv)) / 1e12
    found["backward_tflops"] = 2.5 * flops / timed(back) / 1e12
    found["repeats"] = all(torch.equal(one, other) for one, other in zip(first, back(), strict=True))
    return found


def measurements() -> Iterator[tuple[str, str, Callable[[], dict[str, Any]]]]:
    """Section, name and measurement."""
    for dtype in (torch.bfloat16, torch.float32):
        for fused in (True, False):
            name = f"{str(dtype).removeprefix('torch.')}, {'fused' if fused else 'chunks'}"
            yield "head", name, partial(head, dtype, fused=fused)
    for name, make, deterministic in (("flash", flash, False), ("flash", flash, True), ("flex", flex, True)):
        called = f"{name}, deterministic" if deterministic else name
        yield "attention", called, partial(attention, make, deterministic=deterministic)


def main() -> None:
    """Measure all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no NVIDIA GPU here")
    measure_all(measurements(), args.output)


if __name__ == "__main__":
    main()
