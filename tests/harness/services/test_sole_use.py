"""Two sets of services in one consumer group, or of one name: refused by name; a killed one is waited for."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from rollstream.eventlog.kafka.client import GroupMember
from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.harness.services import sole_use
from rollstream.harness.services.serving import run_until_stopped
from rollstream.harness.services.sole_use import check_sole_use, sole_name, sole_output
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.kafka import KafkaSettings
from rollstream.schemas.services import MetricsSettings, ServiceSettings

LOCATION = "trajectory_builders.b.kafka.group_prefix"


class Leaving:
    """A group whose members leave one after the other, one at each look."""

    def __init__(self, *members: str) -> None:
        self.members = [GroupMember(name, "10.0.0.1") for name in members]

    async def group_members(self, group: str) -> list[GroupMember]:
        found = list(self.members)
        self.members = self.members[1:]
        return found


def test_members_of_a_killed_run_are_waited_for_with_one_message() -> None:
    lines: list[str] = []
    groups = Leaving("producers-1", "producers-2")
    asyncio.run(check_sole_use(groups, ["g-producers"], LOCATION, session_timeout_s=600.0, notify=lines.append))
    (line,) = lines
    assert "producers-1 at 10.0.0.1, producers-2 at 10.0.0.1 to leave consumer group g-producers" in line


@pytest.mark.kafka
def test_a_group_that_others_are_in_is_refused_with_their_names_and_the_remedy(kafka: KafkaSettings) -> None:
    async def scenario() -> None:
        log, other = KafkaLog(kafka, client_id="finetune"), KafkaLog(kafka, client_id="producers-1")
        await log.start()
        await other.start()
        await log.ensure_topics(num_partitions=6)
        group, lines = f"g-{uuid.uuid4().hex[:8]}", list[str]()
        await check_sole_use(log, [group], LOCATION, session_timeout_s=600.0, notify=lines.append)
        assert not lines
        member = await other.group_reader(group, ["tasks"])
        while not await log.group_members(group):
            await member.poll(timeout_s=0.1)
        with pytest.raises(
            ConfigError, match=rf"{LOCATION}: consumer group {group} is in use .*producers-1 at .*; stop"
        ):
            await check_sole_use(log, [group], LOCATION, session_timeout_s=-sole_use.MARGIN_S, notify=lines.append)
        checking = asyncio.create_task(
            check_sole_use(log, [group], LOCATION, session_timeout_s=600.0, notify=lines.append)
        )
        while not lines:
            await asyncio.sleep(0.01)
        await member.close()
        await checking
        await other.close()
        await log.close()

    asyncio.run(scenario())


def test_a_service_whose_name_another_process_has_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sole_use, "PATIENCE_S", 0.0)
    settings = MetricsSettings(
        name="metrics-1", bootstrap_servers="127.0.0.1:1", workspace=tmp_path, artifact_uri="a", num_partitions=1
    )

    async def work(settings: ServiceSettings) -> None:
        raise AssertionError("it began")

    async def scenario() -> None:
        async with sole_name(tmp_path, "metrics-1"), sole_name(tmp_path, "metrics-2"):
            await run_until_stopped("metrics", settings, work)

    message = f"another process named metrics-1 serves workspace {tmp_path}; stop it, or give --name; .*: external"
    with pytest.raises(ConfigError, match=message):
        asyncio.run(scenario())
    assert list((tmp_path / "health").iterdir()) == []


def test_a_name_that_a_dying_process_has_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sole_use, "LOOK_EVERY_S", 0.01)
    order: list[str] = []

    async def hold(text: str) -> None:
        async with sole_name(tmp_path, "learner-1"):
            order.append(f"{text} begins")
            await asyncio.sleep(0.05)
            order.append(f"{text} ends")

    async def scenario() -> None:
        await asyncio.gather(hold("first"), hold("second"))

    asyncio.run(scenario())
    assert order == ["first begins", "first ends", "second begins", "second ends"]


def test_a_folder_of_another_runs_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sole_use, "PATIENCE_S", 0.0)
    monkeypatch.chdir(tmp_path)

    async def scenario() -> None:
        one, other, same = (sole_output(path) for path in (Path("a"), Path("new/output"), tmp_path / "new" / "output"))
        async with one, other, same:
            raise AssertionError("it began")

    with pytest.raises(ConfigError, match=r"output_dir: .*/output is in use by another run, of this or .*; set"):
        asyncio.run(scenario())
    assert list((tmp_path / "new" / "output").iterdir()) == []


@pytest.mark.parametrize(("number", "is_refused"), [(errno.EOPNOTSUPP, False), (errno.EIO, True)])
def test_a_folder_on_a_file_system_without_locks_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int, *, is_refused: bool
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(sole_use.fcntl, "flock", flock)

    async def scenario() -> None:
        async with sole_output(tmp_path):
            pass

    if is_refused:
        with pytest.raises(ConfigError, match=r"finetuning.output_dir: .*\.run\.lock cannot be locked: .*; choose"):
            asyncio.run(scenario())
    else:
        asyncio.run(scenario())
        assert "has no locks" in caplog.text
        assert [*tmp_path.iterdir()] == []


FORKS = """
import asyncio, os, pathlib, sys, time
from rollstream.harness.services.sole_use import sole_name

async def main():
    async with sole_name(pathlib.Path(sys.argv[1]), "producers-1"):
        begun, told = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(told, b"x")  # what runs after a fork has run
            time.sleep(60)
        else:
            os.read(begun, 1)
            pathlib.Path(sys.argv[2]).write_text(str(child))
        os._exit(1)

asyncio.run(main())
"""


def test_a_process_that_users_code_forked_keeps_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sole_use, "PATIENCE_S", 0.0)
    left = tmp_path / "child"
    subprocess.run([sys.executable, "-c", FORKS, str(tmp_path), str(left)], check=False)

    async def again() -> None:
        async with sole_name(tmp_path, "producers-1"):
            pass

    try:
        assert (tmp_path / "health" / "producers-1.lock").exists()
        asyncio.run(again())
    finally:
        os.kill(int(left.read_text()), signal.SIGKILL)
