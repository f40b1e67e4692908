"""The ledger: rejections of complete trajectories, and the summary that seals an epoch. Makes no decisions."""

from rollstream.processors.curate.candidates import Candidate, mean
from rollstream.processors.curate.state import Epoch, Job
from rollstream.schemas.base import Event
from rollstream.schemas.events import EpochSealed, GroupClosed, TrajectoryRejected
from rollstream.schemas.events.training import RejectionCause


def reject(group: Candidate | GroupClosed, cause: RejectionCause, time_ms: int) -> list[Event]:
    """One rejection for each trajectory of the group."""
    return [
        TrajectoryRejected(
            run_id=group.run_id,
            time_ms=time_ms,
            job_id=group.job_id,
            epoch=group.epoch,
            group_id=group.group_id,
            rollout_id=member.rollout_id,
            trajectory_id=member.trajectory_id,
            cause=cause,
            num_tokens=member.num_tokens,
        )
        for member in group.members
    ]


def sealed(job: Job, epoch: Epoch, *, time_ms: int) -> EpochSealed:
    """The summary of an epoch whose groups are all closed and planned."""
    return EpochSealed(
        run_id=job.started.run_id,
        time_ms=time_ms,
        job_id=job.started.job_id,
        epoch=epoch.number,
        is_last=job.is_last(epoch.number),
        num_groups=epoch.num_groups,
        num_trained_groups=len(epoch.trained_means),
        num_batches=epoch.num_batches,
        next_batch_index=job.next_index,
        avg_reward=mean(epoch.means) if epoch.means else None,
        filtered_avg_reward=mean(epoch.trained_means) if epoch.trained_means else None,
        zero_variance_groups=epoch.zero_variance_groups,
        curriculum_percentile=job.progress.percentile,
        curriculum_sha256=job.curriculum_sha256(),
    )
