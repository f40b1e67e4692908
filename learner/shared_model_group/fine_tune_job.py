"""The events of a fine-tuning job: created, started, its examples as tasks, submitted for training, cancelled. Pure.

All follow from the JobSubmitted and the examples, so whoever opens the group can send again what a crash left out. A
batch is an epoch of the job's plan: its examples are played from their records, and once their groups are closed they
are submitted, which lets curation plan one manifest.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rollstream.eventlog import codec
from rollstream.learner.shared_model_group import examples
from rollstream.learner.shared_model_group.job_lifecycle import FineTuneJob
from rollstream.learner.shared_model_group.parameters import FineTuneOptions
from rollstream.schemas import ids
from rollstream.schemas.base import Event
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.events import (
    EpochStarted,
    GroupClosed,
    JobCancelled,
    JobFailed,
    JobStarted,
    JobSubmitted,
    SubmissionReceived,
    TaskCancelled,
    TaskRequested,
)
from rollstream.schemas.events.manifest_size import ATTEMPT, most_members
from rollstream.schemas.events.recorded import INPUT, RECORDED, RecordedGroup
from rollstream.schemas.events.training import SubmittedGroup
from rollstream.schemas.events.weights import FineTune
from rollstream.schemas.settings import MAX_TIMEOUT_S, CurriculumSettings, JobSettings, PlanSettings, RolloutSettings

MAX_GROUP = 512
"""Rollouts of one group, so that its record stays far below the limit."""


def data_sha256(groups: Sequence[RecordedGroup]) -> str:
    """Digest of the examples in their order."""
    return codec.canonical_digest([group.model_dump(mode="json", exclude_defaults=True) for group in groups])


def config_sha256(settings: JobSettings, options: FineTuneOptions) -> str:
    """Digest of a job's training settings, without its duration."""
    content = settings.model_copy(update={"num_versions": 1}).model_dump(mode="json")
    return codec.canonical_digest([content, options.batch_size, options.num_epochs, options.max_staleness])


def job_id_of(model_group: str, settings: JobSettings, fine_tune: FineTune) -> str:
    """Id derived from data, configuration and parent version: the same job created twice is one job."""
    content: Any = [fine_tune.data_sha256, fine_tune.config_sha256, fine_tune.parent_version, fine_tune.num_batches]
    digest = codec.canonical_digest(content)
    return ids.fine_tune_job_id(model_group, settings.kind, digest, fine_tune.attempt)


def attempts_of(submitted: JobSubmitted, jobs: Iterable[FineTuneJob]) -> dict[int, FineTuneJob]:
    """All attempts at a job by number, whichever of them `submitted` is. `jobs`: those of its group."""
    first, found = _first_id(submitted), dict[int, FineTuneJob]()
    for job in jobs:
        one = job.submitted
        if one is not None and one.fine_tune is not None and _first_id(one) == first:
            found[one.fine_tune.attempt] = job
    return found


def next_batch(submitted: JobSubmitted, attempts: Iterable[FineTuneJob]) -> int:
    """The first batch that no attempt at a job has trained, or the last one if all are.

    A version may come after the cancellation of its job, and so after the next attempt has been submitted. That attempt
    fails, and the one after it must know the version.
    """
    reached = 0
    for job in attempts:
        if job.submitted is not None:
            first_batch = fine_tune_of(job.submitted).first_batch
            reached = max(reached, first_batch + max(0, job.version - job.submitted.base_version))
    return min(reached, fine_tune_of(submitted).num_batches - 1)


def num_batches(num_examples: int, batch_size: int, num_epochs: int) -> int:
    """Batches of all passes over the examples."""
    return num_epochs * -(-num_examples // batch_size)


def started_of(submitted: JobSubmitted, *, retokenises: bool) -> JobStarted:
    """The job's JobStarted: its batches are planned from submissions, in their order.

    `retokenises`: some examples are text only.
    """
    fine_tune = fine_tune_of(submitted)
    needs_logprobs = submitted.settings.algorithm.needs.behaviour
    num_remaining = submitted.settings.num_versions
    rollout = RolloutSettings(
        environment=RECORDED,
        environment_config={"retokenise": True} if retokenises else {},
        agents=dict.fromkeys(fine_tune.agents, submitted.model_group),
        policy="model" if needs_logprobs else "demonstration",
        group_timeout_s=MAX_TIMEOUT_S,
        missing_score="unneeded",
    )
    plan = PlanSettings(
        planning="submitted",
        num_epochs=num_remaining,
        num_generations=1,
        min_generations=1,
        max_staleness=fine_tune.max_staleness if needs_logprobs else num_remaining,
        drop_zero_variance=False,
        needs_logprobs=needs_logprobs,
        curriculum=CurriculumSettings(enabled=False, steer=False, min_reward_diff=0.0),
        knows_single_group=True,
    )
    return JobStarted(
        run_id=submitted.run_id,
        time_ms=submitted.time_ms,
        job_id=submitted.job_id,
        model_group=submitted.model_group,
        base_version=submitted.base_version,
        plan=plan,
        rollout=rollout,
        job_sha256=codec.content_digest(submitted),
    )


def batch_range(fine_tune: FineTune, epoch: int) -> range:
    """Places of the examples of a batch; `epoch` counts the batches of this attempt."""
    per_pass = -(-fine_tune.num_examples // fine_tune.batch_size)
    first = (fine_tune.first_batch + epoch) % per_pass * fine_tune.batch_size
    return range(first, min(first + fine_tune.batch_size, fine_tune.num_examples))


def group_ids(submitted: JobSubmitted, epoch: int) -> list[str]:
    """Ids of the groups of a batch, in order."""
    name = ids.name_of(submitted.job_id)
    count = len(batch_range(fine_tune_of(submitted), epoch))
    return [ids.group_id(submitted.run_id, name, epoch, index) for index in range(count)]


def tasks_of(
    submitted: JobSubmitted, started: JobStarted, groups: Sequence[RecordedGroup], epoch: int, *, run_seed: int
) -> list[Event]:
    """The tasks of a batch, then its EpochStarted, which says that they are all there."""
    fine_tune = fine_tune_of(submitted)
    chosen = [groups[position] for position in batch_range(fine_tune, epoch)]
    needs_logprobs = submitted.settings.algorithm.needs.behaviour
    found: list[Event] = [
        TaskRequested.of_run(
            run_seed,
            run_id=submitted.run_id,
            time_ms=submitted.time_ms,
            group_id=group_id,
            example_id=group.example_id,
            job_id=submitted.job_id,
            epoch=epoch,
            index=index,
            inputs=_inputs(group),
            num_rollouts=len(group.members),
            minimum=1,
            min_version=fine_tune.parent_version if needs_logprobs else 0,
            settings=started.rollout,
        )
        for index, (group_id, group) in enumerate(zip(group_ids(submitted, epoch), chosen, strict=True))
    ]
    begun = EpochStarted(run_id=submitted.run_id, time_ms=submitted.time_ms, job_id=submitted.job_id, epoch=epoch)
    return [*found, begun]


def check_groups(groups: Sequence[RecordedGroup]) -> None:
    """Raises ConfigError for no examples, and for a group of too many rollouts."""
    if not groups:
        raise ConfigError("the dataset is empty: no rollout has a message of an agent of the group; give examples")
    for group in groups:
        if len(group.members) > MAX_GROUP:
            raise ConfigError(
                f"example {group.example_id} has {len(group.members)} rollouts, more than {MAX_GROUP}; split the group"
            )


def check_new(
    groups: Sequence[RecordedGroup],
    model_group: str,
    agents: Iterable[str],
    settings: JobSettings,
    options: FineTuneOptions,
) -> None:
    """Raises ConfigError for a batch of more rollouts than its manifest can name, for one that will be stale, and for
    rollouts of RL without a reward.

    For a job that the log lacks: one that it has, from an earlier release, is not refused when it is created again.
    """
    if settings.algorithm.needs.behaviour:
        examples.check_rewards(groups)
    size, last_batch = options.batch_size, settings.num_versions - 1
    largest = max(sum(len(one.members) for one in groups[n : n + size]) for n in range(0, len(groups), size))
    most = most_members(
        ids.fine_tune_job_id(model_group, settings.kind, "0" * 64, ATTEMPT),
        agents,
        epoch=last_batch,
        index=size,
        member=MAX_GROUP,
        max_staleness=options.max_staleness,
    )
    if largest > most:
        raise ConfigError(
            f"a batch of {largest} rollouts exceeds the {most} that fit into its manifest; lower options.batch_size"
        )
    if settings.algorithm.needs.behaviour and last_batch > options.max_staleness:
        raise ConfigError(
            f"the last of {last_batch + 1} batches would have a staleness of {last_batch}, more than "
            f"options.max_staleness ({options.max_staleness}); raise it or options.batch_size, or lower num_epochs"
        )


def due_submissions(job: FineTuneJob) -> Iterator[Event]:
    """Submissions of batches whose groups are all closed, in order, as far as curation has not planned them.

    A batch of which no example could be read fails the job.
    """
    submitted = job.submitted
    if submitted is None or submitted.fine_tune is None or job.is_over:
        return
    for epoch in range(submitted.settings.num_versions):
        if epoch in job.sealed:
            continue
        known = job.closed.of(epoch)
        closed = [known.get(group_id) for group_id in group_ids(submitted, epoch)]
        found = [group for group in closed if group is not None]
        if len(found) < len(closed):
            return
        usable = [group for group in found if not _refusal(submitted, epoch, group)]
        if not usable:
            reason = _refusal(submitted, epoch, found[0])
            error = f"none of the {len(found)} examples of batch {epoch} can be trained on; the first one {reason}"
            yield _failed(submitted, error)
            yield from _released(job, submitted, error, submitted.time_ms)
            return
        yield _submission(submitted, epoch, usable, time_ms=max(group.time_ms for group in found))


def cancel_events(job: FineTuneJob, cause: str, time_ms: int) -> list[Event]:
    """Events that cancel a job: the learner leaves it, its open tasks end, and curation drops its examples."""
    submitted = job.submitted
    if submitted is None or job.is_over:
        return []
    cancelled = JobCancelled(
        run_id=submitted.run_id,
        time_ms=time_ms,
        job_id=job.job_id,
        model_group=submitted.model_group,
        cause=cause,
    )
    return [cancelled, *_released(job, submitted, cause, time_ms)]


def fine_tune_of(submitted: JobSubmitted) -> FineTune:
    """Description of a job of a shared model group. Raises ConfigError for any other job."""
    if submitted.fine_tune is None:
        raise ConfigError(f"job {submitted.job_id} was not created by a shared model group; name one that was")
    return submitted.fine_tune


def _first_id(submitted: JobSubmitted) -> str:
    """Id of the first attempt at a job."""
    first = fine_tune_of(submitted).model_copy(update={"attempt": 0})
    return job_id_of(submitted.model_group, submitted.settings, first)


def _released(job: FineTuneJob, submitted: JobSubmitted, cause: str, time_ms: int) -> Iterator[Event]:
    """Ends the open tasks of a job, and has curation let go of its examples."""
    if submitted.fine_tune is None:
        return
    for epoch in range(submitted.settings.num_versions):
        if epoch in job.sealed:
            continue
        closed = job.closed.of(epoch)
        for group_id in group_ids(submitted, epoch) if epoch in job.epochs_started else ():
            if group_id not in closed:
                yield TaskCancelled(run_id=submitted.run_id, time_ms=time_ms, group_id=group_id, cause=cause)
        if job.is_started:
            yield _submission(submitted, epoch, (), time_ms=time_ms)


def _inputs(group: RecordedGroup) -> dict[str, Any]:
    members = [member.model_dump(mode="json", exclude_defaults=True) for member in group.members]
    return {**group.inputs, INPUT: members}


def _submission(
    submitted: JobSubmitted, epoch: int, groups: Sequence[GroupClosed], *, time_ms: int
) -> SubmissionReceived:
    chosen = tuple(
        SubmittedGroup(
            group_id=group.group_id,
            trajectory_ids=tuple(member.trajectory_id for member in group.members),
            rewards=tuple(member.reward for member in group.members),
        )
        for group in groups
    )
    digest = codec.canonical_digest([submitted.job_id, epoch, [one.model_dump(mode="json") for one in chosen]])
    return SubmissionReceived(
        run_id=submitted.run_id,
        time_ms=time_ms,
        job_id=submitted.job_id,
        submission_id=ids.submission_id(submitted.job_id, epoch, digest),
        epoch=epoch,
        groups=chosen,
        not_offered=(),
    )


def _failed(submitted: JobSubmitted, error: str) -> JobFailed:
    return JobFailed(
        run_id=submitted.run_id,
        time_ms=submitted.time_ms,
        job_id=submitted.job_id,
        model_group=submitted.model_group,
        error=error,
    )


def _refusal(submitted: JobSubmitted, epoch: int, group: GroupClosed) -> str:
    """The reason why nothing of a group can be trained on; empty if something can."""
    if not group.is_viable or not group.members:
        causes = (attempt.cause for attempt in group.attempts if attempt.cause)
        return f"failed: {next(causes, group.void_cause or group.reason)}"
    if not any(member.num_completion_tokens for member in group.members):
        return "has no message of text to train on"
    if not submitted.settings.algorithm.needs.behaviour:
        return ""
    if not any(member.has_logprobs for member in group.members):
        return "has no log-probabilities, which RL needs"
    trains_at, bound = submitted.base_version + epoch, fine_tune_of(submitted).max_staleness
    sampled_at = min(member.min_version for member in group.members if member.num_completion_tokens)
    if trains_at - sampled_at > bound:
        return f"was sampled at version {sampled_at} and would train version {trains_at}; max_staleness is {bound}"
    return ""
