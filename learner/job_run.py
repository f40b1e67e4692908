"""One job from its first manifest to its last: restores, trains, has versions written; long work is in threads."""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from rollstream.eventlog import codec
from rollstream.eventlog.blocking_calls import Retry
from rollstream.eventlog.log import EventLog
from rollstream.learner.checkpoints.checkpoint import Checkpoint, CheckpointFolder
from rollstream.learner.checkpoints.faults import Faults
from rollstream.learner.inbox import Inbox, check_follows, check_next
from rollstream.learner.model.memory import within_memory
from rollstream.learner.model.ranks import Ranks, failing_the_job
from rollstream.learner.model.step import StepResult, adopted
from rollstream.learner.progress import Manifest
from rollstream.learner.publisher import Publisher, difference
from rollstream.learner.reading.members import FORK, MemberReader
from rollstream.learner.scoring.scoring import ScoreWriter
from rollstream.learner.trainer import JobTrainer, drop
from rollstream.learner.untrained import end_of
from rollstream.learner.version_writer import Trained, VersionWriter
from rollstream.schemas.errors import (
    ArtifactError,
    ConfigError,
    DecodeError,
    RollstreamError,
    StoreUnavailableError,
    VersionDivergedError,
)
from rollstream.schemas.events import BatchPlanned, JobSubmitted, WeightsPublished
from rollstream.schemas.permissions import Permissions
from rollstream.schemas.settings import FROZEN

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LearnerContext:
    """Resources shared by all jobs of a learner."""

    log: EventLog
    inbox: Inbox
    executor: ThreadPoolExecutor
    """Its one thread does everything that torch computes."""
    writing: ThreadPoolExecutor
    """Its one thread writes what is trained, while the next batch is."""
    checkpoints: Path
    threads: int | None
    retry: Retry
    permissions: Permissions
    """The names that jobs may use."""
    ranks: Ranks

    async def in_training_thread(self, work: Callable[[], T]) -> T:
        """Run blocking work in the training thread. In a process alone unexpected exceptions are RollstreamErrors."""
        return await self._in(self.executor, work)

    async def in_writing_thread(self, work: Callable[[], T]) -> T:
        """The same where files are written: of several processes all take part, in their only thread."""
        return await self._in(self.writing if self.ranks.num == 1 else self.executor, work)

    async def _in(self, executor: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        if self.ranks.num == 1:
            work = failing_the_job("work on the job")(within_memory("the job")(work))
        return await asyncio.get_running_loop().run_in_executor(executor, work)


class JobRun:
    """A job in work."""

    def __init__(self, job: JobSubmitted, context: LearnerContext, publisher: Publisher) -> None:
        self.job = job
        self._context = context
        self._in_thread = context.in_training_thread
        self._publisher = publisher
        self._folder = CheckpointFolder(context.checkpoints, job.model_group)
        self._faults = Faults(context.checkpoints, job)
        self._writer = VersionWriter(
            job,
            self._folder,
            context.inbox,
            publisher,
            lambda: self.trainer,
            context.retry,
            in_training_thread=context.in_training_thread,
            in_writing_thread=context.in_writing_thread,
        )
        self._members = MemberReader(context.log)
        state = context.inbox.state
        self._scorer = ScoreWriter(
            job, context.log, context.in_training_thread, publisher, lambda: state.group(job.model_group)
        )
        self._next_index = 0
        self._previous_sha256 = codec.EMPTY_SHA256
        self._idle_since = time.monotonic()
        self._carried: dict[str, float] = {}
        """Seconds of a version after its StepTrained was sent; recorded in the next StepTrained, or in JobSucceeded."""
        self._trained: Trained | None = None
        """The batch before the next manifest, if its version is written while that is trained."""
        self._trainer: JobTrainer | None = None
        self.index: int | None = None
        """The manifest that is in work, until its version is written; None while the job is started."""

    @property
    def trainer(self) -> JobTrainer:
        """Model and optimizer; there from `start` on."""
        assert self._trainer is not None
        return self._trainer

    @property
    def next_manifest(self) -> Manifest | None:
        """The manifest to train next, if it is planned."""
        return self._context.inbox.state.job(self.job.job_id).manifests.get(self._next_index)

    async def start(self) -> None:
        """Load the model, publish the base version if the group has none, and go to the newest checkpoint.

        Raises ModelError, ConfigError, ArtifactError, VersionDivergedError, FencedError, RunFailedError.
        """
        self._faults.check(None)
        self._trainer = await self._loaded()
        checkpoint = await self._checkpoint()
        base = await self._base()
        if checkpoint is None or self.trainer.needs_reference:
            await self._stand_at(base)
        if checkpoint is not None:
            await self._resume(checkpoint)
        self._faults.forget_start()
        self._idle_since, self.index = time.monotonic(), self._next_index
        logger.info("job=%s begins at manifest %s", self.job.job_id, self._next_index)

    async def advance(self, *, is_alone: bool = False) -> bool:
        """Train the next manifest, or end the job after its last. False if there is nothing to do yet.

        `is_alone`: no other job waits for the training thread. Then the version of a batch whose next manifest is
        planned is written by the next call, while that is trained.
        """
        if self.job.settings.kind == FROZEN:
            return await self._end(self.job.time_ms)
        if (manifest := self.next_manifest) is not None:
            await self._train(manifest, is_alone=is_alone)
            return True
        state = self._context.inbox.state.job(self.job.job_id)
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
                f"; {FORK}"
            )
        return await self._end(seal.time_ms)

    async def close(self) -> None:
        """Drop data that was read ahead, and a batch whose version is not written."""
        if self._trained is not None and self._trained.weights is not None:
            self._trained.weights.path.unlink(missing_ok=True)
        self._trained = None
        await self._members.close()

    async def drop(self) -> None:
        """Let go of the model in all processes, none of which may be at work."""
        self._trainer = None
        await self._in_thread(lambda: drop(self.job, self._context.ranks))

    async def _end(self, time_ms: int) -> bool:
        await self._publisher.check_owner()
        log, finish_s = self._context.log, self._carried.get("finish", 0.0)
        await log.send(await end_of(log, self.job, num_trained=self._next_index, time_ms=time_ms, finish_s=finish_s))
        return True

    def _missing_manifest(self) -> RollstreamError:
        return self._context.inbox.missing(f"manifest {self._next_index} of job {self.job.job_id}", "batches")

    async def _loaded(self) -> JobTrainer:
        """The model of the job's folder with a new optimizer."""
        context, budget = self._context, self._folder.path / "micro_batch_tokens.json"
        how: dict[str, Any] = {"threads": context.threads, "permissions": context.permissions, "ranks": context.ranks}
        return await self._in_thread(lambda: JobTrainer(self.job, **how, budget=budget))

    async def _checkpoint(self) -> Checkpoint | None:
        """The newest whole checkpoint. The state then reaches back to it, and to the base version."""
        inbox, job = self._context.inbox, self.job
        newest = inbox.state.group(job.model_group).newest_version
        known = {"job_id": job.job_id, "digests": inbox.state.job(job.job_id).digests}
        checkpoint = await self._in_thread(lambda: self._folder.newest(**known, max_version=newest + 1))
        next_index = 0 if checkpoint is None else checkpoint.position.next_index
        group = inbox.state.group(job.model_group)
        has_base = group.is_whole or job.base_version in group.published
        if not has_base or next_index < inbox.state.job(job.job_id).first_index:
            await inbox.follow(job)
        return checkpoint

    async def _base(self) -> WeightsPublished | None:
        """The version to begin from; None if the loaded model is that, and has just been published."""
        job, published = self.job, self._context.inbox.state.group(self.job.model_group).published
        found = published.get(job.base_version)
        where = f"job {job.job_id}: version {job.base_version} of {job.model_group}"
        if found is None and (published or (job.base_version and job.fine_tune and not self._folder.versions())):
            raise ConfigError(f"{where} is not published; `rollstream jobs` lists those that are")
        if found is not None and found.weights_format != (wanted := "lora" if job.settings.model.lora else "full"):
            raise ConfigError(f"{where} has {found.weights_format} weights, not {wanted}; give model.lora as it was")
        if found is not None:
            self.trainer.check_fits(found)
            check_next(job, published.get(job.base_version + 1))
            return found
        if self._folder.versions():  # a checkpoint is only written once the base version is published
            raise self._context.inbox.missing(f"version {job.base_version} of {job.model_group}", "weights")
        if job.fork is not None:
            await self._load_fork()
        artifact = await self._writer.stored_base()
        await self._publisher.publish_base(job, self.trainer.model, artifact)
        return None

    async def _stand_at(self, base: WeightsPublished | None) -> None:
        """Take the base version's weights (None: they are in place), and compare with them where the loss does."""
        trainer = self.trainer
        if base is not None:
            trainer.check_fits(base)
            weights, what = await self._read(base)
            await self._in_thread(lambda: trainer.stand_at(base, weights, what))
        elif trainer.needs_reference:
            await self._in_thread(lambda: trainer.refer_to(trainer.model.weights_bytes(), "the base version"))

    async def _load_fork(self) -> None:
        fork = self.job.fork
        assert fork is not None
        parent_group = fork.parent_of(self.job.model_group)
        where = f"job {self.job.job_id}: version {fork.version} of {parent_group}"
        parent = await self._context.inbox.version_of(parent_group, fork.version)
        if parent is None:
            raise ConfigError(f"{where} is not published; fork from one that `rollstream jobs` lists")
        self.trainer.check_fits(parent)
        try:
            weights, what = await self._read(parent)
        except StoreUnavailableError:
            raise
        except ArtifactError as error:
            raise ConfigError(
                f"job {self.job.job_id}: the weights of version {fork.version} of {parent_group} were removed before "
                f"this fork began: {error}; fork from another version, see is_collected of weight_versions"
            ) from error
        await self._in_thread(lambda: self.trainer.begin(weights, what))

    async def _read(self, published: WeightsPublished) -> tuple[bytes, str]:
        """A version's weights, and their name in errors. Raises ArtifactError."""
        return await self._publisher.read(published.artifact), f"artifact {published.artifact.uri}"

    async def _resume(self, checkpoint: Checkpoint) -> None:
        """Take over a checkpoint, and publish its version if the log lacks it."""
        await self._in_thread(lambda: self.trainer.resume(checkpoint))
        self._next_index = checkpoint.position.next_index
        self._previous_sha256 = checkpoint.position.previous_sha256
        step = checkpoint.position.step
        weights = await self._writer.weights(step.version)
        step = step.model_copy(update={"weights_sha256": weights.sha256})
        try:
            await self._writer.publish(step, await self._writer.stored(step.version, weights))
        finally:
            weights.path.unlink(missing_ok=True)
        self._context.inbox.forget(self.job, next_index=self._next_index, version=checkpoint.position.version)

    async def _train(self, manifest: Manifest, *, is_alone: bool) -> None:
        """Train one manifest, and write the version before meanwhile, if that is left to do. Then write its own."""
        planned, before = manifest.planned, self._trained
        self.index, seconds = planned.index, {**self._carried, "wait": time.monotonic() - self._idle_since}
        self._trained, self._carried = None, {}
        result = await (self._next_result(planned) if before is None else self._beside(before, planned))
        self._next_index, self._previous_sha256 = planned.index + 1, manifest.digest
        trained = Trained(manifest, result, seconds)
        if is_alone and self._may_be_beside(planned):
            self._trained = await self._writer.held(trained)
        else:
            self._carried = await self._writer.finish(trained, self._next_index)
            self._faults.forget(planned.index)
        self._idle_since = time.monotonic()

    def _may_be_beside(self, planned: BatchPlanned) -> bool:
        """Whether a batch's version may be written while the next batch is trained.

        That one must be planned. What puts other weights into the model meanwhile excludes it: a rollback, scores under
        other weights, and published weights that count in place of those trained again. Several processes write
        together, in the thread that trains; and `offload` makes new moments in a step, for which the old would stay.
        """
        following, trainer = self.next_manifest, self.trainer
        return (
            following is not None
            and planned.adopts is None
            and following.planned.adopts is None
            and trainer.scoring.is_idle
            and not trainer.needs_reference
            and self._context.ranks.num == 1
            and self.job.settings.optimizer.offload is None
            and self._publisher.kept(self.job, planned.yields_version, 0) is None
        )

    async def _beside(self, before: Trained, planned: BatchPlanned) -> StepResult:
        """Train a manifest's members while the version before is written, whose errors come first."""
        in_use, ended_s = before.in_use, list[float]()
        training = asyncio.ensure_future(self._next_result(planned, before_step=in_use.wait))
        training.add_done_callback(lambda _: ended_s.append(time.monotonic()))
        try:
            await self._writer.finish(before, self._next_index)
            self._faults.forget(before.manifest.planned.index)
        except BaseException:
            self.index = before.manifest.planned.index
            in_use.abandon()
            training.cancel()
            raise
        finally:
            found = (await asyncio.gather(training, return_exceptions=True))[0]
            if before.weights is not None:
                before.weights.path.unlink(missing_ok=True)
        if isinstance(found, BaseException):
            raise found
        seconds = {**found.seconds, "hold": in_use.held_s + time.monotonic() - ended_s[0]}
        return replace(found, seconds={**seconds, "optimizer": seconds["optimizer"] - in_use.held_s})

    async def _next_result(self, planned: BatchPlanned, *, before_step: Callable[[], None] | None = None) -> StepResult:
        check_follows(planned, self.job, self._previous_sha256)
        return await self._applied(planned, before_step=before_step)

    async def _applied(
        self, planned: BatchPlanned, *, is_passed: bool = False, before_step: Callable[[], None] | None = None
    ) -> StepResult:
        """Train a manifest's members, or return to the version that it adopts. `is_passed`: to go further.

        `before_step`: see `JobTrainer.train`.
        """
        began = time.monotonic()
        self._faults.check(planned.index)
        if planned.adopts is not None:
            await self._return_to(planned.adopts, is_passed=is_passed)
            seconds = {"restore": time.monotonic() - began}
            model = self.trainer.model
            return await self._in_thread(lambda: adopted(model, seconds))  # threads are counted where training runs
        trajectories = await self._members.members(planned)
        seconds = {"fetch": time.monotonic() - began}
        scores = await self._scorer.scores(self.trainer, planned, trajectories, seconds)
        group = self._context.inbox.state.group(self.job.model_group)
        known = group.step(planned.yields_version, self.job.job_id)
        manifests = self._context.inbox.state.job(self.job.job_id).manifests
        if (following := manifests.get(planned.index + 1)) is not None:
            self._members.begin(following.planned)
        result = await self._in_thread(
            lambda: self.trainer.train_known(known, planned, trajectories, scores=scores, before_step=before_step)
        )
        return replace(result, seconds={**seconds, **result.seconds})

    async def _return_to(self, version: int, *, is_passed: bool) -> None:
        """Restore model, optimizer and random state as they were at an earlier version of the job.

        That is its checkpoint. If it was pruned, the manifests after the nearest one before it (or after the base
        version) are trained again, and nothing of them is published. Raises VersionDivergedError if the weights are
        not those that were published, TruncatedError if a manifest is gone.
        """
        job, inbox = self.job, self._context.inbox
        known = {"job_id": job.job_id, "digests": inbox.state.job(job.job_id).digests}
        checkpoint = await self._in_thread(lambda: self._folder.newest(**known, max_version=version))
        next_index = 0 if checkpoint is None else checkpoint.position.next_index
        wanted = range(next_index, version - job.base_version)
        if wanted and next_index < inbox.state.job(job.job_id).first_index:
            await inbox.follow(job)
        if checkpoint is None:
            budgets = self.trainer.budget, self.trainer.scoring.budgets
            self._trainer = None  # two models need not fit into memory
            self._trainer = await self._loaded()
            self.trainer.budget, self.trainer.scoring.budgets = budgets  # what did not fit before does not now
            await self._stand_at(inbox.state.group(job.model_group).published[job.base_version])
        else:
            await self._in_thread(lambda: self.trainer.resume(checkpoint))
        for index in wanted:
            if (manifest := inbox.state.job(job.job_id).manifests.get(index)) is None:
                raise inbox.missing(f"manifest {index} of job {job.job_id}", "batches")
            await self._applied(manifest.planned, is_passed=True)
        if self.job.settings.model.deterministic or not is_passed:  # one passed may be collected, and has other bits
            await self._check_adopted(version)

    async def _check_adopted(self, version: int) -> None:
        """Raises VersionDivergedError if the model is not what was published as `version`."""
        group = self._context.inbox.state.group(self.job.model_group)
        known = (step := group.step_of(version)) or group.published.get(version)
        weights = await self._writer.weights(version)
        weights.path.unlink(missing_ok=True)
        if known is not None and known.weights_sha256 != weights.sha256:
            raise VersionDivergedError(
                f"version {version} of model group {self.job.model_group} is published with hash "
                f"{known.weights_sha256}; going back gave {weights.sha256}: {difference(step, self._context.ranks.num)}"
            )
