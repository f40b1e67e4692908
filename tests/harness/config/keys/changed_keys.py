"""Configurations in which one key is changed, and what the change has an effect on."""

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollstream.harness.components.curriculum import settings_of
from rollstream.harness.config import checks as config_notes
from rollstream.harness.config import file as config_file
from rollstream.harness.config.dataset import read_dataset
from rollstream.harness.config.file import Loaded, validation_config
from rollstream.harness.config.jobs import RunLocation, artifact_uri, jobs_of, rollout_settings, services_of
from rollstream.harness.config.resolve import block_of, is_ours
from rollstream.harness.runs.plan import examples_of
from rollstream.harness.runs.preflight import check_datasets, check_names, check_paths, token_of
from rollstream.harness.runs.run_context import block_of_run, check_embedded, warn_other_workspaces
from rollstream.harness.runs.sampling_checks import check_temperature
from rollstream.harness.services.workspace import EMBEDDED, Workspace
from rollstream.schemas.config import RunConfig
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.finetuning import CurriculumLearningConfig
from rollstream.schemas.kafka import connection, with_secrets
from rollstream.schemas.settings import JobSpec
from tests.harness.config.keys.every_key import (
    ADAPTER,
    ART,
    BUILDER,
    DPO,
    EVAL,
    FINETUNING,
    TRAINER,
    with_key,
)

STEERED = {"window_versions", "explore_share", "steer"}
FILTERED = {"seeded_subsample", "filter_single_group", "groups_by_example"}
BLOCKS = (("trajectory_builders", "b"), ("trainer_adapters", "a"), ("trainers", "t"))


def changed_by(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A function that gives a file other values at these paths (`__` for the dots)."""

    def change(written: dict[str, Any]) -> dict[str, Any]:
        for key, value in changes.items():
            written = with_key(written, key.replace("__", "."), value)
        return written

    return change


EPOCHWISE = {
    "trainers__t": {"_type": "rollstream", "planning": "submitted", "early_stopping": {}},
    "finetuning__run_configuration": {"validation_dataset": "examples.jsonl"},
}


def table_of(written: dict[str, Any]) -> dict[str, Any]:
    """Keys of the blocks that a file has, each with another value."""
    blocks = {"trajectory_builders.b": BUILDER, "trainer_adapters.a": ADAPTER, "trainers.t": TRAINER}
    if written["trainer_adapters"]["a"]["_type"] != "rollstream":
        blocks["trainer_adapters.a"] = {**ADAPTER, **ART}
    if written["trajectory_builders"]["b"]["_type"] == "dpo_traj_builder":
        blocks["trajectory_builders.b"] = {**BUILDER, **DPO}
    blocks |= {"finetuning": FINETUNING, "eval.general": EVAL}
    foreign = {f"{section}.{name}" for section, name in BLOCKS if written[section][name]["_type"].startswith("test_")}
    blocks = {block: keys for block, keys in blocks.items() if block not in foreign}
    return {f"{block}.{key}": value for block, keys in blocks.items() for key, value in keys.items()}


def answer(
    written: dict[str, Any],
    before: Any,
    key: str,
    value: Any,
    caplog: pytest.LogCaptureFixture,
    done: Callable[[dict[str, Any]], Any] = lambda written: effects_of(config_file.resolve(written)),
) -> str:
    """`effect`, `error` or `told`; empty if a key is changed and nobody says a word."""
    values = [value, not value] if isinstance(value, bool) else [value]
    return next(filter(None, (_one_answer(written, before, key, one, caplog, done) for one in values)), "")


def _one_answer(
    written: dict[str, Any],
    before: Any,
    key: str,
    value: Any,
    caplog: pytest.LogCaptureFixture,
    done: Callable[[dict[str, Any]], Any],
) -> str:
    config_notes.forget()
    caplog.clear()
    changed = with_key(written, key, value)
    if changed == written:
        return "what this variant is about"
    with caplog.at_level(logging.WARNING, logger="rollstream"):
        try:
            after = done(changed)
        except ConfigError:
            return "error"
    if after != before:
        return "effect"
    kinds = {f"{block}.{name}": written[block][name]["_type"] for block, name in BLOCKS}
    logged = [re.fullmatch(r"(\S+): (.+): accepted, but .*", record.getMessage()) for record in caplog.records]
    paths = {f"{one[1]}.{name}" for one in logged if one for name in one[2].split(", ")}
    paths |= {path.replace(kind, block, 1) for block, kind in kinds.items() for path in paths if path.startswith(kind)}
    return "told" if any(f"{key}.".startswith(f"{path}.") or path.startswith(f"{key}.") for path in paths) else ""


def effects_of(loaded: Loaded, workspace: Path = Path(".rollstream")) -> Any:
    """All that a configuration comes to. Raises ConfigError."""
    config = loaded.config
    builder = config.builder
    warn_other_workspaces(loaded.finetune, workspace)
    for check in (check_paths, check_names, check_temperature):
        check(config)
    check_datasets(config, is_new=True)
    block = block_of_run(config, Workspace(workspace))
    if builder.bootstrap_servers == EMBEDDED:
        check_embedded(builder, "kafka")
    address = "127.0.0.1:2" if builder.bootstrap_servers == EMBEDDED else builder.bootstrap_servers
    kafka = connection(address, block, os.environ)
    location = RunLocation(kafka, artifact_uri(config, workspace), workspace)
    validated = validation_config(config)
    return {
        "kafka": with_secrets(kafka),
        "partitions": builder.num_partitions,
        "idle": config.trainer.run_idle_timeout_s,
        "jobs": [[_job(config, spec) for spec in jobs_of(config, "run", is_fork=fork)] for fork in (False, True)],
        "services": _services(config, location),
        "examples": examples_of(config),
        "validated": validated
        and [
            validated.dataset and read_dataset(validated.dataset),
            rollout_settings(validated, ""),
            config.validation and config.validation.interval,
        ],
        "output": [config.finetuning.output_dir, config.adapter.export_untrained],
        "conducted": _conducted(loaded) if config.trainer.planning == "submitted" else "streamed",
        "builder": _settings_for_another_builder(loaded),
        "artifacts": location.artifact_uri,
        "workspace": location.workspace,
        "token": config.served and config.served.token is not None and token_of(config, workspace, os.environ),
    }


def _services(config: RunConfig, location: RunLocation) -> list[Any]:
    if config.builder.services == "external":
        return []
    return [with_secrets(one) for one in services_of(config, location, "run").values()]


def _job(config: RunConfig, spec: JobSpec) -> Any:
    """A job without what nobody looks at in it."""
    job, plan, rollout = (one.model_dump(mode="json") for one in (spec.job, spec.plan, spec.rollout))
    for key in ("unbiased_kl",) if not job["algorithm"].get("kl_coefficient") else ():
        job["algorithm"].pop(key, None)
    if spec.job.optimizer.schedule == "constant":
        del job["optimizer"]["final_fraction"]
    is_submitted = plan["planning"] == "submitted"
    for key in ("tasks_per_epoch", "batches_per_epoch") if is_submitted else ():
        del plan[key]
    filters = plan["curriculum"]["enabled"] and not plan["curriculum"]["steer"]
    if is_submitted or filters or not plan["drop_zero_variance"]:
        plan.pop("max_refills", None)
    steers = plan["curriculum"]["steer"]
    unread = STEERED if is_submitted else FILTERED if steers else {*FILTERED, *STEERED} - {"filter_single_group"}
    adaptive = {} if is_submitted else {"steer": steers}
    plan["curriculum"] = plan["curriculum"]["enabled"] and {
        **{key: value for key, value in plan["curriculum"].items() if key not in unread},
        **adaptive,
    }
    if rollout["environment"] in ("recorded", "remote_workflow"):
        del rollout["sampling"]
    return job, plan, rollout


def _conducted(loaded: Loaded) -> Any:
    """Settings that our trainer reads; of another one nothing is known but NAT's own curriculum."""
    curriculum = loaded.finetune.curriculum_learning
    if not is_ours(block_of(loaded.finetune, "trainer")):
        return curriculum.enabled and curriculum.model_dump(include=set(CurriculumLearningConfig.model_fields))
    trainer, settings, builder = (
        loaded.config.trainer,
        settings_of(curriculum),
        block_of(loaded.finetune, "trajectory_builder"),
    )
    pairs = builder.model_dump(include=DPO.keys() - {"custom_step_name"}) if hasattr(builder, "pairs") else None
    stopping = trainer.early_stopping and trainer.early_stopping.model_dump()
    return [
        pairs,
        settings.enabled and settings.model_dump(exclude=STEERED),
        loaded.config.validation is not None and [stopping, trainer.validation_required],
    ]


def _settings_for_another_builder(loaded: Loaded) -> Any:
    """Settings that another package's builder may read in its `initialize`."""
    if is_ours(block_of(loaded.finetune, "trajectory_builder")):
        return None
    return loaded.finetune.model_dump(include={"reward_function", "target_functions", "target_model", "num_epochs"})
