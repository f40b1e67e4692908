"""Runs whose beginning `groups` does not hold any more: they are ended with an error instead of going on unheard."""

from rollstream.processors.curate_state import CurateState
from rollstream.schemas.base import Event
from rollstream.schemas.events import EpochStarted, GroupClosed, JobStarted, RunEnded, SubmissionReceived


def end_of_lost(state: CurateState, event: Event, begin: int) -> list[Event]:
    """The end of a run that goes on although its RunStarted lies before `begin`, the oldest offset that is kept.

    It is sent, not applied: it counts when it comes back as a record.
    """
    needs_run = isinstance(event, JobStarted | EpochStarted | GroupClosed | SubmissionReceived)
    if not begin or not needs_run or event.run_id in state.runs or event.run_id in state.ended:
        return []
    message = (
        f"the run's beginning is gone: topic groups partition 0 holds nothing before offset {begin} any more, "
        "retention or a truncation removed it"
    )
    return [RunEnded(run_id=event.run_id, time_ms=event.time_ms, cause="failed", message=message)]
