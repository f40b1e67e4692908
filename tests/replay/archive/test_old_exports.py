"""Runs that an earlier rollstream trained and exported (tests/golden/exports) are read, folded and trained alike."""

import asyncio
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rollstream.harness.config import file as config_file
from rollstream.harness.config.jobs import jobs_of
from rollstream.learner.library_versions import library_versions
from rollstream.metrics.projection.connection import connect
from rollstream.metrics.rebuild import ExportedRun, rebuild
from rollstream.replay.archive.log import open_export
from rollstream.replay.completeness import compare_named
from rollstream.replay.report import Report, compare_log
from rollstream.replay.source import of_type, read_run
from rollstream.replay.verify import verify
from rollstream.schemas.events import JobStarted, JobSubmitted, RunStarted
from rollstream.schemas.settings import JobSettings, PlanSettings

EXPORTS = Path(__file__).parents[2] / "golden" / "exports"
NAMES = ("grpo", "dpo")


def manifest_of(name: str) -> dict[str, Any]:
    return json.loads((EXPORTS / name / "manifest.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_an_old_export_is_folded_to_the_same_digests(name: str) -> None:
    async def scenario() -> Report:
        report = Report()
        async with open_export(EXPORTS / name) as (log, artifacts):
            events = await read_run(log, manifest_of(name)["run_id"])
            compare_log(events, report)
            report.add(await verify(log, events, artifacts))
            compare_named(events, report)
        return report

    report = asyncio.run(scenario())
    assert (report.differences, report.verdict) == ([], "equal")
    assert report.counts["groups"] == {"grpo": 52, "dpo": 52}[name]


def _as_then(job: JobSettings) -> JobSettings:
    """The job by the rules of that time, of which the size of micro-batches was one."""
    algorithm = job.algorithm.model_copy(update={"max_tokens_per_micro_batch": 16384})
    return job.model_copy(update={"revision": 2, "algorithm": algorithm})


def _planned_then(plan: PlanSettings) -> PlanSettings:
    """The plan by the rules of that time."""
    return plan.model_copy(update={"revision": 1})


@pytest.mark.parametrize("name", NAMES)
def test_an_old_configuration_gives_the_jobs_that_were_recorded(name: str) -> None:
    async def scenario() -> None:
        run_id = manifest_of(name)["run_id"]
        async with open_export(EXPORTS / name) as (log, _):
            events = await read_run(log, run_id)
        (started,) = [event for event, _ in of_type(events.by_topic["groups"], RunStarted)]
        submitted = {event.job_id: event for event, _ in of_type(events.by_topic["jobs"], JobSubmitted)}
        planned = {event.job_id: event for event, _ in of_type(events.by_topic["groups"], JobStarted)}
        for loaded in (config_file.resolve(started.config), config_file.load(EXPORTS / f"{name}.yaml")):
            jobs = jobs_of(loaded.config, run_id)
            of_today = {job.job_id: _as_then(job.job) for job in jobs}
            assert of_today == {key: job.settings for key, job in submitted.items()}
            assert {job.job_id: _planned_then(job.plan) for job in jobs} == {
                key: job.plan for key, job in planned.items()
            }
            assert {job.job_id: job.rollout for job in jobs} == {key: job.rollout for key, job in planned.items()}

    asyncio.run(scenario())


@pytest.mark.parametrize("name", NAMES)
def test_an_old_export_fills_a_metrics_file(name: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_export(EXPORTS / name) as (log, _):
            await rebuild(log, tmp_path / "made.duckdb", exported=ExportedRun(manifest_of(name)["run_id"], True))

    asyncio.run(scenario())
    with connect(tmp_path / "made.duckdb", read_only=True) as connection:
        assert connection.execute("SELECT state FROM runs").fetchall() == [("completed",)]
        assert connection.execute("SELECT version FROM training_steps").fetchall() == [(n,) for n in range(1, 9)]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_old_export_is_trained_to_the_same_bits(name: str, tmp_path: Path) -> None:
    recorded = json.loads((EXPORTS / "machine.json").read_text(encoding="utf-8"))
    libraries = {key: what for key, what in manifest_of(name)["library_versions"].items() if key != "rollstream"}
    if machine() != recorded["machine"] or not libraries.items() <= library_versions().items():
        pytest.skip(f"floating-point sums differ elsewhere: recorded on {recorded['machine']} with {libraries}")
    command = [sys.executable, "-m", "rollstream.harness.cli.main", "replay", manifest_of(name)["run_id"], "--train"]
    done = subprocess.run(
        [*command, "--any-libraries", "--export", str(EXPORTS / name), "--workspace", str(tmp_path / "none")],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=EXPORTS,  # the runs name their model `model`
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"equal: run {manifest_of(name)['run_id']}: "), done.stdout
    assert "8 training steps" in done.stdout


def machine() -> str:
    """Properties of the machine that the order of floating-point sums depends on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    reported = dict(line.replace("\t", "").split(": ", 1) for line in lines if ": " in line)
    kind = ", ".join(reported.get(name, "unknown") for name in ("model name", "cpu family", "model", "stepping"))
    return f"{platform.machine()}, {kind}, {torch.backends.cpu.get_cpu_capability()}"
