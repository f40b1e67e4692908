"""Replay of training: recorded manifests trained again, from the base version or a checkpoint. Publishes nothing."""

from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import EventLog
from rollstream.learner.checkpoint import CheckpointFolder
from rollstream.learner.fetching import check_members, fetch_records
from rollstream.learner.job_run import step_trained
from rollstream.learner.model import sha256_of
from rollstream.learner.trainer import Trainer
from rollstream.schemas.errors import ConfigError, DecodeError, ModelError
from rollstream.schemas.events import BatchPlanned, JobSubmitted, StepTrained, WeightsPublished


@dataclass(frozen=True, slots=True)
class RecordedJob:
    """A job as the log has it."""

    submitted: JobSubmitted
    base: WeightsPublished
    manifests: Mapping[int, BatchPlanned]
    """By index."""
    steps: Mapping[int, StepTrained]
    """By the version that they yielded."""


class Retraining:
    """A job's trainer, standing behind some version of it. Blocking but for the log."""

    def __init__(self, job: RecordedJob, *, threads: int | None) -> None:
        """`threads`: as many as the job was trained with. Raises ModelError, ConfigError."""
        self.job = job
        self.next_index = 0
        self._trainer = Trainer(job.submitted, threads=threads)

    def begin(self, artifacts: ArtifactStore, checkpoints: Path | None, *, version: int) -> int:
        """Stand at the newest version up to `version` that can be had; returns it.

        That is a checkpoint of the job, else its base version: a published artifact, or the model itself where the
        job began with that. Raises ArtifactError, and ModelError if the model is not what it was.
        """
        submitted, checkpoint = self.job.submitted, None
        if checkpoints is not None:
            folder = CheckpointFolder(checkpoints, submitted.model_group)
            checkpoint = folder.newest(job_id=submitted.job_id, max_version=version)
        if checkpoint is None or self._trainer.needs_reference:
            self._stand_at_base(artifacts)
        if checkpoint is None:
            return self.job.base.version
        self._trainer.restore(checkpoint)
        self.next_index = checkpoint.position.next_index
        return checkpoint.position.version

    def _stand_at_base(self, artifacts: ArtifactStore) -> None:
        submitted, base = self.job.submitted, self.job.base
        if base.batch_id is None and submitted.fork is None:
            weights, what = self._trainer.model.weights_bytes(), f"model {submitted.settings.model.path}"
            found = sha256_of(weights)
            if found != base.weights_sha256:
                raise ModelError(
                    f"{what} is not what job {submitted.job_id} began with: its weights "
                    f"hash to {found}, recorded is {base.weights_sha256}; restore the folder"
                )
        else:
            weights, what = artifacts.read(base.artifact), f"artifact {base.artifact.uri}"
            self._trainer.begin(weights, what)
        if self._trainer.needs_reference:
            self._trainer.refer_to(weights, what)

    async def steps(self, log: EventLog, *, until: int) -> AsyncIterator[tuple[StepTrained, StepTrained]]:
        """Train every manifest up to the one that yields version `until`; recorded and replayed step of each.

        Raises DecodeError if a manifest or a trajectory is not what it was, TruncatedError if one is gone.
        """
        while (planned := self.job.manifests.get(self.next_index)) is not None and planned.yields_version <= until:
            recorded = self.job.steps.get(planned.yields_version)
            if recorded is None:
                return
            if recorded.batch_id != planned.batch_id:
                raise DecodeError(
                    f"version {recorded.version} was trained on {recorded.batch_id}, manifest "
                    f"{planned.index} is {planned.batch_id}"
                )
            trajectories = check_members(planned, await fetch_records(log, planned))
            result = self._trainer.train(planned, trajectories)
            sha256 = sha256_of(self._trainer.model.weights_bytes())
            self.next_index += 1
            submitted = self.job.submitted
            yield recorded, step_trained(submitted, planned, result, sha256, term=recorded.term, seconds=result.seconds)


def threads_of(job: RecordedJob, versions: Collection[int]) -> int | None:
    """Threads that versions were trained with, None if nothing says. Raises ConfigError if they changed midway."""
    told = sorted({step.threads for version, step in job.steps.items() if version in versions and step.threads})
    if len(told) > 1:
        named = ", ".join(map(str, told))
        raise ConfigError(f"job {job.submitted.job_id} was trained with {named} threads in turn; give --steps A:B")
    return told[0] if told else job.submitted.settings.threads
