"""Each of the things that several processes do not train, without any process."""

import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollstream.learner.model.memory import KeptBudget, MicroBatchBudget
from rollstream.learner.model.micro_batch import MicroBatch
from rollstream.learner.model.policy import PolicyModel
from rollstream.learner.model.ranks import Ranks
from rollstream.learner.parallel.refusals import refused
from rollstream.learner.scoring.models import ScoringModels, decoded_arguments
from rollstream.learner.trainer import JobTrainer
from rollstream.schemas.errors import ConfigError, RunFailedError
from rollstream.schemas.events import JobSubmitted
from rollstream.schemas.permissions import Permissions
from rollstream.schemas.revisions import NEWEST_REVISION
from rollstream.schemas.settings import JobSettings
from tests.learner.conftest import Lab

REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("optimizer.kind: adamw_8bit", {"optimizer": {"kind": "adamw_8bit"}}),
    ("model.device: cuda (auto and cpu are a device for each process)", {"model": {"device": "cuda"}}),
]
TRAINED: list[dict[str, Any]] = [
    {},
    {"model": {"device": "cpu", "lora": {"rank": 2}, "gradient_checkpointing": True}},
    {"optimizer": {"kind": "muon", "offload": "cpu"}},
    {"model": {"compile": True}},
    {"model": {"quantization": "nf4", "lora": {"rank": 2}}},
    {"algorithm": {"name": "sft"}, "kind": "sft"},
    {"algorithm": {"name": "grpo", "kl_coefficient": 0.1}},
    {"algorithm": {"name": "dpo"}, "kind": "dpo"},
    {"algorithm": {"name": "opsd", "context": "{answer}"}},
    {"algorithm": {"name": "opd", "teacher": "another/teacher"}},
]


class TwoRanks(Ranks):
    """The number of processes for which a job is refused; nothing else of it is used."""

    num = 2


def settings_of(changes: dict[str, Any], path: str = "model") -> JobSettings:
    model = {"path": path, **changes.get("model", {})}
    return JobSettings.model_validate({"kind": "rl", "revision": NEWEST_REVISION, **changes, "model": model})


@pytest.mark.parametrize(("what", "changes"), REFUSED, ids=lambda value: str(value)[:60])
def test_settings_that_several_processes_do_not_train_are_named_before_a_model_is_loaded(
    what: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    settings = settings_of(changes, str(tmp_path / "not there"))
    assert refused(settings) == what
    job = JobSubmitted(
        run_id="run-1", time_ms=1, job_id="run-1/rl", model_group="run-1/main", base_version=0, settings=settings
    )
    with pytest.raises(ConfigError) as error:
        JobTrainer(job, threads=1, permissions=Permissions.of([f"model:{settings.model.path}"], {}), ranks=TwoRanks())
    assert f"2 processes do not train with {what}; start the learner as one process" in str(error.value)


@pytest.mark.parametrize("changes", TRAINED, ids=str)
def test_settings_that_several_processes_train_are_accepted(changes: dict[str, Any]) -> None:
    assert refused(settings_of(changes)) == ""


class Sending(TwoRanks):
    """Two processes, of which this is the first: what it sends the other one is kept."""

    sent = b""

    def together(self, command: str, data: bytes = b"") -> AbstractContextManager[None]:
        self.sent = data
        return nullcontext()


class Refusing:
    """A model without memory for more than 16 tokens in several rows."""

    def logprobs(self, batch: MicroBatch, *, temperature: float) -> torch.Tensor:
        if batch.num_computed > 16 and len(batch.lengths) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return torch.zeros(sum(batch.lengths))


def test_memory_that_runs_out_while_several_score_halves_their_tokens_in_the_next_start(
    tiny_model: Path, tmp_path: Path
) -> None:
    """One of several cannot begin a pass again: the others wait for it in another one."""
    algorithm = {"name": "grpo", "kl_coefficient": 0.1, "max_tokens_per_micro_batch": 256}
    settings = settings_of({"algorithm": algorithm}, str(tiny_model))
    policy, file = PolicyModel(settings.model, seed=0), tmp_path / "scoring_tokens.json"
    policy.ranks = ranks = Sending()
    lab = Lab(tmp_path, tiny_model)
    job: Any = SimpleNamespace(job_id="r/rl", model_group="r/main")
    trajectories = [lab.trajectory(job, 0, member) for member in range(4)]

    def started(*, is_first: bool) -> ScoringModels:
        models = ScoringModels(policy, settings, Permissions.of([], {}), "algorithm.teacher")
        models._reference = Refusing()  # pyright: ignore[reportAttributeAccessIssue]
        if is_first:
            models.keep(KeptBudget(file, "r/rl"))
        return models

    (scorer,) = started(is_first=True).scorers("0" * 64)
    with pytest.raises(torch.OutOfMemoryError):
        started(is_first=True).score(scorer, trajectories)
    assert json.loads(file.read_text())["tokens"] == 128
    with pytest.raises(torch.OutOfMemoryError):  # the other process, which has no file of its own
        started(is_first=False).score(*decoded_arguments(ranks.sent))
    for _ in range(3):
        if json.loads(file.read_text())["tokens"] > 16:
            with pytest.raises(torch.OutOfMemoryError):
                started(is_first=True).score(scorer, trajectories)
    assert json.loads(file.read_text())["tokens"] == 16
    assert len(started(is_first=True).score(scorer, trajectories)) == 4


def test_without_a_file_memory_that_runs_out_while_several_score_fails_the_job_with_the_remedy() -> None:
    def work(tokens: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    with pytest.raises(RunFailedError, match=r"out of memory with .*lower algorithm\.max_tokens_per_micro_batch"):
        MicroBatchBudget(64, halves=False).run(work, 4)
