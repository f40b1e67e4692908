"""Checks around a run: space on the disk, ports of its services."""

import io
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from rollstream.eventlog.disk_space import disk_of, disks_of
from rollstream.harness.config import file as config_file
from rollstream.harness.runs import preflight
from rollstream.harness.runs.display import Display
from rollstream.harness.runs.progress import Progress
from rollstream.harness.runs.run_context import RunRequest, check_run, environment_of_services, has_free_space, held
from rollstream.metrics.projection.connection import MetricsFileError, metrics_file
from rollstream.metrics.projection.database import Database
from rollstream.schemas.errors import ConfigError


def test_a_full_disk_pauses_the_run_with_one_message_until_there_is_room(tmp_path: Path) -> None:
    shown = io.StringIO()
    display = Display(shown, clock=lambda: 1.0)
    paused = f"paused: less than 200% of the disk of {tmp_path} is free; free some space"
    assert not has_free_space([tmp_path], display, 2.0)
    assert not has_free_space([tmp_path], display, 2.0)
    assert shown.getvalue() == f"{paused}\n"
    display.update(Progress("r"))
    assert has_free_space([tmp_path], display, 0.0)
    display.finish(Progress("r"))
    assert shown.getvalue().splitlines() == [paused, "waiting for the log"]


@pytest.mark.slow
def test_a_disk_of_artifacts_or_output_alone_pauses_the_run(tmp_path: Path, small_disk: Callable[[int], Any]) -> None:
    shown = io.StringIO()
    display = Display(shown, clock=lambda: 1.0)
    disk = small_disk(1)
    folders = [tmp_path / "workspace", disk.folder / "artifacts" / "not made yet"]
    assert has_free_space(folders, display, 0.001)
    disk.fill()
    assert not has_free_space(folders, display, 0.001)
    assert shown.getvalue() == f"paused: less than 0% of the disk of {folders[1]} is free; free some space\n"
    disk.free()
    assert has_free_space(folders, display, 0.001)


def test_a_disk_is_looked_at_once_however_many_folders_lie_on_it(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b" / "c"]
    assert [disk.folder for disk in disks_of(folders)] == [tmp_path / "a"]
    assert disk_of(tmp_path / "b").total_bytes == disk_of(tmp_path).total_bytes > 0


@pytest.mark.parametrize(
    ("section", "block", "own", "expected"),
    [
        ("trainer_adapters", {}, {}, None),
        ("trainer_adapters", {"max_staleness": 1}, {}, "PASSIVE"),
        ("trajectory_builders", {"num_producers": 2}, {}, "PASSIVE"),
        ("trainer_adapters", {"max_staleness": 1}, {"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"),
    ],
)
def test_threads_of_services_that_compute_at_the_same_time_do_not_spin(
    written: dict[str, Any], section: str, block: dict[str, Any], own: dict[str, str], expected: str | None
) -> None:
    next(iter(written[section].values())).update(block)
    found = environment_of_services(config_file.resolve(written).config, {"PATH": "/bin", **own})
    assert found.get("OMP_WAIT_POLICY") == expected
    assert found["PATH"] == "/bin"


@contextmanager
def port_after_a_free_one() -> Iterator[int]:
    """A port that is taken meanwhile; the one before it is free."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as taken, suppress(OSError):
            port = taken.getsockname()[1]
            socket.create_server(("127.0.0.1", port - 1)).close()
            yield port
            return


def test_a_port_that_a_gateway_cannot_have_is_found_before_the_run(written: dict[str, Any], tmp_path: Path) -> None:
    written["trajectory_builders"]["b"]["engine"] = {"kind": "scripted"}
    examples = tmp_path / "examples.jsonl"
    examples.write_text('{"id": "x", "question": "1+1", "secret": 2}\n')
    written["eval"] = {"general": {"dataset": {"_type": "jsonl", "file_path": str(examples)}}}
    with port_after_a_free_one() as port:
        written["trajectory_builders"]["b"] |= {"num_producers": 2, "gateway": {"port": port - 1}}
        request = RunRequest(config_file.resolve(written), tmp_path / "workspace", "refused")
        reported = rf"trajectory_builders\.b\.gateway\.port: producers-2: port {port} of 127\.0\.0\.1 cannot be used"
        with pytest.raises(ConfigError, match=reported), held(request, Display(io.StringIO())):
            raise AssertionError("it began")


def test_an_invalid_run_id_is_refused_without_a_log(written: dict[str, Any], tmp_path: Path) -> None:
    request = RunRequest(config_file.resolve(written), tmp_path / "workspace", "refused", run_id="../x")
    with pytest.raises(ConfigError, match=r"--run_id \.\./x is not valid"):
        check_run(request)


def test_metrics_of_another_cluster_are_named_before_the_run(written: dict[str, Any], tmp_path: Path) -> None:
    config, database = config_file.resolve(written).config, Database(metrics_file(tmp_path))
    database.claim_cluster("one")
    database.close()
    preflight.check_metrics(config, tmp_path, "one")
    with pytest.raises(MetricsFileError, match="was made from cluster one, not from two; move it away"):
        preflight.check_metrics(config, tmp_path, "two")
