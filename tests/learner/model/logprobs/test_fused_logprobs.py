"""The fused kernels where there is no GPU: interpreted on the CPU, and compiled for GPUs without being run."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rollstream.learner.model.logprobs import fuses
from rollstream.learner.trainer import JobTrainer
from rollstream.schemas.events import JobSubmitted
from tests.rigs.sources.source_tree import ROOT

pytest.importorskip("triton", reason="torch includes triton only where there may be a GPU")
INTERPRETED = Path(__file__).with_name("interpreted_logprobs.py")
SHARED_MEMORY = {80: 166_912, 86: 101_376, 90: 232_448}
"""Bytes that a block of threads may have, by compute capability."""


@pytest.mark.slow
def test_the_kernels_pass_their_tests_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(INTERPRETED)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "dtype"), [(80, "bf16"), (86, "bf16"), (90, "bf16"), (90, "fp32")])
@pytest.mark.parametrize("name", ["forward_kernel", "backward_kernel"])
def test_the_kernels_compile_for_a_gpu_and_fit_its_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, capability: int, dtype: str
) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from rollstream.learner.model import fused_logprobs

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(fused_logprobs, name)
    tiles = fused_logprobs.tiling(torch.bfloat16 if dtype == "bf16" else torch.float32)
    constants = {
        "bias": None, "WITH_BIAS": False, "WITH_ENTROPY": True, "IS_EVEN": True, "IN_FLOAT32": False, "RUN": tiles.run,
        "TOKENS": tiles.tokens, "COLUMNS": tiles.columns, "DIMS": tiles.dims, "BAND": tiles.band,
    }  # fmt: skip
    kinds = {"scale": "fp32", "targets": "*i64"}
    kinds |= dict.fromkeys(("hidden", "weight", "grad"), f"*{dtype}")
    kinds |= dict.fromkeys(("num_tokens", "vocabulary", "width", "first", "num_columns"), "i32")
    kinds |= dict.fromkeys(constants, "constexpr")
    signature = {argument: kinds.get(argument, "*fp32") for argument in kernel.arg_names}
    aligned = [number for number, kind in enumerate(signature.values()) if kind.startswith("*")]
    aligned += [number for number, key in enumerate(signature) if key in ("width", "vocabulary", "num_columns")]
    source = ASTSource(
        kernel,
        signature,
        {(number,): constants[key] for number, key in enumerate(kernel.arg_names) if key in constants},
        {(number,): [["tt.divisibility", 16]] for number in aligned},
    )
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= SHARED_MEMORY[capability]
    assert "mma" in compiled.asm["ptx"], "products are of tensor cores"
    assert "atom." not in compiled.asm["ptx"], "an order that differs from run to run"


def test_a_cpu_computes_in_chunks() -> None:
    assert not fuses(torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(
    ("revision", "fused_kernels", "may_fuse"), [(7, True, False), (8, True, True), (8, False, False)]
)
def test_a_job_recorded_before_the_kernels_or_without_them_keeps_its_chunks(
    lab: Any, revision: int, fused_kernels: bool, may_fuse: bool
) -> None:
    settings = lab.settings(revision=revision)
    model = settings.model.model_copy(update={"fused_kernels": fused_kernels})
    assert ("fused_kernels" in model.model_dump(mode="json")) != fused_kernels, "older records have the same bytes"
    job = JobSubmitted(
        run_id="run-1",
        time_ms=1,
        job_id="run-1/rl",
        model_group="run-1/main",
        base_version=0,
        settings=settings.model_copy(update={"model": model}),
    )
    found = JobTrainer(job, threads=1, permissions=lab.permissions).model
    assert (found.may_fuse, found.frozen_copy().may_fuse) == (may_fuse, may_fuse)
