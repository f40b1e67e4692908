"""Result of a replay: counts by stage, and differences with both sides named."""

from dataclasses import dataclass, field
from typing import Any

from rollstream.replay.source import RunEvents
from rollstream.schemas.base import Event
from rollstream.schemas.errors import RollstreamError

MISSING = "nothing"


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between the replay and the record."""

    stage: str
    """assembly, curate, trajectories, manifests, weights, checkpoints, training, log."""
    what: str
    """Event, record or file."""
    recorded: str
    replayed: str

    def __str__(self) -> str:
        return f"{self.stage}: {self.what}: recorded {self.recorded}, replayed {self.replayed}"


@dataclass(slots=True)
class Report:
    """Counts of compared items, and the differences."""

    counts: dict[str, int] = field(default_factory=dict[str, int])
    differences: list[Difference] = field(default_factory=list[Difference])
    unended: str = ""
    """Possible reasons for the missing RunEnded of a run whose training is over; empty if it has ended or still trains.
    """
    error: RollstreamError | None = None
    """The error that left out the training, which was to be compared too."""

    @property
    def verdict(self) -> str:
        """`equal`, `NOT equal`, or, where nothing differs but nothing says that the run is whole, `not ended`."""
        return "NOT equal" if self.differences else "not ended" if self.unended else "equal"

    def count(self, what: str, number: int = 1) -> None:
        """Add to the number of things of one name that were compared."""
        self.counts[what] = self.counts.get(what, 0) + number

    def add(self, other: "Report") -> None:
        """Add the result of another replay."""
        for what, number in other.counts.items():
            self.count(what, number)
        self.differences += other.differences
        self.unended = self.unended or other.unended

    def differ(self, stage: str, what: str, recorded: str, replayed: str) -> None:
        """Note a difference."""
        self.differences.append(Difference(stage, what, recorded, replayed))


def compare_log(events: RunEvents, report: Report) -> None:
    """Note records that are not events and have no dead letter; count those that repeat an id with other content.

    The first record of an id counts for every reader, so a later one is not a difference.
    """
    if events.twice:
        report.count("ignored records that repeat an id with other content", len(events.twice))
    for what in events.damaged:
        report.differ("log", what, "an event", "none")


def first_field(recorded: Event, replayed: Event) -> tuple[str, str, str]:
    """Path of the first field of two events' contents that differs, and both values; an empty path if none does."""
    ours, theirs = _content(recorded), _content(replayed)
    return _first(ours, theirs, "") or ("", "", "")


def _content(event: Event) -> dict[str, Any]:
    return event.model_dump(mode="python", exclude=set(event.UNDIGESTED))


def _first(one: Any, other: Any, path: str) -> tuple[str, str, str] | None:
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [*one, *(key for key in other if key not in one)]
        pairs = [(f"{path}.{key}" if path else str(key), one.get(key), other.get(key)) for key in keys]
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) != len(other):
            return path, f"{len(one)} entries", f"{len(other)} entries"
        pairs = [(f"{path}.{index}", *both) for index, both in enumerate(zip(one, other, strict=True))]
    else:
        return None if one == other else (path, _short(one), _short(other))
    return next((found for name, mine, theirs in pairs if (found := _first(mine, theirs, name))), None)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
