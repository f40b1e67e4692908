"""From waiting groups to manifests: when a batch is full, what is too old for it, when an epoch is sealed.

Every trajectory that waits leaves in exactly one manifest or rejection. Functions change the job and epoch that they
are given and return the events to send, in order. What may wait at all is decided in `admission`.
"""

from rollstream.eventlog import codec
from rollstream.processors import curriculum, ledger
from rollstream.processors.candidates import Candidate
from rollstream.processors.curate_state import Epoch, Job, Run
from rollstream.schemas import ids
from rollstream.schemas.base import Event, Locator
from rollstream.schemas.events import BatchPlanned, SubmissionReceived
from rollstream.schemas.events_training import BatchMember


def advance(run: Run, job: Job, epoch: Epoch, time_ms: int) -> list[Event]:
    """Plan every manifest that is due, and seal the epoch if all of it is closed and planned.

    Where submissions decide nothing is due before one: see `plan_submission`.
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
            outputs += rejected + _plan(run, job, epoch, sorted(groups, key=_by_task), time_ms)
        else:
            job.ready += groups
    outputs += _fill_batches(run, job, epoch, time_ms)
    return outputs + (_seal(job, epoch, time_ms) if is_closed else [])


def plan_submission(run: Run, job: Job, epoch: Epoch, event: SubmissionReceived) -> list[Event]:
    """Plan just the submitted trajectories, in the order and with the rewards given, and seal the epoch.

    All others of the epoch are rejected. What the submission names and the epoch does not have (or names again) is
    passed over. The staleness bound holds here too.
    """
    waiting = {group.group_id: group for group in epoch.gathered}
    unused = {group_id: set(range(len(group.members))) for group_id, group in waiting.items()}
    chosen: list[Candidate] = []
    for submitted in event.groups:
        group = waiting.get(submitted.group_id)
        if group is None:
            continue
        place_of = {member.trajectory_id: place for place, member in enumerate(group.members)}
        picked: dict[int, float] = {}
        for trajectory_id, reward in zip(submitted.trajectory_ids, submitted.rewards, strict=False):
            place = place_of.get(trajectory_id)
            if place in unused[group.group_id]:
                picked.setdefault(place, reward)
        unused[group.group_id] -= picked.keys()
        if picked:
            chosen.append(group.only(list(picked), list(picked.values())))
    outputs: list[Event] = []
    for group in epoch.gathered:
        outputs += ledger.reject(group.only(sorted(unused[group.group_id])), "curriculum", event.time_ms)
    epoch.gathered = []
    _take_submitters_word(job, event)
    fresh, rejected = _drop_stale(job, chosen, event.time_ms)
    outputs += rejected + _plan(run, job, epoch, fresh, event.time_ms)
    return outputs + _seal(job, epoch, event.time_ms)


def _take_submitters_word(job: Job, event: SubmissionReceived) -> None:
    """How far the curriculum has opened, and whether the job ends here, is for the submitter to say."""
    if event.curriculum_percentile is not None:
        job.progress = curriculum.Progress(event.curriculum_percentile, job.progress.last_expansion_epoch)
    if event.is_last:
        job.last_epoch = event.epoch


def _filter(
    run: Run, job: Job, epoch: Epoch, groups: list[Candidate], time_ms: int
) -> tuple[list[Candidate], list[Event]]:
    """The classic curriculum over an epoch's groups: those kept, in record order, and the rejections."""
    plan = job.started.plan
    seed = ids.derive_seed(run.started.seed, job.started.job_id, "curriculum")
    seen = [curriculum.GroupRewards(group.group_id, group.example_id, group.rewards) for group in groups]
    settings = plan.curriculum
    if not plan.knows_single_group:
        settings = settings.model_copy(update={"filter_single_group": False})
    job.progress, kept = curriculum.classic_filter(seen, settings, job.progress, epoch.number, seed)
    members = {group.group_id: group.members for group in kept}
    passed: list[Candidate] = []
    rejected: list[Event] = []
    for group in groups:
        places = members.get(group.group_id, ())
        is_flat = group.spread == 0 and (plan.drop_zero_variance or not places)
        if is_flat:
            rejected += ledger.reject(group, "zero_variance", time_ms)
            continue
        left = [place for place in range(len(group.members)) if place not in places]
        rejected += ledger.reject(group.only(left), "curriculum", time_ms)
        if places:
            passed.append(group.only(places))
    return passed, rejected


def _fill_batches(run: Run, job: Job, epoch: Epoch, time_ms: int) -> list[Event]:
    """Manifests from the groups that wait, while there are enough that are fresh at the next one."""
    outputs: list[Event] = []
    while True:
        job.ready, rejected = _drop_stale(job, job.ready, time_ms)
        outputs += rejected
        if len(job.ready) < job.groups_per_batch:
            return outputs
        batch, job.ready = job.ready[: job.groups_per_batch], job.ready[job.groups_per_batch :]
        outputs += _plan(run, job, epoch, sorted(batch, key=_by_task), time_ms)


def _drop_stale(job: Job, groups: list[Candidate], time_ms: int) -> tuple[list[Candidate], list[Event]]:
    fresh: list[Candidate] = []
    rejected: list[Event] = []
    for group in groups:
        if group.is_stale(job.next_version, job.started.plan.max_staleness):
            rejected += ledger.reject(group, "stale", time_ms)
        else:
            fresh.append(group)
    return fresh, rejected


def _plan(run: Run, job: Job, epoch: Epoch, groups: list[Candidate], time_ms: int) -> list[Event]:
    """The next manifest, of the given groups in the given order; none without groups."""
    if not groups:
        return []
    version = job.next_version
    batch_id = ids.batch_id(job.started.job_id, job.next_index)
    job.window.forget(job.window_start)
    batch = BatchPlanned(
        run_id=run.started.run_id,
        time_ms=time_ms,
        batch_id=batch_id,
        job_id=job.started.job_id,
        model_group=job.started.model_group,
        epoch=epoch.number,
        index=job.next_index,
        trains_at_version=version,
        yields_version=version + 1,
        members=tuple(member for group in groups for member in _members(group, version)),
        seed=ids.derive_seed(run.started.seed, batch_id),
        curriculum_sha256=job.curriculum_sha256(),
        previous_sha256=job.previous_sha256,
        locators=_locators(groups),
    )
    job.next_index += 1
    job.previous_sha256 = codec.content_digest(batch)
    epoch.num_batches += 1
    epoch.trained_means += [group.mean_reward for group in groups]
    return [batch]


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
    """Aligned with the members; none at all if a group came without."""
    if any(not group.locators for group in groups):
        return ()
    return tuple(locator for group in groups for locator in group.locators)


def _by_task(group: Candidate) -> tuple[int, int]:
    return group.epoch, group.index


def _seal(job: Job, epoch: Epoch, time_ms: int) -> list[Event]:
    """The end of an epoch; at the job's last one, what still waits has no batch to come to."""
    outputs: list[Event] = []
    del job.epochs[epoch.number]
    job.sealed.add(epoch.number)
    if job.is_last(max(job.sealed)) and not job.epochs:
        for group in job.ready:
            outputs += ledger.reject(group, "left_over", time_ms)
        job.ready = []
    return [*outputs, ledger.sealed(job, epoch, time_ms=time_ms)]
