"""The curate fold over one partition of `groups`: run and job events and closed groups in, events to send out.

`evolve` takes every record of the partition in order and returns task requests, manifests, rejections, epoch seals and
ends of abandoned runs in sending order. No Kafka, clock, randomness or disk: the result depends only on the sequence of
records, so folding again gives the same bytes.
"""

from collections.abc import Callable, Mapping
from typing import cast

from rollstream.eventlog.log import Received
from rollstream.processors.curate import admission, curriculum, gate, ledger, planning
from rollstream.processors.curate.known_groups import KnownGroups, Task
from rollstream.processors.curate.state import Clock, CurateState, EndedRun, Epoch, Idle, Job, Run
from rollstream.processors.curate.tasks import Dataset, request_refill, request_tasks
from rollstream.schemas.base import MAX_TIME_MS, Event
from rollstream.schemas.errors import ArtifactError
from rollstream.schemas.events import (
    EpochStarted,
    GroupClosed,
    JobStarted,
    RollbackRequested,
    RunContinued,
    RunEnded,
    RunStarted,
    SubmissionReceived,
    TaskCancelled,
)
from rollstream.schemas.events.training import StepsRange

Datasets = Mapping[str, Dataset]
"""Datasets by run id. A run's must be there when its EpochStarted is folded."""

MIN_IDLE_STEPS = 4
"""Minimum number of records of one partition before a run counts as idle: a single clock jump is not enough."""

ENDED_WAIT_S = 3600.0
"""Seconds, in event time of other runs, for the groups of an ended run to close; producers fail the rest at once."""

__all__ = ["CurateState", "Datasets", "evolve", "initial"]


def initial() -> CurateState:
    """The state before the first record of a partition."""
    return CurateState()


def evolve(state: CurateState, received: Received, datasets: Datasets) -> list[Event]:
    """Fold one record of `groups` into `state`, which is changed in place; returns the events to send, in order.

    A repeated event id changes nothing; a validation that closes again is rejected again, with the same ids. Records of
    unknown runs are ignored, so the fold may start at `CurateState.low_water` instead of the partition's start. Raises
    ArtifactError if an epoch starts in a run whose dataset is not in `datasets`.
    """
    event = received.event
    outputs = _fold(state, received, datasets)
    steps_at = event.steps_at if isinstance(event, GroupClosed) else None
    return outputs + pass_time(state, event.run_id, event.time_ms, steps_at)


def _fold(state: CurateState, received: Received, datasets: Datasets) -> list[Event]:
    event = received.event
    if isinstance(event, RunStarted):
        if not (event.run_id in state.runs or event.run_id in state.ended or event.run_id in state.past):
            state.runs[event.run_id] = Run(event, received.position.offset)
        return []
    run = state.runs.get(event.run_id)
    if run is None:
        return _after_the_end(state, event)
    if isinstance(event, RunContinued):
        return []
    if isinstance(event, RunEnded):
        return _end_run(state, run, event)
    if isinstance(event, EpochStarted):
        if state.is_refused(event.run_id, received.position.offset):
            return []
        return _start_epoch(run, event, datasets)
    if isinstance(event, GroupClosed):
        is_refused = state.is_refused(event.run_id, received.position.offset)
        return _close_group(run, event, {} if is_refused else datasets)
    handler = _HANDLERS.get(type(event))
    return handler(run, event) if handler else []


def _after_the_end(state: CurateState, event: Event) -> list[Event]:
    """Groups that close after the end of their run go to the ledger; other events are ignored."""
    ended = state.ended.get(event.run_id)
    if isinstance(event, RunEnded) and ended is None:  # the run's beginning is no longer retained
        state.remember(event.run_id)
    if isinstance(event, EpochStarted) and ended is not None and ended.accepts_external_groups:
        _announce(ended.groups, event)
    if not isinstance(event, GroupClosed):
        return []
    if event.purpose == "validation":
        return ledger.reject(event, "validation", event.time_ms)
    if ended is None or ended.groups.has_closed(event.group_id):
        return []
    if ended.groups.close(event.group_id) is None and not ended.accepts_external_groups:
        return []
    if not (ended.groups.open or ended.accepts_external_groups):
        state.remember(event.run_id)
    return ledger.reject(event, "run_ended", event.time_ms)


def _start_job(run: Run, event: Event) -> list[Event]:
    started = cast(JobStarted, event)
    if started.job_id not in run.jobs:
        run.jobs[started.job_id] = Job(started, curriculum.begin(started.plan.curriculum))
    return []


def _start_epoch(run: Run, event: EpochStarted, datasets: Datasets) -> list[Event]:
    job = run.jobs.get(event.job_id)
    if job is None or event.epoch in job.sealed or run.groups.is_announced(event.job_id, event.epoch):
        return []
    if job.is_submitted:  # the harness requests the tasks itself; the epoch ends with its submission
        job.epochs.setdefault(event.epoch, Epoch(event.epoch))
        _announce(run.groups, event)
        return []
    if event.run_id not in datasets:
        raise ArtifactError(f"run {event.run_id}: its dataset {run.started.dataset.uri} is not loaded")
    takers = (*run.beside(job), job)
    for taker in takers:
        taker.epochs.setdefault(event.epoch, Epoch(event.epoch))
    outputs = [judged for taker in takers for judged in gate.judge(run, taker, event.epoch, event.time_ms)]
    requests = request_tasks(run, job, event, datasets[event.run_id])
    num_open = run.groups.announce(event.job_id, event.epoch, len(requests), may_grow=_can_grow(run, job))
    outputs += requests
    for taker in takers:
        epoch = taker.epochs[event.epoch]
        epoch.num_open += num_open
        epoch.num_tasks = len(requests)
        outputs += planning.advance(run, taker, epoch, event.time_ms)
    return outputs


def _announce(groups: KnownGroups, event: EpochStarted) -> None:
    if not groups.is_announced(event.job_id, event.epoch):
        groups.announce(event.job_id, event.epoch, event.num_tasks)


def needs_dataset(state: CurateState, received: Received) -> bool:
    """Whether the answer to a record may ask for tasks."""
    event = received.event
    run = state.runs.get(event.run_id)
    if run is None or state.is_refused(event.run_id, received.position.offset):
        return False
    if isinstance(event, GroupClosed):
        job = run.jobs.get(event.job_id)
        return job is not None and _can_grow(run, job)
    return isinstance(event, EpochStarted)


def _can_grow(run: Run, job: Job) -> bool:
    """Whether epochs of a job may be refilled: those of which one model group alone is trained."""
    return job.max_refills > 0 and not run.beside(job)


def _refill(run: Run, job: Job, epoch: Epoch, closed: GroupClosed, datasets: Datasets) -> list[Event]:
    """Further tasks for an epoch whose last group has closed; none if the run was refused."""
    if epoch.num_open or not _can_grow(run, job) or closed.run_id not in datasets:
        return []
    requests = request_refill(run, job, epoch, closed, datasets[closed.run_id])
    epoch.num_tasks += len(requests)
    epoch.num_open += run.groups.announce(job.started.job_id, epoch.number, epoch.num_tasks, may_grow=True)
    if not epoch.num_open:
        most = job.started.plan.tasks_per_epoch * (1 + job.max_refills)
        run.groups.finish(job.started.job_id, epoch.number, most)
    return [*requests]


def _close_group(run: Run, closed: GroupClosed, datasets: Datasets) -> list[Event]:
    if closed.purpose == "validation":
        job = run.jobs.get(closed.job_id)
        for taker in () if job is None else (*run.beside(job), job):
            gate.take(run, taker, closed)
        return ledger.reject(closed, "validation", closed.time_ms)
    if run.groups.has_closed(closed.group_id):
        return []
    task = run.groups.close(closed.group_id)
    job = run.jobs.get(task.job_id if task else closed.job_id)
    epoch = _epoch_of(job, task, closed) if job else None
    if job is None or epoch is None:
        return ledger.reject(closed, "late", closed.time_ms)
    if job.is_submitted:
        return admission.admit(job, epoch, closed)
    takers = [*run.beside(job), job]
    outputs = admission.reject_frozen(takers, closed)
    for taker in takers:
        own = taker.epochs.get(epoch.number)
        offered = admission.offered(taker, closed)
        if own is None:
            outputs += ledger.reject(offered, "late", closed.time_ms)
            continue
        own.num_open -= task is not None
        outputs += admission.admit(taker, own, offered)
        outputs += _refill(run, taker, own, closed, datasets)
        outputs += planning.advance(run, taker, own, closed.time_ms)
    return outputs


def _epoch_of(job: Job, task: Task | None, closed: GroupClosed) -> Epoch | None:
    """The open epoch of a group. Groups that curation did not request have one only in submitted jobs."""
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


def _roll_back(run: Run, event: Event) -> list[Event]:
    request = cast(RollbackRequested, event)
    job = run.jobs.get(request.job_id)
    is_of_job = job is not None and request.model_group == job.started.model_group
    if job is None or not is_of_job or request.after_version < job.last_adoption:
        return []
    return planning.adopt(run, job, request.version, request.time_ms)


def _end_run(state: CurateState, run: Run, event: RunEnded) -> list[Event]:
    """Reject waiting groups, cancel open tasks and keep only the groups of the run that are still open."""
    outputs: list[Event] = []
    for job in run.jobs.values():
        gathered = [group for epoch in job.epochs.values() for group in epoch.gathered]
        for group in [*job.ready, *gathered]:
            outputs += ledger.reject(group, "run_ended", event.time_ms)
    outputs += [
        TaskCancelled(run_id=event.run_id, time_ms=event.time_ms, group_id=group_id, cause=f"run {event.cause}")
        for group_id in run.groups.open
    ]
    del state.runs[event.run_id]
    accepts_external_groups = any(job.is_submitted for job in run.jobs.values())
    if run.groups.open or accepts_external_groups:
        state.ended[event.run_id] = EndedRun(run.first_offset, run.groups, accepts_external_groups)
    else:
        state.remember(event.run_id)
    return outputs


def refuse(state: CurateState, received: Received, message: str) -> RunEnded:
    """End a run whose dataset cannot be read, or of which an answer is too large to send; this EpochStarted or refill
    and later ones get no tasks."""
    event = received.event
    offset = state.refused[event.run_id] = received.position.offset
    pass_time(state, event.run_id, event.time_ms, None)
    return RunEnded(run_id=event.run_id, time_ms=event.time_ms, cause="failed", message=message, refused_at=offset)


def pass_time(state: CurateState, of_run: str, time_ms: int, steps_at: StepsRange | None) -> list[Event]:
    """Apply the time of a record of `of_run` (with `steps_at` if it is a closed group) to other runs.

    Returns RunEnded for runs without a sign of life for longer than their idle time-out, measured by the closed groups
    of other runs. Only the clocks of steps partitions count: they follow their owners' monotonic clocks, so event time
    between two records of one partition cannot exceed real time. Times of all other events are wall-clock times or
    copied from another partition. The end is sent, not applied: it takes effect when it is read back as a record. An
    ended run whose last groups do not close within ENDED_WAIT_S is dropped.
    """
    own = state.runs.get(of_run) or state.ended.get(of_run)
    if own is not None:
        own.idle.clocks.clear()
    if steps_at is None:
        return []
    outputs: list[Event] = []
    for run_id, run in state.runs.items():
        if run is own or run.idle.is_abandoned:
            continue
        if _is_idle(run.idle, time_ms, steps_at.partition, run.started.idle_timeout_s):
            run.idle.is_abandoned = True
            message = f"no sign of life in {run.started.idle_timeout_s:g} s of other runs' time"
            outputs.append(RunEnded(run_id=run_id, time_ms=time_ms, cause="abandoned", message=message))
    for run_id, ended in list(state.ended.items()):
        if ended is not own and _is_idle(ended.idle, time_ms, steps_at.partition, ENDED_WAIT_S):
            state.remember(run_id)
    return outputs


def _is_idle(idle: Idle, time_ms: int, partition: int, timeout_s: float) -> bool:
    """Whether the event time of one partition since a run's last sign of life exceeds its time-out.

    A replaced owner may write records ahead of its successor's clock: a jump back counts as zero, a jump forward as at
    most a part of the time-out.
    """
    timeout_ms = int(min(timeout_s * 1000, MAX_TIME_MS))
    clock = idle.clocks.setdefault(partition, Clock(time_ms))
    step_ms = max(0, time_ms - clock.newest_ms)
    clock.newest_ms += step_ms
    clock.total_ms += min(step_ms, timeout_ms // MIN_IDLE_STEPS)
    return clock.total_ms > timeout_ms


_HANDLERS: dict[type[Event], Callable[[Run, Event], list[Event]]] = {
    JobStarted: _start_job,
    SubmissionReceived: _take_submission,
    RollbackRequested: _roll_back,
}
