"""Records that a log has lost: detected by the ends that the metrics have seen, and by the offsets that partitions
begin at.
"""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollstream.eventlog.kafka.topic_ids import check_topics
from rollstream.eventlog.log import TopicPartition
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.harness.services.lost_records import check_ends, removed
from rollstream.metrics.projection.connection import metrics_file
from rollstream.metrics.projection.projector import project_to_end
from rollstream.replay.whole import check_runs
from rollstream.schemas.errors import TruncatedError
from rollstream.schemas.events import RunEnded


def workspace_of(log: MemoryLog, folder: Path, *clusters: str) -> None:
    """A workspace whose metrics have read the whole log."""
    path = metrics_file(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    asyncio.run(project_to_end(log, path))
    for cluster in clusters or (asyncio.run(log.cluster_id()),):
        check_topics(folder, cluster, {"groups": "id"})


def log_of_runs(count: int) -> MemoryLog:
    log = MemoryLog(num_partitions=2)
    for number in range(count):
        asyncio.run(log.send(RunEnded(run_id=f"r{number}", time_ms=1, cause="stopped")))
    return log


def test_a_log_that_was_longer_is_named_by_topic_partition_and_range(tmp_path: Path) -> None:
    workspace_of(log_of_runs(5), tmp_path)
    asyncio.run(check_ends(log_of_runs(5), tmp_path, pytest.fail))
    with pytest.raises(
        TruncatedError,
        match="offset 5 of topic groups partition 0 is not kept: it holds 0 to 2; the topic was truncated",
    ):
        asyncio.run(check_ends(log_of_runs(3), tmp_path, pytest.fail))


@pytest.mark.parametrize("clusters", [("other",), ("memory", "other")])
def test_metrics_of_another_cluster_are_ignored(tmp_path: Path, clusters: Any) -> None:
    workspace_of(log_of_runs(5), tmp_path, *clusters)
    asyncio.run(check_ends(log_of_runs(3), tmp_path, pytest.fail))


def test_without_metrics_lost_records_are_found_by_the_runs_themselves(tmp_path: Path) -> None:
    asyncio.run(check_ends(log_of_runs(3), tmp_path / "none", pytest.fail))
    found = "run_started:r0, named by run_ended:r0, is missing in topic groups partition 0 .it holds offsets 0 to 2"
    with pytest.raises(TruncatedError, match=found):
        asyncio.run(check_runs(log_of_runs(3)))


@pytest.mark.slow
def test_metrics_that_cannot_be_queried_are_a_warning(tmp_path: Path) -> None:
    workspace_of(log_of_runs(5), tmp_path)
    code = "import duckdb, sys; held = duckdb.connect(sys.argv[1]); print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(metrics_file(tmp_path))]
    warned: list[str] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        asyncio.run(check_ends(log_of_runs(3), tmp_path, warned.append))
    assert len(warned) == 1
    assert "because the metrics cannot be queried: the metrics file" in warned[0]
    assert f"in use by another process (PID {holder.pid})" in warned[0]


def test_records_removed_by_retention_are_one_line_per_partition() -> None:
    log = log_of_runs(5)
    assert asyncio.run(removed(log)) == []
    log.truncate(TopicPartition("groups", 0), 2)
    assert asyncio.run(removed(log)) == ["topic groups partition 0 no longer has records before offset 2"]
