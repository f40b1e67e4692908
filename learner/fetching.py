"""The trajectories of a manifest, by reference: fetched at their locators, held against their digests."""

from collections.abc import Sequence

from rollstream.eventlog import codec
from rollstream.eventlog.log import EventLog, Position, Record
from rollstream.schemas.errors import DecodeError
from rollstream.schemas.events import BatchPlanned, TrajectoryAssembled


async def fetch_records(log: EventLog, planned: BatchPlanned) -> list[Record]:
    """The records of a manifest's members, in its order.

    Raises DecodeError if locators are missing, TruncatedError if a record is gone.
    """
    if len(planned.locators) != len(planned.members):
        raise DecodeError(
            f"manifest {planned.batch_id} has {len(planned.locators)} locators for {len(planned.members)} members"
        )
    return await log.fetch([Position("trajectories", place.partition, place.offset) for place in planned.locators])


def check_members(planned: BatchPlanned, records: Sequence[Record]) -> list[TrajectoryAssembled]:
    """Decode the members' records. Raises DecodeError naming the first that is not what the manifest says."""
    trajectories: list[TrajectoryAssembled] = []
    for member, record in zip(planned.members, records, strict=True):
        where = f"manifest {planned.batch_id}, trajectory {member.trajectory_id} at {record.partition}@{record.offset}"
        try:
            received = codec.decode(record)
        except DecodeError as error:
            raise DecodeError(f"{where}: {error}") from error
        event = received.event
        if not isinstance(event, TrajectoryAssembled) or event.trajectory_id != member.trajectory_id:
            raise DecodeError(f"{where}: the record there is {event.event_id}")
        if received.digest != member.digest:
            raise DecodeError(f"{where}: its digest is {received.digest}, not {member.digest}; it was changed")
        trajectories.append(event)
    return trajectories
