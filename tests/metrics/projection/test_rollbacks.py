"""The view `rollbacks`: each adopted version with the request that asked for it, and requests that nothing answered."""

import asyncio
from pathlib import Path
from typing import Any

from rollstream.eventlog.memory.log import MemoryLog
from rollstream.metrics.projection.connection import connect
from rollstream.metrics.projection.projector import project_to_end
from rollstream.schemas import events
from rollstream.schemas.base import Event
from tests.metrics.conftest import empty_file

COMMON: dict[str, Any] = {"run_id": "r", "job_id": "r/rl", "model_group": "r/policy"}


def requested(version: int, after: int) -> Event:
    return events.RollbackRequested(**COMMON, time_ms=1, version=version, after_version=after, reason="worse")


def planned(index: int, adopts: int | None) -> Event:
    values = {"batch_id": f"r/rl/b{index:06d}", "epoch": 0, "index": index, "members": (), "seed": 0}
    digests = {"curriculum_sha256": "0" * 64, "previous_sha256": "0" * 64}
    versions = {"trains_at_version": index, "yields_version": index + 1, "adopts": adopts}
    return events.BatchPlanned.model_validate(COMMON | values | digests | versions | {"time_ms": 2})


def published(version: int, adopts: int | None, synthetic: Any) -> Event:
    changes = {"run_id": "r", "model_group": "r/policy", "version": version, "adopts": adopts}
    return synthetic.published(None, "rl", 1).model_copy(update=changes)


def test_every_request_and_every_rollback_is_one_row(tmp_path: Path, synthetic: Any) -> None:
    log = MemoryLog(num_partitions=2)
    reported = [
        requested(1, 3),
        planned(3, 1),
        published(4, 1, synthetic),
        requested(2, 3),  # from before that rollback
        requested(1, 5),
        planned(5, 1),
        planned(7, 6),  # the evaluation gate's
        requested(3, 8),
        requested(3, 8),
    ]
    asyncio.run(log.send_all(reported))
    path = empty_file(tmp_path)
    asyncio.run(project_to_end(log, path))
    with connect(path, read_only=True) as connection:
        rows = connection.execute("SELECT adopts, version, state, reason FROM rollbacks ORDER BY ALL").fetchall()
        adopted = connection.execute("SELECT version, adopts FROM weight_versions").fetchall()
        batches = connection.execute("SELECT version, adopts FROM batches ORDER BY version").fetchall()
    assert rows == [
        (1, 4, "published", "worse"),
        (1, 6, "planned", "worse"),
        (2, None, "superseded", "worse"),
        (3, None, "requested", "worse"),
        (6, 8, "planned", None),
    ]
    assert adopted == [(4, 1)]
    assert batches == [(4, 1), (6, 1), (8, 6)]


def test_a_request_that_nothing_answered_before_the_run_ended_is_ignored(tmp_path: Path) -> None:
    log = MemoryLog(num_partitions=2)
    asyncio.run(log.send_all([requested(1, 3), events.RunEnded(run_id="r", time_ms=9, cause="completed")]))
    path = empty_file(tmp_path)
    asyncio.run(project_to_end(log, path))
    with connect(path, read_only=True) as connection:
        assert connection.execute("SELECT adopts, state FROM rollbacks").fetchall() == [(1, "ignored")]


def judged(epoch: int, version: int, reward: float, good_version: int) -> Event:
    values = {"epoch": epoch, "version": version, "reward": reward, "num_groups": 2, "best_reward": 0.75}
    verdict = {"is_good": version == good_version, "good_version": good_version}
    return events.VersionJudged.model_validate(COMMON | values | verdict | {"time_ms": 2})


def test_a_candidate_has_its_judgement_and_what_replaced_it(tmp_path: Path) -> None:
    log = MemoryLog(num_partitions=2)
    asyncio.run(log.send_all([judged(0, 0, 0.75, 0), planned(0, None), judged(1, 1, 0.25, 0), planned(1, 0)]))
    path = empty_file(tmp_path)
    asyncio.run(project_to_end(log, path))
    with connect(path, read_only=True) as connection:
        rows = connection.execute(
            "SELECT version, reward, is_good, good_version, replaced_by FROM candidates"
        ).fetchall()
    assert rows == [(0, 0.75, True, 0, None), (1, 0.25, False, 0, 2)]
