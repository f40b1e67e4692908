"""From configuration to settings: what the events of a run carry and what its services are started with. Pure."""

from pathlib import Path
from typing import Any, Literal, NamedTuple

from rollstream.harness.reward_choice import evaluators_of, missing_score_of
from rollstream.schemas import ids
from rollstream.schemas.config import AdapterSection, RunConfig, WarmStart
from rollstream.schemas.services import (
    EndpointSettings,
    LearnerSettings,
    MetricsSettings,
    ProcessorSettings,
    ProducerSettings,
    ServiceSettings,
)
from rollstream.schemas.settings import (
    AlgorithmSettings,
    CurriculumSettings,
    JobSettings,
    PlanSettings,
    RolloutSettings,
)

MODEL_GROUP = "policy"
MADE_ELSEWHERE = ("recorded", "remote_workflow")
"""Environments whose rollouts another engine has sampled."""
WARM_START = "sft"
TRAINING = "rl"
KINDS: dict[str, Literal["rl", "sft", "dpo"]] = {"grpo": "rl", "sft": "sft", "dpo": "dpo"}
"""Kind of job by algorithm."""
ENDPOINT = "endpoint-1"
"""Name of the service that serves the trained model; its engine loads versions under this name."""


class JobSpec(NamedTuple):
    """One job of a run, as its events will say it."""

    job_id: str
    model_group: str
    job: JobSettings
    plan: PlanSettings
    rollout: RolloutSettings


class Place(NamedTuple):
    """Where a run takes place."""

    bootstrap_servers: str
    artifact_uri: str
    workspace: Path


def jobs_of(config: RunConfig, run_id: str, *, is_fork: bool = False) -> tuple[JobSpec, ...]:
    """The jobs of a run in order: the warm start, if there is one, then the training.

    A fork begins with trained weights, so it has a warm start only if that says `in_forks`.
    """
    warm = config.adapter.warm_start
    training = _training_job(config, run_id)
    if warm is None or (is_fork and not warm.in_forks):
        return (training,)
    return (_warm_start_job(config, warm, run_id), training)


def rollout_settings(config: RunConfig, run_id: str) -> RolloutSettings:
    """What producers need for each task of a run. `environment_config` and evaluators keep their `${ENV}`.

    Rollouts that were made elsewhere and are only imitated need neither log-probabilities nor versions.
    """
    builder = config.builder
    is_imitated = config.adapter.algorithm.name == "sft" and config.environment in MADE_ELSEWHERE
    group = ids.model_group(run_id, MODEL_GROUP)
    return RolloutSettings(
        environment=config.environment,
        environment_config=builder.environment_config,
        rewards=config.reward_functions,
        reward_weights=builder.reward_weights,
        agents=dict.fromkeys(builder.agents, group),
        sampling=builder.sampling,
        max_turns=builder.max_turns,
        max_attempts=builder.max_attempts,
        rollout_timeout_s=builder.rollout_timeout_s,
        group_timeout_s=builder.group_timeout_s,
        policy="demonstration" if is_imitated else "model",
        evaluators=evaluators_of(config),
        missing_score=missing_score_of(config),
    )


def _training_job(config: RunConfig, run_id: str) -> JobSpec:
    adapter, builder, epochs = config.adapter, config.builder, config.finetuning.num_epochs
    is_submitted = config.trainer.planning == "submitted"
    curriculum = config.finetuning.curriculum_learning
    plan = PlanSettings(
        planning=config.trainer.planning,
        num_epochs=epochs,
        tasks_per_epoch=adapter.tasks_per_epoch,
        batches_per_epoch=1 if is_submitted else adapter.batches_per_epoch,
        num_generations=builder.num_generations,
        min_generations=builder.min_generations,
        max_staleness=adapter.max_staleness,
        drop_zero_variance=builder.drop_zero_variance,
        curriculum=curriculum.model_copy(update={"steer": False}) if is_submitted else curriculum,
        knows_single_group=True,
    )
    algorithm = adapter.algorithm
    drops_flat_groups = "drop_zero_variance" in builder.model_fields_set
    if algorithm.name == "grpo" and builder.num_generations == 1 and "advantage" not in algorithm.model_fields_set:
        algorithm = algorithm.model_copy(update={"advantage": "batch_std"})  # a group of one has nothing to compare
    if algorithm.advantage in ("batch_std", "batch_mean"):
        plan = plan.model_copy(update={"drop_zero_variance": plan.drop_zero_variance and drops_flat_groups})
    if algorithm.name == "dpo":
        plan = _for_pairs(plan, drops_flat_groups=drops_flat_groups)
    elif "temperature" not in algorithm.model_fields_set and builder.sampling.temperature > 0:
        algorithm = algorithm.model_copy(update={"temperature": builder.sampling.temperature})
    job = _job_settings(adapter, num_versions=epochs * plan.batches_per_epoch).model_copy(
        update={"kind": KINDS[algorithm.name], "algorithm": algorithm}
    )
    group = ids.model_group(run_id, MODEL_GROUP)
    return JobSpec(ids.job_id(run_id, TRAINING), group, job, plan, rollout_settings(config, run_id))


def _for_pairs(plan: PlanSettings, *, drops_flat_groups: bool) -> PlanSettings:
    """The plan of a job that compares answers to one prompt, which may all stand in one rollout.

    So groups are not held to differing rewards of their rollouts (`algorithm.min_score_diff` is for answers), and
    nobody's log-probabilities are needed. `drops_flat_groups`: the configuration says so itself.
    """
    changes: dict[str, Any] = {
        "needs_logprobs": False,
        "drop_zero_variance": plan.drop_zero_variance and drops_flat_groups,
        "curriculum": plan.curriculum.model_copy(update={"min_reward_diff": 0.0}),
    }
    return plan.model_copy(update=changes)


def _warm_start_job(config: RunConfig, warm: WarmStart, run_id: str) -> JobSpec:
    """SFT on demonstrations: they do not depend on the weights, so their staleness is no matter."""
    versions = warm.num_epochs * warm.batches_per_epoch
    plan = PlanSettings(
        num_epochs=warm.num_epochs,
        tasks_per_epoch=warm.tasks_per_epoch,
        batches_per_epoch=warm.batches_per_epoch,
        num_generations=warm.num_generations,
        min_generations=1,
        max_staleness=versions,
        drop_zero_variance=False,
        curriculum=CurriculumSettings(enabled=False),
    )
    algorithm = AlgorithmSettings(
        name="sft",
        mini_batches=warm.mini_batches,
        max_tokens_per_micro_batch=config.adapter.algorithm.max_tokens_per_micro_batch,
    )
    job = _job_settings(config.adapter, num_versions=versions).model_copy(
        update={"kind": "sft", "algorithm": algorithm, "optimizer": warm.optimizer}
    )
    rollout = rollout_settings(config, run_id).model_copy(update={"policy": "demonstration"})
    return JobSpec(ids.job_id(run_id, WARM_START), ids.model_group(run_id, MODEL_GROUP), job, plan, rollout)


def _job_settings(adapter: AdapterSection, *, num_versions: int) -> JobSettings:
    return JobSettings(
        kind="rl",
        model=adapter.model,
        optimizer=adapter.optimizer,
        num_versions=num_versions,
        checkpoint_every=adapter.checkpoint_every,
        keep_last=adapter.keep_last,
        keep_every=adapter.keep_every,
        seed=adapter.seed,
        threads=adapter.threads,
    )


def services_of(config: RunConfig, place: Place, run_id: str | None = None) -> dict[str, ServiceSettings]:
    """Settings of every managed service by its name, in the order in which they are to be stopped.

    `run_id` names the run whose model an endpoint serves, if the configuration has one.
    """
    builder = config.builder
    base: dict[str, Any] = {**place._asdict(), "num_partitions": builder.num_partitions}
    session: dict[str, Any] = {"session_timeout_s": builder.session_timeout_s}
    services: list[ServiceSettings] = []
    services += [
        ProducerSettings(
            **base,
            **session,
            name=f"producers-{number}",
            engine=builder.engine,
            max_concurrent_rollouts=builder.max_concurrent_rollouts,
            tick_interval_s=builder.tick_interval_s,
            modules=builder.modules,
        )
        for number in range(1, builder.num_producers + 1)
    ]
    if config.served is not None and run_id is not None:
        group = ids.model_group(run_id, MODEL_GROUP)
        services.append(EndpointSettings(**base, **dict(config.served), name=ENDPOINT, model_group=group))
    services += [
        ProcessorSettings(**base, **session, name=f"processors-{number}")
        for number in range(1, builder.num_processors + 1)
    ]
    services.append(LearnerSettings(**base, name="learner-1", threads=config.adapter.threads))
    services.append(MetricsSettings(**base, name="metrics-1"))
    return {service.name: service for service in services}


def artifact_uri(config: RunConfig, workspace: Path) -> str:
    """Where artifacts lie: as configured, else a folder of the workspace."""
    return config.adapter.artifact_uri or str((workspace / "artifacts").absolute())
