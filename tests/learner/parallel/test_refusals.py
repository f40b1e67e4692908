"""Each of the things that several processes do not train, without any process."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollstream.learner.algorithms.base import Row
from rollstream.learner.model.collate import TrainRow
from rollstream.learner.model.policy import PolicyModel
from rollstream.learner.model.ranks import Ranks
from rollstream.learner.parallel.refusals import refused
from rollstream.learner.scoring.models import ScoringModels
from rollstream.learner.trainer import JobTrainer
from rollstream.schemas.errors import ConfigError, RunFailedError
from rollstream.schemas.events import JobSubmitted
from rollstream.schemas.permissions import Permissions
from rollstream.schemas.settings import NEWEST_REVISION, JobSettings

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


def test_memory_that_runs_out_while_several_score_fails_the_job_with_the_remedy(tiny_model: Path) -> None:
    """One of several cannot begin a pass again: the others wait for it in another one."""
    settings = settings_of({"algorithm": {"name": "grpo", "kl_coefficient": 0.1}}, str(tiny_model))
    policy = PolicyModel(settings.model, seed=0)
    policy.ranks = TwoRanks()
    models = ScoringModels(policy, settings, Permissions.of([], {}), "algorithm.teacher")
    row = Row(np.arange(4, dtype=np.int32), np.arange(4) > 1, np.zeros(4, np.float32), 0)
    with pytest.raises(RunFailedError, match=r"out of memory with .*lower algorithm\.max_tokens_per_micro_batch"):
        models._logprobs(policy, Refusing(), [TrainRow(row, row.mask)] * 4, 1.0)  # pyright: ignore[reportArgumentType]
    assert Refusing.asked == 1


class Refusing:
    """A model that runs out of memory."""

    asked = 0

    def logprobs(self, batch: Any, *, temperature: float) -> Any:
        Refusing.asked += 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
