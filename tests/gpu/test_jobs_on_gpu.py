"""Jobs on a real GPU: stopped and resumed, trained again, and handed to and from the CPU by their checkpoints."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rollstream.eventlog import codec
from rollstream.learner.checkpoints.checkpoint import CheckpointFolder, CheckpointPosition
from rollstream.learner.model.policy import published_sha256
from rollstream.learner.model.step import device_name
from rollstream.learner.reading.members import check_members, fetch_records
from rollstream.learner.tiny_model import make_tiny_model
from rollstream.learner.trainer import JobTrainer
from rollstream.schemas.algorithms import GrpoSettings
from rollstream.schemas.events import BatchPlanned, JobSubmitted, JobSucceeded, StepTrained, TrajectoryAssembled
from rollstream.schemas.revisions import NEWEST_REVISION
from rollstream.schemas.settings import JobSettings, LoraSettings, ModelSettings, OptimizerSettings
from tests.learner.conftest import GROUP, Lab
from tests.rigs.runs.retrained import assert_retrained, steps_of

pytestmark = pytest.mark.gpu
LORA = LoraSettings(rank=4, alpha=8)


@dataclass
class DeviceLab(Lab):
    """A lab whose jobs are trained on a device."""

    device: str = "cpu"

    def settings(self, **changes: Any) -> JobSettings:
        model = {"path": str(self.model), "device": self.device} | changes.pop("model", {})
        optimizer = OptimizerSettings(learning_rate=1e-2, **changes.pop("optimizer", {}))
        return super().settings(model=ModelSettings(**model), optimizer=optimizer, revision=NEWEST_REVISION, **changes)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with heads of 16 numbers, for the token ids of a lab."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", hidden_size=64, num_layers=2)


@pytest.fixture
def lab(tmp_path: Path, tiny: Path, gpu: str) -> DeviceLab:
    return DeviceLab(tmp_path / "lab", tiny, device=gpu)


KINDS: dict[str, dict[str, Any]] = {
    "full-bfloat16": {"model": {"dtype": "bfloat16"}},
    "full-float32": {"model": {"dtype": "float32"}},
    "lora-bfloat16": {"model": {"dtype": "bfloat16", "lora": LORA}},
    "lora-float32": {"model": {"dtype": "float32", "lora": LORA}},
    "reference": {"algorithm": GrpoSettings(kl_coefficient=0.1, mini_batches=2)},
    "muon": {"optimizer": {"kind": "muon"}},
    "offload": {"optimizer": {"offload": "cpu"}},
    "checkpointing": {"model": {"gradient_checkpointing": True, "fp32_head": True}},
}


async def trained(lab: DeviceLab, *, stops: bool, **changes: Any) -> dict[int, StepTrained]:
    """Steps of a job of four versions, without a break or by two learners in turn; trained again to the same bits."""
    job = await lab.submit(num_versions=4, checkpoint_every=2, **changes)
    if stops:
        planned = await lab.plan(job, 3, seal=False)
        await lab.work(lab.has(StepTrained, "weights", 3))
        await lab.plan(job, 1, first=3, previous=codec.content_digest(planned[-1]))
    else:
        await lab.plan(job, 4)
    await lab.work(lab.has(JobSucceeded))
    steps = await steps_of(lab)
    await assert_retrained(lab, job, steps)
    await assert_retrained(lab, job, steps, first=3)
    return steps


@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_job_ends_with_the_weights_of_one_that_was_not_and_replays(
    lab: DeviceLab, tmp_path: Path, kind: str
) -> None:
    async def scenario() -> None:
        stopped = await trained(lab, stops=True, **dict(KINDS[kind]))
        other = DeviceLab(tmp_path / "undisturbed", lab.model, device=lab.device)
        whole = await trained(other, stops=False, **dict(KINDS[kind]))
        assert {version: one.weights_sha256 for version, one in stopped.items()} == {
            version: one.weights_sha256 for version, one in whole.items()
        }
        assert len({one.weights_sha256 for one in whole.values()}) == 4
        assert {one.device for one in whole.values()} == {device_name(torch.device(lab.device))}

    asyncio.run(scenario())


def test_a_job_that_may_vary_trains_on_the_gpu(lab: DeviceLab) -> None:
    async def scenario() -> None:
        job = await lab.submit(model={"deterministic": False})
        await lab.plan(job)
        await lab.work(lab.has(JobSucceeded))
        assert sorted(await steps_of(lab)) == [1, 2, 3]

    asyncio.run(scenario())


Batches = list[tuple[BatchPlanned, list[TrajectoryAssembled]]]


async def recorded(lab: DeviceLab, **changes: Any) -> tuple[JobSubmitted, Batches]:
    job = await lab.submit(**changes)
    planned = await lab.plan(job, 2)
    return job, [(one, check_members(one, await fetch_records(lab.log, one))) for one in planned]


def position_of(job: JobSubmitted, planned: BatchPlanned) -> CheckpointPosition:
    """The position behind a manifest."""
    where: dict[str, Any] = {"run_id": job.run_id, "job_id": job.job_id, "model_group": job.model_group}
    taken = StepTrained(
        **where, batch_id=planned.batch_id, time_ms=1, epoch=0, version=1, term=1, weights_sha256="0" * 64,
        num_optimizer_steps=1, metrics={}, seconds={},
    )  # fmt: skip
    return CheckpointPosition(job_id=job.job_id, version=1, next_index=1, previous_sha256="0" * 64, step=taken)


@pytest.mark.parametrize("to_gpu", [False, True], ids=["to the cpu", "to the gpu"])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_checkpoint_of_one_device_is_resumed_on_the_other(
    lab: DeviceLab, tmp_path: Path, to_gpu: bool, lora: Any, kind: str
) -> None:
    async def scenario() -> None:
        async def trainer(device: str) -> tuple[JobTrainer, JobSubmitted, Batches]:
            one = DeviceLab(tmp_path / f"{device.partition(':')[0]}-{to_gpu}", lab.model, device=device)
            model = {"dtype": "float32", "lora": lora}
            job, batches = await recorded(one, model=model, optimizer={"kind": kind, "eps": 1e-4})
            return JobTrainer(job, threads=1, permissions=one.permissions), job, batches

        first, second = ("cpu", lab.device) if to_gpu else (lab.device, "cpu")
        writer, job, batches = await trainer(first)
        writer.train(*batches[0])
        folder = CheckpointFolder(tmp_path / "checkpoints", GROUP)
        folder.save(writer.checkpoint(position_of(job, batches[0][0])))
        written = published_sha256(writer.model)
        reader, _, same = await trainer(second)
        checkpoint = folder.newest(job_id=job.job_id, max_version=1)
        assert checkpoint is not None
        reader.resume(checkpoint)
        assert published_sha256(reader.model) == written
        results = [writer.train(*batches[1]), reader.train(*same[1])]
        assert results[0].metrics == pytest.approx(results[1].metrics, rel=1e-3, abs=1e-4)
        for name, value in writer.model.weights().items():
            other = reader.model.weights()[name]
            assert torch.allclose(value.cpu(), other.cpu(), rtol=1e-2, atol=1e-3), name

    asyncio.run(scenario())
