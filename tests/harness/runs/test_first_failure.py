"""The first failed rollout of a run with external services: reported from the log, once, as soon as it is there."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rollstream.eventlog.memory.log import MemoryLog
from rollstream.harness.runs import conductor
from rollstream.harness.runs.conductor import ends_of, report_first_failure
from rollstream.schemas import ids
from rollstream.schemas.events import GroupClosed, RolloutFailed
from rollstream.schemas.events.training import AttemptOutcome, StepsRange

RUN = "run-1"
Scenario = Callable[[MemoryLog], Awaitable[None]]


def rollout_of(run_id: str, index: int = 0) -> str:
    return ids.rollout_id(ids.group_id(run_id, "rl", 0, index), 0, 0)


def failed(run_id: str = RUN, *, index: int = 0, cause: str = "environment_error") -> RolloutFailed:
    group_id = ids.group_id(run_id, "rl", 0, index)
    fields: dict[str, Any] = {"run_id": run_id, "group_id": group_id, "rollout_id": rollout_of(run_id, index)}
    return RolloutFailed(**fields, time_ms=1, cause=cause, message=f"broken {index}")


def closed(at: int, cause: str) -> GroupClosed:
    outcome = AttemptOutcome(rollout_id=rollout_of(RUN), member=0, attempt=0, outcome="failed", cause=cause)
    return GroupClosed(
        run_id=RUN, time_ms=1, group_id=ids.group_id(RUN, "rl", 0, 0), example_id="a", job_id=ids.job_id(RUN, "rl"),
        epoch=0, index=0, reason="failed", is_viable=False, size=1, members=(), attempts=(outcome,),
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
