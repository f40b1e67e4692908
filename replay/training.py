"""`replay --train`: recorded manifests trained again; every step's digest must come out equal. Publishes nothing."""

from collections.abc import Callable
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import ReadableLog
from rollstream.learner.library_versions import library_versions
from rollstream.learner.model.ranks import Ranks
from rollstream.learner.progress import Manifest
from rollstream.learner.retrain import RecordedJob, Retraining, check_recorded_ranks, threads_of
from rollstream.replay.report import Report, first_field
from rollstream.replay.source import RunEvents, by_job, of_type
from rollstream.replay.weights import log_state
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.events import BatchPlanned, JobSubmitted, RunStarted, StepTrained
from rollstream.schemas.permissions import MODEL, NOTHING, Permissions


def check_libraries(started: RunStarted) -> None:
    """Raises ConfigError, naming both sides, if a library that decides bits has another version than recorded."""
    here = library_versions()
    different = [
        f"{name} {version} (here {here.get(name, 'none')})"
        for name, version in started.library_versions.items()
        if here.get(name) != version
    ]
    if different:
        raise ConfigError(
            f"run {started.run_id} was trained with {', '.join(different)}; other versions may give different bits; "
            f"install those, or give --any-libraries to see the differences"
        )


def recorded_jobs(events: RunEvents) -> list[RecordedJob]:
    """The run's jobs that trained something, in the order of the log."""
    state = log_state(events)
    trained = by_job(events.by_topic.get("weights", ()), StepTrained)
    planned: dict[str, dict[int, Manifest]] = {}
    for event, received in of_type(events.by_topic.get("batches", ()), BatchPlanned):
        manifest = Manifest(event, received.digest, received.position.offset)
        planned.setdefault(event.job_id, {})[event.index] = manifest
    jobs: list[RecordedJob] = []
    for submitted, _ in of_type(events.by_topic.get("jobs", ()), JobSubmitted):
        group = state.group(submitted.model_group)
        base = group.published.get(submitted.base_version)
        steps: dict[int, StepTrained] = {}
        for step in trained.get(submitted.job_id, ()):
            if group.counts(step):
                steps.setdefault(step.version, step)
        if base is not None and steps:
            jobs.append(RecordedJob(submitted, base, planned.get(submitted.job_id, {}), steps, group.scores))
    return jobs


async def train(
    log: ReadableLog,
    events: RunEvents,
    artifacts: ArtifactStore,
    *,
    checkpoints: Path | None = None,
    first: int | None = None,
    last: int | None = None,
    epoch: int | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
    permissions: Permissions = NOTHING,
    ranks: Ranks | None = None,
) -> Report:
    """Train versions `first` to `last` (default: all) again and compare StepTrained by StepTrained, up to a difference.

    `epoch`: of each job only the versions of this epoch. Begins at the nearest checkpoint below the first version asked
    for, or at the job's base version. Raises ConfigError if there is nothing to train, and the errors of `Retraining`.
    `permissions`: the variables that a model's path may name; the recorded
    models are those of the run that was asked for. `ranks`: the processes that train together, of which this one is the
    first and the others `retrain.take_part`; None: it is alone.
    """
    disable_progress_bar()
    report, together = Report(), ranks or Ranks()
    jobs = recorded_jobs(events)
    asked = versions_asked(events.run_id, jobs, first, last, epoch, has_ended=events.has_ended)
    for job, versions in asked:
        own = permissions._replace(allow=permissions.allow | {f"{MODEL}{job.submitted.settings.model.path}"})
        check_recorded_ranks(job, versions, first=versions[0], num=together.num)
        retraining = Retraining(job, threads=threads_of(job), permissions=own, ranks=together)
        usable = None if first is None and epoch is None else checkpoints
        version = retraining.begin(artifacts, usable, version=versions[0] - 1, until=versions[-1])
        check_recorded_ranks(job, range(version + 1, versions[0]), first=versions[0], num=together.num)
        on_progress(f"job {job.submitted.job_id}: from version {version}, to {versions[-1]}")
        missing = set(range(versions[0], versions[-1] + 1))
        async for recorded, replayed in retraining.steps(log, until=versions[-1]):
            report.count("training steps")
            missing.discard(replayed.version)
            on_progress(f"version {replayed.version} of {versions[-1]}")
            if codec.content_digest(recorded) != codec.content_digest(replayed):
                path, ours, theirs = first_field(recorded, replayed)
                what = f"version {recorded.version} ({recorded.batch_id}): {path}"
                report.differ("training", what + _excuse(job, recorded, replayed), ours, theirs)
                return report
        for version in sorted(missing):
            recorded_as = "trained" if version in job.steps else "nothing"
            report.differ("training", f"version {version}", recorded_as, "nothing: a manifest or step is missing")
        retraining.close()
    return report


def _excuse(job: RecordedJob, recorded: StepTrained, replayed: StepTrained) -> str:
    """Reason for which an unchanged version may differ; empty if none is known."""
    if not job.submitted.settings.model.deterministic:
        return " (trained with model.deterministic: false, so bits may differ)"
    if recorded.device not in ("", replayed.device):
        return f" (trained on {recorded.device}, replayed on {replayed.device}, so bits may differ)"
    return ""


def versions_asked(
    run_id: str,
    jobs: list[RecordedJob],
    first: int | None,
    last: int | None,
    epoch: int | None,
    *,
    has_ended: bool = False,
) -> list[tuple[RecordedJob, list[int]]]:
    """The versions to train of each job that has some, in order. Raises ConfigError if there are none."""
    trained = sorted(version for job in jobs for version in job.steps)
    if not trained:
        wait = "; use --verify alone" if has_ended else " yet; repeat this once it has published a version"
        raise ConfigError(f"run {run_id} has trained nothing{wait}")
    for bound in (first, last):
        if bound is not None and bound not in trained:
            raise ConfigError(f"run {run_id} has no version {bound}; give {trained[0]} to {trained[-1]}")
    of_jobs = [(job, _in_range(job, first, last, epoch)) for job in jobs]
    if not any(versions for _, versions in of_jobs):
        raise ConfigError(f"run {run_id} trained nothing in epoch {epoch}; give another --epoch")
    return [(job, versions) for job, versions in of_jobs if versions]


def _in_range(job: RecordedJob, first: int | None, last: int | None, epoch: int | None) -> list[int]:
    of_epoch = {one.planned.yields_version for one in job.manifests.values() if one.planned.epoch == epoch}
    return [
        version
        for version in sorted(job.steps)
        if (first is None or version >= first)
        and (last is None or version <= last)
        and (epoch is None or version in of_epoch)
    ]
