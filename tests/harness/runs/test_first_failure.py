"""The first failed rollout of a run with external services: reported from the log, once, as soon as it is there. A run
of which no rollout completes: stopped after a few epochs.
"""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rollstream.eventlog.memory.log import MemoryLog
from rollstream.harness.runs import conductor
from rollstream.harness.runs.conductor import Conductor, ends_of, report_first_failure
from rollstream.harness.runs.plan import RunPlan
from rollstream.schemas import ids
from rollstream.schemas.base import Event
from rollstream.schemas.errors import RunFailedError
from rollstream.schemas.events import EpochStarted, GroupClosed, JobFailed, RolloutFailed
from rollstream.schemas.events.training import AttemptOutcome, StepsRange

RUN = "run-1"
Scenario = Callable[[MemoryLog], Awaitable[None]]


def rollout_of(run_id: str, index: int = 0) -> str:
    return ids.rollout_id(ids.group_id(run_id, "rl", 0, index), 0, 0)


def failed(run_id: str = RUN, *, index: int = 0, cause: str = "environment_error") -> RolloutFailed:
    group_id = ids.group_id(run_id, "rl", 0, index)
    fields: dict[str, Any] = {"run_id": run_id, "group_id": group_id, "rollout_id": rollout_of(run_id, index)}
    return RolloutFailed(**fields, time_ms=1, cause=cause, message=f"broken {index}")


def closed(at: int, cause: str, epoch: int = 0, outcome: Any = "failed") -> GroupClosed:
    attempt = AttemptOutcome(rollout_id=rollout_of(RUN), member=0, attempt=0, outcome=outcome, cause=cause)
    return GroupClosed(
        run_id=RUN, time_ms=1, group_id=ids.group_id(RUN, "rl", epoch, 0), example_id="a", job_id=ids.job_id(RUN, "rl"),
        epoch=epoch, index=0, reason="failed", is_viable=False, size=1, members=(), attempts=(attempt,),
        steps_at=StepsRange(partition=0, first_offset=at, last_offset=at),
    )  # fmt: skip


def reports(before: Scenario, after: Scenario, monkeypatch: pytest.MonkeyPatch, wait_s: float = 30.0) -> list[str]:
    """Reports on the events of `before` and `after` the moment from which the log is watched.

    `wait_s`: what a report may take.
    """
    monkeypatch.setattr(conductor, "FAILURE_POLL_S", 0.01)
    found: list[str] = []

    async def scenario() -> None:
        log = MemoryLog(num_partitions=3)
        await before(log)
        watching = asyncio.create_task(report_first_failure(log, RUN, await ends_of(log), found.append))
        await after(log)
        await asyncio.wait({watching}, timeout=wait_s)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    asyncio.run(scenario())
    return found


async def nothing(log: MemoryLog) -> None:
    """No event."""


def test_a_failure_is_reported_while_its_group_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def after(log: MemoryLog) -> None:
        await log.send(failed("run-2"), partition=1)
        await log.send(failed(cause="cancelled"), partition=0)
        await log.send(failed(index=1), partition=2)
        await log.send(failed(index=2), partition=2)

    assert reports(nothing, after, monkeypatch) == [f"rollout {rollout_of(RUN, 1)} failed: environment_error: broken 1"]


@pytest.mark.parametrize(("cause", "num_reports"), [("environment_error", 1), ("producer_lost", 0)])
def test_a_failure_from_before_is_reported_when_its_group_closes(
    monkeypatch: pytest.MonkeyPatch, cause: str, num_reports: int
) -> None:
    async def before(log: MemoryLog) -> None:
        await log.send(failed(cause=cause), partition=0)

    async def after(log: MemoryLog) -> None:
        await log.send(closed(0, cause))

    wait_s = 30.0 if num_reports else 0.5
    assert len(reports(before, after, monkeypatch, wait_s)) == num_reports


def conducted(script: SimpleNamespace, outcomes: list[tuple[str, str]], sealed_before: int = 0) -> tuple[int, str]:
    """Number of epochs that a run seals whose only rollout of each ends so (outcome and cause), and the error."""

    class Failing(script.counterpart):
        def _epoch(self, event: EpochStarted) -> list[Event]:
            outcome, cause = outcomes[event.epoch]
            is_last = event.epoch == len(outcomes) - 1
            found = [
                closed(0, cause, event.epoch, outcome),
                script.sealed(event.job_id, event.epoch, is_last=is_last, reward=None),
            ]
            self.num_sealed = event.epoch + 1
            if is_last:
                end = {"run_id": RUN, "time_ms": 1, "job_id": event.job_id, "model_group": f"{RUN}/policy"}
                found.append(JobFailed(**end, error="nothing was trained"))
            return found

    async def scenario() -> tuple[int, str]:
        log = MemoryLog(num_partitions=1)
        counterpart = Failing(log)
        await log.send(failed(cause="environment_error"))
        run = RunPlan(script.run_started(), (script.job_spec(num_epochs=len(outcomes)),), is_new=True)

        async def work() -> None:
            async with Conductor(log, run) as conducting:
                conducting._completed[run.jobs[0].job_id] = sealed_before - 1
                await conducting.conduct()

        try:
            await script.with_counterpart(counterpart, work())
        except RunFailedError as error:
            return counterpart.num_sealed, str(error)
        return counterpart.num_sealed, ""

    return asyncio.run(scenario())


def test_a_run_of_which_no_rollout_completes_stops_after_a_few_epochs(script: SimpleNamespace) -> None:
    broken, fine = ("failed", "environment_error"), ("complete", "")
    error = (
        "no rollout of job run-1/rl completed in the last 3 epochs; the last failed by environment_error: broken 0; "
    )
    error += "remove the cause"
    assert conducted(script, [broken] * 9) == (3, error)
    assert conducted(script, [broken] * 9, sealed_before=2) == (5, error), "a resumed run tries again"
    assert conducted(script, [broken, broken, fine, *[broken] * 5]) == (6, error)
    assert conducted(script, [broken, ("rejected", "no_logprobs")] * 3) == (6, "")
    assert conducted(script, [("failed", "producer_lost")] * 5) == (5, "")
    assert conducted(script, [broken] * 3) == (3, "")
