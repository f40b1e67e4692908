"""Adapters of several policies on one base model in memory: the same bits as with a base model each."""

import asyncio
import gc
import logging
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from rollstream.learner.model.loading import SHARED_BASES, can_share, described_bases, why_apart
from rollstream.learner.model.policy import PolicyModel
from rollstream.learner.tiny_model import make_tiny_model
from rollstream.learner.worker import Worker
from rollstream.producers.engines.model_cache import ModelCache
from rollstream.schemas.engine_settings import TransformersSettings
from rollstream.schemas.events import JobSubmitted, JobSucceeded, StepTrained
from rollstream.schemas.settings import LoraSettings, ModelSettings, OptimizerSettings
from tests.learner.conftest import Lab
from tests.producers.engines import engine_rig

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of this test alone."""
    return make_tiny_model(tmp_path / "base", seed=0, hidden_size=16, intermediate_size=32)


def lora(folder: Path, rank: int = 4, **changes: Any) -> ModelSettings:
    return ModelSettings(path=str(folder), device="cpu", lora=LoraSettings(rank=rank, **changes))


def frozen(model: PolicyModel) -> set[int]:
    """Addresses of the parameters that are not trained."""
    return {one.data_ptr() for one in model.module.parameters() if not one.requires_grad}


def test_adapters_share_their_base_model_and_nothing_else(folder: Path) -> None:
    one, other = (PolicyModel(lora(folder, rank), seed=rank, shares_base=True) for rank in (4, 8))
    alone = PolicyModel(lora(folder, 8), seed=8)
    assert frozen(one) == frozen(other)
    assert not frozen(alone) & frozen(one)
    trained = [{value.data_ptr() for _, value in model.trainable()} for model in (one, other)]
    assert not trained[0] & trained[1]
    assert other.weights_bytes() == alone.weights_bytes()
    ids = torch.tensor([[3, 5, 7]])
    assert torch.equal(other.module(input_ids=ids).logits, alone.module(input_ids=ids).logits)


def test_an_engine_and_a_learner_that_load_models_in_threads_leave_tied_weights_tied(folder: Path) -> None:
    """Two loads at once would leave transformers' `tie_weights` without effect for the rest of the process."""
    original = PreTrainedModel.tie_weights
    tensors = load_file(folder / "model.safetensors")

    def learn(number: int) -> None:
        PolicyModel(lora(folder), seed=number)

    def generate(number: int) -> None:
        ModelCache(TransformersSettings(device="cpu")).load(engine_rig.published(folder, number), tensors, "weights")

    try:
        with ThreadPoolExecutor(4) as threads:
            for ended in [threads.submit(load, number) for number in range(20) for load in (learn, generate)]:
                ended.result()
        assert PreTrainedModel.tie_weights is original
    finally:
        PreTrainedModel.tie_weights = original


def test_a_base_model_is_let_go_with_the_last_policy_that_holds_it(folder: Path) -> None:
    held = [PolicyModel(lora(folder), seed=seed, shares_base=True) for seed in (1, 2)]
    where = {key[0] for key in SHARED_BASES}
    assert str(folder) in where
    held.clear()
    gc.collect()
    assert str(folder) not in {key[0] for key in SHARED_BASES}


def test_a_model_whose_files_have_changed_is_loaded_again(folder: Path) -> None:
    one = PolicyModel(lora(folder), seed=1, shares_base=True)
    weights = folder / "model.safetensors"
    os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 10**9))
    assert not frozen(one) & frozen(PolicyModel(lora(folder), seed=1, shares_base=True))


def test_a_model_that_cannot_share_has_its_own_base_model(folder: Path) -> None:
    full = ModelSettings(path=str(folder), device="cpu")
    assert not can_share(full, CPU)
    assert not can_share(lora(folder).model_copy(update={"quantization": "nf4"}), CPU)
    assert can_share(lora(folder, use_dora=True), CPU)
    assert not can_share(lora(folder, use_dora=True), torch.device("cuda"))
    models = [PolicyModel(full, seed=1, shares_base=True) for _ in range(2)]
    addresses = [{value.data_ptr() for _, value in model.trainable()} for model in models]
    assert not addresses[0] & addresses[1]


def test_the_description_of_bases_names_those_that_share_and_why_others_do_not() -> None:
    path = Path("/models/base")
    models = {
        "r/solvers": lora(path),
        "r/verifiers": lora(path, 8),
        "r/judges": lora(Path("/models/other")),
        "r/full": ModelSettings(path=str(path), device="cpu"),
        "r/small": lora(path).model_copy(update={"quantization": "nf4"}),
        "r/nowhere": lora(path).model_copy(update={"device": "cuda:999"}),
    }
    assert described_bases(models) == (
        "r/solvers, r/verifiers share /models/base; r/full has its own: its full weights are trained; r/judges has "
        "its own: no other group has its path, dtype, device and attention; r/small has its own: the state of 4-bit "
        "weights is in their modules"
    )
    several = described_bases({"r/solvers": lora(path), "r/verifiers": lora(path)}, num_ranks=2)
    assert several.count("has its own: each process has its shards") == 2
    assert "DoRA" in why_apart(lora(path, use_dora=True), torch.device("cuda"))


async def submitted(lab: Lab, name: str, rank: int) -> JobSubmitted:
    """A job of a model group of its own."""
    job = JobSubmitted(
        run_id="run-1",
        time_ms=1,
        job_id=f"run-1/{name}",
        model_group=f"run-1/{name}",
        base_version=0,
        settings=lab.settings(model=lora(lab.model, rank), optimizer=OptimizerSettings(learning_rate=1e-2)),
    )
    await lab.log.send(job)
    return job


def published(folder: Path, model: Path, jobs: dict[str, int]) -> dict[str, list[str]]:
    """Hashes by model group of what a learner trains, after a look at what its policies share while they train."""
    lab = Lab(folder, model)
    shared: list[bool] = []

    async def scenario() -> dict[str, list[str]]:
        for name, rank in jobs.items():
            await lab.plan(await submitted(lab, name, rank))
        worker: Worker = lab.worker()

        async def is_done() -> bool:
            runs = list(worker._runs.values())  # pyright: ignore[reportPrivateUsage]
            if len(runs) == len(jobs):
                shared.append(len({frozenset(frozen(run.trainer.model)) for run in runs}) == 1)
            return await lab.has(JobSucceeded, count=len(jobs))()

        await lab.work(is_done, worker)
        steps = await lab.events("weights", StepTrained)
        return {name: [one.weights_sha256 for one in steps if one.model_group == f"run-1/{name}"] for name in jobs}

    found = asyncio.run(scenario())
    assert shared
    assert all(shared)
    return found


def test_groups_of_one_learner_train_to_the_bits_of_learners_of_their_own(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rollstream.learner.worker")
    jobs = {"solvers": 4, "verifiers": 8}
    together = published(tmp_path / "together", folder, jobs)
    expected = f"base models: run-1/solvers, run-1/verifiers share {folder}"
    assert [one.getMessage() for one in caplog.records if "base models" in one.getMessage()] == [expected]
    caplog.clear()
    apart = {name: published(tmp_path / name, folder, {name: rank})[name] for name, rank in jobs.items()}
    assert together == apart
    assert "base models" not in caplog.text, "one group alone shares nothing"
    assert all(len(set(hashes)) == 3 for hashes in together.values())
    shutil.rmtree(tmp_path / "together")
