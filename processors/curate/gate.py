"""The evaluation gate: judges the version that a validation played, and replaces one that fails.

The groups of a validation close before the epoch that it precedes begins; that beginning is when it is judged.
"""

from collections.abc import Iterable

from rollstream.processors.curate import admission, curriculum, planning
from rollstream.processors.curate.candidates import mean
from rollstream.processors.curate.state import Job, PlayedGroup, PlayedValidation, Run
from rollstream.schemas import ids
from rollstream.schemas.base import Event
from rollstream.schemas.events import GroupClosed, JobStarted, VersionJudged
from rollstream.schemas.revisions import JUDGES_ALL_SINCE, JUDGES_NEWEST_SINCE
from rollstream.schemas.settings import GateSettings


def passes(gate: GateSettings, reward: float, best_reward: float | None) -> bool:
    """Whether a version with that mean reward is good; `best_reward`: None if no validation was passed yet."""
    if gate.min_reward is not None and reward < gate.min_reward:
        return False
    return gate.max_drop is None or best_reward is None or reward >= best_reward - gate.max_drop


def final_version(started: JobStarted, closed: Iterable[GroupClosed], newest: int, judged: VersionJudged | None) -> int:
    """The version to keep at the end of a job: `newest`, or the last good one if the last validation failed it.

    `closed`: the groups of that validation; `judged`: the job's last judgement.
    """
    job, gate = Job(started, curriculum.begin(started.plan.curriculum)), started.plan.gate
    for event in closed:
        _take(job, event)
    found = _reward(_newest(job), newest)
    if gate is None or found is None or judged is None or judged.good_version is None:
        return newest
    return newest if passes(gate, found, judged.best_reward) else judged.good_version


def take(run: Run, job: Job, event: GroupClosed) -> None:
    """Count a closed group of a validation, unless the job has no gate or its epoch has begun; repeats do not count."""
    if job.started.plan.gate is not None and not run.groups.is_announced(event.job_id, event.epoch):
        _take(job, event)


def _take(job: Job, event: GroupClosed) -> None:
    split = ids.split_index(event.group_id)
    if split is None:
        return
    validation = job.validations.get(split[0])
    if validation is None:
        if job.started.plan.revision < JUDGES_NEWEST_SINCE:
            job.validations.clear()
        validation = job.validations[split[0]] = PlayedValidation(event.epoch)
    own = admission.offered(job, event).members
    sampled = [member for member in own if member.num_completion_tokens]
    scored = own if job.started.plan.revision >= JUDGES_ALL_SINCE else sampled
    if scored and event.group_id not in validation.groups:
        versions = frozenset(version for member in sampled for version in (member.min_version, member.max_version))
        validation.groups[event.group_id] = PlayedGroup(mean([member.reward for member in scored]), versions)
        job.validations[split[0]] = job.validations.pop(split[0])


def _newest(job: Job, epoch: int | None = None) -> PlayedValidation:
    """The validation whose group closed last (before `epoch`), which the epoch waited for: that of a run which was
    killed meanwhile may still close groups when it was asked for again with other examples."""
    played = [one for one in job.validations.values() if epoch in (None, one.epoch)]
    return played[-1] if played else PlayedValidation(-1)


def judge(run: Run, job: Job, epoch: int, time_ms: int) -> list[Event]:
    """The judgement of the validation before an epoch that begins, and a manifest that adopts the last good version if
    the newest one failed.

    Nothing if no rollout of it was scored, or if it did not play the newest planned version alone, as after a rollback
    in between.
    """
    gate, validation = job.started.plan.gate, _newest(job, epoch)
    job.validations.clear()
    version = job.next_version
    reward = _reward(validation, version)
    if gate is None or reward is None:
        return []
    is_good = passes(gate, reward, job.best_reward)
    if is_good:
        job.good_version = version
        job.best_reward = reward if job.best_reward is None else max(reward, job.best_reward)
    judged = VersionJudged(
        run_id=run.started.run_id,
        time_ms=time_ms,
        job_id=job.started.job_id,
        model_group=job.started.model_group,
        epoch=epoch,
        version=version,
        reward=reward,
        num_groups=len(validation.groups),
        is_good=is_good,
        good_version=job.good_version,
        best_reward=job.best_reward,
    )
    if is_good or job.good_version is None:
        return [judged]
    adopted = planning.adopt(run, job, job.good_version, time_ms)
    if adopted:
        job.good_version = job.next_version
    return [judged, *adopted]


def _reward(validation: PlayedValidation, version: int) -> float | None:
    """Mean reward of a validation; None if no rollout of it was scored, or `version` did not play all of it."""
    played = validation.groups.values()
    if frozenset[int]().union(*(one.versions for one in played)) != {version}:
        return None
    return mean([one.reward for one in played])
