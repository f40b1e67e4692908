"""The tables of jobs and engines: one line a job, with its state as the log says it, or a model group of an engine."""

import io
import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rollstream.harness.runs.display import UNCLAIMED_S, Display, line_of
from rollstream.harness.runs.outcome import Outcome, _means, _rewards
from rollstream.harness.runs.plan import RunPlan
from rollstream.harness.runs.progress import Progress, evolve
from rollstream.harness.upkeep.run_tables import jobs_table, runs_table
from rollstream.harness.upkeep.status import engines_table
from rollstream.schemas.base import Event
from rollstream.schemas.events import (
    BatchPlanned,
    JobCancelled,
    JobFailed,
    JobSkipped,
    JobStarted,
    JobSubmitted,
    JobSucceeded,
    LearnerClaimed,
    RunEnded,
    StepTrained,
    WeightsLoaded,
)
from rollstream.schemas.events.training import ForkPoint

JOB = {"run_id": "run-1", "time_ms": 5, "job_id": "run-1/rl", "model_group": "run-1/policy"}
STEP = {"batch_id": "b", "epoch": 0, "term": 1, "weights_sha256": "", "num_optimizer_steps": 1, "metrics": {}}


def row(script: SimpleNamespace, *events: Event, **reported: Any) -> list[str]:
    """The only line of a run whose job was submitted."""
    spec = script.job_spec("rl", num_epochs=7)
    progress = Progress("run-1")
    submitted = JobSubmitted(**JOB, settings=spec.job, **{"base_version": 4, **reported})
    for event in (script.run_started(), submitted, *events):
        progress = evolve(progress, event)
    header, line = jobs_table([progress]).splitlines()
    assert header.split()[:4] == ["run", "job", "kind", "state"]
    return line.split()


def test_a_row_has_the_submitted_job_and_its_progress(script: SimpleNamespace) -> None:
    assert row(script) == ["run-1", "rl", "rl", "submitted", "run-1/policy", "grpo", "0", "0", "7", "4"]
    spec = script.job_spec("rl")
    begun = JobStarted(**JOB, base_version=4, plan=spec.plan, rollout=spec.rollout)
    trained = [StepTrained(**JOB, version=version, **STEP) for version in (5, 6)]
    assert row(script, begun, *trained)[3:] == ["running", "run-1/policy", "grpo", "2", "0", "7", "4"]
    fork = ForkPoint(run_id="parent", version=12)
    assert row(script, base_version=0, fork=fork)[-2:] == ["0", "parent@12"]
    of_group = fork.model_copy(update={"model_group": "critic"})
    assert row(script, base_version=0, fork=of_group)[-1] == "parent/critic@12"


def test_versions_of_rollbacks_count_in_all_columns(script: SimpleNamespace) -> None:
    digests: dict[str, Any] = {"curriculum_sha256": "0" * 64, "previous_sha256": "0" * 64}
    planned = [
        BatchPlanned(
            **JOB, **digests, batch_id=f"b{index}", epoch=0, index=index, trains_at_version=4 + index,
            yields_version=5 + index, members=(), seed=0, adopts=adopts,
        )
        for index, adopts in enumerate((None, None, 5, None))
    ]  # fmt: skip
    trained = [StepTrained(**JOB, version=version, **STEP) for version in (5, 6, 7, 8)]
    assert row(script, *planned, *planned, *trained)[6:9] == ["4", "4", "8"], "7 are planned, and one is adopted"


@pytest.mark.parametrize(
    ("end", "state"),
    [
        (JobSucceeded(**JOB, final_version=5), "succeeded"),
        (JobFailed(**JOB, error="out of memory"), "failed"),
        (JobCancelled(**JOB), "cancelled"),
        (RunEnded(run_id="run-1", time_ms=9, cause="stopped"), "cancelled"),
    ],
)
def test_the_end_of_a_job_is_its_state(script: SimpleNamespace, end: Event, state: str) -> None:
    assert row(script, end)[3] == state


def test_the_table_of_runs_has_the_same_state(script: SimpleNamespace) -> None:
    progress = evolve(
        evolve(Progress("run-1"), script.run_started()),
        JobSubmitted(**JOB, base_version=0, settings=script.job_spec("rl").job),
    )
    assert "  rl submitted  " in runs_table([progress])
    progress = evolve(progress, RunEnded(run_id="run-1", time_ms=9, cause="failed"))
    assert "  rl cancelled  " in runs_table([progress])


def test_rewards_of_several_model_groups_are_named_with_the_epochs_that_they_are_of(script: SimpleNamespace) -> None:
    jobs = {"run-1/rl": ("run-1/seekers", ""), "run-1/rl-tellers": ("run-1/tellers", "run-1/rl")}
    progress = evolve(Progress("run-1"), script.run_started())
    for num, (job_id, (group, tasks_of)) in enumerate(jobs.items()):
        spec = script.job_spec("rl", num_epochs=20)
        common: dict[str, Any] = {"run_id": "run-1", "time_ms": 1, "job_id": job_id, "model_group": group}
        plan = spec.plan.model_copy(update={"tasks_of": tasks_of})
        progress = evolve(progress, JobSubmitted(**common, base_version=0, settings=spec.job))
        progress = evolve(progress, JobStarted(**common, base_version=0, plan=plan, rollout=spec.rollout))
        for epoch in range(20):
            sealed = script.sealed(job_id, epoch, is_last=epoch == 19, reward=(epoch + num) / 10)
            progress = evolve(progress, sealed)
    (_, row) = runs_table([progress]).splitlines()
    assert "  seekers 1.900, tellers 2.000" in row
    spec = script.job_spec("rl")
    run = RunPlan(script.run_started(), (spec,), is_new=True)
    outcome = Outcome("run-1", "completed", 1, rewards=_rewards(_means(progress, run), 20))
    assert outcome.summary().splitlines()[1] == (
        "reward seekers 0.050 -> 1.850, tellers 0.150 -> 1.950 (mean of the first and last 2 of 20 epochs)"
    )
    line = line_of(replace(progress, jobs=dict(sorted(progress.jobs.items(), reverse=True))), None, "")
    assert "reward seekers 1.450, tellers 1.550 (mean of 10 epochs)" in line


def test_a_job_that_no_learner_claims_is_reported_once_with_the_remedy(script: SimpleNamespace) -> None:
    shown, times = io.StringIO(), itertools.count(0, UNCLAIMED_S / 4)
    display = Display(shown, clock=lambda: next(times))
    group = JOB["model_group"]
    settings = script.job_spec("rl").job
    submitted = evolve(Progress("run-1"), JobSubmitted(**JOB, base_version=0, settings=settings))
    claimed = evolve(submitted, LearnerClaimed(run_id="run-1", time_ms=6, model_group=group, term=1, learner="l"))
    for progress in [submitted] * 20 + [claimed] * 20:
        display.update(progress)
    lines = [one for one in shown.getvalue().splitlines() if "rollstream serve learner" in one]
    assert lines == [
        "no learner has claimed job run-1/rl for 60 s; with external services, start `rollstream serve learner`; "
        "`rollstream status` lists the services of this workspace"
    ]


@pytest.mark.parametrize(
    ("claimed", "named"),
    [("", "jobs run-1/rl-a, run-1/rl-b for"), ("a", "job run-1/rl-b for"), ("b", "job run-1/rl-a for")],
)
def test_every_job_whose_model_group_has_no_learner_is_named(script: SimpleNamespace, claimed: str, named: str) -> None:
    shown, times = io.StringIO(), itertools.count(0, UNCLAIMED_S / 4)
    display, progress = Display(shown, clock=lambda: next(times)), Progress("run-1")
    for name in ("a", "b"):
        job: dict[str, Any] = JOB | {"job_id": f"run-1/rl-{name}", "model_group": f"run-1/{name}"}
        progress = evolve(progress, JobSubmitted(**job, base_version=0, settings=script.job_spec("rl").job))
    if claimed:
        group = f"run-1/{claimed}"
        event = LearnerClaimed(run_id="run-1", time_ms=6, model_group=group, term=1, learner="l")
        progress = evolve(progress, event)
    for _ in range(40):
        display.update(progress)
    (line,) = [one for one in shown.getvalue().splitlines() if "rollstream serve learner" in one]
    assert line.startswith(f"no learner has claimed {named} 60 s;")


def test_a_skipped_job_has_a_line_of_its_own_with_the_version_that_stays(script: SimpleNamespace) -> None:
    skipped = JobSkipped(**JOB, job_kind="sft", num_examples=1, min_examples=10, version=3)
    progress = evolve(evolve(Progress("run-1"), script.run_started()), skipped)
    assert progress.job("run-1/rl").error == "1 examples, at least 10 are needed"
    _, line = jobs_table([progress], "run-1/policy").splitlines()
    assert line.split() == ["run-1", "rl", "sft", "skipped", "run-1/policy", "0", "0", "0", "3"]
    assert jobs_table([progress], "run-1/others") == "no jobs yet"


def test_the_table_of_a_log_without_jobs_is_one_line(script: SimpleNamespace) -> None:
    assert jobs_table([]) == "no jobs yet"
    assert jobs_table([evolve(Progress("run-1"), script.run_started())]) == "no jobs yet"


def test_the_table_of_engines_has_a_line_for_each_model_group(script: SimpleNamespace) -> None:
    progress = Progress("run-1")
    for group, version in (("policy", 1), ("verifiers", 3)):
        published = script.published(version, "run-1/rl").model_copy(update={"model_group": f"run-1/{group}"})
        loaded = WeightsLoaded(
            run_id="run-1", time_ms=9, model_group=f"run-1/{group}", version=version - 1, engine="producers-1"
        )
        for event in (published, loaded):
            progress = evolve(progress, event)
    lines = [line.split() for line in engines_table([progress]).splitlines()]
    assert lines[0] == ["run", "model_group", "engine", "version", "newest"]
    assert lines[1:] == [["run-1", "policy", "producers-1", "0", "1"], ["run-1", "verifiers", "producers-1", "2", "3"]]
    ended = evolve(progress, RunEnded(run_id="run-1", time_ms=10, cause="completed"))
    assert engines_table([ended]) == ""


def test_the_table_of_runs_counts_the_versions_that_a_run_has(script: SimpleNamespace) -> None:
    progress = evolve(Progress("run-1"), script.run_started())
    for version in (4, 5):  # of a fork or a what-if
        progress = evolve(progress, script.published(version, "run-1/rl"))
    assert progress.num_versions == 2
    (header, row) = runs_table([progress]).splitlines()
    assert row[: header.index("versions") + len("versions")].endswith(" 2")
