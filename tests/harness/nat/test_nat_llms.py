"""The llms of NAT's file that another package's builder asks under `nat finetune`: what they sample with is checked."""

import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from nat.cli.cli_utils.config_override import load_and_override_config
from nat.cli.register_workflow import register_trajectory_builder
from nat.data_models.config import Config
from nat.data_models.finetuning import FinetuneRunConfig, TrajectoryBuilderConfig
from nat.runtime.loader import PluginTypes, discover_and_register_plugins
from nat.utils.data_models.schema_validator import validate_schema

from rollstream.harness.config.file import Loaded, resolve
from rollstream.harness.config.jobs import ENDPOINT, RunLocation, jobs_of, services_of
from rollstream.harness.config.nat_workflows import check_sampling
from rollstream.harness.nat.handover import loaded_of, repair
from rollstream.harness.runs.sampling_checks import check_temperature
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.kafka import KafkaSettings
from rollstream.schemas.services import EndpointSettings


class TheirBuilderConfig(TrajectoryBuilderConfig, name="nat_llms_builder"):
    """A builder of another package."""


@pytest.fixture(scope="module", autouse=True)
def _their_builder() -> None:
    discover_and_register_plugins(PluginTypes.CONFIG_OBJECT)

    @register_trajectory_builder(config_type=TheirBuilderConfig)
    async def theirs(config: Any, builder: Any) -> AsyncIterator[Any]:
        yield None


def llm(model_name: str = "policy", url: str | None = "http://localhost:8765/v1", **how: Any) -> dict[str, Any]:
    return {"_type": "openai", "api_key": "none", "model_name": model_name, **({"base_url": url} if url else {}), **how}


def loaded(folder: Path, llms: dict[str, Any], *, builder: str = "nat_llms_builder", **changes: Any) -> Loaded:
    """The file as `nat finetune` gives it to our adapter, after the checks before a run."""
    adapter = {"_type": "rollstream", "model": {"path": str(folder)}, "endpoint": {"port": 8765}}
    written = {
        "workflow": {"_type": "rollstream", "environment": "guess_number"},
        "llms": llms,
        "trajectory_builders": {"b": {"_type": builder}},
        "trainer_adapters": {"a": adapter | changes.get("adapter", {})},
        "trainers": {"t": {"_type": "rollstream"}},
        "finetuning": {
            "enabled": True,
            "trainer": "t",
            "trajectory_builder": "b",
            "trainer_adapter": "a",
            "num_epochs": 1,
            **changes.get("finetuning", {}),
        },
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(written))
    context = click.Context(click.Command("finetune"))
    context.params = {"config_file": path}
    with context:
        config = validate_schema(load_and_override_config(path, ()), Config)
        config.finetuning.run_configuration = FinetuneRunConfig(
            config_file=config, dataset="none.json", endpoint=changes.get("endpoint")
        )
        repair(config.finetuning)
        found = loaded_of(config.finetuning)
    check_temperature(found.config)
    check_sampling(found.config, found.finetune)
    return found


def loss_temperature(found: Loaded) -> float:
    (job,) = jobs_of(found.config, "run-1")
    return job.job.algorithm.temperature


@pytest.mark.parametrize(
    ("llms", "changes", "reported"),
    [
        ({"x": llm(temperature=0)}, {}, r"^llms\.x\.temperature: 0 decodes greedily, .* set it above 0$"),
        (
            {"x": llm(temperature=0.3)},
            {"adapter": {"algorithm": {"temperature": 1.0}}},
            r"^llms\.x\.temperature: 0\.3 differs from trainer_adapters\.a\.algorithm\.temperature: 1 .*same value$",
        ),
        (
            {"x": llm(), "y": llm("any", temperature=0.3)},
            {},
            r"^llms\.x\.temperature: 1 differs from llms\.y\..*: 0\.3",
        ),
        ({"x": llm(top_p=0.5), "y": llm()}, {}, r"^llms\.x\.top_p: 0\.5 differs from llms\.y\.top_p: 1 "),
        (
            {"x": llm("gpt", "http://proxy.example/v1", temperature=0)},
            {"finetuning": {"target_model": "gpt"}},
            r"^llms\.x\.temperature: 0 decodes greedily",
        ),
    ],
)
def test_llms_at_the_endpoint_are_held_to_one_distribution(
    tmp_path: Path, llms: dict[str, Any], changes: dict[str, Any], reported: str
) -> None:
    with pytest.raises(ConfigError, match=reported):
        loaded(tmp_path, llms, **changes)


@pytest.mark.parametrize(
    ("llms", "changes", "wanted"),
    [
        ({"x": llm(temperature=0.3)}, {}, 0.3),
        ({"x": llm(temperature=0.3)}, {"adapter": {"algorithm": {"temperature": 0.3}}}, 0.3),
        ({"x": llm(), "judge": llm("gpt", None, temperature=0)}, {}, 1.0),
        ({"x": llm(), "judge": llm("gpt", "http://127.0.0.1:9/v1", temperature=0)}, {}, 1.0),
        ({"x": llm(temperature=0.3), "y": llm("any", temperature=0)}, {"finetuning": {"target_model": "policy"}}, 0.3),
        ({"x": llm(temperature=0)}, {"adapter": {"algorithm": {"name": "sft"}}}, 1.0),
        ({"x": llm(temperature=0)}, {"adapter": {"endpoint": None}}, 1.0),
        ({"x": llm(temperature=0)}, {"endpoint": "http://127.0.0.1:1"}, 1.0),
        ({"x": llm(temperature=0)}, {"builder": "rollstream"}, 1.0),
    ],
)
def test_the_loss_takes_the_temperature_of_the_llms_that_are_trained_on_and_of_no_others(
    tmp_path: Path, llms: dict[str, Any], changes: dict[str, Any], wanted: float
) -> None:
    found = loaded(tmp_path, llms, **changes)
    assert loss_temperature(found) == wanted
    assert loss_temperature(resolve(found.written)) == wanted  # what is stored of the run says the same


@pytest.mark.parametrize(
    ("llms", "changes", "wanted"),
    [
        ({"x": llm(temperature=0.3)}, {}, 0.3),
        ({"x": llm()}, {"endpoint": "http://127.0.0.1:1", "adapter": {"algorithm": {"temperature": 0.7}}}, 0.7),
        ({"x": llm()}, {"endpoint": "http://127.0.0.1:1", "builder": "rollstream"}, 1.0),
        ({"x": llm(temperature=0)}, {"adapter": {"algorithm": {"name": "sft"}}}, None),
        ({"x": llm(temperature=0)}, {"builder": "rollstream"}, None),  # an environment's rollouts do not ask there
    ],
)
def test_the_endpoint_takes_the_temperature_of_the_loss_where_its_answers_are_trained_on(
    tmp_path: Path, llms: dict[str, Any], changes: dict[str, Any], wanted: float | None
) -> None:
    found = loaded(tmp_path, llms, **changes)
    location = RunLocation(KafkaSettings(bootstrap_servers="localhost:1"), "artifacts", tmp_path)
    endpoint = services_of(found.config, location, "run-1")[ENDPOINT]
    assert isinstance(endpoint, EndpointSettings)
    assert endpoint.temperature == wanted


def test_a_key_that_only_the_llm_has_is_not_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        loaded(tmp_path, {"x": llm(temperature=0.3)})
    assert "sampling" not in caplog.text
