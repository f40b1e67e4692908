"""The Faust host on a real broker: metadata beside `groups`' offset, and what goes on while it is folded again."""

import asyncio
import contextlib

import pytest
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.admin import AIOKafkaAdminClient

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.blocking_calls import Retry
from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.eventlog.kafka.security import client_options
from rollstream.eventlog.log import TopicPartition, partition_of
from rollstream.processors.assemble.shell import AssembleShell
from rollstream.processors.curate.low_water import beginning_of
from rollstream.processors.curate.shell import CurateShell
from rollstream.processors.host.host import create_host
from rollstream.schemas.events import BatchPlanned, GroupClosed, RunEnded
from rollstream.schemas.topics import TOPICS
from tests.processors.host.groups_rig import run_events
from tests.rigs.steps_rig import attempt, started

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(180)]
PARTITIONS = 4
RUN = "held"
GROUPS = KafkaPartition(TOPICS["groups"].name, 0)


@contextlib.asynccontextmanager
async def hosting(log, kafka, store, app_id):
    """A host of both folds, its shells beside it."""
    shells = [
        AssembleShell(log, store, service="p"),
        CurateShell(log, store, service="p", retry=Retry(first_wait_s=0.05, max_wait_s=0.05)),
    ]
    host = create_host(kafka, shells, client_id="p", app_id=app_id, session_timeout_s=6)
    await host.start()
    try:
        yield host, shells[1]
    finally:
        await host.stop()


async def wait_until(holds):
    async with asyncio.timeout(60):
        while not await holds():
            await asyncio.sleep(0.05)


async def events(log, topic, kind, start=0):
    """Events of a kind in the one partition of a topic."""
    end = (await log.end_offsets(topic))[0]
    reader, found = await log.reader({TopicPartition(topic, 0): start}), []
    while reader.position(TopicPartition(topic, 0)) < end:
        found += [codec.decode(record).event for record in await reader.poll(timeout_s=1)]
    await reader.close()
    return [event for event in found if isinstance(event, kind)]


async def close_group(log, index):
    for event in [started(index, run=RUN), *attempt(index, 0, run=RUN), *attempt(index, 1, reward=2.0, run=RUN)]:
        await log.send(event, partition=partition_of(event.key, PARTITIONS))


def test_assembly_goes_on_while_curation_waits_to_be_folded_again_and_then_it_goes_on_too(own_broker, tmp_path):
    async def go():
        log, store = KafkaLog(own_broker), ArtifactStore(str(tmp_path / "artifacts"))
        await log.start()
        await log.ensure_topics(num_partitions=PARTITIONS)
        admin = AIOKafkaAdminClient(**client_options(own_broker))
        await admin.start()
        before = (await log.end_offsets("groups"))[0]
        await log.send_all(run_events(store, run=RUN))

        async def committed():
            found = await admin.list_consumer_group_offsets("held", partitions=[GROUPS])
            return found[GROUPS].metadata if found[GROUPS].offset == before + 3 else ""

        async with hosting(log, own_broker, store, "held"):
            await wait_until(committed)
        beginning = beginning_of(await committed(), before + 3)
        assert beginning is not None
        assert (beginning.offset, list(beginning.live or ())) == (before, [RUN])

        away = (tmp_path / "artifacts").rename(tmp_path / "away")
        async with hosting(log, own_broker, store, "held") as (host, curating):

            async def is_waiting():
                return curating.is_waiting(0)

            async def has_closed():
                return len(await events(log, "groups", GroupClosed, before)) == 2

            async def has_planned():
                return [one for one in await events(log, "batches", BatchPlanned) if one.run_id == RUN]

            await wait_until(is_waiting)
            for index in range(2):
                await close_group(log, index)
            await wait_until(has_closed)
            assert curating.is_waiting(0), "assembly went on, curation did not"
            assert not host.failed.done()
            away.rename(tmp_path / "artifacts")
            await wait_until(has_planned)
            (planned,) = await has_planned()
            assert len(planned.members) == 4
            assert curating.progress(0) == 3 + 2, "the run's records and nothing else was folded"
        await log.send(RunEnded(run_id=RUN, time_ms=9, cause="completed"))
        await admin.close()
        await log.close()

    asyncio.run(go())
