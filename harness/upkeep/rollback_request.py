"""The request for a rollback, and the versions of a model group that one may return to.

Curation plans the rollback and the learner publishes it.
"""

import asyncio

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import ReadableLog
from rollstream.harness.runs.follower import records_of, versions_of
from rollstream.harness.runs.plan import look_up
from rollstream.harness.runs.progress import JobProgress, Progress
from rollstream.harness.upkeep.named_version import Target
from rollstream.learner.progress import GroupState
from rollstream.schemas import ids
from rollstream.schemas.errors import ArtifactError, ConfigError, StoreUnavailableError
from rollstream.schemas.events import BatchPlanned, RollbackRequested, WeightsPublished
from rollstream.schemas.settings import EXTERNAL, FROZEN


async def rollback_request(
    log: ReadableLog, artifacts: ArtifactStore, target: Target, *, reason: str, time_ms: int
) -> RollbackRequested:
    """The request to write. Reads the run's records of `groups`, `batches`, `jobs` and `weights`; writes nothing.

    Raises ConfigError if the run, model group or version does not exist, the version cannot be adopted (any more), or
    another rollback is pending; TruncatedError if the run's beginning was removed.
    """
    progress = await look_up(log, target.run_id)
    where = str(target)
    group, collected = await versions_of(log, target.model_group, target.version)
    published = group.published.get(target.version)
    missing = _missing(target, group) if published is None else _gone(collected) if collected else ""
    if published is not None and not missing and not _is_open(progress, target.model_group):  # a fork may be advised
        missing = await _removed(artifacts, published, collected)
    job_id, job = _open_job(progress, target, missing or _fork(progress, target))
    assert job.submitted is not None
    base, planned = job.submitted.base_version, job.submitted.base_version + job.num_planned
    if target.version < base:
        raise ConfigError(f"{where}: job {job_id} begins with version {base}; {missing or target.fork}")
    if published is None:
        raise ConfigError(f"{where}: {missing}")
    if target.version >= planned:
        raise ConfigError(f"{where}: version {target.version} is the newest one; give an earlier version")
    await _check_pending(log, target, job_id, where)
    if removed := await _removed(artifacts, published, collected):
        raise ConfigError(f"{where}: {removed}")
    return RollbackRequested(
        run_id=target.run_id,
        time_ms=time_ms,
        job_id=job_id,
        model_group=target.model_group,
        version=target.version,
        after_version=planned,
        reason=reason,
    )


def _fork(progress: Progress, target: Target) -> str:
    """Advice on beginning a new run from a version that exists."""
    if progress.is_of_shared_model_group:
        return f"begin a new run from it with `rollstream finetune --fork {target}`"
    return target.fork


def _missing(target: Target, group: GroupState) -> str:
    """That the model group has no such version, and which it has."""
    kept = f"it has {min(group.published)} to {max(group.published)}" if group.published else "it has none yet"
    return f"{target.model_group} has no version {target.version}; {kept}"


def _gone(why: object) -> str:
    return f"its weights were removed: {why}; choose a version whose is_collected in weight_versions is false"


async def _removed(artifacts: ArtifactStore, published: WeightsPublished, collected: str) -> str:
    """The reason why the weights of a version are gone; empty if they are there. Raises StoreUnavailableError."""
    try:
        await asyncio.to_thread(artifacts.fetch, published.artifact)
    except StoreUnavailableError:
        raise
    except ArtifactError as error:
        return _gone(collected or error)
    return ""


def _is_open(progress: Progress, model_group: str) -> bool:
    """Whether a job of the group goes on."""
    own = [one for one in progress.jobs.values() if one.submitted and one.submitted.model_group == model_group]
    return progress.ended is None and any(_plans(job) for job in own)


def _plans(job: JobProgress) -> bool:
    """Whether further versions of a job may be planned: after its last seal curation answers no request."""
    return job.outcome is None and not (job.sealed is not None and job.sealed.is_last)


def _open_job(progress: Progress, target: Target, otherwise: str) -> tuple[str, JobProgress]:
    """The job that trains the model group now. Raises ConfigError if there is none; `otherwise`: its advice."""
    where = str(target)
    if progress.ended is not None:
        raise ConfigError(f"{where}: run {target.run_id} has ended ({progress.ended.cause}); {otherwise}")
    jobs = {name: job for name, job in progress.jobs.items() if job.submitted is not None}
    groups = list(dict.fromkeys(job.submitted.model_group for job in jobs.values() if job.submitted))
    own = {name: job for name, job in jobs.items() if job.submitted and job.submitted.model_group == target.model_group}
    if not own:
        raise ConfigError(
            f"{where}: run {target.run_id} trains no model group {ids.name_of(target.model_group)}; name one that "
            f"it trains: {', '.join(groups) or 'none yet'}"
        )
    for name, job in own.items():
        if job.submitted is not None and job.submitted.fine_tune is not None:
            raise ConfigError(
                f"{where}: jobs of a shared model group train it, and each begins with the newest version; {otherwise}"
            )
        if job.submitted is not None and job.submitted.settings.kind == EXTERNAL:
            raise ConfigError(
                f"{where}: another training backend trains it, which keeps its own versions; roll back there"
            )
        if job.submitted is not None and job.submitted.settings.kind == FROZEN:
            raise ConfigError(
                f"{where}: the model group is frozen and has one version only; name a model group that is trained"
            )
        if _plans(job):
            return name, job
    name, job = next(reversed(own.items()))
    state = job.outcome or "planned its last version"
    raise ConfigError(f"{where}: job {name} has {state} and no other job trains the model group now; {otherwise}")


async def _check_pending(log: ReadableLog, target: Target, job_id: str, where: str) -> None:
    """Raises ConfigError if a rollback to another version was requested that curation has not answered yet."""
    adopted_at = 0
    async for received in records_of(log, "batches", target.run_id, target.run_id):
        event = received.event
        if isinstance(event, BatchPlanned) and event.job_id == job_id and event.adopts is not None:
            adopted_at = event.yields_version
    async for received in records_of(log, "groups", target.run_id, target.run_id):
        event = received.event
        if not isinstance(event, RollbackRequested) or event.job_id != job_id or event.after_version < adopted_at:
            continue
        if event.version != target.version:
            raise ConfigError(
                f"{where}: a rollback to version {event.version} is already requested; repeat this one when "
                "`batches` shows it"
            )
