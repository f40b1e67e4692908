"""Settings of rollouts, and published weights for them."""

from pathlib import Path

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.schemas.engine_settings import ScriptedSettings
from rollstream.schemas.events import WeightsPublished
from rollstream.schemas.kafka import KafkaSection, KafkaSettings
from rollstream.schemas.services import ProducerSettings


def settings_of(folder: Path, *allow: str, kafka: KafkaSettings | None = None) -> ProducerSettings:
    return ProducerSettings(
        bootstrap_servers=kafka.bootstrap_servers if kafka else "memory",
        kafka=kafka.section if kafka else KafkaSection(),
        artifact_uri=str(folder / "artifacts"),
        workspace=folder,
        name="producers-1",
        engine=ScriptedSettings(),
        tick_interval_s=0.02,
        allow=allow,
    )


async def publish(log: MemoryLog, folder: Path, base_model: str) -> None:
    """Version 0 of `run-1/policy`, as a learner publishes it."""
    artifact = ArtifactStore(str(folder / "artifacts")).put_bytes(b"weights")
    await log.send(
        WeightsPublished(
            run_id="run-1",
            time_ms=1,
            model_group="run-1/policy",
            job_id="run-1/rl",
            batch_id=None,
            version=0,
            parent=None,
            term=1,
            artifact=artifact,
            weights_sha256=artifact.sha256,
            weights_format="full",
            base_model=base_model,
        )
    )
