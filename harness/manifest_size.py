"""How many trajectories a batch or group may have: one that no record can hold would end every processors process.

Where curation plans by itself their count is known before a run, else when they are submitted; their ids are reckoned
as long as the run can make them.
"""

from collections.abc import Iterable

from rollstream.harness.config.settings import JobSpec
from rollstream.schemas import ids
from rollstream.schemas.base import Locator
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.events_training import BatchMember
from rollstream.schemas.topics import TOPICS

MAX_GROUP = 768
"""Trajectories of a group: so many have room in its GroupClosed, with what became of three attempts at each."""
OTHER_BYTES = 4096
"""Of a manifest's record, all but its members and their locators."""
WRITTEN = "-01234567"
"""Behind the job's name in the ids of submitted groups that are not on the log yet: digits of their digest."""
ATTEMPT = 10
"""Of most rollouts it is the first one, so one of two digits is more than enough on the whole."""


def check_manifests(jobs: Iterable[JobSpec]) -> None:
    """Raises ConfigError for a job whose groups or batches could have more trajectories than a record has room for."""
    for spec in jobs:
        group_size = spec.plan.num_generations * max(1, len(spec.rollout.agents))
        check_group(spec, group_size, "(num_generations x agents)")
        if spec.plan.planning == "submitted":
            continue
        num_groups = -(-spec.plan.tasks_per_epoch // spec.plan.batches_per_epoch)
        num_trajectories = num_groups * group_size
        most = most_trajectories(spec)
        if num_trajectories > most:
            raise ConfigError(
                f"job {spec.job_id}: a batch of {num_trajectories} trajectories (tasks_per_epoch x num_generations, by "
                f"batches_per_epoch) is more than the {most} that a manifest has room for; lower one of the first two, "
                "or raise batches_per_epoch and max_staleness"
            )


def check_group(spec: JobSpec, size: int, made_of: str) -> None:
    """Raises ConfigError for a group of more trajectories than its record has room for."""
    if size > MAX_GROUP:
        raise ConfigError(
            f"job {spec.job_id}: a group of {size} trajectories {made_of} is more than the {MAX_GROUP} that one may "
            "have; lower num_generations"
        )


def check_submission(spec: JobSpec, num_trajectories: int) -> None:
    """Raises ConfigError for more trajectories than the manifest of one submission has room for."""
    most = most_trajectories(spec, WRITTEN)
    if num_trajectories > most:
        raise ConfigError(
            f"job {spec.job_id}: {num_trajectories} trajectories are submitted at once, more than the {most} that a "
            "manifest has room for; roll out fewer examples an epoch, or fewer generations of each"
        )


def most_trajectories(spec: JobSpec, behind_name: str = "") -> int:
    """How many trajectories a manifest of the job has room for; `behind_name`: what ids have behind the job's name."""
    run_id, job = spec.job_id.split("/", 1)
    group = ids.group_id(run_id, job + behind_name, spec.plan.num_epochs, spec.plan.tasks_per_epoch)
    rollout = ids.rollout_id(group, spec.plan.num_generations, ATTEMPT)
    member = BatchMember(
        trajectory_id=ids.trajectory_id(rollout, max(spec.rollout.agents, key=len, default="agent")),
        rollout_id=rollout,
        group_id=group,
        digest="0" * 64,
        reward=-1.0000000000000002e-100,
        staleness=spec.plan.max_staleness,
    )
    locator = Locator(partition=10**3, offset=10**10)
    member_bytes = len(member.model_dump_json()) + len(locator.model_dump_json()) + len(",,")
    return (TOPICS["batches"].max_record_bytes - OTHER_BYTES) // member_bytes
