"""docker-compose.yml without Docker: valid by the compose specification, and its services' commands are ours."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from rollstream.eventlog.broker.broker import PROPERTIES
from rollstream.harness.services.serving import recording, settings_of
from rollstream.producers.engines.vllm.child import Child
from rollstream.schemas.engine_settings import VllmSettings
from rollstream.schemas.services import ProducerSettings, ServiceSettings
from rollstream.schemas.variables import expand

ROOT = Path(__file__).resolve().parents[1]
SPECIFICATION = ROOT / ".cache" / "compose-schema" / "compose" / "config" / "compose_spec.json"
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
OURS = {"producers", "producers-gpu", "gateway", "processors", "learner", "learner-gpu", "metrics", "endpoint"}
RECORDING = ("producers", "producers-gpu", "gateway")
"""Services at whose gateway agents play rollouts."""
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


def test_our_services_end_at_sigterm_from_their_first_moment() -> None:
    """Process 1 of a container gets no signal before it has a handler, unless it is an init."""
    assert {name for name, service in SERVICES.items() if service.get("init")} == OURS


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
        for profile in ("cpu", "gpu", "vllm-cpu", "vllm-gpu", "endpoint")
    }
    assert chosen == {
        "cpu": {"producers", "learner"},
        "gpu": {"producers-gpu", "learner-gpu"},
        "vllm-cpu": {"gateway", "learner", "vllm-1", "vllm-2"},
        "vllm-gpu": {"gateway", "learner-gpu", "vllm-gpu-1", "vllm-gpu-2"},
        "endpoint": {"endpoint"},
    }
    assert SERVICES["learner-gpu"]["command"] == SERVICES["learner"]["command"]
    assert SERVICES["producers-gpu"]["command"] == SERVICES["producers"]["command"]


def gpus_of(service: dict[str, Any]) -> list[str]:
    """Ids of the GPUs that a service computes on, with nothing set; none: it computes on the CPU."""
    devices: list[dict[str, Any]] = (
        service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
    )
    assert all("count" not in device for device in devices), "a count gives every service the same first GPUs"
    return [str(expand(one, {})) for device in devices for one in device["device_ids"]]


def test_each_service_of_a_gpu_profile_has_a_gpu_of_its_own_which_a_variable_changes() -> None:
    for profile, computing in (("gpu", {"producers-gpu"}), ("vllm-gpu", {"vllm-gpu-1", "vllm-gpu-2"})):
        found = {name: gpus_of(one) for name, one in SERVICES.items() if profile in one.get("profiles", [])}
        on_gpus = {name: ids for name, ids in found.items() if ids}
        assert on_gpus.keys() == computing | {"learner-gpu"}
        assert sorted(one for ids in on_gpus.values() for one in ids) == [str(index) for index in range(len(on_gpus))]
    (device,) = SERVICES["vllm-gpu-2"]["deploy"]["resources"]["reservations"]["devices"]
    assert expand(device["device_ids"], {"ROLLSTREAM_GPU_VLLM_2": "GPU-7f"}) == ["GPU-7f"]
    assert not any(gpus_of(one) for one in SERVICES.values() if {"cpu", "vllm-cpu"} & set(one.get("profiles", [])))


@pytest.mark.parametrize("name", RECORDING)
def test_agents_reach_the_gateway_that_records_by_one_port_and_one_name_in_every_profile(name: str) -> None:
    service = SERVICES[name]
    found = started_settings(name)
    assert isinstance(found, ProducerSettings)
    assert found.gateway is not None
    (published,) = service["ports"]
    assert expand(published, {}) == f"127.0.0.1:8766:{found.gateway.port}"
    assert found.gateway.host == "0.0.0.0", "a published port leads to the container's own address"
    assert {name, "gateway"} <= {*found.gateway.allowed_hosts}, "by which agents in other containers ask for it"
    assert "gateway" in {name, *service.get("networks", {}).get("default", {}).get("aliases", [])}
    chosen = [one for one in RECORDING if set(SERVICES[one]["profiles"]) & set(service["profiles"])]
    assert chosen == [name], "two producers processes would divide the rollouts, and each has a gateway of its own"


def started_settings(name: str) -> ServiceSettings:
    """Settings that the service's command starts it with."""
    service = SERVICES[name]
    command = service["command"]
    environment = {key: str(expand(one, {})) for key, one in service["environment"].items()}
    given = json.loads((ROOT / command[-1]).read_text()) if "--settings" in command else {}
    assert "--settings" not in command or "./examples:/app/examples:ro" in service["volumes"]
    assert command[0] == "serve"
    return settings_of(recording(command[1], given), command[command.index("--name") + 1], given, environment)


@pytest.mark.parametrize("name", sorted(OURS - {"learner-gpu"}))
def test_every_service_of_ours_is_started_with_settings_that_it_knows(name: str) -> None:
    service, found = SERVICES[name], started_settings(name)
    assert found.name == service["healthcheck"]["test"][-1]
    assert str(found.workspace).startswith("/data/")


def test_the_vllm_servers_are_what_the_gateway_asks_and_have_what_the_engine_needs() -> None:
    engine = json.loads((ROOT / SERVICES["gateway"]["command"][-1]).read_text())["engine"]
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
