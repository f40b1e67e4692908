"""Trains what a lab's log has recorded of a job once more, and holds it against the record."""

from typing import Any

from rollstream.eventlog import codec
from rollstream.learner.progress import LogState, Manifest, evolve
from rollstream.learner.retrain import RecordedJob, Retraining
from rollstream.schemas.events import BatchPlanned, JobSubmitted, StepTrained, WeightsPublished


async def steps_of(lab: Any) -> dict[int, StepTrained]:
    """Steps by version."""
    return {step.version: step for step in await lab.events("weights", StepTrained)}


async def assert_retrained(lab: Any, job: JobSubmitted, steps: dict[int, StepTrained], *, first: int = 1) -> None:
    """Trained again from the checkpoint before version `first`, every version is equal, bit by bit."""
    batches = [one for one in await lab.received("batches") if isinstance(one.event, BatchPlanned)]
    received = [one for one in batches if one.event.job_id == job.job_id]
    manifests = {one.event.index: Manifest(one.event, one.digest, one.position.offset) for one in received}
    base = next(one for one in await lab.events("weights", WeightsPublished) if one.version == job.base_version)
    state = LogState()
    for one in await lab.received("weights"):
        evolve(state, one)
    recorded = RecordedJob(job, base, manifests, steps, state.group(job.model_group).scores)
    again = Retraining(recorded, threads=1, permissions=lab.permissions)
    began = again.begin(lab.artifacts, lab.folder / "checkpoints", version=first - 1, until=max(steps))
    compared = [
        (codec.content_digest(before), codec.content_digest(after))
        async for before, after in again.steps(lab.log, until=max(steps))
    ]
    assert len(compared) == max(steps) - began
    assert all(before == after for before, after in compared)
