"""`_type`s of NAT's own packages: their fields reach the settings of the job, and what means nothing is told once."""

import logging
from pathlib import Path
from typing import Any

import pytest

from rollstream.harness.config import checks as config_notes
from rollstream.harness.config import file as config_file
from rollstream.harness.config import nat_aliases as aliases
from rollstream.harness.config.components import RollstreamTrainerConfig
from rollstream.harness.config.jobs import jobs_of
from rollstream.harness.config.resolve import block_of
from rollstream.schemas.algorithms import DpoSettings, GrpoSettings
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.settings import JobSettings


@pytest.fixture
def art(written: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """A file as ART's users have it, with an environment in place of their workflow."""
    return written | {
        "llms": {"m": {"_type": "openai", "model_name": "tic_tac_toe", "api_key": "default"}},
        "workflow": {"_type": "tic_tac_toe", "player_model": "m", "max_parser_retries": 2},
        "trajectory_builders": {"b": {"_type": "openpipe_art_traj_builder", "num_generations": 4}},
        "trainer_adapters": {
            "a": {
                "_type": "openpipe_art_trainer_adapter",
                "backend": {
                    "ip": "0.0.0.0",
                    "port": 7623,
                    "name": "tic_tac_toe",
                    "project": "p",
                    "base_model": str(tmp_path / "model"),
                    "api_key": "default",
                    "init_args": {"max_seq_length": 8192},
                    "engine_args": {"gpu_memory_utilization": 0.9, "tensor_parallel_size": 1},
                },
                "training": {"learning_rate": 2e-4, "beta": 0.25, "weight_decay": 0.1, "logging_steps": 5},
            }
        },
        "trainers": {"t": {"_type": "openpipe_art_trainer"}},
    }


def job_of(written: dict[str, Any]) -> JobSettings:
    config = config_file.resolve(written, {}).config
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"planning": "stream"})})
    (job,) = jobs_of(config, "run-1")
    return job.job


def test_learning_rate_and_beta_reach_the_optimizer_and_the_loss(art: dict[str, Any]) -> None:
    job = job_of(art)
    assert (job.optimizer.learning_rate, job.optimizer.weight_decay) == (2e-4, 0.1)
    assert isinstance(job.algorithm, GrpoSettings)
    assert (job.algorithm.name, job.algorithm.kl_coefficient) == ("grpo", 0.25)
    assert job.model.path == art["trainer_adapters"]["a"]["backend"]["base_model"]
    assert job.model.lora is not None


def test_one_rollout_a_task_is_compared_with_the_whole_batch(art: dict[str, Any]) -> None:
    art["trajectory_builders"]["b"]["num_generations"] = 1
    config = config_file.resolve(art, {}).config
    (job,) = jobs_of(config, "run-1")
    assert isinstance(job.job.algorithm, GrpoSettings)
    assert job.job.algorithm.advantage == "batch_std"
    assert not job.plan.drop_zero_variance


def test_an_aliased_file_is_submitted_in_epochs_of_our_own_components(art: dict[str, Any]) -> None:
    config = config_file.resolve(art, {}).config
    assert (config.trainer.planning, config.builder.num_generations) == ("submitted", 4)
    assert (config.environment, config.builder.environment_config) == ("tic_tac_toe", {})
    art["trainers"]["t"]["planning"] = "stream"
    assert config_file.resolve(art, {}).config.trainer.planning == "stream"


def test_our_own_fields_may_stand_in_an_aliased_block_and_win(art: dict[str, Any]) -> None:
    art["trainer_adapters"]["a"] |= {
        "model": {"device": "cpu"},
        "optimizer": {"learning_rate": 1e-3, "schedule": "linear"},
        "algorithm": {"kl_coefficient": 0.5, "mini_batches": 2},
        "tasks_per_epoch": 3,
    }
    art["trajectory_builders"]["b"] |= {"sampling": {"max_new_tokens": 3}, "environment_config": {"move_weight": 0.1}}
    job, config = job_of(art), config_file.resolve(art, {}).config
    assert (job.optimizer.learning_rate, job.optimizer.schedule, job.optimizer.weight_decay) == (1e-3, "linear", 0.1)
    assert isinstance(job.algorithm, GrpoSettings)
    assert (job.algorithm.kl_coefficient, job.algorithm.mini_batches) == (0.5, 2)
    assert job.model.device == "cpu"
    assert (config.adapter.tasks_per_epoch, config.builder.environment_config) == (3, {"move_weight": 0.1})


def test_dpo_takes_beta_as_its_own(art: dict[str, Any]) -> None:
    art["trainer_adapters"]["a"]["algorithm"] = {"name": "dpo"}
    algorithm = config_file.resolve(art, {}).config.adapter.algorithm
    assert isinstance(algorithm, DpoSettings)
    assert algorithm.beta == 0.25


def test_without_training_arguments_arts_defaults_stand(art: dict[str, Any]) -> None:
    art["trainer_adapters"]["a"] = {"_type": "openpipe_art_trainer_adapter", "training": None}
    art["trajectory_builders"]["b"] = {"_type": "openpipe_art_traj_builder"}
    config = config_file.resolve(art, {}).config
    assert config.adapter.model.path == "Qwen/Qwen2.5-7B-Instruct"
    assert config.adapter.optimizer.learning_rate == 5e-5
    assert isinstance(config.adapter.algorithm, GrpoSettings)
    assert config.adapter.algorithm.kl_coefficient == 0.0
    assert config.builder.num_generations == 2
    art["trajectory_builders"]["b"]["num_generations"] = 1
    assert config_file.resolve(art, {}).config.builder.min_generations == 1


def test_ignored_keys_are_logged_once(art: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    config_notes.forget()
    with caplog.at_level(logging.WARNING):
        config_file.resolve(art, {})
        config_file.resolve(art, {})
    logged, of_workflow = [record.getMessage() for record in caplog.records]
    assert of_workflow.startswith("workflow: max_parser_retries, player_model: accepted, but ignored here")
    assert logged.startswith("openpipe_art_trainer_adapter: backend.api_key, backend.engine_args, backend.init_args, ")
    assert "backend.ip, backend.name, backend.port, backend.project, training.logging_steps: accepted" in logged


@pytest.mark.parametrize(
    ("algorithm", "sampling", "is_recorded"),
    [
        ("grpo", {"top_p": 0.9}, True),
        ("gspo", {"top_k": 5}, True),
        ("grpo", {}, None),
        ("dpo", {"top_p": 0.9}, None),
        ("grpo", {"top_p": 0.9, "record_kept_ids": False}, False),
    ],
)
def test_kept_ids_are_recorded_where_the_loss_has_ratios(
    art: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    algorithm: str,
    sampling: dict[str, Any],
    is_recorded: bool | None,
) -> None:
    config_notes.forget()
    art["trajectory_builders"]["b"] = {"_type": "rollstream", "sampling": sampling}
    art["trainer_adapters"]["a"] = {"_type": "rollstream", "model": {"path": "m"}, "algorithm": {"name": algorithm}}
    with caplog.at_level(logging.WARNING):
        config = config_file.resolve(art, {}).config
    assert config.builder.sampling.record_kept_ids is is_recorded
    assert ("trajectory_builders.b.sampling: top_p" in caplog.text) is (is_recorded is False)


def test_an_engine_that_records_no_kept_ids_is_a_warning(art: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    config_notes.forget()
    builder = {"_type": "rollstream", "sampling": {"top_k": 5}, "engine": {"kind": "scripted"}}
    art["trajectory_builders"]["b"] = builder
    art["trainer_adapters"]["a"] = {"_type": "rollstream", "model": {"path": "m"}}
    with caplog.at_level(logging.WARNING):
        config = config_file.resolve(art, {}).config
    assert config.builder.sampling.record_kept_ids is None
    assert "the engine does not record the ids that they leave" in caplog.text


def test_an_installed_engine_records_kept_ids_where_they_are_asked_for(
    art: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    config_notes.forget()
    sampling = {"top_k": 5, "record_kept_ids": True}
    art["trajectory_builders"]["b"] = {"_type": "rollstream", "sampling": sampling, "engine": {"kind": "parrot"}}
    art["trainer_adapters"]["a"] = {"_type": "rollstream", "model": {"path": "m"}}
    with caplog.at_level(logging.WARNING):
        config = config_file.resolve(art, {}).config
    assert config.builder.sampling.record_kept_ids
    assert "top_k" not in caplog.text


@pytest.mark.parametrize(
    ("block", "key", "value", "reported"),
    [
        (
            "trainer_adapters.a.training",
            "learning_rate",
            "fast",
            "trainer_adapters.a.training.learning_rate: is 'fast'",
        ),
        ("trainer_adapters.a.training", "beta", -1, "trainer_adapters.a.training.beta: is -1"),
        (
            "trainer_adapters.a.backend",
            "base_modle",
            "x",
            "trainer_adapters.a.backend.base_modle: unknown key; did you",
        ),
        ("trainer_adapters.a.backend", "base_model", 3, "trainer_adapters.a.backend.base_model: is 3"),
        ("trajectory_builders.b", "num_generations", 0, "trajectory_builders.b.num_generations: is 0"),
        ("trainers.t", "plan", 1, "trainers.t.plan: unknown key; known keys: "),
    ],
)
def test_a_mistake_in_an_aliased_block_is_named(
    art: dict[str, Any], block: str, key: str, value: Any, reported: str
) -> None:
    found: Any = art
    for part in block.split("."):
        found = found[part]
    found[key] = value
    with pytest.raises(ConfigError) as error:
        config_file.resolve(art, {})
    assert str(error.value).startswith(reported)


def test_the_builder_of_preference_pairs_has_nats_fields(art: dict[str, Any]) -> None:
    art["trajectory_builders"]["b"] = {
        "_type": "dpo_traj_builder",
        "ttc_step_name": "move",
        "exhaustive_pairs": False,
        "min_score_diff": 0.1,
        "max_pairs_per_turn": 3,
        "reward_from_score_diff": False,
        "require_multiple_candidates": False,
    }
    with pytest.raises(
        ConfigError,
        match=r"trainer_adapters.a.algorithm.name: is 'grpo'; .* builds preference pairs; set .*\(dpo, malt, or",
    ):
        config_file.resolve(art, {})
    art["trainer_adapters"]["a"]["algorithm"] = {"name": "dpo", "max_pairs_per_turn": 5}
    found = config_file.resolve(art, {})
    block = block_of(found.finetune, "trajectory_builder")
    assert isinstance(block, aliases.DpoBuilderConfig)
    assert (block.ttc_step_name, block.max_pairs_per_turn) == ("move", 3)
    assert (found.config.trainer.planning, found.config.builder.num_generations) == ("submitted", 1)
    assert not found.config.builder.drop_zero_variance
    algorithm = found.config.adapter.algorithm
    assert isinstance(algorithm, DpoSettings)
    assert (algorithm.exhaustive_pairs, algorithm.min_score_diff, algorithm.max_pairs_per_turn) == (False, 0.1, 5)


def test_a_subclass_of_an_own_configuration_keeps_its_defaults_apart() -> None:
    class Further(RollstreamTrainerConfig, name="further_for_a_test"):
        patience: int = 3

    assert (Further().type, RollstreamTrainerConfig().type) == ("further_for_a_test", "rollstream")
    assert Further(planning="submitted").section().planning == "submitted"


@pytest.mark.parametrize(("key", "value"), [("early_stopping", {"patience": 2}), ("validation_required", True)])
def test_an_epochwise_key_is_refused_by_its_path_in_a_streamed_run(art: dict[str, Any], key: str, value: Any) -> None:
    art["trainers"]["t"] = {"_type": "rollstream", key: value}
    with pytest.raises(ConfigError, match=f"trainers.t.{key}: a streamed run does not support this"):
        config_file.resolve(art, {})


def test_early_stopping_without_a_validation_is_a_warning(
    art: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    art["trainers"]["t"] = {"_type": "rollstream", "planning": "submitted", "early_stopping": {"patience": 2}}
    art["finetuning"]["run_configuration"] = {"validation_dataset": "v.jsonl"}
    config_file.resolve(art, {})
    assert "early_stopping" not in caplog.text
    del art["finetuning"]["run_configuration"]
    config_file.resolve(art, {})
    assert "trainers.t: early_stopping: accepted, but ignored here (the run has no validation" in caplog.text
