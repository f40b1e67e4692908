"""The AsyncAPI document: every event is valid by its schema."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from jsonschema import Draft202012Validator

from rollstream.eventlog.codec import HEADERS, encode
from rollstream.eventlog.kafka.asyncapi import asyncapi_document
from rollstream.harness.cli.main import rollstream
from rollstream.schemas.events import KINDS
from rollstream.schemas.topics import TOPICS

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return asyncapi_document()


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.glob("*.v1*.json")))
def test_an_event_is_valid_by_its_schema_as_it_is_written(document: dict[str, Any], name: str) -> None:
    kept = json.loads((GOLDEN / name).read_text())
    kind = kept["value"]["kind"]
    assert f"#/components/messages/{kind}" in [
        message["$ref"] for message in document["channels"][kept["topic"]]["messages"].values()
    ]
    schema = {"$ref": document["components"]["messages"][kind]["payload"]["$ref"], "components": document["components"]}
    encoded = encode(KINDS[kind].model_validate(kept["value"]))
    Draft202012Validator(schema).validate(json.loads(encoded.value))
    assert not Draft202012Validator(schema).is_valid(kept["value"] | {"run_id": 7})
    assert {header for header, _ in encoded.headers} <= set(HEADERS)


def test_every_reference_has_a_target_and_every_topic_a_channel(document: dict[str, Any]) -> None:
    def targets(within: Any) -> set[str]:
        if isinstance(within, dict):
            found = {within["$ref"]} if isinstance(within.get("$ref"), str) else set[str]()
            return found.union(*map(targets, within.values()))
        return set[str]().union(*map(targets, within)) if isinstance(within, list) else set()

    for target in targets(document):
        at: Any = document
        for part in target.removeprefix("#/").split("/"):
            at = at[part]
    assert document["channels"].keys() == TOPICS.keys()
    assert {message for channel in document["channels"].values() for message in channel["messages"]} == {
        *KINDS,
        "dead_letter",
    }


def test_the_command_prints_it_with_the_names_of_the_topics(document: dict[str, Any]) -> None:
    program = [sys.executable, "-m", "rollstream.harness.cli.main", "schema"]
    printed = subprocess.run(program, stdout=subprocess.PIPE, check=True)
    assert json.loads(printed.stdout) == document
    done = CliRunner().invoke(rollstream, ["schema"], env={"ROLLSTREAM_KAFKA_TOPIC_PREFIX": "lab."})
    assert json.loads(done.output)["channels"]["steps"]["address"] == "lab.steps.v1"
