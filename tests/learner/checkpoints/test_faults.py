"""Unexpected exceptions while a job trains: the job fails, and the learner goes on; what passes is tried again."""

import asyncio
import errno
import logging
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
from transformers import AutoModelForCausalLM

from rollstream.eventlog.files import base_sha256, tokenizer_sha256
from rollstream.learner.algorithms.builtin.grpo import Grpo
from rollstream.learner.checkpoints.faults import Faults
from rollstream.learner.model.memory import HALVED
from rollstream.learner.model.policy import PolicyModel
from rollstream.learner.publisher import Publisher
from rollstream.schemas.algorithms import SftSettings
from rollstream.schemas.errors import FencedError, LogError, ModelError, RunFailedError, is_of_device, is_passing
from rollstream.schemas.events import (
    JobFailed,
    JobSubmitted,
    JobSucceeded,
    LearnerClaimed,
    StepTrained,
    WeightsPublished,
)
from tests.learner.checkpoints.faults_rig import failing, fault_files, versions
from tests.learner.conftest import GROUP, RUN


class AcceleratorError(RuntimeError):
    """As torch raises it where a call of CUDA's own fails."""


DEVICE_FAILED = AcceleratorError("CUDA error: unspecified launch failure")


@pytest.mark.parametrize(
    ("owner", "method", "error", "shown"),
    [
        (Grpo, "loss", AssertionError("a bug of ours"), "AssertionError (faults_rig.py line"),
        (PolicyModel, "completion_terms", RuntimeError("shape mismatch"), "RuntimeError (faults_rig.py line"),
        (torch.optim.AdamW, "step", ValueError("odd beta"), "ValueError (faults_rig.py line"),
        (Grpo, "prepare", KeyError("advantage"), "KeyError (faults_rig.py line"),
    ],
    ids=["loss", "forward", "optimizer", "prepare"],
)
def test_an_unexpected_exception_fails_its_job_and_the_learner_goes_on(
    lab: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: type,
    method: str,
    error: Exception,
    shown: str,
) -> None:
    """The second manifest fails: the version of the first is published, and the next job begins from it."""
    monkeypatch.setattr(owner, method, failing(getattr(owner, method), error, 2, 2))

    async def scenario() -> None:
        job = await lab.submit()
        await lab.plan(job)
        following = await lab.submit("next", base_version=1)
        await lab.plan(following)
        with caplog.at_level(logging.ERROR):
            await lab.work(lab.has(JobSucceeded))
        (failed,) = await lab.events("jobs", JobFailed)
        assert failed.job_id == job.job_id
        assert failed.error.startswith(f"training on manifest 1 raised {shown}")
        assert failed.error.endswith(f"{error}; the learner's log has the traceback")
        assert "Traceback (most recent call last)" in caplog.text
        (succeeded,) = await lab.events("jobs", JobSucceeded)
        assert (succeeded.job_id, succeeded.final_version) == (following.job_id, 4)
        published = await lab.events("weights", WeightsPublished)
        assert [one.version for one in published] == [0, 1, 2, 3, 4]
        assert len(await lab.events("weights", LearnerClaimed)) == 1
        assert fault_files(lab) == []

    asyncio.run(scenario())


def test_a_job_of_another_model_group_is_trained_beside_one_that_fails(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Grpo, "loss", failing(Grpo.loss, AssertionError()))

    async def scenario() -> None:
        job = await lab.submit()
        await lab.plan(job)
        other = await lab.submit("sft", model_group=f"{RUN}/other", kind="sft", algorithm=SftSettings())
        await lab.plan(other)
        await lab.work(lab.has(JobSucceeded))
        assert [one.job_id for one in await lab.events("jobs", JobFailed)] == [job.job_id]
        assert [one.job_id for one in await lab.events("jobs", JobSucceeded)] == [other.job_id]

    asyncio.run(scenario())


def test_a_secret_in_an_exception_is_not_recorded(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOSS_API_KEY", "sk-planted-0123456789")
    error = RuntimeError("401 for key sk-planted-0123456789\nat line 2")
    monkeypatch.setattr(PolicyModel, "completion_terms", failing(PolicyModel.completion_terms, error))

    async def scenario() -> None:
        await lab.plan(await lab.submit())
        await lab.work(lab.has(JobFailed))
        (failed,) = await lab.events("jobs", JobFailed)
        assert "401 for key ${LOSS_API_KEY} at line 2" in failed.error

    asyncio.run(scenario())


FULL_DISK = RuntimeError("the kernel cannot be compiled")
FULL_DISK.__context__ = OSError(errno.ENOSPC, "No space left on device")  # a compiler raises its own `from None`
PASSING = [
    FULL_DISK,
    OSError(errno.EIO, "Input/output error"),
    ConnectionResetError("broker gone"),
    TimeoutError("no answer"),
    RuntimeError("[gloo/gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:4711"),
    DEVICE_FAILED,
]


@pytest.mark.parametrize("error", PASSING, ids=lambda one: str(one)[:20])
def test_an_error_that_may_pass_ends_the_process_and_the_next_one_trains_the_job_whole(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def scenario() -> None:
        undisturbed = type(lab)(tmp_path / "undisturbed", lab.model)
        await undisturbed.plan(await undisturbed.submit())
        await undisturbed.work(undisturbed.has(JobSucceeded))
        await lab.plan(await lab.submit())
        monkeypatch.setattr(PolicyModel, "completion_terms", failing(PolicyModel.completion_terms, error, 2, 2))
        with pytest.raises(type(error)):
            await lab.work(lab.has(JobSucceeded))
        assert len(fault_files(lab)) == is_of_device(error)
        await lab.work(lab.has(JobSucceeded))
        assert await lab.outcome() == await undisturbed.outcome()
        assert fault_files(lab) == []
        assert await lab.events("jobs", JobFailed) == []

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("owner", "method", "error", "checkpoint_every"),
    [
        (PolicyModel, "completion_terms", DEVICE_FAILED, 1),
        (Publisher, "publish_step", KeyError("a bug outside of training"), 1),
        (Publisher, "publish_step", KeyError("a bug outside of training"), 3),
    ],
    ids=["device", "shell", "shell-without-checkpoint"],
)
def test_an_exception_that_ends_a_second_process_at_the_same_manifest_fails_the_job(
    lab: Any, monkeypatch: pytest.MonkeyPatch, owner: type, method: str, error: Exception, checkpoint_every: int
) -> None:
    monkeypatch.setattr(owner, method, failing(getattr(owner, method), error, 2))

    async def scenario() -> None:
        job = await lab.submit(checkpoint_every=checkpoint_every)
        await lab.plan(job)
        ends = 0
        while not await lab.events("jobs", JobFailed):
            assert ends < 4
            try:
                await lab.work(lab.has(JobFailed))
            except type(error):
                ends += 1
        assert ends >= 2
        (failed,) = await lab.events("jobs", JobFailed)
        assert failed.job_id == job.job_id
        assert f"ended process 0 of the learner: {type(error).__name__} (faults_rig.py line" in failed.error
        monkeypatch.undo()
        following = await lab.submit("next", base_version=max([0, *await versions(lab)]))
        await lab.plan(following)
        await lab.work(lab.has(JobSucceeded))
        published = await versions(lab)
        assert published == sorted(set(published))

    asyncio.run(scenario())


def test_a_learner_that_was_replaced_records_no_failure(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    began, may_fail = threading.Event(), threading.Event()

    def loss(self: Grpo, tokens: Any, settings: Any) -> Any:
        began.set()
        may_fail.wait(30)
        raise RuntimeError("too late")

    monkeypatch.setattr(Grpo, "loss", loss)

    async def claimed() -> bool:
        if began.is_set() and not may_fail.is_set():
            claim = {"model_group": GROUP, "term": 2, "learner": "learner-1"}
            await lab.log.send(LearnerClaimed(run_id=RUN, time_ms=2, **claim))
            may_fail.set()
        return False

    async def scenario() -> None:
        await lab.plan(await lab.submit())
        with pytest.raises(FencedError):
            await lab.work(claimed)
        assert await lab.events("jobs", JobFailed) == []
        assert await lab.events("weights", StepTrained) == []

    asyncio.run(scenario())


def job_of(name: str = "rl") -> JobSubmitted:
    return JobSubmitted.model_construct(job_id=f"{RUN}/{name}", model_group=GROUP)


def test_a_fault_counts_for_its_job_its_manifest_and_its_type(tmp_path: Path) -> None:
    faults = Faults(tmp_path, job_of())
    for index, error in ((3, DEVICE_FAILED), (4, DEVICE_FAILED), (4, KeyError("x")), (None, KeyError("x"))):
        faults.keep(error, index, is_certain=False)
        for other in (None, 3, 4):
            faults.check(other)
    faults.keep(KeyError("x"), None, is_certain=False)
    faults.check(3)
    Faults(tmp_path, job_of("next")).check(None)
    with pytest.raises(RunFailedError, match="the job's start ended process 0 of the learner: KeyError"):
        faults.check(None)


def test_a_certain_fault_of_another_process_counts_at_once_unless_it_is_of_the_device(tmp_path: Path) -> None:
    first, second = Faults(tmp_path, job_of()), Faults(tmp_path, job_of(), 1)
    second.keep(DEVICE_FAILED, 5, is_certain=True)
    first.check(5)
    second.keep(RuntimeError("boom"), 5, is_certain=True)
    with pytest.raises(RunFailedError, match="manifest 5 ended process 1 of the learner: RuntimeError: boom;"):
        first.check(5)
    first.forget(4)
    with pytest.raises(RunFailedError):
        first.check(5)
    first.forget(5)
    first.check(5)


def test_passing_errors_and_want_of_memory_are_not_kept(tmp_path: Path) -> None:
    faults = Faults(tmp_path, job_of())
    halved = torch.OutOfMemoryError("CUDA out of memory")
    halved.add_note(HALVED)
    for error in (*PASSING[:-1], LogError("no broker"), halved):
        faults.keep(error, 2, is_certain=True)
    assert not list(tmp_path.rglob("fault.*"))


def test_want_of_memory_that_no_restart_lessens_fails_the_job(tmp_path: Path) -> None:
    faults = Faults(tmp_path, job_of())
    for _ in range(2):
        faults.check(2)
        faults.keep(torch.OutOfMemoryError("CUDA out of memory"), 2, is_certain=True)
    with pytest.raises(RunFailedError, match="manifest 2 ended process 0 of the learner: OutOfMemoryError"):
        faults.check(2)
    faults.keep(RunFailedError("out of memory with one row or pair"), 3, is_certain=True)
    with pytest.raises(RunFailedError, match="manifest 3 ended process 0"):
        faults.check(3)
    faults.keep(KeyError("x"), None, is_certain=True)
    faults.forget_start()
    faults.check(None)


def test_a_fault_that_cannot_be_read_is_ignored(tmp_path: Path) -> None:
    faults = Faults(tmp_path, job_of())
    faults.keep(KeyError("x"), 0, is_certain=True)
    (file,) = tmp_path.rglob("fault.*")
    file.write_text("{")
    faults.check(0)
    faults.forget(0)
    assert not file.exists()


def test_a_device_that_failed_is_not_taken_for_a_passing_error() -> None:
    assert is_of_device(DEVICE_FAILED)
    assert not is_passing(DEVICE_FAILED)
    assert not is_of_device(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_of_device(AcceleratorError("CUDA error: out of memory"))
    assert not is_passing(RuntimeError("shape mismatch"))
    assert is_passing(torch.distributed.DistNetworkError("connection to the store was lost"))


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def hub_status(status: int) -> Exception:
    response = httpx.Response(status, request=httpx.Request("GET", "https://hub"))
    return caused(OSError("the hub has refused"), HfHubHTTPError("refused", response=response))


OUTAGES = [
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.ESTALE, "Stale file handle"),
    caused(RuntimeError("torn"), OSError(errno.EIO, "Input/output error")),
    caused(OSError("We couldn't connect"), caused(LocalEntryNotFoundError("not found"), httpx.ConnectError("refused"))),
    RuntimeError("Cannot send a request, as the client has been closed."),
    httpx.ReadTimeout("timed out"),
    ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
    hub_status(503),
    hub_status(429),
]
LASTING = [
    FileNotFoundError(errno.ENOENT, "No such file"),
    PermissionError(errno.EACCES, "Permission denied"),
    OSError("it does not appear to have a file named model.safetensors"),
    caused(OSError("We couldn't connect"), LocalEntryNotFoundError("not found in offline mode")),
    caused(OSError("not found"), OfflineModeIsEnabled("HF_HUB_OFFLINE is set")),
    caused(OSError("not a valid model identifier"), hub_status(404)),
]


@pytest.mark.parametrize("error", OUTAGES, ids=repr)
def test_a_model_that_cannot_be_loaded_for_now_fails_no_job(
    lab: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    load = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", failing(load, error, 1, 3))

    async def scenario() -> None:
        await lab.plan(await lab.submit())
        for _ in range(3):
            with pytest.raises(OSError, match=r"model .* cannot be loaded for now, .*; it is tried again"):
                await lab.work(lab.has(JobFailed))
        await lab.work(lab.has(JobSucceeded))
        assert await lab.events("jobs", JobFailed) == []

    asyncio.run(scenario())


@pytest.mark.parametrize("error", LASTING, ids=repr)
def test_a_model_that_is_not_there_fails_its_job(lab: Any, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", failing(lambda: None, error))

    async def scenario() -> None:
        await lab.submit()
        await lab.work(lab.has(JobFailed))
        (failed,) = await lab.events("jobs", JobFailed)
        assert "cannot be loaded, from a folder or the hub: " in failed.error
        assert failed.error.endswith("correct model.path, or download it first")

    asyncio.run(scenario())


@pytest.mark.parametrize(("number", "kind"), [(errno.EIO, OSError), (errno.EACCES, ModelError)])
def test_a_disk_that_fails_while_a_models_files_are_hashed_is_not_the_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    monkeypatch.setattr(Path, "stat", failing(Path.stat, OSError(number, "odd"), 1, 1000))
    monkeypatch.setattr(Path, "is_file", lambda _: True)
    monkeypatch.setattr(Path, "is_dir", lambda _: True)
    for of_files in (tokenizer_sha256, base_sha256):
        with pytest.raises((OSError, ModelError)) as raised:
            of_files(str(tmp_path))
        assert isinstance(raised.value, kind)
