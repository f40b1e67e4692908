"""The view of how old a step's tokens were, from the metrics that the learner records."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np

from rollstream.eventlog.memory.log import MemoryLog
from rollstream.learner.algorithms import off_policy
from rollstream.metrics.projection.database import connect
from rollstream.metrics.projection.projector import project_to_end
from rollstream.schemas import events


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
