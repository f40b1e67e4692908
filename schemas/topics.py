"""The one table of topics: name, key, size limit, and whether it scales with the rollout partitions."""

from dataclasses import dataclass

PREFIX = "rollstream."
SUFFIX = ".v1"
NUM_PARTITIONS = 6
"""Partition count of the scaled topics of a new log."""
MIB = 1024 * 1024


@dataclass(frozen=True)
class Topic:
    """One topic. `scaled` topics have the rollout partition count, the others one partition."""

    short: str
    key: str
    scaled: bool
    max_record_bytes: int

    @property
    def name(self) -> str:
        """Name in Kafka."""
        return f"{PREFIX}{self.short}{SUFFIX}"


TOPICS: dict[str, Topic] = {
    topic.short: topic
    for topic in (
        Topic("tasks", "group_id", scaled=True, max_record_bytes=1 * MIB),
        Topic("steps", "group_id", scaled=True, max_record_bytes=8 * MIB),
        Topic("trajectories", "group_id", scaled=True, max_record_bytes=8 * MIB),
        Topic("groups", "run_id", scaled=False, max_record_bytes=1 * MIB),
        Topic("batches", "run_id", scaled=False, max_record_bytes=1 * MIB),
        Topic("jobs", "model_group", scaled=False, max_record_bytes=1 * MIB),
        Topic("weights", "model_group", scaled=False, max_record_bytes=1 * MIB),
        Topic("dlq", "as it came", scaled=False, max_record_bytes=8 * MIB),
    )
}
BY_NAME: dict[str, Topic] = {topic.name: topic for topic in TOPICS.values()}
