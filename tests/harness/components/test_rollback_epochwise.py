"""A rollback in an epochwise run: the trainer goes on with the version that has the old weights."""

import asyncio
from pathlib import Path
from typing import Any

from rollstream.schemas.events import BatchPlanned, JobSucceeded, RollbackRequested, TaskRequested
from tests.rigs.runs.epochwise_rig import EpochwiseRig, assert_every_attempt_has_one_outcome, conducted, configuration


def test_an_epochwise_run_goes_on_from_the_adopted_version(tmp_path: Path) -> None:
    async def roll_back(planned: Any) -> None:
        if planned.yields_version == 2:
            request = RollbackRequested(
                run_id="run-1",
                time_ms=1,
                job_id="run-1/rl",
                model_group="run-1/policy",
                version=1,
                after_version=2,
            )
            await rig.log.send(request)

    rig = EpochwiseRig(tmp_path, configuration(tmp_path, num_epochs=4), trains_slowly=roll_back)

    async def scenario() -> None:
        await conducted(rig)
        batches = await rig.events("batches", BatchPlanned)
        assert [batch.adopts for batch in batches].count(1) == 1
        versions = [batch.yields_version for batch in batches]
        assert versions == list(range(1, len(batches) + 1))
        (ended,) = await rig.events("jobs", JobSucceeded)
        assert ended.final_version == len(batches)
        assert {task.epoch for task in await rig.events("tasks", TaskRequested)} == {0, 1, 2, 3}
        await assert_every_attempt_has_one_outcome(rig)

    asyncio.run(scenario())
