"""The event log as an AsyncAPI 3.0 document: topics, keys, headers, and the JSON schema of every event. Pure."""

from collections.abc import Mapping
from importlib import metadata
from typing import Any

from pydantic.json_schema import models_json_schema

from rollstream.eventlog.codec import DIGESTED, HEADERS
from rollstream.schemas.base import Event
from rollstream.schemas.events import KINDS
from rollstream.schemas.topics import PREFIX, SUFFIX, TOPICS, Topic

ERROR_HEADERS = {
    "type": "object",
    "patternProperties": {"^(__connect\\.errors\\.|rollstream\\.)": {"type": "string"}},
    "description": "The record's own headers, and those of Kafka Connect's errors that say where it came from and why.",
}


def asyncapi_document(topic_prefix: str = PREFIX) -> dict[str, Any]:
    """AsyncAPI document of all topics and events. `topic_prefix`: beginning of the topics' names in Kafka."""
    refs, schemas = models_json_schema(
        [(event, "validation") for event in KINDS.values()], ref_template="#/components/schemas/{model}"
    )
    messages = {kind: _message(kind, event, refs[event, "validation"]) for kind, event in KINDS.items()}
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "rollstream event log",
            "version": metadata.version("rollstream"),
            "description": "Events of rollouts, groups, jobs and weight versions, as CloudEvents 1.0 in Kafka's binary "
            "mode. A published event never changes. Fields are added with defaults; old records may have fields that "
            "are no longer written.",
        },
        "defaultContentType": "application/json",
        "channels": {short: _channel(topic, f"{topic_prefix}{short}{SUFFIX}") for short, topic in TOPICS.items()},
        "operations": {
            f"read_{short}": {"action": "receive", "channel": {"$ref": f"#/channels/{short}"}} for short in TOPICS
        },
        "components": {
            "messages": {**messages, "dead_letter": _dead_letter()},
            "schemas": _open(schemas.get("$defs", {})),
        },
    }


def _open(schema: Any) -> Any:
    """A schema that allows further properties, which old and future records have."""
    if isinstance(schema, list):
        return [_open(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    renamed = {"anyOf" if key == "oneOf" else key: _open(one) for key, one in schema.items()}
    return {key: one for key, one in renamed.items() if key != "additionalProperties" or one is not False}


def _channel(topic: Topic, name: str) -> dict[str, Any]:
    kinds = [kind for kind, event in KINDS.items() if topic.short == event.TOPIC] or ["dead_letter"]
    return {
        "address": name,
        "description": f"Key: {topic.key}. Partitions: {'those of the rollouts' if topic.scaled else 'one'}.",
        "messages": {kind: {"$ref": f"#/components/messages/{kind}"} for kind in kinds},
        "bindings": {
            "kafka": {
                "topic": name,
                "topicConfiguration": {"cleanup.policy": ["delete"], "max.message.bytes": topic.max_record_bytes},
                "bindingVersion": "0.5.0",
            }
        },
    }


def _message(kind: str, event: type[Event], schema: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": kind,
        "title": event.__name__,
        "summary": (event.__doc__ or "").strip().partition("\n")[0],
        "contentType": "application/json",
        "headers": {
            "type": "object",
            "required": [name for name in HEADERS if name != DIGESTED],
            "properties": {name: {"type": "string", "description": text} for name, text in HEADERS.items()},
        },
        "payload": dict(schema),
        "bindings": {"kafka": {"key": {"type": "string"}, "bindingVersion": "0.5.0"}},
    }


def _dead_letter() -> dict[str, Any]:
    return {
        "name": "dead_letter",
        "title": "DeadLetter",
        "summary": "A record that could not be used, as it came.",
        "contentType": "application/octet-stream",
        "headers": ERROR_HEADERS,
    }
