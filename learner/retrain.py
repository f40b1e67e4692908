"""Replay of training: recorded manifests trained again, from the base version or a checkpoint. Publishes nothing."""

import hashlib
import math
import os
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import ReadableLog
from rollstream.learner.checkpoints.checkpoint import Checkpoint, CheckpointFolder
from rollstream.learner.inbox import check_follows
from rollstream.learner.model.policy import published_sha256
from rollstream.learner.model.ranks import Ranks
from rollstream.learner.model.step import StepResult, adopted, device_name
from rollstream.learner.parallel.process_ranks import ProcessRanks
from rollstream.learner.progress import Manifest
from rollstream.learner.publisher import step_trained
from rollstream.learner.reading.members import check_members, fetch_records
from rollstream.learner.scoring.index import ScoreIndex
from rollstream.learner.scoring.scores import recorded_scores
from rollstream.learner.service import follow
from rollstream.learner.trainer import JobTrainer, drop
from rollstream.schemas.errors import ConfigError, DecodeError, ModelError
from rollstream.schemas.events import BatchPlanned, JobSubmitted, StepTrained, WeightsPublished
from rollstream.schemas.permissions import NOTHING, Permissions, named_by_algorithm, named_by_model


@dataclass(frozen=True, slots=True)
class RecordedJob:
    """A job as the log has it."""

    submitted: JobSubmitted
    base: WeightsPublished
    manifests: Mapping[int, Manifest]
    """Manifests by index."""
    steps: Mapping[int, StepTrained]
    """Steps by the version that they yielded."""
    scores: ScoreIndex = field(default_factory=ScoreIndex)
    """Scores of its model group."""


_WHOLE = "use a whole copy or export of the run"


class Retraining:
    """A job's trainer, standing behind some version of it. Blocking but for the log."""

    def __init__(
        self,
        job: RecordedJob,
        *,
        threads: int | None,
        permissions: Permissions = NOTHING,
        ranks: Ranks = Ranks(),  # noqa: B008 -- a process alone has no state
    ) -> None:
        """`threads`: for versions whose record does not say how many. `ranks`: the processes that train together.

        Raises ModelError, ConfigError (see `JobTrainer`).
        """
        self.job = job
        self.next_index = 0
        self._previous_sha256 = codec.EMPTY_SHA256
        self._ranks = ranks
        self._trainer = JobTrainer(job.submitted, threads=threads, permissions=permissions, ranks=ranks)
        self._returns = {one.planned.adopts for one in job.manifests.values() if one.planned.adopts is not None}
        """Versions that a manifest returns to."""

    def begin(
        self, artifacts: ArtifactStore, checkpoints: Path | None, *, version: int, until: float = math.inf
    ) -> int:
        """Load the newest version up to `version` from which all up to `until` can be trained; returns it.

        That is a checkpoint of the job, before every version that a rollback on the way returns to, else its base
        version: a published artifact, or the model itself where the job began with that. Raises ArtifactError, and
        ModelError if the model is not what it was.
        """
        checkpoint = None if checkpoints is None else self._checkpoint(checkpoints, version, until)
        if checkpoint is None or self._trainer.needs_reference:
            self._stand_at_base(artifacts)
        if checkpoint is None:
            return self.job.base.version
        self._trainer.resume(checkpoint)
        self.next_index = checkpoint.position.next_index
        self._previous_sha256 = checkpoint.position.previous_sha256
        return checkpoint.position.version

    def _checkpoint(self, checkpoints: Path, version: int, until: float) -> Checkpoint | None:
        """The newest checkpoint of recorded weights up to `version` after which no manifest up to `until` returns to
        before it.
        """
        folder = CheckpointFolder(checkpoints, self.job.submitted.model_group)
        while True:
            found = folder.newest(job_id=self.job.submitted.job_id, max_version=version, steps=self.job.steps)
            if found is None or (needed := self._needed(found.position.version, until)) == found.position.version:
                return found
            version = needed

    def _needed(self, version: int, until: float) -> int:
        """The version to begin at, at most `version`, to have all that manifests return to up to `until`."""
        for manifest in sorted(self.job.manifests.values(), key=lambda one: one.planned.index, reverse=True):
            planned = manifest.planned
            if planned.adopts is not None and version < planned.yields_version <= until:
                version = min(version, planned.adopts)
        return version

    def _stand_at_base(self, artifacts: ArtifactStore) -> None:
        submitted, base = self.job.submitted, self.job.base
        if base.batch_id is not None or submitted.fork is not None:
            self._trainer.stand_at(base, artifacts.read(base.artifact), f"artifact {base.artifact.uri}")
            return
        weights, what = self._trainer.model.weights_bytes(), f"model {submitted.settings.model.path}"
        found = hashlib.sha256(weights).hexdigest()
        if found != base.weights_sha256:
            raise ModelError(
                f"{what} is not what job {submitted.job_id} began with: its weights "
                f"hash to {found}, recorded is {base.weights_sha256}; {self._remedy()}"
            )
        if self._trainer.needs_reference:
            self._trainer.refer_to(weights, what)

    def _remedy(self) -> str:
        """Remedy for weights with another hash: with `dtype: auto`, the device decides in which type they are."""
        here = device_name(self._trainer.model.device)
        others = sorted({step.device for step in self.job.steps.values()} - {"", here})
        if others and self.job.submitted.settings.model.dtype == "auto":
            return f"replay it on {others[0]}, where it was trained (here: {here})"
        return "restore the folder"

    def close(self) -> None:
        """Let go of the model, also in the other processes."""
        drop(self.job.submitted, self._ranks)

    async def steps(self, log: ReadableLog, *, until: int) -> AsyncIterator[tuple[StepTrained, StepTrained]]:
        """Train every manifest up to the one that yields version `until`; recorded and replayed step of each.

        Raises DecodeError if a manifest or a trajectory is not what it was or does not follow the manifest before it,
        TruncatedError if one is gone.
        """
        while (manifest := self.job.manifests.get(self.next_index)) is not None:
            planned, submitted = manifest.planned, self.job.submitted
            if planned.yields_version > until:
                return
            check_follows(planned, submitted, self._previous_sha256)
            recorded = self.job.steps.get(planned.yields_version)
            if recorded is None:
                return
            if recorded.batch_id != planned.batch_id:
                raise DecodeError(
                    f"version {recorded.version} was trained on {recorded.batch_id}, manifest "
                    f"{planned.index} is {planned.batch_id}; {_WHOLE}"
                )
            if recorded.threads:  # they may have changed when the learner was started again
                self._trainer.use_threads(recorded.threads)
            self._hold_state(planned.trains_at_version, until)
            result = await self._applied(log, planned, recorded)
            sha256 = published_sha256(self._trainer.model)
            self.next_index, self._previous_sha256 = planned.index + 1, manifest.digest
            step = step_trained(submitted, manifest, result, sha256, term=recorded.term, seconds=result.seconds)
            if not recorded.manifest_sha256:  # recorded before steps named their manifest's digest
                step = step.model_copy(update={"manifest_sha256": ""})
            yield recorded, step

    def _hold_state(self, version: int, until: int) -> None:
        """Hold the state at `version` if a manifest up to `until` returns to it, and drop what none does any more."""
        if not self._returns:
            return
        ahead = {
            one.planned.adopts
            for one in self.job.manifests.values()
            if version < one.planned.yields_version <= until and one.planned.adopts is not None
        }
        self._trainer.hold_state(version, ahead)

    async def _applied(self, log: ReadableLog, planned: BatchPlanned, recorded: StepTrained) -> StepResult:
        if planned.adopts is None:
            trajectories = check_members(planned, await fetch_records(log, planned))
            asked = self._trainer.asked(planned, trajectories, self.job.base.weights_sha256)
            scores = await recorded_scores(log, self.job.scores, planned, asked)
            known = recorded.micro_batch_tokens
            return self._trainer.train(planned, trajectories, scores=scores, micro_batch_tokens=known)
        if not self._trainer.return_to(planned.adopts):
            raise DecodeError(
                f"manifest {planned.batch_id} adopts version {planned.adopts}, which no manifest yields; {_WHOLE}"
            )
        return adopted(self._trainer.model, {})


def take_part(ranks: ProcessRanks) -> None:
    """Train what the first process trains, until that ends. It has checked what the recorded jobs name."""

    def permitted(job: JobSubmitted) -> Permissions:
        names = named_by_model(job.settings.model.path) | named_by_algorithm(job.settings.algorithm.name)
        return Permissions.of(names, os.environ)

    disable_progress_bar()
    follow(ranks, threads=None, permitted=permitted)


def threads_of(job: RecordedJob) -> int | None:
    """Threads that the job began with, None if nothing says; `steps` takes those of each version."""
    counts = [step.threads for _, step in sorted(job.steps.items()) if step.threads]
    return counts[0] if counts else job.submitted.settings.threads


def check_recorded_ranks(job: RecordedJob, versions: Collection[int], *, first: int, num: int) -> None:
    """Raises ConfigError if not `num` processes trained one of the versions. `first`: the first one that is asked for.

    A rollback is as good with any number: it computes nothing.
    """
    trained = {
        version: step.ranks for version, step in job.steps.items() if version in versions and step.adopts is None
    }
    others = {version: ranks for version, ranks in trained.items() if ranks != num}
    if not others:
        return
    last = max(others)
    ranks = others[last]
    where, remedy = "", f"give --ranks {ranks}"
    if last < first:
        where = f"no checkpoint of version {last} or later is here to begin at before version {first}; "
        remedy = f"give --steps A:B with a checkpoint from {last} to A - 1"
    elif last < max(trained):
        remedy = f"give --steps A:B from {last + 1} on"
    elif len(set(trained.values())) > 1:
        remedy += " with --steps A:B for versions that as many trained"
    raise ConfigError(
        f"version {last} of job {job.submitted.job_id} was trained by {_processes(ranks)}; this replay trains in "
        f"{_processes(num)}, and bits are equal only for as many; {where}{remedy}, or leave --train out (--verify "
        "checks everything else)"
    )


def _processes(num: int) -> str:
    return "one process" if num == 1 else f"{num} processes together"
