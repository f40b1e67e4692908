"""The same under `nat finetune`, which hands components what it has made of the file: no key is lost on the way."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from nat.cli.cli_utils.config_override import load_and_override_config
from nat.data_models.config import Config
from nat.data_models.finetuning import FinetuneRunConfig
from nat.runtime.loader import PluginTypes, discover_and_register_plugins
from nat.utils.data_models.schema_validator import validate_schema

from rollstream.harness.nat.handover import complete, loaded_of, repair
from rollstream.harness.services.workspace import Workspace
from rollstream.schemas.errors import ConfigError
from tests.harness.config.keys.changed_keys import EPOCHWISE, answer, changed_by, effects_of, table_of

VARIANTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "our three": changed_by(),
    "with a validation": changed_by(**EPOCHWISE),
    "without a curriculum": changed_by(finetuning__curriculum_learning={}),
    "a Kafka of one's own": changed_by(trainer_adapters__a__bootstrap_servers="127.0.0.1:9"),
}


@pytest.fixture(scope="module", autouse=True)
def _discovered() -> None:
    discover_and_register_plugins(PluginTypes.CONFIG_OBJECT)


@pytest.fixture
def nats(base: dict[str, Any]) -> dict[str, Any]:
    """The file as NAT reads it: it knows no plain name of an environment."""
    workflow = {"_type": "rollstream", "environment": "guess_number"}
    return changed_by(workflow=workflow, finetuning__enabled=True, trainers__t__planning="submitted")(base)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_key_has_an_effect_or_is_refused_or_logged_under_nat_finetune(
    nats: dict[str, Any], variant: str, caplog: pytest.LogCaptureFixture
) -> None:
    written = VARIANTS[variant](nats)
    before = under_nat(written)
    table = {key: value for key, value in table_of(written).items() if not key.startswith("eval.general.")}
    answers = {key: answer(written, before, key, value, caplog, under_nat) for key, value in table.items()}
    silent = [key for key, found in answers.items() if not found]
    assert not silent, ", ".join(silent)
    assert answer(written, before, "trainers.t.planning", "stream", caplog, under_nat) in ("told", "error")
    if variant == "our three":
        effective = {key for key, found in answers.items() if found == "effect"}
        flags = {f"finetuning.curriculum_learning.{name}" for name in ("seeded_subsample", "groups_by_example")}
        assert flags <= effective
        assert {"trainer_adapters.a.bootstrap_servers", "trainer_adapters.a.workspace"} <= effective


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("finetuning.num_epoch", "finetuning.num_epoch: unknown key; did you mean num_epochs?"),
        (
            "finetuning.curriculum_learning.window_version",
            "finetuning.curriculum_learning.window_version: unknown key; did you mean window_versions?",
        ),
        ("finetuning.run_configuration.endpont", "finetuning.run_configuration.endpont: unknown key; did you mean"),
        ("trainers.t.planing", "trainers.t.planing: unknown key; did you mean planning?"),
        ("trajectory_builders.b.sampling.top_pp", "trajectory_builders.b.sampling.top_pp: unknown key; did you mean"),
    ],
)
def test_a_misspelt_key_is_one_error_that_names_block_key_and_the_nearest_one(
    nats: dict[str, Any], key: str, message: str
) -> None:
    parts = key.replace(".", "__")
    with pytest.raises(ConfigError) as reported:
        under_nat(changed_by(**{parts: 1})(nats))
    assert message in str(reported.value)


def test_the_command_line_overrides_the_files_run_configuration(nats: dict[str, Any]) -> None:
    written = changed_by(finetuning__run_configuration={"validation_interval": 3, "validation_dataset": "o.jsonl"})(
        nats
    )
    found = handed_over(written, validation_interval=7).run_configuration
    assert (found.validation_interval, found.validation_dataset) == (7, "o.jsonl")


def under_nat(written: dict[str, Any]) -> Any:
    """Results of a file. Raises ConfigError."""
    with click.Context(click.Command("finetune")) as context:
        finetune = handed_over(written, context=context)
        loaded = loaded_of(finetune)
        workspace = finetune.run_configuration.config_file.trainer_adapters["a"].workspace
        Workspace(workspace).create()
        return effects_of(loaded, workspace)


def handed_over(written: dict[str, Any], context: click.Context | None = None, **options: Any) -> Any:
    """Configuration that components get in `initialize`, as NAT's command makes it from a file. Raises ConfigError."""
    path = Path("nat.yaml")
    path.write_text(yaml.safe_dump(written))
    context = context or click.Context(click.Command("finetune"))
    context.params = {"config_file": path, **options}
    for name in options:
        context.set_parameter_source(name, click.core.ParameterSource.COMMANDLINE)
    with context:
        try:
            config = validate_schema(load_and_override_config(path, ()), Config)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        config.finetuning.run_configuration = FinetuneRunConfig(config_file=config, **options)
        if not config.finetuning.enabled:
            raise ConfigError("NAT ends here")
        repair(config.finetuning)
        complete(config.finetuning)
        return config.finetuning
