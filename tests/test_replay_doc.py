"""docs/replay.md has a row for every field of every event."""

import re
from pathlib import Path

from rollstream.schemas import events
from rollstream.schemas.base import Event

PAGE = Path(__file__).parent.parent / "docs" / "replay.md"
OF_ALL = {"run_id", "kind", "v", "time_ms"}


def documented() -> dict[str, set[str]]:
    """Fields by event, as the table has them."""
    found: dict[str, set[str]] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")]
        if line.startswith("| ") and len(cells) == 3 and cells[0] not in ("event", "---"):
            found.setdefault(cells[0], set()).update(re.findall(r"`(\w+)`", cells[1]))
    return found


def test_every_field_of_every_event_is_documented() -> None:
    kinds = [kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, Event)]
    written = {kind.__name__: set(kind.model_fields) - OF_ALL for kind in kinds if kind is not Event}
    rows = documented()
    assert rows.pop("all") == OF_ALL
    assert {name: fields for name, fields in rows.items() if fields} == {
        name: fields for name, fields in written.items() if fields
    }
    assert rows.keys() == written.keys()
