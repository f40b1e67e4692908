"""A job of two real processes: the first one is the learner, the other does what it does."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import safetensors.torch
import torch

from rollstream.eventlog import codec
from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.learner.parallel.process_ranks import END, ProcessRanks, joined
from rollstream.learner.service import follow
from rollstream.schemas.algorithms import CustomSettings
from rollstream.schemas.errors import VersionDivergedError
from rollstream.schemas.events import (
    BatchPlanned,
    JobFailed,
    JobProgressed,
    JobSubmitted,
    JobSucceeded,
    StepTrained,
    WeightsPublished,
)
from rollstream.schemas.kafka import KafkaSettings
from rollstream.schemas.permissions import Permissions
from rollstream.schemas.settings import LoraSettings, ModelSettings, OptimizerSettings
from tests.learner.conftest import Lab
from tests.learner.parallel.launched_rig import launched, pid_file, slowly, wait_until
from tests.rigs.services.failing_algorithm import MESSAGE, NAME
from tests.rigs.services.process_group import together

pytestmark = pytest.mark.slow
VERSIONS = 4


def of_job(model: Path, *, lora: bool = False) -> dict[str, Any]:
    settings = ModelSettings(path=str(model), device="cpu", lora=LoraSettings(rank=2) if lora else None)
    return {"num_versions": VERSIONS, "checkpoint_every": 2, "model": settings}


async def trained(folder: Path, model: Path, ranks: ProcessRanks, *, stops: bool = False, lora: bool = False) -> None:
    """A job in a folder; with `stops` each manifest is trained by a new learner."""
    lab = Lab(folder, model)
    job = await lab.submit(**of_job(model, lora=lora))
    planned: list[BatchPlanned] = []
    for count in range(VERSIONS if stops else 0):
        previous = {"first": count, "previous": codec.content_digest(planned[-1])} if planned else {}
        planned += await lab.plan(job, 1, seal=False, **previous)
        await lab.work(slowly(lab.has(JobProgressed, "jobs", count + 1)), lab.worker(ranks=ranks))
    if stops:
        await lab.seal(job, VERSIONS)
    else:
        await lab.plan(job, VERSIONS)
    await lab.work(slowly(lab.has(JobSucceeded)), lab.worker(ranks=ranks))
    await keep(lab, folder)


async def keep(lab: Lab, folder: Path) -> None:
    """Keep the contents of the log and the workspace."""
    steps = await lab.events("weights", StepTrained)
    published = [one for one in await lab.events("weights", WeightsPublished) if one.version == VERSIONS]
    (folder / "last.safetensors").write_bytes(lab.artifacts.read(published[0].artifact))
    found = {"hashes": [one.weights_sha256 for one in steps], "ranks": [one.ranks for one in steps]}
    found["checkpoints"] = sorted(path.name.rpartition(".")[2] for path in (folder / "checkpoints").glob("*/v*"))
    (folder / "found.json").write_text(json.dumps(found))


async def continued(folder: Path, model: Path, ranks: ProcessRanks, by_two: int) -> None:
    """A job of which two processes train the first manifests, and this one alone the others."""
    lab = Lab(folder, model)
    job = await lab.submit(**of_job(model))
    planned = await lab.plan(job, by_two, seal=False)
    await lab.work(slowly(lab.has(JobProgressed, "jobs", by_two)), lab.worker(ranks=ranks))
    await lab.plan(job, VERSIONS - by_two, first=by_two, previous=codec.content_digest(planned[-1]))
    try:
        await lab.work(slowly(lab.has(JobSucceeded)))
        await keep(lab, folder)
    except VersionDivergedError as error:
        (folder / "error.txt").write_text(str(error))


async def refused(folder: Path, model: Path, ranks: ProcessRanks) -> None:
    """Jobs that several processes do not train, then one that they do."""
    errors: list[str] = []
    for number, kind in enumerate(["adamw_8bit", "adamw"]):
        lab = Lab(folder / str(number), model)
        optimizer = OptimizerSettings.model_validate({"kind": kind, "learning_rate": 1e-2})
        job = await lab.submit(optimizer=optimizer)
        await lab.plan(job)
        await lab.work(slowly(lab.has(JobSucceeded if number else JobFailed)), lab.worker(ranks=ranks))
        errors += [one.error for one in await lab.events("jobs", JobFailed)]
    (folder / "errors.json").write_text(json.dumps(errors))


async def of_groups(folder: Path, model: Path, ranks: ProcessRanks, *groups: str) -> None:
    """A job of each model group, all of them in work in turn."""
    lab = Lab(folder, model)
    for group in groups:
        job = JobSubmitted(
            run_id="run-1",
            time_ms=1,
            job_id=f"run-1/rl-{group}",
            model_group=f"run-1/{group}",
            base_version=0,
            settings=lab.settings(**of_job(model)),
        )
        await lab.log.send(job)
        await lab.plan(job, VERSIONS)
    await lab.work(slowly(lab.has(JobSucceeded, "jobs", len(groups))), lab.worker(ranks=ranks))
    steps = await lab.events("weights", StepTrained)
    hashes = {group: [one.weights_sha256 for one in steps if one.model_group == f"run-1/{group}"] for group in groups}
    (folder / "found.json").write_text(json.dumps({**hashes, "order": [one.model_group for one in steps]}))


def several_jobs(folder: Path, model: Path) -> None:
    """One of the processes."""
    with joined() as ranks:
        if ranks.index:
            follow(ranks, threads=1, permitted=lambda _: Permissions.of([f"model:{model}"], {}))
            return
        asyncio.run(trained(folder / "undisturbed", model, ranks))
        asyncio.run(trained(folder / "stopped", model, ranks, stops=True))
        asyncio.run(trained(folder / "lora", model, ranks, lora=True))
        asyncio.run(continued(folder / "continued", model, ranks, 2))
        asyncio.run(continued(folder / "diverged", model, ranks, 3))
        asyncio.run(refused(folder / "refused", model, ranks))
        asyncio.run(of_groups(folder / "groups", model, ranks, "provers", "verifiers"))
        for group in ("provers", "verifiers"):
            asyncio.run(of_groups(folder / group, model, ranks, group))
        ranks.send(END)


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of two processes."""
    found = tmp_path_factory.mktemp("jobs")
    together(2, several_jobs, found, tiny_model)
    return found


def found_in(folder: Path) -> dict[str, list[Any]]:
    return json.loads((folder / "found.json").read_text())


def test_a_job_of_two_processes_is_recorded_as_such_and_restarted_with_equal_bits(folder: Path) -> None:
    undisturbed = found_in(folder / "undisturbed")
    assert undisturbed["ranks"] == [2] * VERSIONS
    assert set(undisturbed["checkpoints"]) == {"shards"}
    assert found_in(folder / "stopped")["hashes"] == undisturbed["hashes"]
    assert len(found_in(folder / "lora")["hashes"]) == VERSIONS


def test_jobs_of_two_model_groups_in_turn_train_as_each_does_alone(folder: Path) -> None:
    found = found_in(folder / "groups")
    assert found["order"] == ["run-1/provers", "run-1/verifiers"] * VERSIONS
    for group in ("provers", "verifiers"):
        assert len(set(found[group])) == VERSIONS
        assert found[group] == found_in(folder / group)[group]


def test_one_process_trains_nearly_what_two_train(folder: Path, tmp_path: Path, tiny_model: Path) -> None:
    async def scenario() -> None:
        lab = Lab(tmp_path, tiny_model)
        job = await lab.submit(num_versions=VERSIONS)
        await lab.plan(job, VERSIONS)
        await lab.work(lab.has(JobSucceeded))
        version = (await lab.events("weights", WeightsPublished))[-1]
        alone = safetensors.torch.load(lab.artifacts.read(version.artifact))
        for name in ("undisturbed", "continued"):
            found = safetensors.torch.load_file(folder / name / "last.safetensors")
            assert all(torch.allclose(alone[name], found[name], atol=1e-5) for name in alone)

    asyncio.run(scenario())


def test_one_process_continues_from_the_shards_of_two_and_explains_differing_bits(folder: Path) -> None:
    assert found_in(folder / "continued")["ranks"] == [2, 2, 1, 1]
    error = (folder / "diverged" / "error.txt").read_text()
    assert "it was trained by 2 process(es) then and by 1 now, and bits are equal only for as many" in error


@pytest.mark.kafka
def test_a_killed_process_restarts_the_job_from_its_position_and_one_that_fails_alone_fails_the_next_job(
    lab: Any, own_topics: KafkaSettings, folder: Path, tmp_path: Path
) -> None:
    errors: list[str] = []

    async def scenario() -> list[StepTrained]:
        async with KafkaLog(own_topics, client_id="lab") as log:
            await log.ensure_topics(num_partitions=6)
            lab.log = log
            job = await lab.submit(**of_job(lab.model))
            with launched(lab, own_topics, tmp_path) as torchrun:
                await lab.plan(job, 1, seal=False)
                previous = await wait_until(lab, torchrun, 1)
                kill(tmp_path, rank=1)
                for count in range(1, VERSIONS):
                    digest = codec.content_digest((await lab.events("batches", BatchPlanned))[-1])
                    await lab.plan(job, 1, seal=count == VERSIONS - 1, first=count, previous=digest)
                    previous = await wait_until(lab, torchrun, count + 1)
                    if count == 2:
                        kill(tmp_path, rank=0)
                assert await lab.events("jobs", JobFailed) == fault_files(lab) == []
                errors.extend(await failed_after_restart(lab, torchrun))
                return previous

    steps = asyncio.run(scenario())
    assert [step.weights_sha256 for step in steps] == found_in(folder / "undisturbed")["hashes"]
    assert len({step.term for step in steps}) >= 3, (tmp_path / "learner.log").read_text()
    (error,) = errors
    assert error.startswith(f"manifest 0 ended process 1 of the learner: algorithm {NAME}: the loss has no gradient: ")
    assert f"RuntimeError (failing_algorithm.py line 22, in fail): {MESSAGE}" in error


async def failed_after_restart(lab: Any, torchrun: psutil.Process) -> list[str]:
    """Errors of two jobs: in the backward pass of the first, process 1 fails where process 0 waits."""
    algorithm = CustomSettings(name=NAME, options={"fails_in": "backward"})
    planted = await lab.submit("planted", base_version=VERSIONS, **of_job(lab.model), algorithm=algorithm)
    await lab.plan(planted, VERSIONS)
    following = await lab.submit("following", base_version=VERSIONS, **of_job(lab.model))
    await lab.plan(following, VERSIONS)
    await wait_until(lab, torchrun, 2 * VERSIONS)
    failed = await lab.events("jobs", JobFailed)
    assert {one.job_id for one in failed} == {planted.job_id}
    return [one.error for one in failed]


def fault_files(lab: Any) -> list[Path]:
    return list((lab.folder / "checkpoints").glob("*/fault.*"))


def kill(folder: Path, *, rank: int) -> None:
    os.kill(int(pid_file(folder, rank).read_text()), signal.SIGKILL)


def test_settings_that_several_processes_do_not_train_fail_their_job_alone(folder: Path) -> None:
    errors = json.loads((folder / "refused" / "errors.json").read_text())
    assert len(errors) == 1
    assert "2 processes do not train with optimizer.kind: adamw_8bit" in errors[0]
