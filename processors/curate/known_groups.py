"""Tracks open and closed groups of a run in memory that does not grow with their number.

Groups announced by an epoch are closed if they are not open. For others, which occur only with a foreign writer or a
submitting harness, the indices are kept as ranges by the prefix of the id.
"""

from dataclasses import dataclass, field

from rollstream.processors.curate.ranges import Ranges
from rollstream.schemas import ids


@dataclass(frozen=True, slots=True)
class Task:
    """A requested task whose group is not closed."""

    job_id: str
    epoch: int


@dataclass(slots=True)
class KnownGroups:
    """Groups of one run."""

    open: dict[str, Task] = field(default_factory=dict[str, Task])
    """Open tasks by group id, in the order in which they were requested."""
    announced: dict[str, dict[int, Ranges]] = field(default_factory=dict[str, dict[int, Ranges]])
    """Announced epochs, as ranges of indices from 0, by job and number of tasks."""
    growing: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])
    """Number of tasks so far, by job and epoch, of open epochs that may request more."""
    others: dict[str, Ranges] = field(default_factory=dict[str, Ranges])
    """Closed groups that no epoch had announced when they closed: index by the id without it."""

    def is_announced(self, job_id: str, epoch: int) -> bool:
        """Whether an epoch's tasks were already announced."""
        is_growing = (job_id, epoch) in self.growing
        return is_growing or any(epoch in epochs for epochs in self.announced.get(job_id, {}).values())

    def announce(self, job_id: str, epoch: int, num_tasks: int, *, may_grow: bool = False) -> int:
        """Record that an epoch has tasks 0 to `num_tasks` - 1; returns how many of their groups are not closed yet.

        An epoch can be announced only once, unless it `may_grow`: then again with more tasks, until `finish`.
        """
        first = self.growing.get((job_id, epoch), 0)
        run_id, job = ids.run_of(job_id), ids.name_of(job_id)
        head, _ = _split(ids.group_id(run_id, job, epoch, 0))
        closed = self.others.get(head, ())
        names = [(index, ids.group_id(run_id, job, epoch, index)) for index in range(first, num_tasks)]
        added = [name for index, name in names if name in self.open or index not in closed]
        if may_grow:
            self.growing[job_id, epoch] = num_tasks
        else:
            self.announced.setdefault(job_id, {}).setdefault(num_tasks, Ranges()).add(epoch)
        self.open.update((name, Task(job_id, epoch)) for name in added)
        return len(added)

    def finish(self, job_id: str, epoch: int, most: int) -> None:
        """An epoch that could grow has all its tasks. From now on all `most` that it could have had count as closed:
        one number for all epochs keeps the memory constant."""
        if self.growing.pop((job_id, epoch), None) is not None:
            self.announced.setdefault(job_id, {}).setdefault(most, Ranges()).add(epoch)

    def has_closed(self, group_id: str) -> bool:
        """Whether a group is already closed."""
        if group_id in self.open:
            return False
        position = ids.epoch_position(group_id)
        if position is not None:
            job_id, epoch, task = position
            if task < self.growing.get((job_id, epoch), 0):
                return True
            for num_tasks, epochs in self.announced.get(job_id, {}).items():
                if task < num_tasks and epoch in epochs:
                    return True
        head, number = _split(group_id)
        return number in self.others.get(head, ())

    def close(self, group_id: str) -> Task | None:
        """Record that a group has closed; returns its task, None if it is unknown."""
        task = self.open.pop(group_id, None)
        if task is None and not self.has_closed(group_id):
            self._add_other(group_id)
        return task

    def _add_other(self, group_id: str) -> None:
        head, number = _split(group_id)
        self.others.setdefault(head, Ranges()).add(number)


def _split(group_id: str) -> tuple[str, int]:
    """Split an id into prefix and index; an id without an index gives itself and 0."""
    return ids.split_index(group_id) or (group_id, 0)
