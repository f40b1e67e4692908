"""The number of trajectories that fit into the manifest of a batch, which is one record.

Pure. Whoever decides the size of batches asks it before a rollout is made: curation could only end the run.
"""

from collections.abc import Iterable

from rollstream.schemas import ids
from rollstream.schemas.base import Locator
from rollstream.schemas.events.training import BatchMember
from rollstream.schemas.topics import TOPICS

OTHER_BYTES = 4096
"""Size of a manifest's record apart from its members and their locators."""
ATTEMPT = 10
"""An attempt's number with two digits: most rollouts need one attempt, so that is more than enough in total."""


def most_members(job_id: str, agents: Iterable[str], *, epoch: int, index: int, member: int, max_staleness: int) -> int:
    """Number of trajectories that fit into a manifest of a job.

    `epoch`, `index` (of a group in its epoch), `member` (of a group): the largest that ids can have; `agents`: those
    whose trajectories it names.
    """
    group = ids.group_id(ids.run_of(job_id), ids.name_of(job_id), epoch, index)
    rollout = ids.rollout_id(group, member, ATTEMPT)
    largest = BatchMember(
        trajectory_id=ids.trajectory_id(rollout, max(agents, key=_num_bytes, default="agent")),
        rollout_id=rollout,
        group_id=group,
        digest="0" * 64,
        reward=-1.0000000000000002e-100,
        staleness=max_staleness,
    )
    locator = Locator(partition=10**3, offset=10**10)
    member_bytes = _num_bytes(largest.model_dump_json()) + _num_bytes(locator.model_dump_json()) + len(",,")
    return (TOPICS["batches"].max_record_bytes - OTHER_BYTES) // member_bytes


def _num_bytes(text: str) -> int:
    return len(text.encode())
