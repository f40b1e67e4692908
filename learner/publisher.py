"""A learner's voice on one model group: claims it, and publishes what the log lacks, unless a newer claim is there."""

import logging
from collections.abc import Collection, Mapping
from functools import partial

from rollstream.eventlog import terms
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.blocking_calls import NeededSpace, Retry, retrying
from rollstream.eventlog.failpoints import failpoint
from rollstream.eventlog.files import HashedFile
from rollstream.eventlog.log import EventLog
from rollstream.learner.collection import Collector, NeedsReader
from rollstream.learner.inbox import Inbox
from rollstream.learner.model.policy import PolicyModel
from rollstream.learner.model.step import StepResult
from rollstream.learner.progress import Manifest, TrainedStep
from rollstream.schemas.base import Event
from rollstream.schemas.errors import FencedError, LogError, TruncatedError, VersionDivergedError
from rollstream.schemas.events import JobProgressed, JobSubmitted, LearnerClaimed, StepTrained, WeightsPublished
from rollstream.schemas.settings import ArtifactRef

logger = logging.getLogger(__name__)


class Publisher:
    """Owner of a model group from `claim` on, until somebody else claims it."""

    def __init__(
        self,
        log: EventLog,
        artifacts: ArtifactStore,
        inbox: Inbox,
        needs: NeedsReader,
        model_group: str,
        learner: str,
        *,
        retry: Retry = Retry(),  # noqa: B008 -- frozen
        num_ranks: int = 1,
    ) -> None:
        """`needs`: one for all model groups of a process.

        `retry`: how long an artifact store that is away is tried again. `num_ranks`: processes that train together.
        """
        self.term = 0
        self._artifacts = artifacts
        self._retry = retry
        self._num_ranks = num_ranks
        self._log = log
        self._inbox = inbox
        self._model_group = model_group
        self._learner = learner
        self._claimed_at = -1
        self._collector = Collector(log, artifacts, needs, model_group, learner)

    async def claim(self, job: JobSubmitted) -> None:
        """Claim the model group with the next term. Raises FencedError if another claim came first."""
        await self._inbox.catch_up(("weights",))
        self.term = terms.term_of(self._inbox.state.owners.get(self._model_group)) + 1
        position = await self._log.send(
            LearnerClaimed(
                run_id=job.run_id,
                time_ms=job.time_ms,
                model_group=self._model_group,
                term=self.term,
                learner=self._learner,
            )
        )
        self._claimed_at = position.offset
        await self.check_owner()
        logger.info("claimed model_group=%s term=%s", self._model_group, self.term)

    async def put(self, job: JobSubmitted, weights: HashedFile) -> ArtifactRef:
        """Store the weights of a version of a job; waits for room on a full disk, while the job is needed.

        Raises StoreUnavailableError once patience with the store has ended, and NotNeededError.
        """
        doing = f"store weights of {self._model_group}"
        space = NeededSpace(self._artifacts.folder, weights.size_bytes) if self._artifacts.folder else None
        put = partial(self._artifacts.put_hashed, weights, ".safetensors")
        return await retrying(put, doing, self._retry, space=space, is_needed=partial(self.is_needed, job))

    async def read(self, artifact: ArtifactRef) -> bytes:
        """A version's weights, or the run's dataset. Raises ArtifactError if gone, StoreUnavailableError as above."""
        doing = f"load {artifact.uri} for {self._model_group}"
        return await retrying(lambda: self._artifacts.read(artifact), doing, self._retry)

    async def check_owner(self) -> None:
        """Read on to the end of `weights`. Raises FencedError if the model group is another learner's by now.

        A model group whose run is over, and that has no open job, has no owner.
        """
        await self._inbox.catch_up(("weights",))
        owner = self._inbox.state.owners.get(self._model_group)
        if owner is not None and owner.offset != self._claimed_at:
            raise FencedError(
                f"model group {self._model_group} was claimed by learner {owner.learner} with term {owner.term}; "
                f"this learner ({self._learner}, term {self.term}) stops"
            )

    async def is_over(self, job: JobSubmitted) -> bool:
        """Whether a job has ended by now, such as by a cancellation while a batch of it was trained."""
        await self._inbox.catch_up(("jobs",))
        return job.job_id in self._inbox.state.closed

    async def is_needed(self, job: JobSubmitted) -> bool:
        """Whether neither a job nor its run has ended by now."""
        try:
            await self._inbox.catch_up(("jobs", "groups"))
        except TruncatedError:
            raise
        except LogError:  # the log may wait for the same disk; whoever asks tries again
            return True
        state = self._inbox.state
        return job.job_id not in state.closed and job.run_id not in state.ended_runs

    async def publish_base(self, job: JobSubmitted, model: PolicyModel, artifact: ArtifactRef) -> None:
        """Publish the version that a job begins with, if the model group has none."""
        await self.check_owner()
        published = self._published(job, model, version=job.base_version, sha256=artifact.sha256, artifact=artifact)
        if not self._known(job, published.version, published.weights_sha256):
            await self._log.send(published)

    async def publish_step(
        self, job: JobSubmitted, model: PolicyModel, step: StepTrained, artifact: ArtifactRef
    ) -> None:
        """Send what the log lacks of StepTrained, WeightsPublished and JobProgressed of one version, in this order.

        Nothing is sent for a job that is over: a retry begins from the version before, and trains the batch. Raises
        FencedError, or VersionDivergedError if the version is known with another hash; then nothing is sent.
        """
        if await self.is_over(job):
            logger.info("job=%s is over: its version=%s is dropped", job.job_id, step.version)
            return
        await self.check_owner()
        is_published = self._known(job, step.version, step.weights_sha256)
        group = self._inbox.state.group(self._model_group)
        if group.step(step.version, job.job_id) is None:
            await self._log.send(step.model_copy(update={"term": self.term}))
            failpoint("learner/between-step-and-weights")
        events: list[Event] = []
        if not is_published:
            published = self._published(
                job, model, version=step.version, sha256=step.weights_sha256, artifact=artifact
            ).model_copy(
                update={
                    "batch_id": step.batch_id,
                    "parent": step.version - 1,
                    "time_ms": step.time_ms,
                    "adopts": step.adopts,
                }
            )
            events.append(published)
        if job.job_id not in group.progressed.get(step.version, ()):
            events.append(_progressed(job, step))
        await self._log.send_all(events)

    async def collect(self, at_checkpoints: Collection[int], time_ms: int) -> None:
        """Let weights go that nothing needs any more. `time_ms`: of the version that made them so.

        Raises FencedError; then nothing is removed.
        """
        await self._collector.collect(at_checkpoints, time_ms, self.check_owner)

    def kept(self, job: JobSubmitted, version: int, size_bytes: int) -> ArtifactRef | None:
        """The artifact of a job's version that is on the log; `size_bytes`: of one that only its StepTrained names."""
        group = self._inbox.state.group(self._model_group)
        published, step = group.published.get(version), group.step(version, job.job_id)
        if published is not None or step is None:
            return published.artifact if published else None
        sha256 = step.weights_sha256
        return ArtifactRef(uri=f"{sha256[:2]}/{sha256}.safetensors", sha256=sha256, size_bytes=size_bytes)

    def _known(self, job: JobSubmitted, version: int, sha256: str) -> bool:
        """Whether a version is published. Raises VersionDivergedError if the log has another hash for it.

        The step of a job that was closed before it published the version does not count.
        """
        group = self._inbox.state.group(self._model_group)
        published, step = group.published.get(version), group.step(version, job.job_id)
        for known in (published and published.weights_sha256, step and step.weights_sha256):
            if known is not None and known != sha256:
                raise VersionDivergedError(
                    f"version {version} of model group {self._model_group} is published with hash {known}, "
                    f"and training gave {sha256}: {difference(step, self._num_ranks)}"
                )
        return published is not None

    def _published(
        self, job: JobSubmitted, model: PolicyModel, *, version: int, sha256: str, artifact: ArtifactRef
    ) -> WeightsPublished:
        return WeightsPublished(
            run_id=job.run_id,
            time_ms=job.time_ms,
            model_group=self._model_group,
            job_id=job.job_id,
            batch_id=None,
            version=version,
            parent=None,
            term=self.term,
            weights_sha256=sha256,
            weights_format="lora" if job.settings.model.lora else "full",
            base_model=job.settings.model.path,
            lora=model.adapter_config(),
            artifact=artifact,
            tokenizer_sha256=model.tokenizer_sha256,
            quantization=job.settings.model.quantization,
            base_sha256=model.base_sha256,
        )


def difference(step: TrainedStep | None, num_ranks: int) -> str:
    """The reason why a version may have other bits than when it was published. `step`: of that time."""
    if step is not None and step.ranks not in (0, num_ranks):
        return (
            f"it was trained by {step.ranks} process(es) then and by {num_ranks} now, and bits are equal only for as "
            f"many; start the learner with {step.ranks}, until it has caught up with what is published"
        )
    threads = "" if step is not None and step.threads else "threads, "
    return f"device, {threads}libraries or inputs differ from the first time; restore those"


def _progressed(job: JobSubmitted, step: StepTrained) -> JobProgressed:
    num_adopted = step.num_adopted + (step.adopts is not None)
    done = (step.version - job.base_version - num_adopted) / job.settings.num_versions
    return JobProgressed(
        run_id=job.run_id,
        time_ms=step.time_ms,
        job_id=job.job_id,
        model_group=job.model_group,
        version=step.version,
        percent=min(100.0, 100.0 * done),
    )


def step_trained(
    job: JobSubmitted,
    manifest: Manifest,
    result: StepResult,
    weights_sha256: str,
    *,
    term: int,
    seconds: dict[str, float],
) -> StepTrained:
    """The StepTrained of a manifest. `seconds`: durations by phase; all but `wait` count for tokens/s."""
    planned, busy_s = manifest.planned, _busy(seconds)
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
        ranks=result.ranks,
        device=result.device,
        micro_batch_tokens=result.micro_batch_tokens,
        weights_sha256=weights_sha256,
        manifest_sha256=manifest.digest,
        scores_sha256=result.scores_sha256,
        num_optimizer_steps=result.num_optimizer_steps,
        metrics=result.metrics,
        seconds=seconds,
        tokens_per_s=result.num_tokens / busy_s if busy_s else 0.0,
        adopts=planned.adopts,
        num_adopted=planned.num_adopted,
    )


def with_phases(step: StepTrained, phases: Mapping[str, float]) -> StepTrained:
    """The step with more phases in its durations, and its tokens/s over all of them."""
    seconds = {**step.seconds, **phases}
    busy_s = _busy(seconds)
    tokens = step.tokens_per_s * _busy(step.seconds)
    return step.model_copy(update={"seconds": seconds, "tokens_per_s": tokens / busy_s if busy_s else 0.0})


def _busy(seconds: Mapping[str, float]) -> float:
    return sum(value for name, value in seconds.items() if name != "wait")
