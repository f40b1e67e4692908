"""When `finetune` ends before its run, it shows how to continue; what `stop` reports."""

import asyncio
import errno
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.harness.cli.main import error_line
from rollstream.harness.cli.terminal import interruption_line
from rollstream.harness.finetune import Interrupted, _Conducted, _resumable
from rollstream.harness.runs.outcome import Outcome
from rollstream.harness.runs.plan import RunPlan
from rollstream.harness.runs.progress import Progress, evolve
from rollstream.harness.runs.run_context import RunContext
from rollstream.harness.services.supervisor import Supervisor
from rollstream.harness.upkeep.run_control import stopped_line
from rollstream.schemas.errors import LogError, StoreUnavailableError

FULL = OSError(errno.ENOSPC, "No space left on device", "/data/out")
RESUMES = "run run-1 stays open: `rollstream finetune --config_file FILE --resume run-1`"


@pytest.fixture
def run(script: SimpleNamespace, tmp_path: Path) -> RunContext:
    plan = RunPlan(script.run_started(), (script.job_spec(),), is_new=True)
    return RunContext(MemoryLog(), ArtifactStore(str(tmp_path)), plan, Supervisor([], tmp_path), asyncio.Event())


@pytest.mark.parametrize("error", [LogError(), StoreUnavailableError("away"), FULL, TimeoutError("late")], ids=repr)
def test_an_error_of_an_open_run_has_the_command_that_resumes_it(error: Exception, run: RunContext) -> None:
    with pytest.raises(type(error)) as early, _resumable(run, is_open=True):
        raise error
    assert early.value is error, "the log does not have the run yet"
    run.begun.set()
    with pytest.raises(type(error)) as message, _resumable(run, is_open=True):
        raise error
    assert RESUMES in error_line(message.value)
    assert getattr(message.value, "errno", None) == getattr(error, "errno", None)
    with pytest.raises(type(error)) as same, _resumable(run, is_open=False):
        raise error
    assert same.value is error


def test_an_interrupted_run_can_be_resumed_only_once_the_log_has_it(run: RunContext) -> None:
    early = interruption_line(Interrupted(signal.SIGINT, _Conducted(run, is_open=True)), None)
    assert early == "interrupted before run run-1 was begun; nothing was started"
    run.begun.set()
    assert RESUMES in interruption_line(Interrupted(signal.SIGINT, _Conducted(run, is_open=True)), None)


def test_an_interruption_after_the_runs_end_reports_whether_its_model_is_saved(run: RunContext) -> None:
    run.begun.set()
    ended = Outcome("run-1", "completed", 3, output_dir=Path("/models/mine"))
    conducted = _Conducted(run, outcome=ended)
    reported = interruption_line(Interrupted(signal.SIGINT, conducted), None)
    assert reported == "interrupted; run run-1 has ended (completed); its model is saved in /models/mine"
    conducted.outcome = ended._replace(status="failed", output_dir=None)
    reported = interruption_line(Interrupted(signal.SIGINT, conducted), None)
    assert reported == "interrupted; run run-1 has ended (failed); no model was saved"
    reported = interruption_line(Interrupted(signal.SIGINT, _Conducted(run)), "run-1")
    assert reported == (
        "interrupted; run run-1 has ended, and its model may not be saved: `rollstream finetune --config_file FILE "
        "--resume run-1` saves it"
    )


def test_a_run_without_a_version_is_stopped_before_its_first_one(script: SimpleNamespace) -> None:
    progress = evolve(Progress("run-1"), script.run_started())
    assert stopped_line(progress) == "run run-1 stopped before its first version: nothing was trained"
    progress = evolve(progress, script.published(0, "run-1/rl"))
    assert stopped_line(progress) == "run run-1 stopped at version 0: nothing was trained"
