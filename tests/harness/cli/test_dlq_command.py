"""`rollstream dlq` on a broker, as a user meets it: a process of its own for each command."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.broker.credentials import environment
from rollstream.eventlog.dead_letters import REDRIVEN_FROM, send_dead_letter
from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.eventlog.kafka.security import client_options
from rollstream.eventlog.log import Encoded, Position, Record, partition_of
from rollstream.schemas import ids
from rollstream.schemas.errors import DecodeError
from rollstream.schemas.events import RewardRecorded
from rollstream.schemas.kafka import KafkaSettings
from rollstream.schemas.topics import MIB, TOPICS

pytestmark = [pytest.mark.kafka, pytest.mark.slow]
RUN = ids.new_run_id("letters")
GROUP = ids.group_id(RUN, "rl", 0, 0)
OWN = partition_of(GROUP, 6)
LARGE = b"\x1b[31m" + b"\x00" * 10 * MIB


def good() -> Encoded:
    base = {"run_id": RUN, "time_ms": 1, "group_id": GROUP, "rollout_id": f"{GROUP}/m0/a0"}
    return codec.encode(RewardRecorded.model_validate(base | {"reward_index": 0, "name": "task", "value": 0.5}))


async def put(kafka: KafkaSettings, value: bytes) -> Record:
    """A record by a client that compresses before it measures."""
    producer = AIOKafkaProducer(**client_options(kafka), compression_type="gzip", max_request_size=20 * MIB)
    await producer.start()
    try:
        where = await producer.send_and_wait(TOPICS["steps"].name, value, key=GROUP.encode(), partition=OWN)
    finally:
        await producer.stop()
    return (await fetched(kafka, Position("steps", OWN, where.offset)))[0]


async def fetched(kafka: KafkaSettings, *positions: Position) -> list[Record]:
    log = KafkaLog(kafka)
    await log.start()
    try:
        return await log.fetch(positions)
    finally:
        await log.close()


async def add_dead_letter(kafka: KafkaSettings, artifacts: ArtifactStore) -> None:
    """Three letters: a record that is not JSON, one of 10 MB, and one that is whole."""
    log = KafkaLog(kafka)
    await log.start()
    try:
        await log.ensure_topics(num_partitions=6)
        for value in (b"{", LARGE, good().value):
            record = await put(kafka, value)
            assert record.value == value
            error = DecodeError("not UTF-8 JSON")
            await send_dead_letter(log, record, service="p", stage="assemble", error=error, artifacts=artifacts)
    finally:
        await log.close()


def test_letters_are_listed_shown_and_redriven(kafka: KafkaSettings, tmp_path: Path) -> None:
    def dlq(*arguments: str) -> subprocess.CompletedProcess[str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith("ROLLSTREAM_")}
        env |= environment(kafka)
        where = ["--bootstrap_servers", kafka.bootstrap_servers, "-w", str(tmp_path)]
        command = [sys.executable, "-m", "rollstream.harness.cli.main", "dlq", *arguments, *where]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)

    asyncio.run(add_dead_letter(kafka, ArtifactStore(str(tmp_path / "artifacts"))))
    listed = dlq("list", "--run", RUN, "--json")
    assert listed.returncode == 0, listed.stderr
    broken, large, whole = (one["number"] for one in json.loads(listed.stdout))
    output = dlq("list", "--run", RUN, "--limit", "2").stdout.splitlines()
    assert [line.split()[0] for line in output] == ["number", str(large), str(whole)]
    assert f"steps/{OWN}@" in output[1]
    assert dlq("list", "--run", "nobody").stdout == "no dead letters of run nobody\n"

    shown = dlq("show", str(large), "--limit", "8", "--raw", str(tmp_path / "raw")).stdout
    assert f"value ({len(LARGE)} bytes):\nhex 1b 5b 33 31 6d 00 00 00... ({len(LARGE) - 8} bytes more)" in shown
    assert "\x1b" not in shown
    assert "reason: rollstream.schemas.errors.DecodeError: not UTF-8 JSON" in shown
    assert (tmp_path / "raw").read_bytes() == LARGE

    for number in (broken, large):
        refused = dlq("redrive", str(whole), str(number))
        assert refused.returncode == 1
        assert refused.stderr.startswith(f"error: dead letter {number} still cannot be decoded: not UTF-8 JSON")
        assert len(refused.stderr.splitlines()) == 1
    sent = dlq("redrive", str(whole))
    assert sent.stdout.startswith(f"dead letter {whole}: sent to steps/{OWN}@"), sent.stderr
    offset = int(sent.stdout.strip().rpartition("@")[2])
    (record,) = asyncio.run(fetched(kafka, Position("steps", OWN, offset)))
    assert record.value == good().value
    assert dict(record.headers)[REDRIVEN_FROM] == f"dlq/0@{whole}".encode()
    again = dlq("redrive", str(whole))
    assert (again.returncode, f"dead letter {whole} was already redriven to steps/{OWN}@{offset}" in again.stderr) == (
        1,
        True,
    )
    (tmp_path / "value").write_bytes(good().value)
    corrected = dlq("redrive", str(broken), "--value", str(tmp_path / "value"))
    assert corrected.returncode == 0, corrected.stderr
    assert dlq("show", "999999").stderr.startswith("error: dead letter 999999 does not exist (topic dlq holds ")
    assert dlq("redrive", "1", "2", "--value", "x").stderr.startswith(
        "error: --value FILE replaces the value of one dead letter"
    )
    assert dlq("redrive", str(large), "--value", str(tmp_path / "none")).stderr.count("none") == 1
