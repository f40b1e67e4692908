"""Items that must exist according to a run's own records: jobs, manifests, versions, tasks. Pure: events in,
differences out.

Digests reveal a record that was changed, but not one that is missing. A missing record is found through those that name
it: a manifest names its job, a job that succeeded names its last version, a version names the step that made it; tokens
and engines name the version that they were sampled or loaded with. The newest records of an open run are not named by
any other yet.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from operator import itemgetter
from typing import NamedTuple

from rollstream.eventlog import terms
from rollstream.eventlog.log import format_position
from rollstream.learner.progress import GroupState
from rollstream.learner.shared_model_group.job_queue import GROUP_KEY
from rollstream.replay.report import MISSING, Report
from rollstream.replay.source import RunEvents, by_job, of_type
from rollstream.replay.weights import log_state, model_groups, versions_used
from rollstream.schemas import ids
from rollstream.schemas.errors import TruncatedError
from rollstream.schemas.events import (
    BatchPlanned,
    EpochSealed,
    EpochStarted,
    GroupClosed,
    JobCancelled,
    JobFailed,
    JobProgressed,
    JobSkipped,
    JobStarted,
    JobSubmitted,
    JobSucceeded,
    LearnerClaimed,
    ModelSwitched,
    ReferenceScored,
    RunEnded,
    RunStarted,
    StepTrained,
    TaskRequested,
    WeightsPublished,
)

STAGE = "log"
MAX_MISSING = 10_000
"""Missing records that are noted one by one: a changed number may name any number of them."""
_Trained = StepTrained | WeightsPublished | JobProgressed
"""Event that says which version a job has trained."""


class Named(NamedTuple):
    """A record that must be there, and the record that says so."""

    topic: str
    event_id: str
    by: str


def check_whole(events: RunEvents) -> None:
    """Raise TruncatedError naming the first record of a run that is missing although others name it.

    Changed records are left to `replay --verify`.
    """
    missing = next(_missing(events), None)
    if missing is not None:
        raise gone(events, missing)


def unended(events: RunEvents) -> str:
    """A message about a run whose training is over but whose RunEnded is missing; empty if it has ended or still
    trains.

    No record distinguishes a run that is being ended, or was killed there, from one whose RunEnded was lost.
    """
    is_over = _is_over(events, ids.job_id(events.run_id, ids.TRAINING))
    if not is_over or ids.event_id("run_ended", events.run_id) in events.by_id:
        return ""
    return (
        f"run {events.run_id}: its training is over and no RunEnded is in {events.held('groups')}: it is being ended, "
        "was killed before that (`rollstream finetune --resume` ends it), or the record is gone"
    )


def gone(events: RunEvents, missing: Named) -> TruncatedError:
    """The error of a record that is gone though another one names it."""
    return TruncatedError(
        f"run {events.run_id} is incomplete: {missing.event_id}, named by {missing.by}, is missing in "
        f"{events.held(missing.topic)}; use a complete log or export of it"
    )


def compare_named(events: RunEvents, report: Report) -> None:
    """Note every record that others name and that is missing, and every digest and count that does not agree."""
    report.unended = unended(events)
    for name in dict.fromkeys(islice(_missing(events), MAX_MISSING)):
        report.differ(STAGE, f"{name.event_id} in {events.held(name.topic)}", f"named by {name.by}", MISSING)
    _compare_digests(events, report)
    _compare_ends(events, report)
    for kind in (GroupClosed, BatchPlanned):
        for event, received in of_type(events.by_topic.get(kind.TOPIC, ()), kind):
            if len(event.locators) != len(event.members):
                what = f"{event.event_id} at {format_position(received.position)}: locators"
                report.differ(STAGE, what, f"{len(event.locators)}", f"{len(event.members)} members")


def _missing(events: RunEvents) -> Iterator[Named]:
    yield from _jobs(events)
    yield from _manifests(events)
    yield from _epochs(events)
    yield from _versions(events)
    yield from _tasks(events)


def _jobs(events: RunEvents) -> Iterator[Named]:
    """Jobs that were started or planned for, and their ends in a completed run."""
    started = [job for job, _ in of_type(events.by_topic.get("groups", ()), JobStarted)]
    batches = [batch for batch, _ in of_type(events.by_topic.get("batches", ()), BatchPlanned)]
    naming = {batch.job_id: batch.event_id for batch in reversed(batches)}
    naming |= {
        job.job_id: job.event_id
        for kind in (JobProgressed, JobFailed, JobCancelled)
        for job, _ in of_type(events.by_topic.get("jobs", ()), kind)
    }
    naming |= {job.job_id: job.event_id for job in started}
    run_ended = _completed(events)
    if run_ended is not None and not _is_of_group(events):
        naming.setdefault(ids.job_id(events.run_id, ids.TRAINING), run_ended.event_id)
    for job_id, by in naming.items():
        if ids.event_id("job_submitted", job_id) not in events.by_id:
            yield Named("jobs", ids.event_id("job_submitted", job_id), by)
        if run_ended is not None and not _is_over(events, job_id):
            yield Named("jobs", ids.event_id("job_succeeded", job_id), run_ended.event_id)
    for job, _ in of_type(events.by_topic.get("jobs", ()), JobCancelled):
        if not job.is_asked_for and ids.event_id("run_ended", events.run_id) not in events.by_id:
            yield Named("groups", ids.event_id("run_ended", events.run_id), job.event_id)


def _is_of_group(events: RunEvents) -> bool:
    """Whether a shared model group began the run: it has the jobs that were created, and none of its own."""
    started = events.by_id.get(ids.event_id("run_started", events.run_id))
    return started is not None and isinstance(started.event, RunStarted) and GROUP_KEY in started.event.config


def _manifests(events: RunEvents) -> Iterator[Named]:
    """Manifests that seals count, that steps were trained with, and up to the last version of a job that succeeded."""
    counted = {job_id: (seal.next_batch_index, seal.event_id) for job_id, seal in _newest_seals(events).items()}
    for succeeded, _ in of_type(events.by_topic.get("jobs", ()), JobSucceeded):
        job = events.by_id.get(ids.event_id("job_submitted", succeeded.job_id))
        if job is not None and isinstance(job.event, JobSubmitted):
            number = succeeded.final_version - job.event.base_version
            if number > counted.get(succeeded.job_id, (0, ""))[0]:
                counted[succeeded.job_id] = number, succeeded.event_id
    for step, _ in of_type(events.by_topic.get("weights", ()), StepTrained):
        if ids.event_id("batch_planned", step.batch_id) not in events.by_id:
            yield Named("batches", ids.event_id("batch_planned", step.batch_id), step.event_id)
    for job_id, (number, by) in counted.items():  # the newest one counts the most
        for index in range(number):
            batch_id = ids.batch_id(job_id, index)
            if ids.event_id("batch_planned", batch_id) not in events.by_id:
                yield Named("batches", ids.event_id("batch_planned", batch_id), by)


def _epochs(events: RunEvents) -> Iterator[Named]:
    """Starts of jobs and epochs, seals below an epoch that has begun, and the last seal of a job that succeeded."""
    if not events.started.is_what_if:  # the epochs of a what-if are those of its parent
        yield from _starts(events)
    newest: dict[str, EpochStarted] = {}
    for epoch, _ in of_type(events.by_topic.get("groups", ()), EpochStarted):
        if epoch.job_id not in newest or epoch.epoch > newest[epoch.job_id].epoch:
            newest[epoch.job_id] = epoch
    planners = _planners(events)
    newest |= {job_id: newest[by] for job_id, by in planners.items() if by in newest}
    for job_id, epoch in newest.items():
        for number in range(epoch.epoch):
            sealed = ids.epoch_event("epoch_sealed", job_id, number)
            if sealed not in events.by_id:
                yield Named("batches", sealed, epoch.event_id)
    over = {seal.job_id for seal, _ in of_type(events.by_topic.get("batches", ()), EpochSealed) if seal.is_last}
    batches = of_type(events.by_topic.get("batches", ()), BatchPlanned)
    last = {job_id: epoch.epoch for job_id, epoch in newest.items()}
    for event, _ in (*batches, *of_type(events.by_topic.get("weights", ()), StepTrained)):
        last[event.job_id] = max(event.epoch, last.get(event.job_id, event.epoch))
    for succeeded, _ in of_type(events.by_topic.get("jobs", ()), JobSucceeded):
        job_id = succeeded.job_id
        if job_id in last and job_id not in over:
            yield Named("batches", ids.epoch_event("epoch_sealed", job_id, last[job_id]), succeeded.event_id)


def _starts(events: RunEvents) -> Iterator[Named]:
    """JobStarted and EpochStarted of the jobs and epochs that curation planned, which begin only with them."""
    planned = [
        one for kind in (EpochSealed, BatchPlanned) for one, _ in of_type(events.by_topic.get("batches", ()), kind)
    ]
    begun = [event for event, _ in of_type(events.by_topic.get("groups", ()), EpochStarted)]
    planners = _planners(events)
    for event in (*begun, *planned):
        started = events.by_id.get(ids.event_id("job_started", event.job_id))
        if started is None:
            yield Named("groups", ids.event_id("job_started", event.job_id), event.event_id)
        is_submitted = (
            started is not None
            and isinstance(started.event, JobStarted)
            and started.event.plan.planning == "submitted"  # a submission alone may begin an epoch
        )
        begun_by = ids.epoch_event("epoch_started", planners.get(event.job_id, event.job_id), event.epoch)
        if not is_submitted and begun_by not in events.by_id:
            yield Named("groups", begun_by, event.event_id)


def _planners(events: RunEvents) -> dict[str, str]:
    """Id of the job that begins the epochs of a job that trains on another one's tasks, by the latter's id."""
    jobs = [job for job, _ in of_type(events.by_topic.get("groups", ()), JobStarted)]
    return {job.job_id: job.plan.tasks_of for job in jobs if job.plan.tasks_of}


def _versions(events: RunEvents) -> Iterator[Named]:
    """Steps and versions of every model group, and the claims under which they were written."""
    state, used, num_sealed = log_state(events), versions_used(events), _num_sealed(events)
    kinds = (StepTrained, WeightsPublished, JobProgressed)
    trained = [by_job(events.by_topic.get(kind.TOPIC, ()), kind) for kind in kinds]
    for model_group in model_groups(events):
        yield from _claims(events, model_group)
        jobs = [job for job, _ in of_type(events.by_topic.get("jobs", ()), JobSubmitted)]
        jobs = sorted((job for job in jobs if job.model_group == model_group), key=lambda job: job.base_version)
        group, shown = state.group(model_group), sorted(used.get(model_group, {}).items())
        for number, job in enumerate(jobs):
            end = jobs[number + 1].base_version if number + 1 < len(jobs) else math.inf
            begin = bisect_left(shown, job.base_version, key=itemgetter(0))
            of_job = shown[begin : bisect_right(shown, end, key=itemgetter(0))]
            used_by_it = {version: by for version, by in of_job if group.publisher(version) in (None, job.job_id)}
            own = chain.from_iterable(of_jobs.get(job.job_id, ()) for of_jobs in trained)
            needed = _needed(events, job, group, used_by_it, own, num_sealed.get(job.job_id, 0))
            yield from _of_job(events, job, group, needed)


def _of_job(events: RunEvents, job: JobSubmitted, group: GroupState, needed: Mapping[int, str]) -> Iterator[Named]:
    """`needed`: versions that the job has trained, see `_needed`."""
    group_id, base = job.model_group, job.base_version
    if (needed or group.published) and base not in group.published:
        yield Named("weights", ids.version_event("weights_published", group_id, base), job.event_id)
    newest = max(needed, default=base)
    for version in range(base + 1, newest + 1):
        by = needed.get(version) or needed[newest]
        is_published = version in group.published
        if group.step(version, job.job_id) is None:
            yield Named("weights", ids.version_event("step_trained", group_id, version), by)
        is_last_step = (
            version == newest and ids.split_event(by)[0] == "step_trained"
        )  # its learner may have been killed here
        if not is_published and not is_last_step:
            yield Named("weights", ids.version_event("weights_published", group_id, version), by)
        progressed = ids.version_event("job_progressed", job.job_id, version)
        if progressed not in events.by_id and (version < newest or ids.split_event(by)[0] == "job_succeeded"):
            yield Named("jobs", progressed, by)


def _needed(
    events: RunEvents,
    job: JobSubmitted,
    group: GroupState,
    used: Mapping[int, str],
    own: Iterable[_Trained],
    sealed: int,
) -> dict[int, str]:
    """Versions that a job has trained, each with an event that says so; one that says more overrides the others.

    Steps and versions of void terms say nothing. `used`: versions between the job's base version and the next job's,
    each with an event that names it. `own`: events of the job. `sealed`: its manifests.
    """
    needed, published = dict[int, str](), dict[int, str]()
    for event in own:
        is_void = isinstance(event, WeightsPublished) and group.publisher(event.version) != job.job_id
        is_void = is_void or (isinstance(event, StepTrained) and group.step(event.version, job.job_id) is None)
        if event.version > job.base_version and not is_void:
            (needed if isinstance(event, StepTrained) else published)[event.version] = event.event_id
    needed |= {**used, **published}  # `used` says that the version was published, and not how far the job has come
    succeeded = events.by_id.get(ids.event_id("job_succeeded", job.job_id))
    if succeeded is not None and isinstance(succeeded.event, JobSucceeded):
        planned = max([succeeded.event.final_version, job.base_version + sealed])
        if planned > job.base_version:
            needed[planned] = succeeded.event.event_id
    return needed


def _claims(events: RunEvents, model_group: str) -> Iterator[Named]:
    claims = of_type(events.by_topic.get("weights", ()), LearnerClaimed)
    claimed = {claim.term for claim, _ in claims if claim.model_group == model_group}
    for kind in (ReferenceScored, StepTrained, WeightsPublished):
        for event, _ in of_type(events.by_topic.get("weights", ()), kind):
            if event.model_group == model_group and terms.needs_claim(event) and event.term not in claimed:
                claimed.add(event.term)
                yield Named("weights", ids.claim_event(model_group, event.term), event.event_id)


def _tasks(events: RunEvents) -> Iterator[Named]:
    """A task of every closed group; in a completed run, a closed group or a cancellation of every task."""
    dead = any(topic == "tasks" for topic, _, _ in events.dead)
    for group, _ in of_type(events.by_topic.get("groups", ()), GroupClosed):
        is_known = ids.event_id("task_requested", group.group_id) in events.by_id
        if not is_known and not (dead and group.void_cause == "undecodable"):
            yield Named("tasks", ids.event_id("task_requested", group.group_id), group.event_id)
    if _completed(events) is None:
        return
    for task, _ in of_type(events.by_topic.get("tasks", ()), TaskRequested):
        answers = (ids.event_id("group_closed", task.group_id), ids.event_id("task_cancelled", task.group_id))
        if not any(answer in events.by_id for answer in answers):
            yield Named("groups", ids.event_id("group_closed", task.group_id), task.event_id)


def _compare_digests(events: RunEvents, report: Report) -> None:
    """Hold what names another record by its digest against that record; what was recorded without one names nothing."""
    for job, _ in of_type(events.by_topic.get("jobs", ()), JobSubmitted):
        _compare_digest(events, report, job.event_id, ids.event_id("run_started", events.run_id), job.run_sha256)
    for started, _ in of_type(events.by_topic.get("groups", ()), JobStarted):
        _compare_digest(
            events, report, started.event_id, ids.event_id("job_submitted", started.job_id), started.job_sha256
        )
    for step, _ in of_type(events.by_topic.get("weights", ()), StepTrained):
        _compare_digest(
            events, report, step.event_id, ids.event_id("batch_planned", step.batch_id), step.manifest_sha256
        )
        planned = events.by_id.get(ids.event_id("batch_planned", step.batch_id))
        if planned is None or not isinstance(planned.event, BatchPlanned):
            continue
        for name in ("adopts", "num_adopted"):
            ours, theirs = getattr(step, name), getattr(planned.event, name)
            if ours != theirs:
                report.differ(STAGE, f"{step.event_id}: {name}", str(ours), str(theirs))


def _compare_digest(events: RunEvents, report: Report, by: str, event_id: str, sha256: str) -> None:
    found = events.by_id.get(event_id)
    if sha256 and found is not None and found.digest != sha256:
        report.differ(STAGE, f"{event_id}, named by {by}", sha256, found.digest)


def _compare_ends(events: RunEvents, report: Report) -> None:
    """Hold the last version that a job names against its manifests, and the one that its group took against the job."""
    num_sealed = _num_sealed(events)
    for succeeded, _ in of_type(events.by_topic.get("jobs", ()), JobSucceeded):
        job = events.by_id.get(ids.event_id("job_submitted", succeeded.job_id))
        if job is None or not isinstance(job.event, JobSubmitted):
            continue
        planned = job.event.base_version + num_sealed.get(succeeded.job_id, 0)
        if planned != succeeded.final_version:
            report.differ(STAGE, f"{succeeded.event_id}: final_version", str(succeeded.final_version), str(planned))
    for switched, _ in of_type(events.by_topic.get("jobs", ()), ModelSwitched):
        yielded = _yielded(events, switched.job_id)
        if switched.version != yielded:
            report.differ(STAGE, f"{switched.event_id}: version", str(switched.version), str(yielded))


def _yielded(events: RunEvents, job_id: str) -> int | None:
    """The version that a job ended with, None if it did not end well."""
    for found in map(events.by_id.get, (ids.event_id("job_succeeded", job_id), ids.event_id("job_skipped", job_id))):
        match found and found.event:
            case JobSucceeded(final_version=version) | JobSkipped(version=version):
                return version
    return None


def _num_sealed(events: RunEvents) -> dict[str, int]:
    """Manifests of each job, as its newest seal counts them."""
    return {job_id: seal.next_batch_index for job_id, seal in _newest_seals(events).items()}


def _newest_seals(events: RunEvents) -> dict[str, EpochSealed]:
    """The seal that counts the most manifests, by job."""
    newest: dict[str, EpochSealed] = {}
    for seal, _ in of_type(events.by_topic.get("batches", ()), EpochSealed):
        known = newest.get(seal.job_id)
        if known is None or seal.next_batch_index > known.next_batch_index:
            newest[seal.job_id] = seal
    return newest


def _completed(events: RunEvents) -> RunEnded | None:
    ended = [event for event, _ in of_type(events.by_topic.get("groups", ()), RunEnded)]
    return ended[0] if ended and ended[0].cause == "completed" else None


def _is_over(events: RunEvents, job_id: str) -> bool:
    return any(f"job_{how}:{job_id}" in events.by_id for how in ("succeeded", "failed", "cancelled"))
