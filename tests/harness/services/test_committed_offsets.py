"""Committed offsets that Kafka has dropped are found when a service starts."""

import asyncio
from pathlib import Path

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.protocol.admin import DeleteGroupsRequest

from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.eventlog.kafka.security import client_options
from rollstream.eventlog.log import TopicPartition
from rollstream.harness.services.committed_offsets import check_committed, remember_committed
from rollstream.schemas.errors import TruncatedError
from rollstream.schemas.kafka import KafkaSettings

STEPS, GROUPS = TopicPartition("steps", 0), TopicPartition("groups", 0)


def test_a_lost_offset_is_reported_with_partition_and_remedy(tmp_path: Path) -> None:
    check_committed(tmp_path, "c", "rollstream-processors", {})
    check_committed(tmp_path, "c", "rollstream-processors", {STEPS: 7, GROUPS: 3})
    remember_committed(tmp_path, "c", "rollstream-processors", {STEPS: 9, GROUPS: 3})
    check_committed(tmp_path, "c", "rollstream-producers", {})
    check_committed(tmp_path, "other", "rollstream-processors", {})
    with pytest.raises(TruncatedError, match=r"rollstream-processors has lost .* set topic partition steps/0 to 9 by"):
        check_committed(tmp_path, "c", "rollstream-processors", {GROUPS: 3})
    with pytest.raises(TruncatedError, match="groups/0 to 3, steps/0 to 9"):
        check_committed(tmp_path, "c", "rollstream-processors", {})


def test_an_offset_missing_for_a_moment_is_still_remembered(tmp_path: Path) -> None:
    check_committed(tmp_path, "c", "g", {STEPS: 7, GROUPS: 3})
    remember_committed(tmp_path, "c", "g", {})
    remember_committed(tmp_path, "c", "g", {STEPS: 8})
    with pytest.raises(TruncatedError, match="groups/0 to 3, steps/0 to 8"):
        check_committed(tmp_path, "c", "g", {})


def test_offsets_that_could_not_be_written_are_remembered_at_the_next_commit(tmp_path: Path) -> None:
    lock = tmp_path / ".committed.json.lock"
    lock.mkdir()
    remember_committed(tmp_path, "c", "g", {STEPS: 7})
    check_committed(tmp_path, "c", "g", {})
    lock.rmdir()
    remember_committed(tmp_path, "c", "g", {STEPS: 7})
    with pytest.raises(TruncatedError, match="steps/0 to 7"):
        check_committed(tmp_path, "c", "g", {})


@pytest.mark.kafka
def test_offsets_that_a_broker_dropped_are_missing(kafka: KafkaSettings, tmp_path: Path) -> None:
    async def scenario() -> None:
        log = KafkaLog(kafka)
        await log.start()
        await log.ensure_topics(num_partitions=6)
        admin = AIOKafkaAdminClient(**client_options(kafka))
        await admin.start()
        try:
            await log.send_raw("steps", key=b"k", value=b"v", partition=0)
            reader = await log.group_reader("dropped", ["steps"])
            while not (records := await reader.poll(timeout_s=1.0)):
                continue
            await reader.commit({TopicPartition("steps", records[0].partition): records[0].offset + 1})
            await reader.close()
            check_committed(tmp_path, "c", "dropped", await log.committed_offsets("dropped"))
            await admin._send_request(DeleteGroupsRequest(["dropped"]), await admin.find_coordinator("dropped"))
            with pytest.raises(TruncatedError, match="dropped has lost its committed offsets"):
                check_committed(tmp_path, "c", "dropped", await log.committed_offsets("dropped"))
        finally:
            await admin.close()
            await log.close()

    asyncio.run(scenario())
