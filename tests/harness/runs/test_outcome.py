"""The summary at the end of a run."""

import asyncio
import errno
import json
import os
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.harness import finetune
from rollstream.harness.config import file as config_file
from rollstream.harness.config.jobs import jobs_of
from rollstream.harness.runs.driver import lacking
from rollstream.harness.runs.earlier_output import move_earlier_output
from rollstream.harness.runs.outcome import MAX_REPEATED, Outcome, end
from rollstream.harness.runs.plan import RunPlan
from rollstream.harness.runs.progress import Progress, evolve
from rollstream.harness.services import outputs
from rollstream.schemas.events import RunEnded

REASON = "step 3 of trajectory run-1/rl/e00000/t00001/m0/a0/agent " + "has no token " * 12
LOGGED = (f"learner-1: job=run-1/rl failed: {REASON}",)


def test_a_long_reason_that_a_services_error_has_shown_is_not_repeated() -> None:
    outcome = Outcome("run-1", "failed", 2, message=f"job run-1/rl failed: {REASON}", logged=LOGGED)
    assert outcome.summary() == (
        "run run-1 failed at version 2 after 0 s: job run-1/rl failed: see the error of learner-1 above"
    )
    assert REASON in outcome.as_json()["message"], "the file of the result has all of it"
    assert "logged" not in outcome.as_json()


def test_a_short_reason_or_one_that_was_not_shown_is_whole() -> None:
    assert len(REASON) > MAX_REPEATED
    assert Outcome("run-1", "failed", 2, message=REASON).summary().endswith(REASON)
    short = Outcome("run-1", "failed", 2, message="job x failed: too few", logged=("learner-1: job=x failed: too few",))
    assert short.summary().endswith("job x failed: too few")


def leave_files_of_another_run(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "run_id.txt").write_text("run-of-another-workspace")
    (folder / "model.safetensors").write_text("another run")


def test_a_run_of_several_model_groups_lists_the_folders_of_its_models(
    written: dict[str, Any], script: SimpleNamespace, tmp_path: Path
) -> None:
    written["trajectory_builders"]["b"]["agents"] = {"prover": "provers", "verifier": "verifiers"}
    config = config_file.resolve(written).config
    jobs = jobs_of(config, script.run)
    header = json.dumps({"w": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}).encode()
    artifacts = ArtifactStore(str(tmp_path / "artifacts"))
    weights = artifacts.put_bytes(struct.pack("<Q", len(header)) + header)
    progress = evolve(Progress(script.run), script.run_started())
    for event in lacking(progress, script.run_started(), jobs):
        progress = evolve(progress, event)
    for spec in jobs:
        for version in (0, 1):
            event = script.published(version, spec.job_id)
            event = event.model_copy(update={"model_group": spec.model_group, "artifact": weights})
            progress = evolve(progress, event)
    progress = evolve(progress, RunEnded(run_id=script.run, time_ms=9000, cause="stopped"))
    run = RunPlan(script.run_started(), jobs, is_new=True)
    leave_files_of_another_run(config.finetuning.output_dir)
    outcome = asyncio.run(end(MemoryLog(), artifacts, progress, run, config))
    assert outcome.message == f"files of another run, which came to {config.finetuning.output_dir} meanwhile, were " + (
        f"moved to {config.finetuning.output_dir / 'earlier'}"
    )
    assert (config.finetuning.output_dir / "earlier" / "model.safetensors").read_text() == "another run"
    output = config.finetuning.output_dir
    assert (output / "run_id.txt").read_text() == script.run
    assert outcome.output_dir == output.absolute()
    assert sorted(json.loads((output / "model_groups.json").read_text())) == ["provers", "verifiers"]
    assert sorted(path.parent.name for path in output.glob("*/*.safetensors")) == ["earlier", "provers", "verifiers"]
    move_earlier_output(config)
    assert sorted(path.name for path in output.iterdir()) == ["earlier", "earlier-2"]


@pytest.mark.parametrize(("num_last", "num_epochs"), [(0, 3), (4, 4)], ids=["empty", "failed"])
def test_only_the_empty_epoch_that_ends_a_run_early_is_not_counted(
    written: dict[str, Any], script: SimpleNamespace, tmp_path: Path, num_last: int, num_epochs: int
) -> None:
    """An epoch whose rollouts have all failed has no mean reward, but it was rolled out."""
    config = config_file.resolve(written).config
    jobs = jobs_of(config, script.run)
    progress = evolve(Progress(script.run), script.run_started())
    for event in lacking(progress, script.run_started(), jobs):
        progress = evolve(progress, event)
    job_id = jobs[-1].job_id
    for epoch, reward in enumerate([0.25, None, 0.75, None]):
        is_last = epoch == 3
        num_groups = num_last if is_last else 4
        event = script.sealed(job_id, epoch, is_last=is_last, reward=reward, num_groups=num_groups)
        progress = evolve(progress, event)
    progress = evolve(progress, RunEnded(run_id=script.run, time_ms=9000, cause="stopped"))
    run = RunPlan(script.run_started(), jobs, is_new=True)
    outcome = asyncio.run(end(MemoryLog(), ArtifactStore(str(tmp_path / "artifacts")), progress, run, config))
    assert (outcome.num_epochs, outcome.rewards) == (
        num_epochs,
        f"reward 0.250 -> 0.750 (mean of the first and last of {num_epochs} epochs)",
    )


def test_a_result_is_written_once_the_disk_has_room_and_the_old_one_is_whole_until_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, full, write = tmp_path / "result.json", [True], outputs.replacing
    path.write_text("{}")

    def once_there_is_room(*arguments: Any, **named: Any) -> Any:
        assert path.read_text() == "{}"
        if full and full.pop():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*arguments, **named)

    monkeypatch.setattr(outputs, "replacing", once_there_is_room)
    asyncio.run(finetune.write_result(path, Outcome("run-1", "completed", 3)))
    assert json.loads(path.read_text())["version"] == 3
    assert "waiting for free space" in caplog.text
