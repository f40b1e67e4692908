"""The stored form of a run that `nat finetune` conducts: the file as written, never the values of `${ENV}`."""

import asyncio
from pathlib import Path

import click
import pytest
import yaml
from nat.cli.cli_utils.config_override import load_and_override_config
from nat.data_models.config import Config
from nat.data_models.finetuning import FinetuneRunConfig
from nat.runtime.loader import PluginTypes, discover_and_register_plugins
from nat.utils.data_models.schema_validator import validate_schema

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.harness.config.file import load, resolve
from rollstream.harness.nat.command import run_name
from rollstream.harness.nat.handover import complete, loaded_of, repair
from rollstream.harness.runs.plan import new_run, open_run
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.events import JobStarted, JobSubmitted
from tests.harness.conftest import published

SECRET = "sk-very-secret"
FILE = {
    "workflow": {"_type": "rollstream", "environment": "guess_number"},
    "trajectory_builders": {"rollouts": {"_type": "rollstream", "environment_config": {"key": "${A_KEY}"}}},
    "trainer_adapters": {"learner": {"_type": "rollstream", "model": {"path": "none"}}},
    "trainers": {"trainer": {"_type": "rollstream"}},
    "eval": {
        "evaluators": {
            "judge": {
                "_type": "llm_judge",
                "base_url": "http://127.0.0.1:1/v1",
                "model": "m",
                "prompt": "{response}",
                "api_key": "${A_KEY}",
            },
        }
    },
    "finetuning": {
        "enabled": True,
        "trainer": "trainer",
        "trajectory_builder": "rollouts",
        "trainer_adapter": "learner",
        "reward_function": {"name": "judge"},
        "num_epochs": 1,
    },
}


def handed_over(path: Path, overrides=()):
    """Configuration that components get, as NAT's command makes it from a file."""
    discover_and_register_plugins(PluginTypes.CONFIG_OBJECT)
    config = validate_schema(load_and_override_config(path, overrides), Config)
    config.finetuning.run_configuration = FinetuneRunConfig(config_file=config, dataset="examples.json")
    repair(config.finetuning)
    return config.finetuning


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("A_KEY", SECRET)
    path = tmp_path / "my-run.yaml"
    path.write_text(yaml.safe_dump(FILE))
    return path


def test_secrets_stay_out_of_what_is_stored_and_overrides_are_in_it(file):
    overrides = (("finetuning.num_epochs", "3"),)
    finetune = handed_over(file, overrides)
    with click.Context(click.Command("finetune")) as context:
        context.params = {"config_file": file, "override": overrides}
        loaded = loaded_of(finetune)
        assert run_name() == "my-run"
    assert SECRET not in str(loaded.written)
    assert loaded.config.builder.environment_config == {"key": "${A_KEY}"}
    assert loaded.config.evaluators["judge"]["api_key"] == "${A_KEY}"
    assert loaded.config.reward_functions == ("judge",)
    again = resolve(loaded.written).config
    assert again.finetuning.num_epochs == loaded.config.finetuning.num_epochs == 3
    assert again.environment == "guess_number"
    assert again.dataset is not None
    assert str(again.dataset.file_path) == "examples.json"


def test_a_secret_that_stands_in_the_file_is_refused_as_it_would_be_stored(file):
    file.write_text(file.read_text().replace("${A_KEY}", SECRET))
    finetune = handed_over(file)
    with click.Context(click.Command("finetune")) as context:
        context.params = {"config_file": file}
        with pytest.raises(ConfigError, match=r"eval.evaluators.judge.api_key: secrets are not allowed in the file"):
            loaded_of(finetune)


def test_without_the_command_what_could_be_a_secret_is_refused(file):
    finetune = handed_over(file)
    with pytest.raises(ConfigError, match="stored as written"):
        loaded_of(finetune)
    del finetune.run_configuration.config_file.eval.evaluators["judge"]
    finetune.run_configuration.config_file.trajectory_builders["rollouts"].environment_config.clear()
    assert loaded_of(finetune).config.environment == "guess_number"


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_run_of_nat_finetune_is_resumed_from_the_same_file_without_an_override(file, tmp_path, max_staleness):
    content = yaml.safe_load(file.read_text())
    content["trainer_adapters"]["learner"] |= {"max_staleness": max_staleness}
    content["finetuning"]["curriculum_learning"] = {"enabled": True, "groups_by_example": False}
    file.write_text(yaml.safe_dump(content))
    (tmp_path / "examples.json").write_text('[{"id": "x", "question": "?", "answer": "1"}]')
    finetune = handed_over(file)
    finetune.run_configuration.dataset = str(tmp_path / "examples.json")

    async def resumed():
        log, artifacts = MemoryLog(num_partitions=2), ArtifactStore(str(tmp_path / "a"))
        with click.Context(click.Command("finetune")) as context:
            context.params = {"config_file": file}
            complete(finetune)
            run = await new_run(log, artifacts, loaded_of(finetune), "run", run_id="run-1")
        spec = run.jobs[-1]
        common = {"run_id": "run-1", "time_ms": run.started.time_ms, "model_group": spec.model_group}
        submitted = JobSubmitted(**common, job_id=spec.job_id, settings=spec.job, base_version=0)
        started = JobStarted(**common, job_id=spec.job_id, base_version=0, plan=spec.plan, rollout=spec.rollout)
        await log.send_all([run.started, submitted, started, published(0, spec.job_id)])
        again = await open_run(log, artifacts, load(file), "run-1")
        return run, again

    run, again = asyncio.run(resumed())
    assert again.jobs == run.jobs
    assert again.is_submitted
    assert not run.jobs[-1].plan.curriculum.groups_by_example
