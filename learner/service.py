"""The learner as a service: connects what the settings name and runs the worker until it is cancelled."""

import os

from transformers.utils import logging as transformers_logging

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.learner.worker import Worker
from rollstream.schemas.permissions import Permissions
from rollstream.schemas.services import LearnerSettings


async def serve(settings: LearnerSettings) -> None:
    """Serve jobs until cancelled; logs `ready` once the log is read.

    Raises LogError if the log cannot be reached, FencedError if another learner took a model group over,
    VersionDivergedError if training gave other bits than those that were published.
    """
    transformers_logging.disable_progress_bar()
    async with KafkaLog(settings.connection, client_id=settings.name) as log:
        worker = Worker(
            log,
            ArtifactStore(settings.artifact_uri),
            name=settings.name,
            checkpoints=settings.workspace / "checkpoints",
            model_groups=settings.model_groups,
            threads=settings.threads,
            permissions=Permissions.of(settings.allow, os.environ),
        )
        await worker.run()
