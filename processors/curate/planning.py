"""Plans manifests from waiting groups: when a batch is full, which groups are stale, when an epoch is sealed.

Every waiting trajectory ends in exactly one manifest or rejection. Functions modify their job and epoch and return the
events to send, in order. `admission` decides which groups wait.
"""

from rollstream.eventlog import codec
from rollstream.processors.curate import curriculum, ledger
from rollstream.processors.curate.candidates import Candidate
from rollstream.processors.curate.state import Epoch, Job, Run
from rollstream.schemas import ids
from rollstream.schemas.base import Event, Locator
from rollstream.schemas.events import BatchPlanned, SubmissionReceived
from rollstream.schemas.events.training import BatchMember
from rollstream.schemas.revisions import COUNTS_ADOPTED_SINCE, JUDGES_AGENTS_SINCE


def advance(run: Run, job: Job, epoch: Epoch, time_ms: int) -> list[Event]:
    """Plan every manifest that is due, and seal the epoch if all its groups are closed and planned.

    Submitted jobs wait for a submission: see `plan_submission`.
    """
    if job.is_submitted:
        return []
    is_closed = epoch.num_open == 0
    outputs: list[Event] = []
    if is_closed:
        groups, epoch.gathered = epoch.gathered, []
        if job.filters_epochs:
            groups, rejected = _filter(run, job, epoch, groups, time_ms)
            outputs += rejected
        if job.is_single_batch:
            groups, rejected = _drop_stale(job, groups, time_ms)
            groups.sort(key=_by_task)
            outputs += rejected + _reject_surplus(job, epoch, groups, time_ms) + _plan(run, job, epoch, groups, time_ms)
        else:
            job.ready += groups
    outputs += _fill_batches(run, job, epoch, time_ms)
    return outputs + (_seal(job, epoch, time_ms) if is_closed else [])


def _reject_surplus(job: Job, epoch: Epoch, groups: list[Candidate], time_ms: int) -> list[Event]:
    """Leave out what a refilled epoch has beyond a batch: a what-if may find groups worth training that were not."""
    if epoch.num_tasks <= job.groups_per_batch:
        return []
    surplus = groups[job.groups_per_batch :]
    del groups[job.groups_per_batch :]
    return [event for group in surplus for event in ledger.reject(group, "left_over", time_ms)]


def plan_submission(run: Run, job: Job, epoch: Epoch, event: SubmissionReceived) -> list[Event]:
    """Plan exactly the submitted trajectories, in the given order and with the given rewards, and seal the epoch.

    All other trajectories of the epoch are rejected. Submitted ids that the epoch lacks, and repeated ids, are ignored.
    The staleness bound applies. Submissions to another training backend need no manifest. A part of a submission is
    kept until the submission itself arrives.
    """
    epoch.not_offered.take(event)
    if event.is_part:
        return []
    waiting = {group.group_id: group for group in epoch.gathered}
    unused = {group_id: set(range(len(group.members))) for group_id, group in waiting.items()}
    chosen: list[Candidate] = []
    for submitted in event.groups:
        group = waiting.get(submitted.group_id)
        if group is None:
            continue
        index_of = {member.trajectory_id: index for index, member in enumerate(group.members)}
        picked: dict[int, float] = {}
        for trajectory_id, reward in zip(submitted.trajectory_ids, submitted.rewards, strict=False):
            index = index_of.get(trajectory_id)
            if index in unused[group.group_id]:
                picked.setdefault(index, reward)
        unused[group.group_id] -= picked.keys()
        if picked:
            chosen.append(group.only(list(picked), list(picked.values())))
    outputs: list[Event] = []
    not_offered = epoch.not_offered.names
    for group in epoch.gathered:
        outputs += _leave_out(job, event, not_offered, group, unused[group.group_id])
    epoch.gathered = []
    _take_submitters_word(job, event)
    chosen, handed_over = _hand_over(epoch, chosen, event.time_ms)
    fresh, rejected = _drop_stale(job, chosen, event.time_ms)
    outputs += handed_over + rejected + _plan(run, job, epoch, fresh, event.time_ms)
    return outputs + _seal(job, epoch, event.time_ms)


def _leave_out(
    job: Job, event: SubmissionReceived, names: frozenset[str], group: Candidate, indices: set[int]
) -> list[Event]:
    """Rejections of a group's unsubmitted trajectories: left out by a component if the submission says so, else by the
    curriculum."""
    withheld: set[int] = set()
    if event.not_offered is not None:
        is_open = not job.started.plan.curriculum.enabled
        withheld = {index for index in indices if is_open or group.members[index].trajectory_id in names}
    outputs = ledger.reject(group.only(sorted(withheld)), "not_submitted", event.time_ms)
    return outputs + ledger.reject(group.only(sorted(indices - withheld)), "curriculum", event.time_ms)


def _hand_over(epoch: Epoch, groups: list[Candidate], time_ms: int) -> tuple[list[Candidate], list[Event]]:
    """The groups left to plan, and the ledger entries of those that another training backend trains."""
    outputs: list[Event] = []
    for group in (group for group in groups if group.is_external):
        epoch.trained_means.append(group.mean_reward)
        outputs += ledger.reject(group, "handed_over", time_ms)
    return [group for group in groups if not group.is_external], outputs


def _take_submitters_word(job: Job, event: SubmissionReceived) -> None:
    """Apply the submission's curriculum percentile and end of the job."""
    if event.curriculum_percentile is not None:
        job.progress = curriculum.CurriculumProgress(event.curriculum_percentile, job.progress.last_expansion_epoch)
    if event.is_last:
        job.last_epoch = event.epoch


def _filter(
    run: Run, job: Job, epoch: Epoch, groups: list[Candidate], time_ms: int
) -> tuple[list[Candidate], list[Event]]:
    """The epochwise curriculum over an epoch's groups: the kept ones, in record order, and the rejections."""
    plan = job.started.plan
    seed = ids.derive_seed(run.started.seed, job.started.job_id, "curriculum")
    by_agent = plan.revision >= JUDGES_AGENTS_SINCE
    seen = [
        curriculum.GroupRewards(g.group_id, g.example_id, g.rewards, g.reward_range if by_agent else None)
        for g in groups
    ]
    settings = plan.curriculum
    if not plan.knows_single_group:
        settings = settings.model_copy(update={"filter_single_group": False})
    job.progress, kept = curriculum.epochwise_filter(seen, settings, job.progress, epoch.number, seed)
    members = {group.group_id: group.members for group in kept}
    passed: list[Candidate] = []
    rejected: list[Event] = []
    for group in groups:
        indices = members.get(group.group_id, ())
        is_flat = group.reward_range == 0 and (plan.drop_zero_variance or not indices)
        if is_flat:
            rejected += ledger.reject(group, "zero_variance", time_ms)
            continue
        left = [index for index in range(len(group.members)) if index not in indices]
        rejected += ledger.reject(group.only(left), "curriculum", time_ms)
        if indices:
            passed.append(group.only(indices))
    return passed, rejected


def _fill_batches(run: Run, job: Job, epoch: Epoch, time_ms: int) -> list[Event]:
    """Manifests from waiting groups, while there are enough fresh ones for the next manifest."""
    outputs: list[Event] = []
    while True:
        num_fresh, *versions = job.fresh
        checked = num_fresh if versions == [job.next_version, job.last_adoption] else 0
        job.ready[checked:], rejected = _drop_stale(job, job.ready[checked:], time_ms)
        job.fresh = len(job.ready), job.next_version, job.last_adoption
        outputs += rejected
        if len(job.ready) < job.groups_per_batch:
            return outputs
        batch, job.ready = job.ready[: job.groups_per_batch], job.ready[job.groups_per_batch :]
        outputs += _plan(run, job, epoch, sorted(batch, key=_by_task), time_ms)


def _drop_stale(job: Job, groups: list[Candidate], time_ms: int) -> tuple[list[Candidate], list[Event]]:
    fresh: list[Candidate] = []
    rejected: list[Event] = []
    for group in groups:
        if job.is_stale(group):
            rejected += ledger.reject(group, "stale", time_ms)
        else:
            fresh.append(group)
    return fresh, rejected


def _plan(run: Run, job: Job, epoch: Epoch, groups: list[Candidate], time_ms: int) -> list[Event]:
    """The next manifest with the given groups in order; none without groups."""
    if not groups:
        return []
    job.window.forget(job.window_start)
    batch = _manifest(run, job, epoch.number, groups, time_ms)
    epoch.num_batches += 1
    epoch.trained_means += [group.mean_reward for group in groups]
    return [batch]


def adopt(run: Run, job: Job, version: int, time_ms: int) -> list[Event]:
    """A manifest without members that yields the weights of an earlier version of the job as its next version.

    What was sampled before is stale from then on. Nothing if the job has no such version, or is over.
    """
    if job.is_over or not job.started.base_version <= version < job.next_version:
        return []
    epoch = max(job.epochs) if job.epochs else job.sealed.newest
    batch = _manifest(run, job, epoch, [], time_ms, adopts=version)
    job.last_adoption = batch.yields_version
    job.num_adopted += 1
    return [batch]


def _manifest(
    run: Run, job: Job, epoch: int, groups: list[Candidate], time_ms: int, *, adopts: int | None = None
) -> BatchPlanned:
    """The next manifest, linked to the one before."""
    version = job.next_version
    batch_id = ids.batch_id(job.started.job_id, job.next_index)
    batch = BatchPlanned(
        run_id=run.started.run_id,
        time_ms=time_ms,
        batch_id=batch_id,
        job_id=job.started.job_id,
        model_group=job.started.model_group,
        epoch=epoch,
        index=job.next_index,
        trains_at_version=version,
        yields_version=version + 1,
        members=tuple(member for group in groups for member in _members(group, version)),
        seed=ids.derive_seed(run.started.seed, batch_id),
        curriculum_sha256=job.curriculum_sha256(),
        previous_sha256=job.previous_sha256,
        locators=_locators(groups),
        adopts=adopts,
        num_adopted=job.num_adopted if job.started.plan.revision >= COUNTS_ADOPTED_SINCE else 0,
    )
    job.next_index += 1
    job.previous_sha256 = codec.content_digest(batch)
    return batch


def _members(group: Candidate, version: int) -> list[BatchMember]:
    return [
        BatchMember(
            trajectory_id=member.trajectory_id,
            rollout_id=member.rollout_id,
            group_id=group.group_id,
            digest=member.digest,
            reward=reward,
            staleness=group.staleness(member, version),
        )
        for member, reward in zip(group.members, group.rewards, strict=True)
    ]


def _locators(groups: list[Candidate]) -> tuple[Locator, ...]:
    """Aligned with the members; empty if a group has none."""
    if any(not group.locators for group in groups):
        return ()
    return tuple(locator for group in groups for locator in group.locators)


def _by_task(group: Candidate) -> tuple[int, int]:
    return group.epoch, group.index


def _seal(job: Job, epoch: Epoch, time_ms: int) -> list[Event]:
    """Seal an epoch; after the job's last one, waiting groups are rejected because no batch follows."""
    outputs: list[Event] = []
    del job.epochs[epoch.number]
    job.sealed.add(epoch.number)
    if job.is_last(job.sealed.newest) and not job.epochs:
        for group in job.ready:
            outputs += ledger.reject(group, "left_over", time_ms)
        job.ready, job.fresh = [], (0, 0, 0)
    return [*outputs, ledger.sealed(job, epoch, time_ms=time_ms)]
