"""A worker that stands still while there is work ends with a clear error, so that its supervisor starts it again.

Faust and its client stall silently now and then after a rebalance or a lost broker (faust-streaming #175, #532, #640;
aiokafka #1154): the process lives, its heartbeats go out, nothing is read. Only the position of the fold tells.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from rollstream.eventlog.log import EventLog, TopicPartition
from rollstream.processors.faust_app import Host
from rollstream.schemas.errors import LogError

CHECKS = 6
"""Looks within one stall time-out."""


@dataclass(slots=True)
class Standstill:
    """Since when each assigned partition has stood at its position although there is more to read."""

    timeout_s: float
    _since: dict[TopicPartition, tuple[int | None, float]] = field(
        default_factory=dict[TopicPartition, tuple[int | None, float]]
    )

    def observe(
        self, now_s: float, positions: Mapping[TopicPartition, int | None], ends: Mapping[TopicPartition, int]
    ) -> TopicPartition | None:
        """A partition that has stood still for the time-out, None if there is none.

        `positions`: by assigned partition the offset that the fold wants next, None while it has none.
        `ends`: the offset after the newest record.
        """
        before = self._since
        self._since = {}
        for partition, position in positions.items():
            end = ends.get(partition, 0)
            if end <= (0 if position is None else position):
                continue
            known = before.get(partition)
            since = known[1] if known is not None and known[0] == position else now_s
            self._since[partition] = (position, since)
            if now_s - since >= self.timeout_s:
                return partition
        return None


async def watch(host: Host, log: EventLog, *, timeout_s: float) -> None:
    """Look again and again. Raises LogError when an assigned partition has stood still for `timeout_s` with lag."""
    standstill = Standstill(timeout_s)
    while True:
        await asyncio.sleep(timeout_s / CHECKS)
        try:
            ends = await _ends(host, log)
        except LogError:
            standstill = Standstill(timeout_s)  # the broker is away: nobody moves, and the log's own error tells
            continue
        positions = host.positions()
        stuck = standstill.observe(time.monotonic(), positions, ends)
        if stuck is not None:
            raise LogError(
                f"{stuck.topic} partition {stuck.partition} has stood at offset {positions[stuck]} for {timeout_s:.0f} "
                f"s while the log goes on to {ends[stuck]}; the worker ends so that it is started again"
            )


async def _ends(host: Host, log: EventLog) -> dict[TopicPartition, int]:
    ends: dict[TopicPartition, int] = {}
    for shell in host.shells.values():
        for partition, end in (await log.end_offsets(shell.topic)).items():
            ends[TopicPartition(shell.topic, partition)] = end
    return ends
