"""One job from its first manifest to its last: restores, trains, checkpoints, publishes. Blocking work runs aside."""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rollstream.eventlog import codec
from rollstream.eventlog.failpoints import failpoint
from rollstream.eventlog.log import EventLog
from rollstream.learner.checkpoint import Checkpoint, CheckpointFolder, CheckpointPosition
from rollstream.learner.fetching import check_members, fetch_records
from rollstream.learner.inbox import Inbox
from rollstream.learner.model import sha256_of
from rollstream.learner.progress import Manifest
from rollstream.learner.publisher import Publisher
from rollstream.learner.step import StepResult
from rollstream.learner.trainer import Trainer
from rollstream.schemas.errors import ConfigError, DecodeError, RollstreamError
from rollstream.schemas.events import BatchPlanned, JobSubmitted, JobSucceeded, StepTrained, WeightsPublished

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Workplace:
    """What all jobs of a learner share."""

    log: EventLog
    inbox: Inbox
    executor: ThreadPoolExecutor
    """Its one thread does everything that torch does."""
    checkpoints: Path
    threads: int | None

    async def aside(self, work: Callable[[], T]) -> T:
        """Run blocking work in the training thread."""
        return await asyncio.get_running_loop().run_in_executor(self.executor, work)


class JobRun:
    """A job in work."""

    def __init__(self, job: JobSubmitted, place: Workplace, publisher: Publisher) -> None:
        self.job = job
        self._place = place
        self._publisher = publisher
        self._folder = CheckpointFolder(place.checkpoints, job.model_group)
        self._next_index = 0
        self._previous_sha256 = codec.EMPTY_SHA256
        self._idle_since = time.monotonic()
        self._trainer: Trainer | None = None

    @property
    def trainer(self) -> Trainer:
        """Model and optimizer; there from `start` on."""
        assert self._trainer is not None
        return self._trainer

    @property
    def next_manifest(self) -> Manifest | None:
        """The manifest to train next, if it is planned."""
        return self._place.inbox.state.job(self.job.job_id).manifests.get(self._next_index)

    async def start(self) -> None:
        """Load the model, publish the base version if the group has none, and go to the newest checkpoint.

        Raises ModelError, ConfigError, ArtifactError, VersionDivergedError, FencedError.
        """
        threads = self._place.threads
        self._trainer = await self._place.aside(lambda: Trainer(self.job, threads=threads))
        base = await self._base()
        newest = self._place.inbox.state.group(self.job.model_group).newest_version
        checkpoint = await self._place.aside(
            lambda: self._folder.newest(job_id=self.job.job_id, max_version=newest + 1)
        )
        if checkpoint is None or self.trainer.needs_reference:
            await self._stand_at(base)
        if checkpoint is not None:
            await self._resume(checkpoint)
        self._idle_since = time.monotonic()
        logger.info("job=%s begins at manifest %s", self.job.job_id, self._next_index)

    async def advance(self) -> bool:
        """Train the next manifest, or end the job after its last. False if there is nothing to do yet."""
        manifest = self.next_manifest
        if manifest is not None:
            await self._train(manifest)
            return True
        state = self._place.inbox.state.job(self.job.job_id)
        if any(index > self._next_index for index in state.manifests):
            raise self._missing_manifest()
        seal = state.last_seal
        if seal is None:
            return False
        if seal.next_batch_index > self._next_index:
            raise self._missing_manifest()
        if seal.next_batch_index != self._next_index:
            raise DecodeError(
                f"job {self.job.job_id} is sealed with {seal.next_batch_index} manifests, {self._next_index} are there"
            )
        await self._publisher.check_owner()
        await self._place.log.send(
            JobSucceeded(
                run_id=self.job.run_id,
                time_ms=seal.time_ms,
                job_id=self.job.job_id,
                model_group=self.job.model_group,
                final_version=self.job.base_version + self._next_index,
            )
        )
        return True

    def _missing_manifest(self) -> RollstreamError:
        return self._place.inbox.missing(f"manifest {self._next_index} of job {self.job.job_id}", "batches")

    async def _base(self) -> WeightsPublished | None:
        """The version to begin from; None if the loaded model is that, and has just been published."""
        state, job = self._place.inbox.state, self.job
        found = state.group(job.model_group).published.get(job.base_version)
        if found is None and state.group(job.model_group).published:
            raise ConfigError(f"job {job.job_id}: version {job.base_version} of {job.model_group} is not published")
        wanted = "lora" if job.settings.model.lora else "full"
        if found is not None and found.weights_format != wanted:
            raise ConfigError(f"job {job.job_id}: {job.model_group} has {found.weights_format} weights, not {wanted}")
        if found is not None:
            return found
        if self._folder.versions():  # a checkpoint is only written once the base version is published
            raise self._place.inbox.missing(f"version {job.base_version} of {job.model_group}", "weights")
        if job.fork is not None:
            await self._load_fork()
        weights = await self._place.aside(self.trainer.model.weights_bytes)
        artifact = await asyncio.to_thread(self._publisher.artifacts.put_bytes, weights, ".safetensors")
        await self._publisher.publish_base(job, self.trainer.model, weights, artifact)
        return None

    async def _stand_at(self, base: WeightsPublished | None) -> None:
        """Take the base version's weights (None: they are in place), and compare with them where the loss does.

        Where they are those of the model's folder, that has been loaded already, and is more exact: what is published
        may be rounded to bfloat16.
        """
        trainer = self.trainer
        if base is not None:
            weights, what = await self._read(base)
            loaded = sha256_of(await self._place.aside(trainer.model.weights_bytes))
            if self.job.fork is not None or loaded != base.weights_sha256:
                await self._place.aside(lambda: trainer.begin(weights, what))
            if trainer.needs_reference:
                await self._place.aside(lambda: trainer.refer_to(weights, what))
        elif trainer.needs_reference:
            await self._place.aside(lambda: trainer.refer_to(trainer.model.weights_bytes(), "the base version"))

    async def _load_fork(self) -> None:
        fork = self.job.fork
        assert fork is not None
        parent_group = f"{fork.run_id}/{self.job.model_group.split('/', 1)[-1]}"
        parent = self._place.inbox.state.group(parent_group).published.get(fork.version)
        if parent is None:
            raise ConfigError(f"job {self.job.job_id}: version {fork.version} of {parent_group} is not published")
        weights, what = await self._read(parent)
        await self._place.aside(lambda: self.trainer.begin(weights, what))

    async def _read(self, published: WeightsPublished) -> tuple[bytes, str]:
        """A version's weights, and what they are called in an error. Raises ArtifactError."""
        weights = await asyncio.to_thread(self._publisher.artifacts.read, published.artifact)
        return weights, f"artifact {published.artifact.uri}"

    async def _resume(self, checkpoint: Checkpoint) -> None:
        """Take over a checkpoint, and publish its version if the log lacks it."""
        await self._place.aside(lambda: self.trainer.restore(checkpoint))
        self._next_index = checkpoint.position.next_index
        self._previous_sha256 = checkpoint.position.previous_sha256
        await self._publish(checkpoint.position.step, await self._place.aside(self.trainer.model.weights_bytes))

    async def _train(self, manifest: Manifest) -> None:
        """Train one manifest and let the world know. The order of what is kept:

        1. the checkpoint, if one is due: weights, optimizer, position and the StepTrained to be sent
        2. the artifact
        3. StepTrained, WeightsPublished, JobProgressed, as far as the log lacks them, if nobody else has claimed

        A crash before 1 trains the manifest again; after it, the restart publishes from the checkpoint.
        """
        planned = manifest.planned
        self._check(planned)
        seconds = {"wait": time.monotonic() - self._idle_since}
        began = time.monotonic()
        records = await fetch_records(self._place.log, planned)
        trajectories = await self._place.aside(lambda: check_members(planned, records))
        seconds["fetch"] = time.monotonic() - began
        result = await self._place.aside(lambda: self.trainer.train(planned, trajectories))
        weights = await self._place.aside(self.trainer.model.weights_bytes)
        step = step_trained(
            self.job, planned, result, sha256_of(weights), term=self._publisher.term, seconds=seconds | result.seconds
        )
        self._next_index, self._previous_sha256 = planned.index + 1, manifest.digest
        failpoint("learner/after-train-before-checkpoint")
        step = await self._save(step)
        failpoint("learner/between-checkpoint-and-publish")
        await self._publish(step, weights)
        await self._place.aside(
            lambda: self._folder.prune(keep_last=self.job.settings.keep_last, keep_every=self.job.settings.keep_every)
        )
        self._idle_since = time.monotonic()

    def _check(self, planned: BatchPlanned) -> None:
        """Raises DecodeError if a manifest does not follow the one before it."""
        if planned.previous_sha256 != self._previous_sha256:
            raise DecodeError(
                f"manifest {planned.batch_id} follows {planned.previous_sha256}, not {self._previous_sha256}: "
                "the chain of manifests is broken"
            )
        version = self.job.base_version + planned.index
        if planned.trains_at_version != version or planned.model_group != self.job.model_group:
            raise DecodeError(
                f"manifest {planned.batch_id} trains {planned.model_group} at version {planned.trains_at_version}, "
                f"not {self.job.model_group} at {version}"
            )

    async def _save(self, step: StepTrained) -> StepTrained:
        """Write a checkpoint if one is due; the step with the seconds that it took."""
        settings = self.job.settings
        if self._next_index % settings.checkpoint_every and self._next_index != settings.num_versions:
            return step
        position = CheckpointPosition(
            job_id=self.job.job_id,
            version=step.version,
            next_index=self._next_index,
            previous_sha256=self._previous_sha256,
            step=step,
        )
        began = time.monotonic()
        await self._place.aside(lambda: self._folder.save(self.trainer.checkpoint(position)))
        return step.model_copy(update={"seconds": {**step.seconds, "checkpoint": time.monotonic() - began}})

    async def _publish(self, step: StepTrained, weights: bytes) -> None:
        began = time.monotonic()
        artifact = await asyncio.to_thread(self._publisher.artifacts.put_bytes, weights, ".safetensors")
        step = step.model_copy(update={"seconds": {**step.seconds, "publish": time.monotonic() - began}})
        await self._publisher.publish_step(self.job, self.trainer.model, step, artifact)


def step_trained(
    job: JobSubmitted,
    planned: BatchPlanned,
    result: StepResult,
    weights_sha256: str,
    *,
    term: int,
    seconds: dict[str, float],
) -> StepTrained:
    """What is said of a trained manifest. `seconds`: durations by phase; all but `wait` count for tokens/s."""
    busy_s = sum(value for name, value in seconds.items() if name != "wait")
    return StepTrained(
        run_id=job.run_id,
        time_ms=planned.time_ms,
        model_group=job.model_group,
        job_id=job.job_id,
        batch_id=planned.batch_id,
        epoch=planned.epoch,
        version=planned.yields_version,
        term=term,
        threads=result.threads,
        weights_sha256=weights_sha256,
        num_optimizer_steps=result.num_optimizer_steps,
        metrics=result.metrics,
        seconds=seconds,
        tokens_per_s=result.num_tokens / busy_s if busy_s else 0.0,
    )
