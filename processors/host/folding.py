"""Records that cannot be decoded or folded, for both shells: distinguished from other failures, dead-lettered,
passed over from then on, and bounded, so that a broken fold still ends. What is folded again then is the shell's own.
"""

import logging
from collections.abc import Callable, Container, Mapping, Set
from dataclasses import dataclass, field
from typing import TypeVar

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.dead_letters import FOLD, DeadLetterIndex, send_dead_letter
from rollstream.eventlog.log import EventLog, Position, Received, Record, TopicPartition, format_position
from rollstream.schemas.base import Event
from rollstream.schemas.errors import ArtifactError, DecodeError, FoldError
from rollstream.schemas.events import RunEnded

MAX_IN_A_ROW = 16
"""Maximum consecutive records that cannot be folded; with so many it is the fold that is broken, not the records."""
MIN_KEYS = 3
"""Minimum number of groups (in `groups`: runs) that those records belong to."""
MAX_OF_A_RUN = 16
"""Number of a run's records in `groups` that cannot be folded at which the run is ended."""
RUNS_REMEMBERED = 4096
RUNS_COMMITTED = 16
"""Maximum number committed with an offset, newest first."""
MAX_ID_BYTES = 100
"""Maximum length of their ids; only a forged record has a longer one. So all of them take 2 KB at most."""

Faults = tuple[int, bool]
"""Records of a run that cannot be folded, and whether its end has been folded."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


def fold_one(evolve: Callable[[Received], T], received: Received) -> T:
    """The result of `evolve`. Raises FoldError from its exceptions; then the state is invalid.

    Errors that are not the record's fault (ArtifactError, MemoryError) are raised unchanged.
    """
    try:
        return evolve(received)
    except (ArtifactError, MemoryError):
        raise
    except Exception as error:
        raise FoldError(
            f"{format_position(received.position)} ({received.event.event_id}) cannot be folded: "
            f"{type(error).__name__}: {error}"
        ) from error


@dataclass(slots=True)
class _Faults:
    count: int = 0
    has_ended: bool = False


@dataclass(slots=True)
class FaultyRuns:
    """Runs with records of `groups` that cannot be folded, the newest RUNS_REMEMBERED of them.

    Once a run has MAX_OF_A_RUN of them, only its end is still folded; after its end it has as many again.
    """

    _runs: dict[str, _Faults] = field(default_factory=dict[str, _Faults])

    def begin(self, run_id: str) -> None:
        """Forget a run's faults because its beginning has been folded: earlier records, which a refold does not read,
        do not count.
        """
        self._runs.pop(run_id, None)

    def add(self, run_id: str) -> bool:
        """Count a record that cannot be folded. Whether its run must be ended: true once a run."""
        faults = self._runs[run_id] = self._runs.pop(run_id, None) or _Faults()
        faults.count += 1
        if len(self._runs) > RUNS_REMEMBERED:
            del self._runs[next(iter(self._runs))]
        return faults.count == MAX_OF_A_RUN and not faults.has_ended

    def committed(self, live: Container[str]) -> dict[str, Faults]:
        """The state that a restart needs: the newest runs but those in `live`, whose records it folds again."""
        ids = [run_id for run_id in self._runs if run_id not in live and len(run_id.encode()) <= MAX_ID_BYTES]
        found = [(run_id, self._runs[run_id]) for run_id in ids]
        return {run_id: (one.count, one.has_ended) for run_id, one in found[-RUNS_COMMITTED:]}

    def restore(self, committed: Mapping[str, Faults]) -> None:
        """Restore the runs' state at the time when an offset was committed."""
        self._runs |= {run_id: _Faults(*faults) for run_id, faults in committed.items()}

    def is_given_up(self, run_id: str) -> bool:
        """Whether a run has too many of them."""
        return run_id in self._runs and self._runs[run_id].count >= MAX_OF_A_RUN

    def passes_over(self, event: Event) -> bool:
        """Whether an event is not folded, because its run has too many of them."""
        return self.is_given_up(event.run_id) and not isinstance(event, RunEnded)

    def end(self, run_id: str) -> None:
        """The run's end has been folded: groups of it that close later are tried."""
        faults = self._runs.get(run_id)
        if faults is not None and not faults.has_ended:
            self._runs[run_id] = _Faults(has_ended=True)


class DeadRecords:
    """Records with a dead letter: of any worker, as far as `dlq` was read, and poison that was found here since."""

    def __init__(self, log: EventLog, artifacts: ArtifactStore | None, *, topic: str, service: str, stage: str) -> None:
        """Letters are about records of `topic`; they name `service`, and `stage` where a record cannot be decoded."""
        self._log = log
        self._artifacts = artifacts
        self._service = service
        self._stage = stage
        self._index = DeadLetterIndex(log, (topic,))
        self._poison: dict[TopicPartition, set[int]] = {}
        """Offsets of records on which the fold has raised here, by partition."""

    @property
    def num_read(self) -> int:
        """Records of `dlq` so far: what shows that a long one is still being read."""
        return self._index.num_read

    async def refresh(self, since: int = 0) -> None:
        """Read `dlq` from the offset `since` to its end. Raises LogError."""
        await self._index.refresh(since)

    def needed_from(self, where: TopicPartition, commit_offset: int) -> int:
        """Offset from which `dlq` must be read for a partition that is read again from `commit_offset` on."""
        return self._index.needed_from(where, commit_offset)

    def offsets(self, where: TopicPartition) -> Set[int]:
        """Offsets of the records that are skipped whenever a partition is read again."""
        return self._index.offsets(where) | self._poison.get(where, frozenset[int]())

    def answered(self, where: TopicPartition) -> Set[int]:
        """Offsets of the records that already have a letter when they arrive for the first time; grows by `refresh`."""
        return self._index.offsets(where)

    def is_poison(self, where: TopicPartition, offset: int) -> bool:
        """Whether a dead record is one on which the fold raised."""
        return offset in self._index.poison(where) or offset in self._poison.get(where, ())

    async def add(self, record: Record, error: FoldError) -> None:
        """Pass over a record on which the fold has raised. Raises `error` where it is the fold that is broken."""
        where = TopicPartition(record.topic, record.partition)
        if await is_broken(self._log, where, self.offsets(where), record.offset):
            raise error
        logger.error("%s; it goes to the dead letters", error, exc_info=error.__cause__)
        self._poison.setdefault(where, set()).add(record.offset)

    def forget(self, where: TopicPartition, before: int | None = None) -> None:
        """Forget what has been added of a partition, or of its offsets below `before`: the letters are acknowledged."""
        known = self._poison.pop(where, set[int]())
        if before is not None and (kept := {offset for offset in known if offset >= before}):
            self._poison[where] = kept

    def drop(self, where: TopicPartition) -> None:
        """Forget a partition that is another member's now; `refresh` reads its letters again if it comes back."""
        self.forget(where)
        self._index.drop(where)

    async def send(self, record: Record, error: DecodeError | FoldError) -> None:
        """Send a record to the dead letters; returns once it is acknowledged. As `send_dead_letter`."""
        stage, cause = (self._stage, error) if isinstance(error, DecodeError) else (FOLD, error.__cause__ or error)
        await send_dead_letter(
            self._log, record, service=self._service, stage=stage, error=cause, artifacts=self._artifacts
        )


async def is_broken(log: EventLog, where: TopicPartition, poison: Container[int], offset: int) -> bool:
    """Whether the records before `offset` could not be folded either, so many that the fold must end.

    Neighbours of fewer than MIN_KEYS keys are their writer's fault: no single group or run ends the fold of all.
    """
    before = range(offset - MAX_IN_A_ROW, offset)
    if not all(one in poison for one in before):
        return False
    found = await log.fetch(Position(where.topic, where.partition, one) for one in before)
    return len({record.key for record in found}) >= MIN_KEYS
