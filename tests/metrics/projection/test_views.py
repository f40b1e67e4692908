"""Views of single kinds: ages of tokens, dead letters, odd timestamps, and attempts without an end."""

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstream.eventlog.dead_letters import LINES, send_dead_letter
from rollstream.eventlog.log import Record
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.learner.algorithms import off_policy
from rollstream.metrics.projection.connection import connect
from rollstream.metrics.projection.projector import project_to_end
from rollstream.schemas import events
from rollstream.schemas.base import Event
from rollstream.schemas.errors import DecodeError
from tests.metrics.conftest import ask, empty_file


def projected(found: Iterable[Event], folder: Path) -> Path:
    log = MemoryLog(num_partitions=2)
    asyncio.run(log.send_all(list(found)))
    folder.mkdir(exist_ok=True)
    path = empty_file(folder)
    asyncio.run(project_to_end(log, path))
    return path


def test_bad_lines_of_two_ingested_files_are_letters_of_their_own_and_of_no_run(tmp_path: Path) -> None:
    log = MemoryLog(num_partitions=2)

    async def fill() -> None:
        for file in ("data/one.jsonl", "data/two.jsonl", "data/two.jsonl"):
            line = Record(LINES, 0, 20, file.encode(), b"x", (), 0)
            error = DecodeError(f"{file} line 20: not a JSON object")
            await send_dead_letter(log, line, service="ingest", stage="line", error=error)

    asyncio.run(fill())
    path = empty_file(tmp_path)
    asyncio.run(project_to_end(log, path))
    found = ask(path, "SELECT run_id, key FROM dead_letters ORDER BY key")
    assert found == [(None, "data/one.jsonl"), (None, "data/two.jsonl")]


@pytest.mark.parametrize("timestamp_ms", [-(2**62), -1, 2**63 - 1])
def test_a_timestamp_that_no_clock_gives_fails_no_view(
    timestamp_ms: int, tmp_path: Path, synthetic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(time, "time_ns", lambda: timestamp_ms * 1_000_000)
        path = projected(synthetic.all_events(), tmp_path)
    assert ask(path, "SELECT started_at, seconds FROM runs") == [(None, None)]
    views = ask(path, "SELECT view_name FROM duckdb_views() WHERE NOT internal AND schema_name = 'main'")
    assert len(views) > 20
    for (view,) in views:
        ask(path, f"SELECT * FROM {view}")


def test_an_attempt_without_an_end_is_dead_once_its_group_or_run_is_over(tmp_path: Path, synthetic: Any) -> None:
    endless = [event for event in synthetic.all_events() if not isinstance(event, events.RolloutEnded)]
    open_ones = [event for event in endless if not isinstance(event, events.GroupClosed)]
    begun = [event for event in open_ones if not isinstance(event, events.RunEnded)]
    for found, state in ((begun, "running"), (open_ones, "dead"), (endless, "dead")):
        path = projected(found, tmp_path / str(len(found)))
        states = {one for (one,) in ask(path, "SELECT state FROM rollouts WHERE cause IS NULL")}
        assert states == {state}


def ages_in(path: Path, made: list[Any], counts: dict[str, float]) -> tuple[int, list[Any]]:
    """The newest version, and the rows of the view once its step has these metrics."""
    last = max(at for at, event in enumerate(made) if isinstance(event, events.StepTrained))
    changed = list(made)
    changed[last] = made[last].model_copy(update={"metrics": {"loss/total": 0.5, **counts}})
    log = MemoryLog(num_partitions=2)
    asyncio.run(log.send_all(changed))
    asyncio.run(project_to_end(log, path))
    columns = "version, min_versions_old, max_versions_old, num_tokens, share"
    with connect(path, read_only=True) as connection:
        return made[last].version, connection.execute(f"SELECT {columns} FROM token_staleness").fetchall()


def test_the_ages_of_a_steps_tokens_are_rows(tmp_path: Path, synthetic: Any) -> None:
    counts = off_policy.ages([(np.array([7, 7, 7, 6, 3, -1]), np.ones(6, np.bool_))], 7)
    version, rows = ages_in(tmp_path / "metrics.duckdb", list(synthetic.all_events()), counts)
    assert rows == [(version, 0, 0, 3, 0.6), (version, 1, 1, 1, 0.2), (version, 3, 4, 1, 0.2)]


def test_the_view_knows_every_age_that_is_counted(tmp_path: Path, synthetic: Any) -> None:
    counts = {off_policy.age_name(*bounds): at + 1.0 for at, bounds in enumerate(off_policy.AGES)}
    _, rows = ages_in(tmp_path / "metrics.duckdb", list(synthetic.all_events()), counts)
    assert [(row[1:3], row[3]) for row in rows] == [(bounds, at + 1) for at, bounds in enumerate(off_policy.AGES)]
