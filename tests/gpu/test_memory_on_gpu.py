"""A GPU whose memory really runs out: in a micro-batch, in a single row, in the optimizer step."""

import gc
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rollstream.learner.algorithms.base import BatchView
from rollstream.schemas.errors import RunFailedError
from rollstream.schemas.settings import ModelSettings
from tests.rigs.grouped_batches import GPU_SCALE, Stepped, at_most, grouped, step

pytestmark = pytest.mark.gpu
TOKENS = 1 << 14
"""Tokens of a micro-batch that holds the whole batch."""


@pytest.fixture(scope="module")
def long_rows() -> BatchView:
    """32 rows of about 400 tokens that share nothing."""
    return grouped(replace(GPU_SCALE, num_groups=32, group_size=1, prompt=2, answer=500))


def settings_of(folder: Path, device: str) -> ModelSettings:
    return ModelSettings(path=str(folder), device=device, dtype="bfloat16")


def peak_of(settings: ModelSettings, batch: BatchView, **options: Any) -> tuple[Stepped, int]:
    """A step, and the most memory that torch held meanwhile."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    found = step(settings, batch, **options)
    return found, torch.cuda.max_memory_reserved()


def test_a_micro_batch_that_does_not_fit_is_halved_and_gives_the_step_of_the_half(
    cuda: str, folder: Path, long_rows: BatchView, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_of(folder, cuda)
    whole, most = peak_of(settings, long_rows, max_tokens_per_micro_batch=TOKENS)
    assert whole.result.micro_batch_tokens == ()
    del whole
    half, least = peak_of(settings, long_rows, max_tokens_per_micro_batch=TOKENS // 2)
    del half
    assert least < 0.8 * most, "else the limit below is none"
    gc.collect()
    with at_most((least + most) / 2, cuda), caplog.at_level(logging.WARNING):
        found = step(settings, long_rows, max_tokens_per_micro_batch=TOKENS)
    (tokens,) = found.results[0].micro_batch_tokens
    assert tokens in (TOKENS // 2, TOKENS // 4)
    assert "CUDA out of memory" in caplog.text
    given = step(settings, long_rows, max_tokens_per_micro_batch=tokens)
    assert given.result.micro_batch_tokens == ()
    assert all(one.equal(wanted) for one, wanted in zip(found.weights, given.weights, strict=True))


def test_a_row_that_does_not_fit_fails_with_the_remedy_and_leaves_the_memory_free(cuda: str, folder: Path) -> None:
    settings = settings_of(folder, cuda)
    row = grouped(replace(GPU_SCALE, num_groups=1, group_size=1, prompt=10, answer=30_000))
    _, least = peak_of(settings, grouped(replace(GPU_SCALE, num_groups=1, group_size=1)))
    gc.collect()
    before = torch.cuda.memory_allocated()
    with (
        at_most(1.2 * least, cuda),
        pytest.raises(
            RunFailedError, match=r"out of memory with one row or pair \(CUDA out of memory.*shorten the com"
        ),
    ):
        step(settings, row, max_tokens_per_micro_batch=1 << 20)
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + 2**24


def test_memory_that_runs_out_in_the_optimizer_step_is_named_as_such(
    cuda: str, folder: Path, batch: BatchView, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = torch.optim.AdamW.step

    def limited(self: torch.optim.Optimizer, closure: None = None) -> None:
        """Take a step in 16 MiB, which do not hold two moments of 17 million parameters."""
        torch.cuda.empty_cache()
        with at_most(torch.cuda.memory_reserved() + 2**24, cuda):
            plain(self, closure)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(torch.optim.AdamW, "step", limited)
    with pytest.raises(RunFailedError, match=r"out of memory in the optimizer step \(CUDA out of memory"):
        step(settings_of(folder, cuda), batch)
