"""What becomes of a group when it closes: its rewards are stored, and it waits for a manifest or is rejected."""

from rollstream.processors import ledger
from rollstream.processors.candidates import Candidate, candidate, is_trainable, rollout_rewards
from rollstream.processors.curate_state import Epoch, Job
from rollstream.processors.window import Entry
from rollstream.schemas.base import Event
from rollstream.schemas.events import GroupClosed


def admit(job: Job, epoch: Epoch, event: GroupClosed) -> list[Event]:
    """Take in a closed group: count it, store its rewards, reject what cannot be trained on, keep the rest waiting."""
    epoch.num_groups += 1
    group = candidate(event)
    if not event.is_viable or not event.members:
        return ledger.reject(group, "not_viable", event.time_ms)
    epoch.means.append(group.mean_reward)
    epoch.zero_variance_groups += group.spread == 0
    if not group.is_demonstration:
        newest = max(member.max_version for member in event.members)
        job.window.add(event.example_id, event.group_id, Entry(newest, rollout_rewards(event.members)))
    needs_logprobs = job.started.plan.needs_logprobs and not group.is_demonstration
    places = [
        place for place, member in enumerate(group.members) if is_trainable(member, needs_logprobs=needs_logprobs)
    ]
    rejected = _reject_barren(group, set(places), event.time_ms)
    return rejected + _keep_waiting(job, epoch, group.only(places), event.time_ms)


def _reject_barren(group: Candidate, trainable: set[int], time_ms: int) -> list[Event]:
    """Rejections of what has no sampled tokens, or none whose log-probabilities are known."""
    barren = [place for place in range(len(group.members)) if place not in trainable]
    silent = [place for place in barren if not group.members[place].num_completion_tokens]
    unknown = [place for place in barren if place not in silent]
    return [
        *ledger.reject(group.only(silent), "no_token_ids", time_ms),
        *ledger.reject(group.only(unknown), "no_logprobs", time_ms),
    ]


def _keep_waiting(job: Job, epoch: Epoch, group: Candidate, time_ms: int) -> list[Event]:
    plan = job.started.plan
    if len({member.member for member in group.members}) < min(plan.min_generations, plan.num_generations):
        return ledger.reject(group, "not_viable", time_ms)
    if job.is_submitted or job.filters_epochs:
        epoch.gathered.append(group)
    elif group.is_demonstration:
        _hold(job, epoch, group)
    elif plan.drop_zero_variance and group.spread == 0:
        return ledger.reject(group, "zero_variance", time_ms)
    elif plan.curriculum.enabled and group.spread < plan.curriculum.min_reward_diff:
        return ledger.reject(group, "curriculum", time_ms)
    else:
        _hold(job, epoch, group)
    return []


def _hold(job: Job, epoch: Epoch, group: Candidate) -> None:
    (epoch.gathered if job.is_single_batch else job.ready).append(group)
