"""docker-compose.yml without Docker: valid by the compose specification, and its services' commands are ours."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from rollstream.eventlog.broker.broker import PROPERTIES

ROOT = Path(__file__).resolve().parents[1]
SPECIFICATION = ROOT / ".cache" / "compose-schema" / "compose" / "config" / "compose_spec.json"
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
OURS = {"producers", "processors", "learner", "learner-gpu", "metrics"}


def test_the_compose_file_is_valid_by_the_compose_specification() -> None:
    assert SPECIFICATION.exists(), "run `make test`: it fetches the specification (requirements/compose-schema.txt)"
    errors = jsonschema.Draft7Validator(json.loads(SPECIFICATION.read_text())).iter_errors(COMPOSE)
    assert [f"{error.json_path}: {error.message}" for error in errors] == []


def test_a_misspelt_key_is_not_valid() -> None:
    broken = {**COMPOSE, "services": {"kafka": {"imagee": "apache/kafka"}}}
    errors = list(jsonschema.Draft7Validator(json.loads(SPECIFICATION.read_text())).iter_errors(broken))
    assert errors


def test_every_service_restarts_is_checked_and_keeps_its_data() -> None:
    assert set(SERVICES) == OURS | {"kafka"}
    for name, service in SERVICES.items():
        assert service["restart"] == "unless-stopped", name
        assert service["healthcheck"]["test"], name
        assert service["volumes"], name


def test_the_broker_keeps_what_the_embedded_one_keeps() -> None:
    embedded = dict(line.split("=", 1) for line in PROPERTIES.splitlines())
    composed = {
        name.removeprefix("KAFKA_").lower().replace("_", "."): value
        for name, value in SERVICES["kafka"]["environment"].items()
    }
    for name in ("offsets.retention.minutes", "log.message.timestamp.after.max.ms", "auto.create.topics.enable"):
        assert composed[name] == embedded[name], name
    assert composed["log.retention.hours"] == embedded["log.retention.ms"] == "-1"
    for name in composed.keys() & embedded.keys():
        if name.endswith((".min.isr", ".factor", ".delay.ms")):
            assert composed[name] == embedded[name], name


def test_only_loopback_ports_are_published() -> None:
    for name, service in SERVICES.items():
        for port in service.get("ports", ()):
            assert str(port).startswith("127.0.0.1:"), name


def test_every_volume_that_is_used_is_declared() -> None:
    used = {
        str(volume).split(":")[0]
        for service in SERVICES.values()
        for volume in service["volumes"]
        if not str(volume).startswith(".")
    }
    assert used == set(COMPOSE["volumes"])


def test_the_gpu_learner_is_chosen_by_profile() -> None:
    assert SERVICES["learner-gpu"]["profiles"] == ["gpu"]
    assert SERVICES["learner"]["profiles"] == ["cpu"]
    assert SERVICES["learner-gpu"]["command"] == SERVICES["learner"]["command"]
