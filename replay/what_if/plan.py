"""Manifests that would have been planned: recorded groups, in recorded order, under another curriculum or with other
rewards.

Pure: events in, manifests of the new run out. Log-probabilities stay as recorded, and so do versions in what is
recorded; the plan counts in those of the new run, of which there are fewer where a batch is left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollstream.eventlog import codec
from rollstream.eventlog.log import Received
from rollstream.processors.curate import fold as curate
from rollstream.schemas import ids
from rollstream.schemas.base import Event
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.events import (
    BatchPlanned,
    EpochSealed,
    EpochStarted,
    GroupClosed,
    JobStarted,
    RollbackRequested,
    RunStarted,
    SubmissionReceived,
    TrajectoryRejected,
)
from rollstream.schemas.events.training import MemberRef, SubmittedGroup
from rollstream.schemas.settings import CurriculumSettings, JobSpec

FIXED_PLAN = ("planning", "tasks_per_epoch", "num_generations", "oversampling", "max_refills")
"""Settings that decided which rollouts exist."""
OF_REWARDS = ("rewards", "reward_weights", "evaluators")
"""Settings that decide what a recorded rollout is worth."""
OF_TASKS = ("window_versions", "explore_share")
"""Settings of a curriculum that only choose tasks."""
OF_FILTER = ("seeded_subsample", "groups_by_example", "filter_single_group")
"""Settings of how a curriculum filters, which alone do not make it one that does."""
OF_SELECTION = (*OF_TASKS, *OF_FILTER, "min_reward_diff", "steer")
"""Settings of a curriculum that do not decide which groups of an epoch it filters by their mean rewards."""
FREE_ROLLOUT = (*OF_REWARDS, "agents", "missing_score", "frozen_agents")


@dataclass(slots=True)
class Counterfactual:
    """Manifests and seals of the new run in the order in which they are to be sent, and why others are left out."""

    events: list[Event] = field(default_factory=list[Event])
    rejected: dict[str, int] = field(default_factory=dict[str, int])
    """Trajectories by cause."""

    @property
    def num_batches(self) -> int:
        """Manifests."""
        return sum(isinstance(event, BatchPlanned) for event in self.events)


@dataclass(slots=True)
class _Numbering:
    """Versions of the new run by the recorded ones: the newest one that each had planned at the same records."""

    job: JobStarted
    datasets: curate.Datasets
    recorded: curate.CurateState = field(default_factory=curate.initial)
    versions: dict[int, int] = field(default_factory=dict[int, int])

    def take(self, received: Received, planned: curate.CurateState) -> None:
        """Take in a record that `planned`, the state of the new run, has taken in too."""
        curate.evolve(self.recorded, received, self.datasets)
        old, new = (_newest_version(state, self.job) for state in (self.recorded, planned))
        if old is None or new is None:
            return
        last = max(self.versions, default=old)
        oldest = self.versions.get(last, new)
        for version in range(last, old + 1):
            self.versions[version] = max(oldest, new - (old - version))

    def group(self, event: GroupClosed) -> GroupClosed:
        """The group as if versions of the new run had sampled it."""
        members = tuple(
            member.model_copy(
                update={name: self.versions.get(value, value) for name, value in _versions_of(member).items()}
            )
            for member in event.members
        )
        return event.model_copy(update={"members": members})

    def rollback(self, event: RollbackRequested) -> RollbackRequested | None:
        """The same request to the new run; None if the recorded job had no such version."""
        if event.version not in self.versions:
            return None
        after = self.versions.get(event.after_version, event.after_version)
        return event.model_copy(update={"version": self.versions[event.version], "after_version": after})


def _newest_version(state: curate.CurateState, started: JobStarted) -> int | None:
    run = state.runs.get(started.run_id)
    job = run.jobs.get(started.job_id) if run is not None else None
    return None if job is None else job.next_version


def _versions_of(member: MemberRef) -> dict[str, int]:
    return {"min_version": member.min_version, "max_version": member.max_version}


def check(recorded: JobStarted, spec: JobSpec) -> None:
    """Raises ConfigError if the new settings would need rollouts that were never made."""
    before, now = recorded.plan, spec.plan
    for name in FIXED_PLAN:
        if getattr(before, name) != getattr(now, name):
            raise ConfigError(_fixed(name, getattr(before, name), getattr(now, name)))
    if before.planning == "submitted" and before.curriculum != now.curriculum:
        raise ConfigError(
            "finetuning.curriculum_learning cannot change in a what-if of submitted epochs: their trainer selected "
            "the trajectories before submission; use `finetune --fork` to select again"
        )
    if now.num_epochs > before.num_epochs:
        raise ConfigError(_fixed("num_epochs", before.num_epochs, now.num_epochs))
    if now.max_staleness > before.max_staleness:
        raise ConfigError(
            f"max_staleness can only be tightened in a what-if: recorded with {before.max_staleness}, "
            f"not {now.max_staleness}; set it to at most {before.max_staleness}"
        )
    _check_rewards(recorded, spec)
    for name in type(spec.rollout).model_fields:
        ours, theirs = getattr(recorded.rollout, name), getattr(spec.rollout, name)
        if name not in FREE_ROLLOUT and ours != theirs:
            raise ConfigError(_fixed(name, ours, theirs))


def filtering(recorded: JobStarted, spec: JobSpec, *, steers: bool = False) -> JobSpec:
    """The job with a changed curriculum as a filter of the recorded groups: a what-if requests no tasks to steer.

    `steers`: the file asks for `steer: true`. Raises ConfigError if that would have to choose tasks.
    """
    before, now = recorded.plan.curriculum, spec.plan.curriculum
    changed = any(
        getattr(before, name) != getattr(now, name) for name in type(now).model_fields.keys() - {*OF_SELECTION}
    )
    if not now.enabled or not now.steer or not (changed or not before.steer):
        return spec
    if steers:
        raise ConfigError(
            "finetuning.curriculum_learning.steer: a what-if requests no tasks, so a changed curriculum can only "
            "filter the recorded groups; leave steer out, or use `finetune --fork` to make new rollouts"
        )
    curriculum = now.model_copy(update={"steer": False})
    return spec._replace(plan=spec.plan.model_copy(update={"curriculum": curriculum}))


def without_task_choice(spec: JobSpec) -> JobSpec:
    """The job without the settings that only choose tasks, which a what-if does not request."""
    neutral = {name: CurriculumSettings.model_fields[name].default for name in OF_TASKS}
    curriculum = spec.plan.curriculum.model_copy(update=neutral)
    return spec._replace(plan=spec.plan.model_copy(update={"curriculum": curriculum}))


def _check_rewards(recorded: JobStarted, spec: JobSpec) -> None:
    """Raises ConfigError if the algorithm reads rewards that other settings would not change."""
    if spec.job.algorithm.needs.step_rewards and recorded.rollout.reward_weights != spec.rollout.reward_weights:
        raise ConfigError(
            "reward_weights cannot change in a what-if with algorithm.step_rewards: process: the rewards of steps "
            "were weighted when their trajectories were assembled; leave it out"
        )
    for name in OF_REWARDS if spec.job.algorithm.needs.named_rewards else ():
        if getattr(recorded.rollout, name) != getattr(spec.rollout, name):
            raise ConfigError(
                f"{name} cannot change in a what-if with algorithm {spec.job.algorithm.name}, which reads the recorded "
                "rewards by name; change algorithm.reward_weights, or train by another algorithm or advantage"
            )


def _fixed(name: str, before: Any, now: Any) -> str:
    return (
        f"{name} cannot change in a what-if: the rollouts were made with {before!r}, not {now!r}; "
        "use `finetune --fork` to make new ones"
    )


def replan(
    records: list[Received],
    recorded: JobStarted,
    spec: JobSpec,
    run_id: str,
    rewards: Mapping[str, float | None],
    datasets: curate.Datasets,
) -> Counterfactual:
    """Fold a run's records of `groups` under `spec`. `rewards`: by trajectory id, in place of the recorded ones; a
    trajectory with None is rejected as `no_score`.

    `datasets`: by the recorded run's id. Raises ConfigError if nothing is left to train.
    """
    state = curate.initial()
    made = Counterfactual()
    previous = codec.EMPTY_SHA256
    num_tasks = _num_tasks(records, recorded)
    numbering = _Numbering(recorded, datasets)
    for received in records:
        event = _replaced(received.event, recorded, spec, rewards, num_tasks, numbering)
        if event is None:
            numbering.take(received, state)
            continue
        if num_unscored := _num_members(received.event) - _num_members(event):
            made.rejected["no_score"] = made.rejected.get("no_score", 0) + num_unscored
        for output in curate.evolve(state, received.with_event(event), datasets):
            if isinstance(output, TrajectoryRejected):
                made.rejected[output.cause] = made.rejected.get(output.cause, 0) + 1
            elif isinstance(output, (BatchPlanned, EpochSealed)):
                moved = _moved(output, spec, run_id, previous)
                made.events.append(moved)
                previous = codec.content_digest(moved) if isinstance(moved, BatchPlanned) else previous
        numbering.take(received, state)
    while made.events and not isinstance(made.events[-1], EpochSealed):
        made.events.pop()  # of an epoch that never came to its end
    if not made.num_batches:
        causes = (
            ", ".join(f"{number} {cause}" for cause, number in made.rejected.items()) or "no epoch has come to its end"
        )
        raise ConfigError(
            f"nothing is left to train ({causes}); relax the curriculum or change the rewards of the what-if"
        )
    made.events[-1] = made.events[-1].model_copy(update={"is_last": True})
    return made


def _num_tasks(records: list[Received], recorded: JobStarted) -> dict[int, int]:
    """Recorded number of tasks by epoch, for a job that requested more in place of groups of equal rewards.

    A what-if has all of these from the beginning and requests no others: those were never played.
    """
    found: dict[int, int] = {}
    for event in (received.event for received in records if recorded.plan.max_refills):
        if isinstance(event, GroupClosed) and event.job_id == recorded.job_id and event.purpose != "validation":
            found[event.epoch] = max(found.get(event.epoch, recorded.plan.tasks_per_epoch), event.index + 1)
    return found


def _replaced(
    event: Event,
    recorded: JobStarted,
    spec: JobSpec,
    rewards: Mapping[str, float | None],
    num_tasks: Mapping[int, int],
    numbering: _Numbering,
) -> Event | None:
    """The event to fold in place of a recorded one; None for events of other jobs, and for the end."""
    if isinstance(event, RunStarted):
        return event
    if getattr(event, "job_id", None) != recorded.job_id:
        return None
    if isinstance(event, JobStarted):
        return event.model_copy(update={"plan": spec.plan.model_copy(update={"max_refills": 0})})
    if isinstance(event, EpochStarted):
        count = num_tasks.get(event.epoch, event.num_tasks)
        return event.model_copy(update={"num_tasks": count}) if event.epoch < spec.plan.num_epochs else None
    if isinstance(event, GroupClosed):
        return numbering.group(_rescored(event, spec, rewards)) if event.epoch < spec.plan.num_epochs else None
    if isinstance(event, RollbackRequested):
        return numbering.rollback(event)
    if isinstance(event, SubmissionReceived):
        return _resubmitted(event, rewards) if event.epoch < spec.plan.num_epochs else None
    return None


def _rescored(event: GroupClosed, spec: JobSpec, rewards: Mapping[str, float | None]) -> GroupClosed:
    """The recorded group, with the new rewards of its trajectories and without those that have none any more."""
    members = [
        (member.model_copy(update={"reward": reward}), index)
        for index, member in enumerate(event.members)
        if (reward := rewards.get(member.trajectory_id, member.reward)) is not None
    ]
    changes: dict[str, Any] = {"members": tuple(member for member, _ in members)}
    if len(members) < len(event.members):
        num_rollouts = len({member.member for member, _ in members})
        changes["is_viable"] = event.is_viable and num_rollouts >= spec.plan.minimum_of(event.size)
        if len(event.locators) == len(event.members):
            changes["locators"] = tuple(event.locators[index] for _, index in members)
    return event.model_copy(update=changes)


def _num_members(event: Event) -> int:
    return len(event.members) if isinstance(event, GroupClosed) else 0


def _resubmitted(event: SubmissionReceived, rewards: Mapping[str, float | None]) -> SubmissionReceived:
    """The recorded submission, with the new rewards of those trajectories that have some, without those rejected."""
    groups = tuple(
        group.model_copy(
            update={
                "trajectory_ids": tuple(name for name, _ in scored),
                "rewards": tuple(reward for _, reward in scored),
            }
        )
        for group, scored in ((group, _scored(group, rewards)) for group in event.groups)
    )
    return event.model_copy(update={"groups": groups})


def _scored(group: SubmittedGroup, rewards: Mapping[str, float | None]) -> list[tuple[str, float]]:
    """Trajectories of a submitted group that are not rejected, with their rewards."""
    found = [
        (name, rewards.get(name, reward)) for name, reward in zip(group.trajectory_ids, group.rewards, strict=True)
    ]
    return [(name, reward) for name, reward in found if reward is not None]


def _moved(output: BatchPlanned | EpochSealed, spec: JobSpec, run_id: str, previous: str) -> Event:
    """The same said of the new run's job."""
    changes: dict[str, Any] = {"run_id": run_id, "job_id": spec.job_id}
    if isinstance(output, BatchPlanned):
        changes |= {"batch_id": ids.batch_id(spec.job_id, output.index), "model_group": spec.model_group}
        changes["previous_sha256"] = previous
    return output.model_copy(update=changes)
