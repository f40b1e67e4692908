"""The event log on Kafka. All imports of aiokafka are here, except in the host of the Faust worker."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.eventlog.kafka import asyncapi, client, log, topic_ids

__all__ = ["asyncapi", "client", "log", "topic_ids"]
