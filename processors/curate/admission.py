"""Admits closed groups: stores their rewards, then keeps them for a manifest or rejects them."""

from collections.abc import Sequence

from rollstream.processors.curate import ledger
from rollstream.processors.curate.candidates import (
    Candidate,
    Entry,
    bounds_by_agent,
    candidate,
    is_trainable,
    rollout_rewards,
)
from rollstream.processors.curate.state import Epoch, Job
from rollstream.schemas.base import Event
from rollstream.schemas.events import GroupClosed
from rollstream.schemas.revisions import JUDGES_AGENTS_SINCE


def offered(job: Job, event: GroupClosed) -> GroupClosed:
    """A closed group as a job is offered it: with the trajectories of the agents that speak through its model group."""
    agents = job.agents
    if agents is None:
        return event
    return _only(event, [index for index, member in enumerate(event.members) if member.agent in agents], job)


def reject_frozen(jobs: Sequence[Job], event: GroupClosed) -> list[Event]:
    """Reject the trajectories of agents whose model group none of the jobs trains. The last job asked for the group."""
    agents = [job.agents for job in jobs]
    if None in agents:
        return []
    trained = frozenset[str]().union(*(one for one in agents if one is not None))
    indices = [index for index, member in enumerate(event.members) if member.agent not in trained]
    return ledger.reject(_only(event, indices, jobs[-1]), "frozen", event.time_ms) if indices else []


def _only(event: GroupClosed, indices: Sequence[int], job: Job) -> GroupClosed:
    has_locators = len(event.locators) == len(event.members)
    changes: dict[str, object] = {
        "job_id": job.started.job_id,
        "members": tuple(event.members[index] for index in indices),
        "locators": tuple(event.locators[index] for index in indices) if has_locators else (),
    }
    return event.model_copy(update=changes)


def admit(job: Job, epoch: Epoch, event: GroupClosed) -> list[Event]:
    """Count a closed group, store its rewards, reject untrainable trajectories and keep the rest for a manifest."""
    epoch.num_groups += 1
    group = candidate(event)
    if not event.is_viable or not event.members:
        return ledger.reject(group, "not_viable", event.time_ms)
    epoch.means.append(group.mean_reward)
    epoch.zero_variance_groups += group.reward_range == 0
    if group.is_external:
        return _keep_waiting(job, epoch, group, event)
    if not group.is_demonstration:
        newest = max(member.max_version for member in event.members)
        entry = Entry(newest, rollout_rewards(event.members))
        if job.started.plan.revision >= JUDGES_AGENTS_SINCE:
            entry = entry._replace(bounds=bounds_by_agent((one.agent, one.reward) for one in event.members))
        job.window.add(event.example_id, event.group_id, entry)
    needs_logprobs = job.started.plan.needs_logprobs and not group.is_demonstration
    indices = [
        index for index, member in enumerate(group.members) if is_trainable(member, needs_logprobs=needs_logprobs)
    ]
    rejected = _reject_untrainable(group, set(indices), event.time_ms)
    return rejected + _keep_waiting(job, epoch, group.only(indices), event)


def _reject_untrainable(group: Candidate, trainable: set[int], time_ms: int) -> list[Event]:
    """Rejections of trajectories without sampled tokens, or without their log-probabilities."""
    untrainable = [index for index in range(len(group.members)) if index not in trainable]
    silent = [index for index in untrainable if not group.members[index].num_completion_tokens]
    unknown = [index for index in untrainable if index not in silent]
    return [
        *ledger.reject(group.only(silent), "no_token_ids", time_ms),
        *ledger.reject(group.only(unknown), "no_logprobs", time_ms),
    ]


def _keep_waiting(job: Job, epoch: Epoch, group: Candidate, closed: GroupClosed) -> list[Event]:
    plan, time_ms = job.started.plan, closed.time_ms
    if len({member.member for member in group.members}) < plan.minimum_of(closed.size):
        return ledger.reject(group, "not_viable", time_ms)
    if job.is_submitted or job.filters_epochs:
        epoch.gathered.append(group)
    elif group.is_demonstration:
        _hold(job, epoch, group)
    elif plan.drop_zero_variance and group.reward_range == 0:
        return ledger.reject(group, "zero_variance", time_ms)
    elif plan.curriculum.enabled and group.reward_range < plan.curriculum.min_reward_diff:
        return ledger.reject(group, "curriculum", time_ms)
    else:
        _hold(job, epoch, group)
    return []


def _hold(job: Job, epoch: Epoch, group: Candidate) -> None:
    (epoch.gathered if job.is_single_batch else job.ready).append(group)
