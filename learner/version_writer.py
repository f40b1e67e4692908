"""From a trained batch to its published version: weights, checkpoint, artifact and events, in this order."""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from rollstream.eventlog.blocking_calls import Retry
from rollstream.eventlog.failpoints import failpoint
from rollstream.eventlog.files import HashedFile
from rollstream.learner.checkpoints.checkpoint import CheckpointFolder, CheckpointPosition, CheckpointWriter, part
from rollstream.learner.inbox import Inbox
from rollstream.learner.model.step import StepResult
from rollstream.learner.model.tensor_file import from_bytes
from rollstream.learner.progress import Manifest
from rollstream.learner.publisher import Publisher, step_trained, with_phases
from rollstream.learner.trainer import JobTrainer
from rollstream.schemas.errors import RollstreamError, retrieve_exception
from rollstream.schemas.events import JobSubmitted, StepTrained
from rollstream.schemas.settings import ArtifactRef

logger = logging.getLogger(__name__)
InThread = Callable[[Callable[[], Any]], Awaitable[Any]]


class AbandonedError(RollstreamError):
    """The version before was not written, so the batch that was trained meanwhile does not count."""


class StateInUse:
    """A version's weights and optimizer state while files are written of them, beside the training of the next batch.

    Its forward and backward passes only read them. Its first optimizer step, which changes them, waits.
    """

    def __init__(self) -> None:
        self.held_s = 0.0
        """Seconds that the optimizer step waited."""
        self._is_free = threading.Event()
        self._is_abandoned = False

    def release(self) -> None:
        """Let the optimizer step begin: the files are written."""
        self._is_free.set()

    def abandon(self) -> None:
        """Have the optimizer step raise AbandonedError, unless the state was released before."""
        self._is_abandoned = not self._is_free.is_set()
        self._is_free.set()

    def wait(self) -> None:
        """Wait until the state is released; in the training thread. Raises AbandonedError."""
        began = time.monotonic()
        self._is_free.wait()
        self.held_s += time.monotonic() - began
        if self._is_abandoned:
            raise AbandonedError


@dataclass(frozen=True, slots=True)
class Trained:
    """A batch that was trained, and whose version is not written yet."""

    manifest: Manifest
    result: StepResult
    seconds: dict[str, float]
    """Phases before and in its training."""
    state: Mapping[str, Tensor] | None = None
    """Everything to go on from, if the next batch may be trained meanwhile."""
    weights: HashedFile | None = None
    """Its weights as published, if they are written already."""
    in_use: StateInUse = field(default_factory=StateInUse)

    @property
    def is_beside(self) -> bool:
        """Whether its version is written while the next batch is trained."""
        return self.state is not None

    def phase(self, name: str, began_s: float) -> dict[str, float]:
        """A phase from a moment (monotonic, s) until now; empty if training did not wait for it."""
        return {} if self.is_beside else {name: time.monotonic() - began_s}


class VersionWriter:
    """Writes and publishes the versions of one job."""

    def __init__(
        self,
        job: JobSubmitted,
        folder: CheckpointFolder,
        inbox: Inbox,
        publisher: Publisher,
        trainer: Callable[[], JobTrainer],
        retry: Retry,
        *,
        in_training_thread: InThread,
        in_writing_thread: InThread,
    ) -> None:
        """`trainer`: the job's by now."""
        self._job = job
        self._folder = folder
        self._inbox = inbox
        self._publisher = publisher
        self._trainer = trainer
        self._in_training_thread = in_training_thread
        self._in_writing_thread = in_writing_thread
        self._files = CheckpointWriter(folder, retry, in_writing_thread, partial(publisher.is_needed, job))

    async def weights(self, version: int) -> HashedFile:
        """The model's weights in a file as they are published, which its user removes.

        With `model.deterministic` off, a version that the log knows with other bits is taken over from there first.
        Raises ArtifactError if it was collected.
        """
        written = await self._files.weights(version, await self._in_training_thread(self._trainer().model.published))
        kept = self._publisher.kept(self._job, version, written.size_bytes)
        if self._job.settings.model.deterministic or kept is None or kept.sha256 == written.sha256:
            return written
        written.path.unlink(missing_ok=True)
        logger.warning("version=%s was trained again with other bits: its published weights count", version)
        tensors = from_bytes(await self._publisher.read(kept), f"artifact {kept.uri}")
        await self._in_training_thread(lambda: self._trainer().take_over(tensors))
        return await self._files.weights(version, tensors)

    async def held(self, trained: Trained) -> Trained:
        """The batch with everything that `finish` needs while the next one is trained.

        Weights that are published in another type than the trained one are written at once: the copies that this takes
        would be in the way of the next batch.
        """
        began, trainer = time.monotonic(), self._trainer()
        state = await self._in_training_thread(trainer.state)
        if trainer.model.publishes_exactly:
            return replace(trained, state=state)
        weights = await self.weights(trained.manifest.planned.yields_version)
        seconds = {**trained.seconds, **trained.phase("hash", began)}
        return replace(trained, state=state, weights=weights, seconds=seconds)

    async def finish(self, trained: Trained, next_index: int) -> dict[str, float]:
        """Write and publish a version; the phase after its events were sent. The order of what is kept:

        1. the weights as published, for the checkpoint and the artifact to link
        2. the checkpoint, if one is due: weights, optimizer, position and the StepTrained to be sent
        3. the artifact, which is stored while the checkpoint is written
        4. StepTrained, WeightsPublished, JobProgressed, as far as the log lacks them, if nobody else has claimed
        5. checkpoints, then artifacts that nothing needs any more are removed

        A crash before 2 trains the manifest again; after it, the restart publishes from the checkpoint. `next_index`:
        of the manifest to train next. The state is released after 2. Raises NotNeededError if the job ends while this
        waits for space on a full disk.
        """
        if await self._publisher.is_over(self._job):
            trained.in_use.release()
            return {}
        began = time.monotonic()
        weights = trained.weights or await self._weights_of(trained)
        step = step_trained(
            self._job,
            trained.manifest,
            trained.result,
            weights.sha256,
            term=self._publisher.term,
            seconds={**trained.seconds, **trained.result.seconds, **trained.phase("hash", began)},
        )
        failpoint("learner/after-train-before-checkpoint")
        storing = asyncio.ensure_future(self.stored(step.version, weights))
        storing.add_done_callback(retrieve_exception)  # an error of the checkpoint comes first
        is_due = self._is_checkpoint_due(step, next_index)
        try:
            if is_due:
                step = await self._saved(step, weights, trained, next_index)
            trained.in_use.release()
            failpoint("learner/between-checkpoint-and-publish")
            began = time.monotonic()
            artifact = await storing
            sent_at = time.monotonic()
            await self.publish(with_phases(step, trained.phase("publish", began)), artifact)
        finally:
            storing.cancel()
            weights.path.unlink(missing_ok=True)
        if is_due:
            self._inbox.forget(self._job, next_index=next_index, version=step.version)
        await self._publisher.check_owner()  # another one may have gone on above this version
        await self._in_writing_thread(lambda: self._prune(step.version))
        checkpoints = self._folder.versions()  # restarts need all above them: see `GroupNeeds.trained_again`
        needed = [one for one in self._adopted() if one <= max(checkpoints, default=-1)]
        await self._publisher.collect({*checkpoints, *needed}, step.time_ms)
        return {} if trained.is_beside else {"finish": time.monotonic() - sent_at}

    async def stored(self, version: int, weights: HashedFile) -> ArtifactRef:
        """Store a version's artifact unless it is published: storing it again would bring back a collected one."""
        known = self._inbox.state.group(self._job.model_group).published.get(version)
        return known.artifact if known else await self._publisher.put(self._job, weights)

    async def stored_base(self) -> ArtifactRef:
        """Store the weights of the version that the job begins with, which is not published yet."""
        weights = await self.weights(self._job.base_version)
        try:
            return await self._publisher.put(self._job, weights)
        finally:
            weights.path.unlink(missing_ok=True)

    async def publish(self, step: StepTrained, artifact: ArtifactRef) -> None:
        """Send a version whose artifact is stored, as far as the log lacks it."""
        await self._publisher.publish_step(self._job, self._trainer().model, step, artifact)

    async def _weights_of(self, trained: Trained) -> HashedFile:
        """The weights of a batch's state, or of the model as it is, where nothing was trained since."""
        version = trained.manifest.planned.yields_version
        if trained.state is None:
            return await self.weights(version)
        return await self._files.weights(version, part(trained.state, "weights"))

    async def _saved(self, step: StepTrained, weights: HashedFile, trained: Trained, next_index: int) -> StepTrained:
        """Write a checkpoint, once there is room; the step with the seconds that it took."""
        manifest, began = trained.manifest, time.monotonic()
        position = CheckpointPosition(
            job_id=self._job.job_id,
            version=step.version,
            next_index=next_index,
            previous_sha256=manifest.digest,
            step=step,
        )
        state = trained.state
        checkpoint = await self._in_writing_thread(lambda: self._trainer().checkpoint(position, weights, state))
        await self._files.checkpoint(checkpoint)
        return with_phases(step, trained.phase("checkpoint", began))

    def _is_checkpoint_due(self, step: StepTrained, next_index: int) -> bool:
        settings = self._job.settings
        if step.adopts is not None:
            return True  # a restart would have to go back once more
        is_last = next_index - step.num_adopted == settings.num_versions
        return next_index % settings.checkpoint_every == 0 or is_last

    def _prune(self, version: int) -> None:
        """Remove checkpoints that neither the settings keep nor a planned rollback needs, after `version` was sent."""
        settings, newest = self._job.settings, self._inbox.state.group(self._job.model_group).newest_version
        how = {"keep_last": settings.keep_last, "keep_every": settings.keep_every}
        self._folder.prune(newest=max(version, newest), **how, needed=self._adopted())

    def _adopted(self) -> list[int]:
        """Versions that planned manifests return to."""
        manifests = self._inbox.state.job(self._job.job_id).manifests
        return [one.planned.adopts for one in manifests.values() if one.planned.adopts is not None]
