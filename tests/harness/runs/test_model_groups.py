"""The conductor's part in a run of several model groups: jobs side by side, one plan of epochs, and its end."""

from types import SimpleNamespace
from typing import Any

import pytest

from rollstream.harness.config.dataset import Example
from rollstream.harness.runs.driver import is_over, lacking, reason_to_stop
from rollstream.harness.runs.progress import Progress, evolve
from rollstream.harness.runs.validation import Validation
from rollstream.schemas.base import Event
from rollstream.schemas.events import EpochStarted, JobFailed, JobStarted, JobSubmitted, JobSucceeded, WeightsPublished
from rollstream.schemas.settings import FROZEN, ForkPoint, JobSpec


class Conducted:
    """Progress of a run, and what its log lacks next."""

    def __init__(self, script: SimpleNamespace, *jobs: JobSpec) -> None:
        self.script = script
        self.jobs = jobs
        self.progress = Progress(script.run)

    def take(self, *events: Event) -> None:
        for event in events:
            self.progress = evolve(self.progress, event)

    def next(self) -> list[Event]:
        """Take in the events that are written now, and return them."""
        events = lacking(self.progress, self.script.run_started(), self.jobs)
        self.take(*events)
        return events

    def publish(self, group: str, version: int = 0) -> None:
        event: WeightsPublished = self.script.published(version, f"{self.script.run}/x")
        self.take(event.model_copy(update={"model_group": f"run-1/{group}", "time_ms": 2000 + len(group)}))

    def seal(self, job: str, epoch: int, *, is_last: bool) -> None:
        self.take(self.script.sealed(f"run-1/{job}", epoch, is_last=is_last))

    def end(self, job: str, version: int) -> None:
        group = next(spec.model_group for spec in self.jobs if spec.job_id == f"run-1/{job}")
        common: dict[str, Any] = {"run_id": "run-1", "time_ms": 9000, "job_id": f"run-1/{job}", "model_group": group}
        self.take(JobSucceeded(**common, final_version=version))


def specs(script: SimpleNamespace, name: str, num_epochs: int) -> list[JobSpec]:
    main: JobSpec = script.job_spec(name, num_epochs=num_epochs)
    plan = main.plan.model_copy(update={"tasks_of": main.job_id})
    beside = main._replace(job_id=f"{main.job_id}-b", model_group="run-1/b", plan=plan)
    return [beside, main._replace(model_group="run-1/a")]


@pytest.fixture
def conducted(script: SimpleNamespace) -> Conducted:
    main = script.job_spec("frozen-c")
    job = main.job.model_copy(update={"kind": FROZEN})
    frozen = main._replace(model_group="run-1/c", job=job, fork=ForkPoint(run_id="other", version=3))
    return Conducted(script, frozen, *specs(script, "sft", 1), *specs(script, "rl", 2))


def kinds(events: list[Event]) -> list[str]:
    return [event.event_id for event in events]


def test_the_jobs_of_a_stage_run_side_by_side_and_one_of_them_plans_epochs(conducted: Conducted) -> None:
    assert kinds(conducted.next()) == [
        "run_started:run-1",
        "job_submitted:run-1/frozen-c",
        "job_submitted:run-1/sft-b",
        "job_submitted:run-1/sft",
    ]
    submitted = [job.submitted for job in conducted.progress.jobs.values()]
    assert [event.fork.version if event and event.fork else None for event in submitted] == [3, None, None]
    for group in ("a", "b"):
        conducted.publish(group)
        assert conducted.next() == []
    conducted.publish("c")
    started = conducted.next()
    assert kinds(started) == [
        "job_started:run-1/sft-b",
        "job_started:run-1/sft",
        "epoch_started:run-1/sft/e0",
    ]
    conducted.seal("sft", 0, is_last=True)
    conducted.end("frozen-c", 0)
    conducted.end("sft", 1)
    assert conducted.next() == []
    conducted.publish("a", 1)
    conducted.publish("b", 2)
    conducted.end("sft-b", 2)
    second = conducted.next()
    assert [type(event) for event in second] == [JobSubmitted, JobSubmitted, JobStarted, JobStarted, EpochStarted]
    bases = {event.model_group: event.base_version for event in second if isinstance(event, JobSubmitted)}
    assert bases == {"run-1/a": 1, "run-1/b": 2}
    conducted.seal("rl-b", 0, is_last=False)
    assert conducted.next() == []
    conducted.seal("rl", 0, is_last=False)
    assert kinds(conducted.next()) == ["epoch_started:run-1/rl/e1"]


def test_a_run_ends_when_all_its_jobs_have_ended(conducted: Conducted) -> None:
    for name, version in (("frozen-c", 0), ("sft-b", 1), ("sft", 1), ("rl", 3)):
        conducted.end(name, version)
    assert not is_over(conducted.progress, conducted.jobs)
    conducted.end("rl-b", 3)
    assert is_over(conducted.progress, conducted.jobs)


def test_a_job_that_fails_ends_the_run_by_its_name_and_that_of_its_model_group(conducted: Conducted) -> None:
    common: dict[str, Any] = {"run_id": "run-1", "time_ms": 9000, "job_id": "run-1/rl-b", "model_group": "run-1/b"}
    conducted.take(JobFailed(**common, error="no room"))
    assert reason_to_stop(conducted.progress, conducted.jobs) == "job run-1/rl-b (model group b) failed: no room"


def test_the_version_shown_of_a_run_is_that_of_the_job_that_plans(conducted: Conducted) -> None:
    conducted.next()
    conducted.publish("b", 4)
    assert conducted.progress.version == -1
    conducted.publish("a", 2)
    assert (conducted.progress.version, conducted.progress.version_of("run-1/b")) == (2, 4)


def test_a_validation_waits_for_what_is_planned_of_each_model_group(conducted: Conducted) -> None:
    main = conducted.jobs[-1]
    agents = {"x": "run-1/a", "y": "run-1/b", "z": "run-1/c"}
    rollout = main.rollout.model_copy(update={"agents": agents})
    validation = Validation(conducted.script.run_started(), main, [Example("x", {})], rollout)
    for spec, base in ((conducted.jobs[-2], 1), (main, 5)):
        common: dict[str, Any] = {"run_id": "run-1", "time_ms": 1, "job_id": spec.job_id}
        conducted.take(
            JobStarted(**common, model_group=spec.model_group, base_version=base, plan=spec.plan, rollout=rollout)
        )
    conducted.seal("rl-b", 0, is_last=False)
    (task,) = validation.due_tasks(0, conducted.progress)
    assert {group: task.wanted_version(group) for group in agents.values()} == {
        "run-1/a": 5,
        "run-1/b": 2,
        "run-1/c": 0,
    }
