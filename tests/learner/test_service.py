"""The learner as a service on a real broker."""

import asyncio
import contextlib
from typing import Any

import pytest

from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.learner.service import serve
from rollstream.schemas.events import JobSucceeded, WeightsPublished
from rollstream.schemas.kafka import KafkaSettings
from rollstream.schemas.services import LearnerSettings


@pytest.mark.kafka
def test_a_service_trains_a_job_on_a_real_broker(lab: Any, kafka: KafkaSettings) -> None:
    async def scenario() -> None:
        log = KafkaLog(kafka, client_id="lab")
        await log.start()
        await log.ensure_topics(num_partitions=6)
        lab.log = log
        settings = LearnerSettings(
            bootstrap_servers=kafka.bootstrap_servers,
            kafka=kafka.section,
            artifact_uri=lab.artifacts.uri,
            workspace=lab.folder,
            name="learner-0",
            num_partitions=6,
            model_groups=("run-1/main",),
            threads=1,
            allow=(f"model:{lab.model}",),
        )
        job = await lab.submit()
        service = asyncio.create_task(serve(settings))
        await lab.plan(job)
        async with asyncio.timeout(60):
            while not service.done() and not any(
                e.run_id == job.run_id for e in await lab.events("jobs", JobSucceeded)
            ):
                await asyncio.sleep(0.05)
        service.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await service
        published = [p for p in await lab.events("weights", WeightsPublished) if p.model_group == job.model_group]
        assert [p.version for p in published] == [0, 1, 2, 3]
        await log.close()

    asyncio.run(scenario())
