"""Views of epochs and validations in a log with several runs: of one run they read its rows alone, and show them."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollstream.eventlog.memory.log import MemoryLog
from rollstream.metrics.projection.projector import project_to_end
from rollstream.schemas import ids
from rollstream.schemas.base import Event
from rollstream.schemas.events import EpochSealed, GroupClosed
from tests.metrics.conftest import SyntheticRun, ask, empty_file

RUNS = ("demo-000001", "demo-000002", "demo-000003")
CLOSED = {"group_closed", "group_member"}
PARTS = CLOSED | {"epoch_started", "epoch_sealed", "batch_planned", "batch_member"}
"""Tables that grow with each epoch of each run."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Metrics of several runs: one is complete, one is validated and not sealed, one has an epoch without members."""
    first, second, third = (list(SyntheticRun(run_id=run_id).all_events()) for run_id in RUNS)
    second = [event for event in second if not isinstance(event, EpochSealed)]
    empty = {"members": (), "is_viable": False}
    for at, event in enumerate(third):
        if isinstance(event, GroupClosed) and event.epoch == 1:
            third[at] = event.model_copy(update=empty)
    last = [event for event in second if isinstance(event, GroupClosed)][-1]
    group = ids.validation_group_id(RUNS[1], "rl", 0, "aaaaaaaa", 0)
    members = [one.model_copy(update={"trajectory_id": f"{group}/m{one.member}/a0/agent"}) for one in last.members]
    played = {"group_id": group, "epoch": 0, "purpose": "validation", "members": tuple(members)}
    return projected(tmp_path, [*first, *second, *third, last.model_copy(update=played)])


def projected(folder: Path, found: list[Event]) -> Path:
    path = empty_file(folder)

    async def scenario() -> None:
        log = MemoryLog(num_partitions=2)
        await log.send_all(found)
        await project_to_end(log, path)

    asyncio.run(scenario())
    return path


def scans(plan: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Table and filters of each scan of a plan."""
    info = plan.get("extra_info", {})
    if "Table" in info:
        yield info["Table"].rpartition(".")[2], str(info.get("Filters", ""))
    for child in plan.get("children", ()):
        yield from scans(child)


@pytest.mark.parametrize(("view", "parts"), [("epochs", PARTS), ("epoch_summary", PARTS), ("validations", CLOSED)])
def test_a_query_for_one_run_reads_no_rows_of_others(file: Path, view: str, parts: set[str]) -> None:
    plan = ask(file, f"EXPLAIN (FORMAT json) SELECT * FROM {view} WHERE run_id = '{RUNS[1]}'")[0][1]
    found = [scan for one in json.loads(plan) for scan in scans(one) if scan[0] in parts]
    assert {table for table, _ in found} == parts
    assert [table for table, filters in found if RUNS[1] not in filters] == []


def test_epochs_of_several_runs_are_counted_apart(file: Path) -> None:
    columns = (
        "epoch, state, groups, trained_groups, round(avg_reward, 6), round(reward_std, 6), min_reward, max_reward, "
        "round(filtered_avg_reward, 6), zero_variance_groups, num_trajectories, num_tokens, num_batches"
    )
    # by hand: 3 groups of 4 with 10 tokens each, of rewards 0 and 0.5 (epoch 1: 0.6), of the last group all 0.5
    means, trained = (round(1 / 3, 6), round(1.1 / 3, 6)), (0.25, 0.3)
    deviations = tuple(
        round(((2 * (0.0 - mean) ** 2 + 2 * (high - mean) ** 2 + 2 * (0.5 - mean) ** 2) / 6) ** 0.5, 6)
        for mean, high in ((1 / 3, 0.5), (1.1 / 3, 0.6))
    )
    counts = (1, 12, 120, 1)
    expected: dict[str, list[tuple[Any, ...]]] = {
        run_id: [
            (epoch, state, 3, 2, means[epoch], deviations[epoch], 0.0, (0.5, 0.6)[epoch], trained[epoch], *counts)
            for epoch in range(2)
        ]
        for run_id, state in zip(RUNS, ("sealed", "running", "sealed"), strict=True)
    }
    expected[RUNS[2]][1] = (1, "sealed", 3, 2, means[1], None, None, None, trained[1], 1, 0, 0, 1)
    found = {
        run_id: ask(file, f"SELECT {columns} FROM epoch_summary WHERE run_id = '{run_id}' ORDER BY epoch")
        for run_id in RUNS
    }
    assert found == expected
    every = ask(file, f"SELECT {columns} FROM epoch_summary ORDER BY run_id, epoch")
    assert every == [row for run_id in RUNS for row in expected[run_id]]
