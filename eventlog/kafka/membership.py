"""aiokafka's consumer, which stays a member of its group when a rebalance has overtaken one of its commits."""

from contextvars import ContextVar
from typing import Any

from aiokafka import AIOKafkaConsumer
from aiokafka.consumer.group_coordinator import GroupCoordinator

_committed_as: ContextVar[tuple[int, str] | None] = ContextVar("_committed_as", default=None)
"""Generation and member id of the commit that the current task has sent."""


class _Coordinator(GroupCoordinator):
    """Joins its group again after a refused commit only if the generation is still the commit's, as Kafka's Java client
    does.

    A commit that is sent while the member joins is read by the broker after the join, with the generation before it.
    aiokafka 0.14 joins again for that, and a commit every second meets the next join, too, so that groups rebalanced
    for minutes.
    """

    async def _do_commit_offsets(self, assignment: Any, offsets: Any) -> None:
        _committed_as.set((self.generation, self.member_id))  # in a task of the commit's own (`commit_offsets`)
        await super()._do_commit_offsets(assignment, offsets)

    def reset_generation(self) -> None:
        sent = _committed_as.get()
        if sent is None or sent == (self.generation, self.member_id):
            super().reset_generation()


class MemberConsumer(AIOKafkaConsumer):
    """A consumer whose group, if it has one, is joined as above."""

    async def start(self) -> None:
        """Connect, and find the group's coordinator."""
        await super().start()
        if isinstance(self._coordinator, GroupCoordinator):
            self._coordinator.__class__ = _Coordinator  # `start` takes no other class
