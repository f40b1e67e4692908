"""Ends a stalled worker with a clear error so that its supervisor restarts it.

Faust and its client occasionally stall after a rebalance or a lost broker (faust-streaming #175, #532, #640; aiokafka
#1154): the process is alive and sends heartbeats, but reads nothing. Only the folds' progress shows this. A refold
counts as progress, and waiting for the artifact store or acknowledgements is not a stall. A rebalance resets the timer,
so frequent rebalances could hide a stall; therefore the total over all rebalances is limited to TIMEOUTS_IN_ALL
time-outs.
"""

import asyncio
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field

from rollstream.eventlog.log import ReadableLog, TopicPartition
from rollstream.processors.host.app import Host
from rollstream.processors.host.host import REBALANCE_TIMEOUT_S
from rollstream.schemas.errors import AccessDeniedError, LogError

CHECKS = 6
"""Looks within one stall time-out."""
MAX_REBALANCE_S = 2 * REBALANCE_TIMEOUT_S
"""Maximum seconds without a fetch after a rebalance; a client that never fetches again is stalled."""
TIMEOUTS_IN_ALL = 10
SLACK_S = 1.0
"""So late may a look be on a busy machine."""


@dataclass(slots=True)
class Standstill:
    """Tracks since when each assigned partition has made no progress although it has more records."""

    timeout_s: float
    _since: dict[TopicPartition, tuple[int | None, float]] = field(
        default_factory=dict[TopicPartition, tuple[int | None, float]]
    )

    def observe(
        self,
        now_s: float,
        positions: Mapping[TopicPartition, int | None],
        ends: Mapping[TopicPartition, int],
        *,
        progress: Mapping[TopicPartition, int] = {},
        waiting: Container[TopicPartition] = (),
    ) -> TopicPartition | None:
        """A partition without progress for the time-out, None if there is none.

        `positions`: next offset of the fold by assigned partition, None without one. `ends`: end offsets. `progress`: a
        value that changes while the fold works, even if its position does not (default: the position). `waiting`:
        partitions whose folds wait for something outside of the log; they are not stalled.
        """
        before = self._since
        self._since = {}
        for partition, position in positions.items():
            end = ends.get(partition, 0)
            if end <= (0 if position is None else position) or partition in waiting:
                continue
            done = progress.get(partition, position)
            known = before.get(partition)
            since = known[1] if known is not None and known[0] == done else now_s
            self._since[partition] = (done, since)
            if now_s - since >= self.timeout_s:
                return partition
        return None


@dataclass(slots=True)
class StandstillInAll:
    """Tracks the total time without progress of each assigned partition, over rebalances."""

    timeout_s: float
    _stood: dict[TopicPartition, tuple[dict[bool, int], float]] = field(
        default_factory=dict[TopicPartition, tuple[dict[bool, int], float]]
    )
    """Progress at the last look with a position and at that without one, and for how long it has stood."""

    def observe(
        self,
        elapsed_s: float,
        positions: Mapping[TopicPartition, int | None],
        ends: Mapping[TopicPartition, int],
        *,
        progress: Mapping[TopicPartition, int],
        waiting: Container[TopicPartition] = (),
    ) -> TopicPartition | None:
        """A partition without progress for the time-out, None if there is none.

        `elapsed_s`: time since the previous call; other arguments as in `Standstill`. Time without assignment does not
        count. Observations with and without a position are compared separately, so that a rebalance that removes and
        restores the position is not progress.
        """
        for partition, position in positions.items():
            if ends.get(partition, 0) <= (position or 0) or partition in waiting:
                self._stood.pop(partition, None)
                continue
            done, stood_s = self._stood.get(partition, ({}, -elapsed_s))
            kind = position is not None
            has_moved = done.get(kind, progress[partition]) != progress[partition]
            stood_s = 0.0 if has_moved else stood_s + elapsed_s
            self._stood[partition] = done | {kind: progress[partition]}, stood_s
            if stood_s >= self.timeout_s:
                return partition
        return None


async def watch(
    host: Host, log: ReadableLog, *, timeout_s: float, monotonic: Callable[[], float] = time.monotonic
) -> None:
    """Check periodically.

    Raises LogError when an assigned partition with lag has made no progress for `timeout_s`, or for TIMEOUTS_IN_ALL
    times as long in total over rebalances. Time in which this process itself was stopped or suspended does not count.
    """
    standstill, in_all = Standstill(timeout_s), StandstillInAll(TIMEOUTS_IN_ALL * timeout_s)
    generation, moved_at = host.generation, monotonic()
    while True:
        before = monotonic()
        await asyncio.sleep(timeout_s / CHECKS)
        elapsed_s = monotonic() - before
        if elapsed_s > 2 * timeout_s / CHECKS + SLACK_S:
            standstill, elapsed_s = Standstill(timeout_s), 0.0
        host.check_membership()
        if host.generation != generation:
            generation, moved_at, standstill = host.generation, monotonic(), Standstill(timeout_s)
        elif not host.is_flowing and monotonic() < moved_at + MAX_REBALANCE_S:
            standstill = Standstill(timeout_s)
        try:
            ends = await _ends(host, log)
        except AccessDeniedError:
            raise
        except LogError:
            standstill = Standstill(timeout_s)  # the broker is down: the log raises its own error
            continue
        positions = host.positions()
        progress = {where: host.shell(where).progress(where.partition) for where in positions}
        waiting = {where for where in positions if host.shell(where).is_waiting(where.partition)}
        stuck = standstill.observe(monotonic(), positions, ends, progress=progress, waiting=waiting)
        where = in_all.observe(elapsed_s, positions, ends, progress=progress, waiting=waiting)
        if (where := stuck or where) is not None:
            for_s = f"{timeout_s:.0f} s" if stuck else f"{in_all.timeout_s:.0f} s in all, over rebalances,"
            raise LogError(
                f"{where.topic} partition {where.partition} is stalled at offset {positions[where]} for {for_s} with "
                f"log end {ends[where]}; the worker exits to be restarted"
            )


async def _ends(host: Host, log: ReadableLog) -> dict[TopicPartition, int]:
    ends: dict[TopicPartition, int] = {}
    for shell in host.shells.values():
        for partition, end in (await log.end_offsets(shell.topic)).items():
            ends[TopicPartition(shell.topic, partition)] = end
    return ends
