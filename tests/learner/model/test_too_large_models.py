"""Models that do not fit into memory: each fails its job with the remedy, and the learner continues with the others."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollstream.learner.model.policy import PolicyModel
from rollstream.learner.tiny_model import make_tiny_model
from rollstream.schemas.algorithms import GrpoSettings, OpdSettings
from rollstream.schemas.events import JobFailed, JobSucceeded
from rollstream.schemas.settings import ModelSettings

REASON = "CUDA out of memory. Tried to allocate 20.00 GiB"
Applies = Callable[..., bool]


def without_memory(patched: pytest.MonkeyPatch, owner: Any, name: str, applies: Applies) -> None:
    """Let a function run out of memory wherever `applies` to its arguments."""
    plain = getattr(owner, name)

    def full(*args: Any, **options: Any) -> Any:
        if applies(*args):
            raise torch.OutOfMemoryError(f"{REASON}\nand more")
        return plain(*args, **options)

    patched.setattr(owner, name, full)


async def failure_beside_another(lab: Any, **changes: Any) -> str:
    """The error of a job, while one of another model group is trained."""
    good = await lab.submit("good", model_group="run-1/good", num_versions=1)
    await lab.plan(good, 1)
    bad = await lab.submit("bad", num_versions=1, **changes)
    await lab.plan(bad, 1)

    async def are_over() -> bool:
        return all([await lab.has(kind)() for kind in (JobFailed, JobSucceeded)])

    await lab.work(are_over)
    (failed,) = await lab.events("jobs", JobFailed)
    (succeeded,) = await lab.events("jobs", JobSucceeded)
    assert (failed.job_id, succeeded.job_id) == ("run-1/bad", "run-1/good")
    return failed.error


@pytest.mark.parametrize(
    ("name", "subject"),
    [
        ("to", "model {} on cpu"),
        ("from_pretrained", "model {} on cpu"),
        ("forward", "model {} on cpu"),
        ("published", "the job"),
    ],
)
def test_a_model_that_does_not_fit_fails_its_job_alone(
    lab: Any, monkeypatch: pytest.MonkeyPatch, name: str, subject: str
) -> None:
    large = make_tiny_model(lab.folder / "large", hidden_size=64)
    found: dict[str, tuple[Any, Applies]] = {
        "to": (torch.nn.Module, lambda own, *_: getattr(getattr(own, "config", None), "hidden_size", 0) == 64),
        "from_pretrained": (AutoModelForCausalLM, lambda path, *_: path == str(large)),
        "forward": (torch.nn.Linear, lambda _, values: values.shape[-1] == 64),
        "published": (PolicyModel, lambda own: own.settings.path == str(large)),
    }
    owner, applies = found[name]
    without_memory(monkeypatch, owner, name, applies)
    error = asyncio.run(failure_beside_another(lab, model=ModelSettings(path=str(large), device="cpu")))
    assert error == (
        f"{subject.format(large)} does not fit into memory ({REASON}); take a smaller model, another model.device or a "
        "device with more memory, or train an adapter (model.lora, with model.quantization below it)"
    )


@pytest.mark.parametrize("revision", [5, 6])
def test_a_reference_that_does_not_fit_beside_the_policy_fails_its_job_alone(
    lab: Any, monkeypatch: pytest.MonkeyPatch, revision: Any
) -> None:
    without_memory(monkeypatch, PolicyModel, "frozen_copy", lambda *_: True)
    algorithm = GrpoSettings(kl_coefficient=0.1)
    error = asyncio.run(failure_beside_another(lab, algorithm=algorithm, revision=revision))
    assert error.startswith(f"the copy of model {lab.model} that the loss compares with does not fit into memory (")
    assert "set model.reference_dtype to bfloat16" in error


def test_a_teacher_that_does_not_fit_beside_the_policy_fails_its_job_alone(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.model = make_tiny_model(lab.folder / "policy", hidden_size=16)
    teacher: Path = make_tiny_model(lab.folder / "teacher", hidden_size=64)
    is_teachers: Applies = lambda own, *_: getattr(getattr(own, "config", None), "hidden_size", 0) == 64  # noqa: E731
    without_memory(monkeypatch, torch.nn.Module, "to", is_teachers)
    error = asyncio.run(failure_beside_another(lab, algorithm=OpdSettings(teacher=str(teacher))))
    assert error.startswith(f"model {teacher} on cpu does not fit into memory ({REASON}); take a smaller model")
