"""Trackers of a run's file: services of their own, which the run does not need."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from rollstream.eventlog.broker.restarts import MAX_RESTARTS
from rollstream.harness.config import file as config_file
from rollstream.harness.config.checks import check_trackers
from rollstream.harness.config.jobs import RunLocation, services_of
from rollstream.harness.services.supervisor import MAX_OF_TRACKER, ChildSpec, LogRelay, Supervisor
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.kafka import KafkaSettings
from rollstream.schemas.services import TrackerServiceSettings
from tests.rigs.services.service_processes import spec

BOARDS = {"kind": "tensorboard", "log_dir": "boards"}


def resolved(written: dict[str, Any], *trackers: dict[str, Any], **builder: Any) -> Any:
    written["trainers"] = {name: {**block, "trackers": list(trackers)} for name, block in written["trainers"].items()}
    for block in written["trajectory_builders"].values():
        block.update(builder)
    return config_file.resolve(written).config


def test_each_tracker_is_a_service_of_the_run(written: dict[str, Any], tmp_path: Path) -> None:
    config = resolved(written, BOARDS, {"kind": "wandb", "project": "p"})
    location = RunLocation(KafkaSettings(bootstrap_servers="127.0.0.1:1"), "store", tmp_path)
    services = services_of(config, location, "run-1")
    found = [one for one in services.values() if isinstance(one, TrackerServiceSettings)]
    assert [(one.name, one.tracker.kind, one.runs) for one in found] == [
        ("tracker-1", "tensorboard", ("run-1",)),
        ("tracker-2", "wandb", ("run-1",)),
    ]
    names = list(services)
    assert names.index("tracker-1") > names.index("learner-1")
    assert names[-1] == "metrics-1"


def test_the_same_tracker_twice_is_refused(written: dict[str, Any]) -> None:
    config = resolved(written, BOARDS, {"kind": "wandb"}, {**BOARDS, "log_dir": str(Path("boards").absolute())})
    with pytest.raises(ConfigError, match=r"trackers\.2: is the same tracker as trainers\.\w+\.trackers\.0; remove"):
        check_trackers(config)


def test_with_external_services_trackers_are_only_mentioned(
    written: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    check_trackers(resolved(written, {"kind": "python:no_such.Thing"}, services="external", bootstrap_servers="a:1"))
    assert (
        "trackers: accepted, but ignored here (with external services start `rollstream serve tracker`)" in caplog.text
    )


def test_a_tracker_that_ends_again_and_again_fails_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    begun = tmp_path / "begun"
    command = spec("tracker-1", f"open({str(begun)!r}, 'a').write('x'); raise SystemExit('error: no board')").command

    async def scenario() -> None:
        child = ChildSpec("tracker-1", command, is_needed=False)
        supervisor = Supervisor([child], tmp_path, unneeded_backoff_s=0.01)
        supervisor.start()
        watching = asyncio.create_task(supervisor.watch())
        while (not begun.exists() or begun.stat().st_size <= MAX_RESTARTS + 1) and not watching.done():
            await asyncio.sleep(0.05)
        assert not watching.done()
        watching.cancel()
        await asyncio.wait({watching})
        await supervisor.stop()

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    warnings = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert [text for text in warnings if "error: no board" in text] == warnings
    assert len(warnings) == 1, "it is reported once"


def test_the_last_error_of_a_tracker_is_passed_on_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    line = "2026-01-01 00:00:00,000 ERROR rollstream.metrics: not all was sent"
    code = (
        f"import signal, sys, time; end = lambda *_: (print({line!r}, flush=True), sys.exit(0)); "
        "signal.signal(signal.SIGTERM, end); print('ready', flush=True); time.sleep(60)"
    )

    async def scenario() -> None:
        child = ChildSpec("tracker-1", spec("tracker-1", code).command, is_needed=False)
        supervisor = Supervisor([child], tmp_path)
        supervisor.start()
        log = tmp_path / "tracker-1.log"
        while not log.exists() or "ready" not in log.read_text():
            await asyncio.sleep(0.05)
        await supervisor.stop()

    with caplog.at_level(logging.ERROR):
        asyncio.run(scenario())
    assert "tracker-1: not all was sent" in caplog.text


def test_errors_of_a_tracker_leave_room_for_those_of_services(tmp_path: Path) -> None:
    relay = LogRelay(tmp_path)
    with (tmp_path / "tracker-1.log").open("a") as file:
        for number in range(100):
            file.write(f"2026-01-01 00:00:01,000 ERROR rollstream.metrics: request {number} failed\n")
    (tmp_path / "learner-1.log").write_text("2026-01-01 00:00:01,000 ERROR rollstream.learner: out of memory\n")
    found = relay.new_errors(["tracker-1", "learner-1"])
    assert len(found) == MAX_OF_TRACKER + 1
    assert found[-1] == "learner-1: out of memory"
