"""docker-compose.yml without Docker: valid by the compose specification, and its services' commands are ours."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from rollstream.eventlog.broker.broker import PROPERTIES
from rollstream.harness.services.serving import settings_of
from rollstream.producers.engines.vllm.child import Child
from rollstream.schemas.services import VllmSettings
from rollstream.schemas.variables import expand

ROOT = Path(__file__).resolve().parents[1]
SPECIFICATION = ROOT / ".cache" / "compose-schema" / "compose" / "config" / "compose_spec.json"
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
OURS = {"producers", "producers-vllm", "processors", "learner", "learner-gpu", "metrics", "gateway"}
VLLM = {"vllm-1", "vllm-2", "vllm-gpu-1", "vllm-gpu-2"}


def test_the_compose_file_is_valid_by_the_compose_specification() -> None:
    assert SPECIFICATION.exists(), "run `make test`: it fetches the specification (requirements/compose-schema.txt)"
    errors = jsonschema.Draft7Validator(json.loads(SPECIFICATION.read_text())).iter_errors(COMPOSE)
    assert [f"{error.json_path}: {error.message}" for error in errors] == []


def test_a_misspelt_key_is_not_valid() -> None:
    broken = {**COMPOSE, "services": {"kafka": {"imagee": "apache/kafka"}}}
    errors = list(jsonschema.Draft7Validator(json.loads(SPECIFICATION.read_text())).iter_errors(broken))
    assert errors


def test_every_service_restarts_is_checked_and_keeps_its_data() -> None:
    assert set(SERVICES) == OURS | VLLM | {"kafka"}
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


def test_profiles_choose_the_learners_device_and_the_engine() -> None:
    chosen = {
        profile: {name for name, one in SERVICES.items() if profile in one.get("profiles", [])}
        for profile in ("cpu", "gpu", "vllm-cpu", "vllm-gpu", "gateway")
    }
    assert chosen == {
        "cpu": {"producers", "learner"},
        "gpu": {"producers", "learner-gpu"},
        "vllm-cpu": {"producers-vllm", "learner", "vllm-1", "vllm-2"},
        "vllm-gpu": {"producers-vllm", "learner-gpu", "vllm-gpu-1", "vllm-gpu-2"},
        "gateway": {"gateway"},
    }
    assert SERVICES["learner-gpu"]["command"] == SERVICES["learner"]["command"]


@pytest.mark.parametrize("name", sorted(OURS - {"learner-gpu"}))
def test_every_service_of_ours_is_started_with_settings_that_it_knows(name: str) -> None:
    service = SERVICES[name]
    command, environment = (
        service["command"],
        {key: str(expand(one, {})) for key, one in service["environment"].items()},
    )
    given = json.loads((ROOT / command[-1]).read_text()) if "--settings" in command else {}
    assert "--settings" not in command or "./examples:/app/examples:ro" in service["volumes"]
    assert command[0] == "serve"
    found = settings_of(command[1], command[command.index("--name") + 1], given, environment)
    assert found.name == service["healthcheck"]["test"][-1]
    assert str(found.workspace).startswith("/data/")


def test_the_vllm_servers_are_what_the_producers_ask_and_have_what_the_engine_needs() -> None:
    engine = json.loads((ROOT / SERVICES["producers-vllm"]["command"][-1]).read_text())["engine"]
    started = Child(VllmSettings(max_loras=engine["max_loras"]), "MODEL", is_lora=True, log=Path("unused")).command()
    needed = {one for one in started if one.startswith("--") and not one.startswith(("--port", "--host", "--dtype"))}
    for name in sorted(VLLM):
        service = SERVICES[name]
        aliases = service.get("networks", {}).get("default", {}).get("aliases", [name])
        assert [f"http://{alias}:8000" in engine["base_urls"] for alias in aliases] == [True], name
        assert needed <= set(service["command"])
        assert service["entrypoint"][:2] == started[:2]
        assert {"VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"} <= service["environment"].keys()
        assert "ports" not in service, "whoever reaches it can change its weights"
    assert engine["folder"].startswith("/data/")
