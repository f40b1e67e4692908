"""Undoes one record of the curate fold: its run is folded again; of other runs only idle times are saved."""

from dataclasses import dataclass

from rollstream.processors.curate.state import Clock, CurateState, EndedRun
from rollstream.schemas.base import Event
from rollstream.schemas.events import GroupClosed


@dataclass(frozen=True, slots=True)
class Undo:
    """The part of the state before a record that cannot be rebuilt by folding its run's earlier records.

    For other runs that is one clock each, because a record carries the time of at most one steps partition.
    """

    run_id: str
    first_offset: int | None
    """Offset at which the record's run began; None: it is not known, or nothing of it is left to change."""
    was_past: bool
    refused_at: int | None
    own_clocks: dict[int, Clock]
    was_abandoned: dict[str, bool]
    partition: int | None
    """The steps partition whose time the record carries."""
    clocks: dict[str, Clock | None]
    """Clocks of that partition, by other run; None: there was none yet."""
    ended: dict[str, EndedRun]

    @classmethod
    def before(cls, state: CurateState, event: Event) -> "Undo":
        """Save the state before a record with that event."""
        run_id = event.run_id
        own = state.runs.get(run_id) or state.ended.get(run_id)
        partition = event.steps_at.partition if isinstance(event, GroupClosed) and event.steps_at is not None else None
        idle = {} if partition is None else state.idle_runs()
        clocks = {name: None if partition is None else _copy(one.clocks.get(partition)) for name, one in idle.items()}
        return cls(
            run_id,
            None if own is None else own.first_offset,
            run_id in state.past,
            state.refused.get(run_id),
            {} if own is None else dict(own.idle.clocks),
            {name: one.is_abandoned for name, one in idle.items()}
            | ({} if own is None else {run_id: own.idle.is_abandoned}),
            partition,
            clocks,
            dict(state.ended),
        )

    def apply(self, state: CurateState, rebuilt: CurateState) -> None:
        """Restore `state`; `rebuilt` is the fold of the run's own records before this one."""
        state.runs.pop(self.run_id, None)
        if not self.was_past:
            state.past.pop(self.run_id, None)
        if self.refused_at is not None:
            state.refused[self.run_id] = self.refused_at
        for run_id in self.ended.keys() - state.ended.keys():
            state.past.pop(run_id, None)
        state.ended = {run_id: run for run_id, run in self.ended.items() if run_id != self.run_id} | rebuilt.ended
        runs = [*state.runs.values(), *rebuilt.runs.values()]
        state.runs = {run.started.run_id: run for run in sorted(runs, key=lambda run: run.first_offset)}
        for run_id, idle in state.idle_runs().items():
            idle.is_abandoned = self.was_abandoned.get(run_id, idle.is_abandoned)
            if run_id == self.run_id:
                idle.clocks = self.own_clocks
            elif self.partition is not None:
                idle.clocks.pop(self.partition, None)
                if (clock := self.clocks[run_id]) is not None:
                    idle.clocks[self.partition] = clock


def _copy(clock: Clock | None) -> Clock | None:
    return None if clock is None else Clock(clock.newest_ms, clock.total_ms)
