"""Devices, models and batches of the tests that run on an NVIDIA GPU, where a CPU rehearses most of them.

`make test-gpu` runs them; with ROLLSTREAM_TEST_DEVICE=cpu most of them are rehearsed without one.
"""

import gc
import inspect
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen

from rollstream.learner.algorithms.base import BatchView
from rollstream.learner.model.policy import make_deterministic
from tests.rigs.grouped_batches import CPU_SCALE, GPU_SCALE, Scale, grouped, make_model


@pytest.fixture(scope="session", autouse=True)
def varlen_attn_with_groups() -> Iterator[None]:
    """Give varlen_attn the argument `enable_gqa` where torch is older than the one that the project pins.

    torch 2.11, which a GPU's driver may be too old to replace, takes as many heads of keys and values as of queries.
    """
    plain: Any = varlen.varlen_attn
    if "enable_gqa" in inspect.signature(plain).parameters:
        yield
        return

    def repeated(query: Any, key: Any, value: Any, *args: Any, enable_gqa: bool = False, **options: Any) -> Any:
        times = query.shape[1] // key.shape[1] if enable_gqa else 1
        return plain(query, *(one.repeat_interleave(times, dim=1) for one in (key, value)), *args, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(varlen, "varlen_attn", repeated)
        yield


@pytest.fixture(autouse=True)
def deterministic(gpu: str) -> Iterator[None]:
    """Train as the learner does by default, and leave the process and the GPU to others as they were."""
    make_deterministic(1)
    yield
    make_deterministic(None, deterministic=False)
    if gpu != "cpu":
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture
def cuda(gpu: str) -> str:
    """The device of a test that no CPU can rehearse."""
    if gpu == "cpu":
        pytest.skip("only a GPU has what this test looks at")
    return gpu


@pytest.fixture(scope="session")
def scale(gpu: str) -> Scale:
    """Sizes for the device."""
    return CPU_SCALE if gpu == "cpu" else GPU_SCALE


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, scale: Scale) -> Path:
    """Folder of a model of two layers with heads of 64 numbers, on a GPU 14 of them in 2 groups."""
    return make_model(tmp_path_factory.mktemp("wide") / "model", scale)


@pytest.fixture(scope="session")
def batch(scale: Scale) -> BatchView:
    """Groups of rows that share a prompt."""
    return grouped(scale)


@pytest.fixture(scope="session")
def few(scale: Scale) -> BatchView:
    """So few rows that the CPU trains on them at once."""
    return grouped(replace(scale, num_groups=2, group_size=3, prompt=20, answer=16))
