"""Errors in one of two real processes: its job fails, and both go on; or both end, and the next start fails the job."""

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rollstream.learner.algorithms.builtin.grpo import Grpo
from rollstream.learner.model.policy import PolicyModel
from rollstream.learner.parallel.process_ranks import END, ProcessRanks, joined
from rollstream.learner.service import follow
from rollstream.schemas.algorithms import CustomSettings, GrpoSettings
from rollstream.schemas.events import JobFailed, JobSucceeded, StepTrained
from rollstream.schemas.permissions import Permissions
from rollstream.schemas.settings import ModelSettings, OptimizerSettings
from tests.learner.conftest import Lab
from tests.rigs.services.failing_algorithm import MESSAGE, NAME
from tests.rigs.services.process_group import together

pytestmark = pytest.mark.slow
SMALL = 24
"""Tokens of a micro-batch, so that each process has several."""
ODD, AWAY, LACKING = 0.011, 0.012, 0.013
"""Learning rates of jobs in which process 1 fails."""
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


def planted(method: str, *ranks: int) -> dict[str, Any]:
    options = {"fails_in": method, "ranks": list(ranks)}
    return {"algorithm": CustomSettings(name=NAME, max_tokens_per_micro_batch=SMALL, options=options)}


def at_rate(rate: float) -> dict[str, Any]:
    return {"optimizer": OptimizerSettings(learning_rate=rate)}


FAILING: dict[str, dict[str, Any]] = {
    "loss of 1": planted("loss", 1),
    "loss of 0": planted("loss", 0),
    "loss of both": planted("loss", 0, 1),
    "prepare of 1": planted("prepare", 1),
    "memory of 1": at_rate(LACKING),
    "optimizer of 1": at_rate(ODD),
}


def fail_in_steps() -> None:
    """Fail in this process's optimizer steps, in jobs of the learning rates for it; of AWAY in the first step only."""
    plain, away = torch.optim.AdamW.step, itertools.count()

    def step(self: torch.optim.AdamW, *given: Any, **options: Any) -> Any:
        rate = self.defaults["lr"]
        if rate == LACKING:
            raise OUT_OF_MEMORY
        if rate == ODD:
            raise AssertionError(MESSAGE)
        if rate == AWAY and next(away) == 0:
            raise OSError(5, "Input/output error")
        return plain(self, *given, **options)

    torch.optim.AdamW.step = step


def fail_in_second_batch() -> Callable[[], None]:
    """Have a built-in algorithm's loss fail in the second batch of this process from then on; gives the way back."""
    plain, calls = Grpo.loss, itertools.count()

    def loss(self: Grpo, tokens: Any, settings: Any) -> Any:
        if next(calls):
            raise KeyError(MESSAGE)
        return plain(self, tokens, settings)

    Grpo.loss = loss

    def restore() -> None:
        Grpo.loss = plain

    return restore


def slowly(has: Callable[[], Awaitable[bool]]) -> Callable[[], Awaitable[bool]]:
    async def inspect() -> bool:
        await asyncio.sleep(0.1)
        return await has()

    return inspect


def lab_of(folder: Path, model: Path) -> Lab:
    return Lab(folder, model)


def permissions_of(model: Path) -> Permissions:
    return Permissions.of([f"model:{model}", NAME], {})


async def worked(lab: Lab, ranks: ProcessRanks, *kinds: type) -> None:
    """Let a worker serve the lab's jobs until an event of one of these kinds is there."""

    async def has_any() -> bool:
        return any([await lab.has(kind)() for kind in kinds])

    await lab.work(slowly(has_any), lab.worker(ranks=ranks, permissions=permissions_of(lab.model)))


async def submitted(folder: Path, model: Path, **changes: Any) -> Lab:
    lab = lab_of(folder, model)
    job = await lab.submit(**{"model": ModelSettings(path=str(model), device="cpu"), **changes})
    await lab.plan(job)
    return lab


async def found_in(lab: Lab) -> dict[str, Any]:
    return {
        "failed": [one.error for one in await lab.events("jobs", JobFailed)],
        "hashes": [one.weights_sha256 for one in await lab.events("weights", StepTrained)],
        "succeeded": len(await lab.events("jobs", JobSucceeded)),
        "faults": [path.name for path in lab.folder.glob("checkpoints/*/fault.*")],
    }


async def of_one_start(folder: Path, model: Path, ranks: ProcessRanks) -> None:
    """Jobs that fail, one that another worker completes, and between them those that succeed."""
    found: dict[str, Any] = {}
    for name, changes in {"before": {}, **FAILING, "after": {}}.items():
        lab = await submitted(folder / name, model, **changes)
        await worked(lab, ranks, JobFailed, JobSucceeded)
        found[name] = await found_in(lab)
    restore = fail_in_second_batch()
    lab = await submitted(folder / "second batch", model)
    await worked(lab, ranks, JobFailed, JobSucceeded)
    found["second batch"] = await found_in(lab)
    restore()
    lab = await submitted(folder / "away", model, **at_rate(AWAY))
    try:
        await worked(lab, ranks, JobFailed, JobSucceeded)
    except OSError as error:
        found["passed"] = [error.errno, str(error), await found_in(lab)]
    await worked(lab, ranks, JobFailed, JobSucceeded)
    found["away"] = await found_in(lab)
    (folder / "found.json").write_text(json.dumps(found))


def one_start(folder: Path, model: Path) -> None:
    """One of the processes."""
    with joined() as ranks:
        if ranks.index:
            fail_in_steps()
            follow(ranks, threads=1, permitted=lambda _: permissions_of(model))
            return
        asyncio.run(of_one_start(folder, model, ranks))
        ranks.send(END)


@pytest.fixture(scope="module")
def found(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of jobs that two processes served in one start."""
    folder = tmp_path_factory.mktemp("errors")
    together(2, one_start, folder, tiny_model)
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("loss of 1", f"train: process 1: algorithm {NAME}: loss raised RuntimeError (failing_algorithm.py line "),
        ("loss of 0", f"algorithm {NAME}: loss raised RuntimeError (failing_algorithm.py line "),
        ("loss of both", f"algorithm {NAME}: loss raised RuntimeError (failing_algorithm.py line "),
        (
            "prepare of 1",
            f"train: process 1: algorithm {NAME}: prepare raised RuntimeError (failing_algorithm.py line ",
        ),
        ("memory of 1", "train: process 1: out of memory in the optimizer step (CUDA out of memory. Tried to allocate"),
        ("optimizer of 1", "train: process 1: training on manifest 0 raised AssertionError (test_errors_of_several.py"),
    ],
)
def test_an_error_in_one_process_fails_its_job_at_once(found: dict[str, Any], name: str, expected: str) -> None:
    (error,) = found[name]["failed"]
    assert error.startswith(expected)
    assert ("Tried to allocate 20.00 MiB" if name == "memory of 1" else MESSAGE) in error
    assert found[name]["hashes"] == found[name]["faults"] == []


def test_the_versions_before_an_error_stay_and_later_jobs_train_the_same_bits(found: dict[str, Any]) -> None:
    assert found["before"]["succeeded"] == found["after"]["succeeded"] == 1
    assert len(set(found["before"]["hashes"])) == 3
    assert found["before"]["hashes"] == found["after"]["hashes"]
    (error,) = found["second batch"]["failed"]
    assert error.startswith("training on manifest 1 raised KeyError (test_errors_of_several.py line")
    assert found["second batch"]["hashes"] == found["before"]["hashes"][:1]


def test_an_error_of_one_process_that_may_pass_ends_all_and_fails_no_job(found: dict[str, Any]) -> None:
    number, message, meanwhile = found["passed"]
    assert number == 5
    assert "train: process 1: [Errno 5] Input/output error" in message
    assert meanwhile["failed"] == meanwhile["faults"] == found["away"]["failed"] == []
    assert found["away"]["succeeded"] == 1


def fail_in_forwards(error: Exception) -> None:
    def completion_terms(self: PolicyModel, batch: Any, **options: Any) -> Any:
        raise error

    PolicyModel.completion_terms = completion_terms


def start(folder: Path, model: Path, error: Exception | None, changes: dict[str, Any]) -> None:
    """One of the processes of a start in which process 1 cannot compute."""
    with joined() as ranks:
        if ranks.index:
            if error is not None:
                fail_in_forwards(error)
            checkpoints = folder / "checkpoints"
            follow(ranks, threads=1, permitted=lambda _: permissions_of(model), checkpoints=checkpoints)
            return

        async def scenario() -> None:
            lab = await submitted(folder, model, **changes)
            await worked(lab, ranks, JobFailed, JobSucceeded)
            (folder / "found.json").write_text(json.dumps(await found_in(lab)))

        asyncio.run(scenario())
        ranks.send(END)


def starts_until_found(folder: Path, model: Path, error: Exception | None, changes: dict[str, Any]) -> int:
    """Start processes until a job has ended; how many starts ended without that."""
    for number in range(5):
        try:
            together(2, start, folder, model, error, changes)
        except AssertionError:
            assert not (folder / "found.json").exists()
        else:
            return number
    raise AssertionError("every start ended without an end of the job")


@pytest.mark.parametrize(
    ("error", "changes", "starts", "expected"),
    [
        (
            RuntimeError("shape mismatch"),
            {},
            1,
            "manifest 0 ended process 1 of the learner: RuntimeError (test_errors_of_several.py line ",
        ),
        (None, planted("backward", 0), 1, "manifest 0 ended process 0 of the learner: algorithm"),
        (None, planted("backward", 1), 1, "manifest 0 ended process 1 of the learner: algorithm"),
        (
            OUT_OF_MEMORY,
            {"algorithm": GrpoSettings(max_tokens_per_micro_batch=2)},
            2,
            "manifest 0 ended process 1 of the learner: out of memory with micro-batches of 1 tokens",
        ),
        (RuntimeError("CUDA error: unspecified launch failure"), {}, 2, "manifest 0 ended process 1 of the learner"),
    ],
    ids=["forward", "backward of 0", "backward of 1", "memory", "device"],
)
def test_an_error_where_the_other_process_waits_fails_the_job_at_a_later_start(
    tmp_path: Path, tiny_model: Path, error: Exception | None, changes: dict[str, Any], starts: int, expected: str
) -> None:
    assert starts_until_found(tmp_path, tiny_model, error, changes) == starts
    found = json.loads((tmp_path / "found.json").read_text())
    (failed,) = found["failed"]
    assert failed.startswith(expected)
    assert failed.endswith("the learner's log has the traceback")
    assert found["hashes"] == []
