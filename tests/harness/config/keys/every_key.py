"""Every key of every block of a run's file, with a value that is another than it has: what the tests change one by one.

A key that is added to a configuration must be added here; `unlisted` says which are missing.
"""

import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from rollstream.harness.config.components import (
    RollstreamTrainerAdapterConfig,
    RollstreamTrainerConfig,
    RollstreamTrajectoryBuilderConfig,
)
from rollstream.harness.config.nat_aliases import ArtAdapterConfig, ArtBuilderConfig, ArtTrainerConfig, DpoBuilderConfig
from rollstream.schemas.algorithms import CustomSettings
from rollstream.schemas.config import EvalGeneral, FinetuningSection

SECRET = "${TEST_KAFKA_SECRET}"
ENGINE = {
    "kind": "scripted", "device": "cpu", "dtype": "float32", "deterministic": True, "threads": 3, "max_batch": 5,
    "batching": "static", "prefix_cache_mb": 7, "kv_cache_mb": 9, "full_copies": 2,
}  # fmt: skip
SERVED = {
    "base_url": "http://127.0.0.1:1/v1", "model": "other", "api_key_variable": "OTHER_KEY", "api": "completions",
    "timeout_s": 3.0, "retries": 3, "retry_wait_s": 0.5, "max_concurrent": 3,
}  # fmt: skip
OTHERS = SERVED | {
    "base_urls": ["http://127.0.0.1:1"], "executable": "other", "arguments": ["--other"], "folder": "elsewhere",
    "max_loras": 3, "max_lora_rank": 8, "start_timeout_s": 3.0, "load_timeout_s": 3.0,
    "health_interval_s": 3.0, "health_timeout_s": 3.0,
    "check_weights": True,
}  # fmt: skip
KAFKA = {
    "security_protocol": "SSL", "sasl_mechanism": "PLAIN", "username": "other", "password": SECRET,
    "password_file": "password.txt", "ca_file": "ca.pem", "cert_file": "cert.pem", "key_file": "key.pem",
    "key_password": SECRET, "key_password_file": "key-password.txt", "check_hostname": False,
    "topic_prefix": "other.", "group_prefix": "other", "replication_factor": 2, "min_insync_replicas": 1,
}  # fmt: skip
OPTIMIZER = {
    "kind": "muon", "learning_rate": 0.5, "betas": [0.1, 0.2], "eps": 0.1, "weight_decay": 0.1, "max_grad_norm": 9.0,
    "warmup_steps": 7, "schedule": "linear", "final_fraction": 0.5, "max_skipped_steps": 5, "offload": "cpu",
}  # fmt: skip
COMPONENT = {"_type": "no_such_type", "reward.name": "other"}


def _at(location: str, values: dict[str, Any]) -> dict[str, Any]:
    return {f"{location}.{key}": value for key, value in values.items()}


BUILDER = {
    **COMPONENT, "bootstrap_servers": "127.0.0.1:1", **_at("kafka", KAFKA), "services": "external",
    "environment": "arithmetic", "environment_config": {"heeding": 0.5}, "rewards": ["other"],
    "reward_weights": {"reward": 0.5}, "missing_score": "reject", "modules": ["colorsys"], "agents": ["agent", "other"],
    "num_generations": 5, "min_generations": 3, "oversampling": 3, "responses_per_step": 2, "drop_zero_variance": False,
    "drop_dead_branches": True, "renderer": "qwen3",
    **_at("league", {
        "pool": 3, "every": 3, "latest_ratio": 0.25, "scripted": ["perfect"], "frozen": ["0"], "seats": ["agent"],
        "outcome": "won", "max_loaded": 3,
    }),
    **_at("sampling", {"temperature": 0.5, "top_p": 0.5, "top_k": 3, "max_new_tokens": 5, "record_kept_ids": True}),
    **_at("engine", ENGINE | OTHERS),
    "max_turns": 3, "max_attempts": 5, "rollout_timeout_s": 3.0, "group_timeout_s": 3.0,
    "max_concurrent_rollouts": 3, "follow_lag": True, "num_partitions": 5, "num_producers": 3, "num_processors": 3,
    "session_timeout_s": 3.0, "tick_interval_s": 3.0, "workspace": "elsewhere",
    **_at("gateway", {
        "host": "127.0.0.2", "port": 9, "allowed_hosts": ["proxy"], "max_concurrent_calls": 3,
        "model_aliases": ["claude-*"], "requests_per_minute": 3, "calls_per_key": 3,
    }),
}  # fmt: skip
ADAPTER = {
    **COMPONENT,
    "model.path": "no/such/folder",
    **_at("model.lora", {
        "rank": 3, "alpha": 3.0, "dropout": 0.5, "target_modules": ["q_proj"], "use_rslora": True, "use_dora": True,
    }),
    "model.dtype": "float32",
    "model.device": "cpu", "model.gradient_checkpointing": True, "model.attn_implementation": "eager",
    "model.fp32_head": True, "model.deterministic": False, "model.compile": True, "model.reference_dtype": "bfloat16",
    "model.quantization": "nf4", "model.fused_kernels": False, "model.flash_attention": "FA3",
    "algorithm.name": "sft",
    **_at("algorithm", {
        "clip_low": 0.1, "clip_high": 0.1, "dual_clip": 5.0, "advantage": "group_mean", "step_rewards": "process",
        "entropy_coefficient": 0.5, "kl_coefficient": 0.5, "unbiased_kl": True, "mask_truncated": True,
        "truncation_penalty": 0.5, "mini_batches": 3, "num_iterations": 2, "max_tokens_per_micro_batch": 5,
        "temperature": 0.5, "beta": 0.5,
        "exhaustive_pairs": False, "min_score_diff": 0.5, "max_pairs_per_turn": 3, "sft_weight": 0.5,
        "gamma": 0.5, "gae_lambda": 0.5,
        "average_logprobs": True, "rae_decay": 0.5, "selection": "weighted", "reward_threshold": 0.25,
        "weighting_minimum": 0.5, "weighting_epsilon": 0.5, "pair_selection": "interval", "midpoint": 0.5,
        "reference": "base", "reward_weights": {"other": 2.0}, "step_discount": 0.5, "aggregation": "sequences",
        "aggregation_length": 7, "divergence": "binary_kl", "delta": 0.5, "ratio_max": 9.0, "temperature_positive": 0.5,
        "temperature_negative": 0.5, "k_positive": 0.5, "lambda_positive": 0.5, "k_negative": 0.5,
        "lambda_negative": 0.5, "loss_type": "ipo", "label_smoothing": 0.25, "desirable_weight": 0.5,
        "undesirable_weight": 0.5, "teacher": "another/teacher", "context": "{answer}",
        "teacher_url": "http://teacher:8000", "rl": 0.5, "ce": 0.5, "ce_threshold": 0.5, "ref_kl": 0.5,
        "reference_point": "sampled", "off_policy_mask_threshold": 0.5, "calculate_entropy": False,
    }),
    **_at("algorithm.off_policy", {
        "level": "token", "mode": "truncate", "clip_min": 0.5, "clip_max": 5.0, "reject": "k3", "reject_above": 0.5,
    }),
    **_at("algorithm.overlong", {"max_length": 9, "buffer": 3}),
    **_at("optimizer", OPTIMIZER),
    "max_staleness": 2, "batches_per_epoch": 3, "tasks_per_epoch": 5, "max_refills": 3,
    **_at("warm_start", {
        "num_epochs": 3, "tasks_per_epoch": 3, "batches_per_epoch": 3, "num_generations": 3, "mini_batches": 3,
        "in_forks": True,
    }),
    **_at("warm_start.optimizer", OPTIMIZER),
    "artifact_uri": "elsewhere", "checkpoint_every": 3, "keep_last": 3, "keep_every": 3, "threads": 3, "ranks": 2,
    "seed": 3, "bootstrap_servers": "127.0.0.1:1", **_at("kafka", KAFKA), "workspace": "elsewhere",
    **_at("endpoint", {
        "host": "localhost", "port": 1, "model_name": "other", "token": "${TEST_KAFKA_SECRET}",
        "token_file": "token.txt", "requires_token": False, "allowed_hosts": ["proxy"], "max_new_tokens": 5,
        "wait_timeout_s": 3.0, "model_aliases": ["claude-*"], "requests_per_minute": 3, "calls_per_key": 3,
    }),
    **_at("endpoint.engine", ENGINE | OTHERS),
    "model_groups": {"policy": {"model": {"path": "other/group"}}},
    "retokenise": True, "export_untrained": True,
}  # fmt: skip
TRAINER = {
    **COMPONENT, "planning": "submitted", "run_idle_timeout_s": 3.0,
    **_at("early_stopping", {"patience": 5, "min_delta": 0.5}), "validation_required": True,
    **_at("evaluation_gate", {"min_reward": 0.5, "max_drop": 0.5}),
    "trackers": [{"kind": "tensorboard", "log_dir": "elsewhere"}],
}  # fmt: skip
FINETUNING = {
    "enabled": False, "trainer": "no_such", "trajectory_builder": "no_such", "trainer_adapter": "no_such",
    "reward_function.name": "other", "target_functions": ["solver"], "target_model": "other", "num_epochs": 5,
    "output_dir": "elsewhere",
    **_at("curriculum_learning", {
        "enabled": True, "initial_percentile": 0.5, "increment_percentile": 0.5, "expansion_interval": 3,
        "min_reward_diff": 0.5, "sort_ascending": True, "random_subsample": 0.5, "window_versions": 3,
        "explore_share": 0.5, "steer": False, "seeded_subsample": False, "filter_single_group": False,
        "groups_by_example": False,
    }),
    **_at("run_configuration", {
        "config_file": "other.yaml", "dataset": "other.jsonl", "result_json_path": "$.answer",
        "endpoint": "http://127.0.0.1:1", "endpoint_timeout": 5, "override": [["a", "b"]],
        "validation_dataset": "other.jsonl", "validation_interval": 3, "validation_config_file": "other.yaml",
    }),
}  # fmt: skip
ART = {
    **_at("backend", {
        "base_model": "other/model", "ip": "::1", "port": 1, "name": "other", "project": "other", "api_key": "none",
        "delete_old_checkpoints": True, "init_args": {"a": 1}, "engine_args": {"a": 1}, "server_config": {"a": 1},
    }),
    **_at("training", {
        "learning_rate": 0.5, "beta": 0.5, "weight_decay": 0.5, "adam_beta1": 0.5, "adam_beta2": 0.5,
        "adam_epsilon": 0.5, "max_grad_norm": 0.5, "warmup_steps": 5, "lr_scheduler_type": "cosine",
    }),
}  # fmt: skip
DPO = {
    "ttc_step_name": "other", "exhaustive_pairs": False, "min_score_diff": 0.5, "max_pairs_per_turn": 3,
    "reward_from_score_diff": False, "require_multiple_candidates": False, "custom_step_name": "other",
}  # fmt: skip
EVAL = {
    "dataset._type": "csv", "dataset.file_path": "other.jsonl", "dataset.id_key": "other",
    **_at("dataset.structure", {
        "disable": True, "question_key": "other", "answer_key": "other", "generated_answer_key": "other",
        "trajectory_key": "other", "expected_trajectory_key": "other",
    }),
    "dataset.filter.allowlist.field": {"other": ["a1"]}, "dataset.filter.denylist.field": {"other": ["a1"]},
    "max_concurrency": 3, "output_dir": "elsewhere", "output": {"dir": "x"}, "workflow_alias": "other",
    "profiler": {"a": 1}, "validate_llm_endpoints": True, "per_input_user_id": False,
}  # fmt: skip
TABLES: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "builder": (RollstreamTrajectoryBuilderConfig, BUILDER),
    "adapter": (RollstreamTrainerAdapterConfig, ADAPTER),
    "trainer": (RollstreamTrainerConfig, TRAINER),
    "finetuning": (FinetuningSection, FINETUNING),
    "eval.general": (EvalGeneral, EVAL),
    "openpipe_art_trainer": (ArtTrainerConfig, TRAINER),
    "openpipe_art_traj_builder": (ArtBuilderConfig, BUILDER),
    "openpipe_art_trainer_adapter": (ArtAdapterConfig, {**ADAPTER, **ART}),
    "dpo_traj_builder": (DpoBuilderConfig, {**BUILDER, **DPO}),
}


def keys_of(model: type[BaseModel]) -> Iterator[str]:
    """Dotted paths of all values that a block may hold, those of optional blocks in it too."""
    for name, field in model.model_fields.items():
        key = field.alias or name
        inner = list(_models(field.annotation))
        if not inner:
            yield key
        for one in inner:
            yield from (f"{key}.{rest}" for rest in keys_of(one))


def unlisted(name: str) -> set[str]:
    """Keys that a model has and its table lacks, and the other way round."""
    model, table = TABLES[name]
    return set(keys_of(model)) ^ set(table)


def with_key(written: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy of a file with one key changed."""
    first, _, rest = key.partition(".")
    if not rest:
        return {**written, first: value}
    inner = written.get(first)
    return {**written, first: with_key(inner if isinstance(inner, dict) else {}, rest, value)}


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if annotation is CustomSettings:
        return  # its keys are those of a user's algorithm
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif typing.get_origin(annotation) not in (dict, list, tuple):
        for inner in typing.get_args(annotation):
            yield from _models(inner)
