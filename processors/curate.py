"""The curate fold over one partition of `groups`: run and job events and closed groups in, what to send out.

`evolve` is given every record of the partition in order and answers with task requests, manifests, rejections, epoch
seals and ends of abandoned runs, in the order in which they are to be sent. No Kafka, clock, randomness or disk: the
answer depends on the sequence of records alone, so folding it again gives the same bytes.
"""

from collections.abc import Callable, Mapping
from typing import cast

from rollstream.eventlog.log import Received
from rollstream.processors import admission, curriculum, ledger, planning
from rollstream.processors.curate_state import CurateState, EndedRun, Epoch, Job, Run, Task
from rollstream.processors.task_requests import Dataset, request_tasks
from rollstream.schemas import ids
from rollstream.schemas.base import Event
from rollstream.schemas.errors import ArtifactError
from rollstream.schemas.events import (
    EpochStarted,
    GroupClosed,
    JobStarted,
    RunEnded,
    RunStarted,
    SubmissionReceived,
    TaskCancelled,
)

Datasets = Mapping[str, Dataset]
"""Datasets by run id. A run's must be there when its EpochStarted is folded."""

__all__ = ["CurateState", "Datasets", "evolve", "initial"]


def initial() -> CurateState:
    """The state before the first record of a partition."""
    return CurateState()


def evolve(state: CurateState, received: Received, datasets: Datasets) -> list[Event]:
    """Fold one record of `groups` into `state`, which is changed in place; returns what to send, in order.

    A repeated event id changes nothing. Records of runs that the state does not know answer nothing, so the fold may
    begin at `CurateState.low_water` instead of the partition's start. Raises ArtifactError if an epoch starts in a
    run whose dataset is not given.
    """
    event = received.event
    outputs = _fold(state, received, datasets)
    return outputs + _abandon_idle_runs(state, event)


def _fold(state: CurateState, received: Received, datasets: Datasets) -> list[Event]:
    event = received.event
    if isinstance(event, RunStarted):
        if event.run_id not in state.runs and event.run_id not in state.ended:
            state.runs[event.run_id] = Run(event, received.position.offset)
        return []
    run = state.runs.get(event.run_id)
    if run is None:
        return _after_the_end(state, event)
    if event.event_id in run.seen:
        return []
    run.seen.add(event.event_id)
    if isinstance(event, RunEnded):
        return _end_run(state, run, event)
    if isinstance(event, EpochStarted):
        return _start_epoch(run, event, datasets)
    handler = _HANDLERS.get(type(event))
    return handler(run, event) if handler else []


def _after_the_end(state: CurateState, event: Event) -> list[Event]:
    """A group that closes after its run has ended goes to the ledger; anything else is passed over."""
    if isinstance(event, RunEnded):  # of a run whose beginning is not kept
        state.ended.setdefault(event.run_id, EndedRun(0, set()))
    ended = state.ended.get(event.run_id)
    if isinstance(event, EpochStarted) and ended is not None and ended.takes_others:
        ended.open_groups.update(name for name in _announced(event) if f"group_closed:{name}" not in ended.seen)
    if not isinstance(event, GroupClosed):
        return []
    if event.purpose == "validation":
        return ledger.reject(event, "validation", event.time_ms)
    if ended is None:
        return []
    is_other = ended.takes_others and event.event_id not in ended.seen
    if event.group_id not in ended.open_groups and not is_other:
        return []
    ended.open_groups.discard(event.group_id)
    ended.seen.add(event.event_id)
    return ledger.reject(event, "run_ended", event.time_ms)


def _start_job(run: Run, event: Event) -> list[Event]:
    started = cast(JobStarted, event)
    run.jobs[started.job_id] = Job(started, curriculum.begin(started.plan.curriculum))
    return []


def _start_epoch(run: Run, event: EpochStarted, datasets: Datasets) -> list[Event]:
    job = run.jobs.get(event.job_id)
    if job is None or event.epoch in job.sealed:
        return []
    if job.is_submitted:
        return _await_tasks(run, job, event)
    if event.run_id not in datasets:
        raise ArtifactError(f"run {event.run_id}: its dataset is not loaded; fetch {run.started.dataset.uri} first")
    epoch = job.epochs.setdefault(event.epoch, Epoch(event.epoch))
    requests = request_tasks(run, job, event, datasets[event.run_id])
    run.tasks.update((request.group_id, Task(event.job_id, event.epoch)) for request in requests)
    epoch.num_open += len(requests)
    return [*requests, *planning.advance(run, job, epoch, event.time_ms)]


def _await_tasks(run: Run, job: Job, event: EpochStarted) -> list[Event]:
    """Take note of the tasks that the harness asks for itself. The epoch lasts until it is submitted."""
    job.epochs.setdefault(event.epoch, Epoch(event.epoch))
    for group_id in _announced(event):
        if f"group_closed:{group_id}" not in run.seen:
            run.tasks[group_id] = Task(event.job_id, event.epoch)
    return []


def _announced(event: EpochStarted) -> list[str]:
    """Groups of the tasks that the harness asks for itself."""
    job = event.job_id.removeprefix(f"{event.run_id}/")
    return [ids.group_id(event.run_id, job, event.epoch, index) for index in range(event.num_tasks)]


def _close_group(run: Run, event: Event) -> list[Event]:
    closed = cast(GroupClosed, event)
    if closed.purpose == "validation":
        return ledger.reject(closed, "validation", closed.time_ms)
    task = run.tasks.pop(closed.group_id, None)
    job = run.jobs.get(task.job_id if task else closed.job_id)
    epoch = _epoch_of(job, task, closed) if job else None
    if job is None or epoch is None:
        return ledger.reject(closed, "late", closed.time_ms)
    if not job.is_submitted:
        epoch.num_open -= task is not None
    outputs = admission.admit(job, epoch, closed)
    return outputs + planning.advance(run, job, epoch, closed.time_ms)


def _epoch_of(job: Job, task: Task | None, closed: GroupClosed) -> Epoch | None:
    """The open epoch of a group. What curate did not ask for itself belongs to one only where submissions decide."""
    if task is not None and not job.is_submitted:
        return job.epochs[task.epoch]
    if not job.is_submitted or closed.epoch in job.sealed:
        return None
    return job.epochs.setdefault(closed.epoch, Epoch(closed.epoch))


def _take_submission(run: Run, event: Event) -> list[Event]:
    submission = cast(SubmissionReceived, event)
    job = run.jobs.get(submission.job_id)
    if job is None or not job.is_submitted or submission.epoch in job.sealed:
        return []
    epoch = job.epochs.setdefault(submission.epoch, Epoch(submission.epoch))
    return planning.plan_submission(run, job, epoch, submission)


def _end_run(state: CurateState, run: Run, event: RunEnded) -> list[Event]:
    """Reject what still waits, cancel open tasks, keep no more of the run than the groups that are still to close."""
    outputs: list[Event] = []
    for job in run.jobs.values():
        gathered = [group for epoch in job.epochs.values() for group in epoch.gathered]
        for group in [*job.ready, *gathered]:
            outputs += ledger.reject(group, "run_ended", event.time_ms)
    outputs += [
        TaskCancelled(run_id=event.run_id, time_ms=event.time_ms, group_id=group_id, cause=f"run {event.cause}")
        for group_id in run.tasks
    ]
    del state.runs[event.run_id]
    takes_others = any(job.is_submitted for job in run.jobs.values())
    ended = EndedRun(run.first_offset, set(run.tasks), takes_others, run.seen if takes_others else set())
    state.ended[event.run_id] = ended
    return outputs


def _abandon_idle_runs(state: CurateState, event: Event) -> list[Event]:
    """Ends for runs that made no progress while another run's event time passed their idle time-out.

    Every steps partition and the harness have clocks of their own, which may be hours apart; a time is only ever
    compared with one of the same clock. The end is sent, not applied: it counts when it comes back as a record.
    """
    clock = _clock_of(event)
    outputs: list[Event] = []
    for run_id, run in state.runs.items():
        if run_id == event.run_id:
            run.idle_since_ms.clear()
            continue
        if run.started.is_what_if:
            continue  # it has no rollouts that could keep it going
        idle_ms = event.time_ms - run.idle_since_ms.setdefault(clock, event.time_ms)
        timeout_s = run.started.idle_timeout_s
        if idle_ms > timeout_s * 1000 and not run.is_abandoned:
            run.is_abandoned = True
            message = f"no progress in {timeout_s:g} s of other runs' time"
            outputs.append(RunEnded(run_id=run_id, time_ms=event.time_ms, cause="abandoned", message=message))
    return outputs


def _clock_of(event: Event) -> str:
    if not isinstance(event, GroupClosed):
        return "harness"
    return f"steps/{event.steps_at.partition}" if event.steps_at else "steps"


_HANDLERS: dict[type[Event], Callable[[Run, Event], list[Event]]] = {
    JobStarted: _start_job,
    GroupClosed: _close_group,
    SubmissionReceived: _take_submission,
}
