"""A learner's voice on one model group: claims it, and publishes what the log lacks, unless a newer claim is there."""

import logging

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.failpoints import failpoint
from rollstream.eventlog.log import EventLog
from rollstream.learner import terms
from rollstream.learner.inbox import Inbox
from rollstream.learner.model import PolicyModel, sha256_of
from rollstream.schemas.base import Event
from rollstream.schemas.errors import FencedError, VersionDivergedError
from rollstream.schemas.events import JobProgressed, JobSubmitted, LearnerClaimed, StepTrained, WeightsPublished
from rollstream.schemas.settings import ArtifactRef

logger = logging.getLogger(__name__)


class Publisher:
    """Owner of a model group from `claim` on, until somebody else claims it."""

    def __init__(self, log: EventLog, artifacts: ArtifactStore, inbox: Inbox, model_group: str, learner: str) -> None:
        self.artifacts = artifacts
        self.term = 0
        self._log = log
        self._inbox = inbox
        self._model_group = model_group
        self._learner = learner
        self._claimed_at = -1

    async def claim(self, job: JobSubmitted) -> None:
        """Claim the model group with the next term. Raises FencedError if another claim came first."""
        await self._inbox.catch_up(("weights",))
        self.term = terms.term_of(self._inbox.state.owners, self._model_group) + 1
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

    async def check_owner(self) -> None:
        """Read on to the end of `weights`. Raises FencedError if the model group is another learner's by now."""
        await self._inbox.catch_up(("weights",))
        owner = self._inbox.state.owners[self._model_group]
        if owner.offset != self._claimed_at:
            raise FencedError(
                f"model group {self._model_group} was claimed by learner {owner.learner} with term {owner.term}; "
                f"this learner ({self._learner}, term {self.term}) stops"
            )

    async def publish_base(self, job: JobSubmitted, model: PolicyModel, weights: bytes, artifact: ArtifactRef) -> None:
        """Publish the version that a job begins with, if the model group has none."""
        await self.check_owner()
        published = self._published(job, model, version=job.base_version, sha256=sha256_of(weights), artifact=artifact)
        if not self._known(published.version, published.weights_sha256):
            await self._log.send(published)

    async def publish_step(
        self, job: JobSubmitted, model: PolicyModel, step: StepTrained, artifact: ArtifactRef
    ) -> None:
        """Send what the log lacks of StepTrained, WeightsPublished and JobProgressed of one version, in this order.

        Raises FencedError, or VersionDivergedError if the version is known with another hash; then nothing is sent.
        """
        await self.check_owner()
        is_published = self._known(step.version, step.weights_sha256)
        group = self._inbox.state.group(self._model_group)
        if step.version not in group.trained:
            await self._log.send(step.model_copy(update={"term": self.term}))
            failpoint("learner/between-step-and-weights")
        events: list[Event] = []
        if not is_published:
            published = self._published(
                job, model, version=step.version, sha256=step.weights_sha256, artifact=artifact
            ).model_copy(update={"batch_id": step.batch_id, "parent": step.version - 1, "time_ms": step.time_ms})
            events.append(published)
        if step.version not in group.progressed:
            events.append(_progressed(job, step))
        await self._log.send_all(events)

    def _known(self, version: int, sha256: str) -> bool:
        """Whether a version is published. Raises VersionDivergedError if the log has another hash for it."""
        group = self._inbox.state.group(self._model_group)
        published = group.published.get(version)
        for known in (published.weights_sha256 if published else None, group.trained.get(version)):
            if known is not None and known != sha256:
                raise VersionDivergedError(
                    f"version {version} of model group {self._model_group} is published with hash {known}, "
                    f"and training gave {sha256}: threads, libraries or inputs differ from the first time"
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
        )


def _progressed(job: JobSubmitted, step: StepTrained) -> JobProgressed:
    done = (step.version - job.base_version) / job.settings.num_versions
    return JobProgressed(
        run_id=job.run_id,
        time_ms=step.time_ms,
        job_id=job.job_id,
        model_group=job.model_group,
        version=step.version,
        percent=min(100.0, 100.0 * done),
    )
