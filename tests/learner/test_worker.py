"""A learner from submitted job to succeeded job, on a log in memory."""

import asyncio
from typing import Any

from rollstream.schemas.events import (
    JobProgressed,
    JobSucceeded,
    LearnerClaimed,
    StepTrained,
    WeightsPublished,
)


def test_a_job_is_trained_from_the_base_version_to_its_last(lab: Any) -> None:
    async def scenario() -> None:
        job = await lab.submit()
        await lab.plan(job)
        await lab.work(lab.has(JobSucceeded))
        published = await lab.events("weights", WeightsPublished)
        steps = await lab.events("weights", StepTrained)
        assert [(p.version, p.parent) for p in published] == [(0, None), (1, 0), (2, 1), (3, 2)]
        assert len({p.weights_sha256 for p in published}) == 4
        assert [s.weights_sha256 for s in steps] == [p.weights_sha256 for p in published[1:]]
        assert all(p.weights_sha256 == p.artifact.sha256 for p in published)
        assert (await lab.events("weights", LearnerClaimed))[0].term == 1
        assert [p.percent for p in await lab.events("jobs", JobProgressed)][-1] == 100
        (end,) = await lab.events("jobs", JobSucceeded)
        assert end.final_version == 3
        metrics = steps[0].metrics
        assert metrics["staleness/max"] == 1
        assert metrics["policy/entropy"] > 3
        assert 0 < metrics["policy/ess"] <= 1
        phases = {"fetch", "collate", "forward_backward", "optimizer"}
        assert phases | {"wait", "hold", "hash", "checkpoint", "publish"} == set(steps[-1].seconds)
        assert phases | {"wait", "hold"} == set(steps[1].seconds)  # its version is written while the next is trained
        for version in published:
            lab.artifacts.fetch(version.artifact)

    asyncio.run(scenario())
