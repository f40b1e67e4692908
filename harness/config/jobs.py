"""Derives settings from a configuration: those that events of a run carry and those that its services start with.

Pure. Also checks that batches and groups fit into a record: a larger one would end every processors process. The size
of planned batches is known before the run, that of others at submission; ids are taken as long as they can become.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rollstream.harness.config import rewards
from rollstream.processors.curate.state import groups_per_batch, num_batches
from rollstream.producers.league.draw import frozen_player
from rollstream.schemas import ids
from rollstream.schemas.algorithms import SftSettings, recorded
from rollstream.schemas.config import AdapterSection, BuilderSection, RunConfig
from rollstream.schemas.engine_settings import OpenAISettings, ScriptedSettings
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.events.manifest_size import most_members
from rollstream.schemas.events.recorded import MADE_ELSEWHERE, RECORDED
from rollstream.schemas.kafka import KafkaSettings, from_environment, given, merged
from rollstream.schemas.league import LeagueSettings, OpponentVersions
from rollstream.schemas.permissions import named_by, named_by_algorithm, named_by_model, named_by_teacher
from rollstream.schemas.revisions import NEWEST_PLAN_REVISION, NEWEST_REVISION
from rollstream.schemas.services import (
    EndpointSettings,
    LearnerSettings,
    MetricsSettings,
    ProcessorSettings,
    ProducerSettings,
    ServiceSettings,
    TrackerServiceSettings,
)
from rollstream.schemas.settings import (
    EXTERNAL,
    FROZEN,
    NEW_PLAN,
    ForkPoint,
    JobSettings,
    JobSpec,
    PlanSettings,
    RolloutSettings,
    WarmStart,
)

ENDPOINT = "endpoint-1"
"""Name of the service that serves the trained model; its engine loads versions under this name."""


class RunLocation(NamedTuple):
    """Location of a run: workspace, log, artifacts."""

    kafka: KafkaSettings
    artifact_uri: str
    workspace: Path


def jobs_of(config: RunConfig, run_id: str, *, is_fork: bool = False) -> tuple[JobSpec, ...]:
    """The jobs of a run in order: those of frozen model groups, the warm start, if there is one, then the training.

    Warm start and training have a job for each trained model group. The one that plans the tasks is the last of them.
    A fork starts from trained weights, so it has a warm start only with `in_forks`.
    """
    trained, groups = config.trained(), config.by_group()
    first, *others = trained
    loaded = groups.keys() - trained.keys() - served_models(config).keys()
    frozen = [_frozen_job(one, run_id, name) for name, one in groups.items() if name in loaded]
    warm = config.adapter.warm_start
    has_warm_start = warm is not None and not (is_fork and not warm.in_forks)
    jobs: list[JobSpec] = []
    for make in (*((_warm_start_job,) if has_warm_start else ()), _training_job):
        jobs += [_beside(make(trained[name], run_id, name)) for name in others]
        jobs.append(make(trained[first], run_id, first))
    return tuple(spec._replace(fork=_fork(config, spec.model_group)) for spec in (*frozen, *jobs))


def served_models(config: RunConfig, run_id: str | None = None) -> dict[str, OpenAISettings]:
    """The models that others serve, by model group: of the run, or by their names alone."""
    named = {name: one.endpoint for name, one in config.adapter.model_groups.items() if one.endpoint is not None}
    groups = {name: name if run_id is None else ids.model_group(run_id, name) for name in named}
    return {groups[name]: OpenAISettings(**dict(one)) for name, one in named.items()}


def _fork(config: RunConfig, model_group: str) -> ForkPoint | None:
    """The version that a model group begins with, if its section names one."""
    section = config.adapter.model_groups.get(ids.name_of(model_group))
    found = None if section is None or section.version is None else ids.parsed_version(section.version)
    return None if found is None else ForkPoint(run_id=found[0], model_group=found[1], version=found[2])


def _beside(spec: JobSpec) -> JobSpec:
    """The job as one whose tasks are those of the job with its present id."""
    plan = spec.plan.model_copy(update={"tasks_of": spec.job_id})
    run_id, group = ids.run_of(spec.job_id), ids.name_of(spec.model_group)
    return spec._replace(job_id=ids.job_id(run_id, ids.name_of(spec.job_id), group), plan=plan)


def _frozen_job(config: RunConfig, run_id: str, name: str) -> JobSpec:
    """The job that publishes the weights of a model group that is not trained."""
    adapter, group = config.adapter, ids.model_group(run_id, name)
    how: dict[str, Any] = {"seed": adapter.seed, "threads": adapter.threads, "revision": NEWEST_REVISION}
    job = JobSettings(kind=FROZEN, model=adapter.model, **how)
    return JobSpec(ids.job_id(run_id, ids.FROZEN, name), group, job, PlanSettings(), rollout_settings(config, run_id))


def rollout_settings(config: RunConfig, run_id: str) -> RolloutSettings:
    """The settings that producers need for each task of a run. `environment_config` and evaluators keep their `${ENV}`.

    Rollouts made elsewhere and used only for SFT need neither log-probabilities nor versions.
    """
    builder = config.builder
    algorithms = [one.adapter.algorithm for one in config.trained().values()]
    is_imitated = config.environment in MADE_ELSEWHERE and all(one.is_imitation for one in algorithms)
    return RolloutSettings(
        environment=config.environment,
        environment_config=builder.environment_config,
        rewards=config.reward_functions,
        reward_weights=rewards.weights_of(config),
        agents={agent: ids.model_group(run_id, group) for agent, group in config.agents.items()},
        sampling=builder.sampling,
        max_turns=builder.max_turns,
        max_attempts=builder.max_attempts,
        rollout_timeout_s=builder.rollout_timeout_s,
        group_timeout_s=builder.group_timeout_s,
        policy=EXTERNAL if config.is_external else "demonstration" if is_imitated else "model",
        evaluators=rewards.evaluators_of(config),
        missing_score=rewards.missing_score_of(config),
        league=builder.league,
        responses_per_step=builder.responses_per_step,
        drop_dead_branches=rewards.drops_dead_branches(config),
        renderer=builder.renderer,
        frozen_agents=rewards.frozen_agents_of(config),
        algorithm_weights=rewards.algorithm_weights_of(config),
    )


def _training_job(config: RunConfig, run_id: str, name: str) -> JobSpec:
    adapter, builder = config.adapter, config.builder
    is_submitted = config.trainer.planning == "submitted"
    curriculum = config.finetuning.curriculum_learning
    plan = PlanSettings(
        planning=config.trainer.planning,
        num_epochs=config.finetuning.num_epochs,
        tasks_per_epoch=adapter.tasks_per_epoch,
        batches_per_epoch=1 if is_submitted else adapter.batches_per_epoch,
        max_refills=adapter.max_refills,
        num_generations=builder.num_generations,
        oversampling=builder.oversampling,
        min_generations=builder.min_generations,
        max_staleness=adapter.max_staleness,
        drop_zero_variance=builder.drop_zero_variance,
        curriculum=curriculum.model_copy(update={"steer": False}) if is_submitted else curriculum,
        **NEW_PLAN,
        has_recorded_sizes=config.environment == RECORDED,
        gate=config.trainer.evaluation_gate,
    )
    algorithm = rewards.algorithm_of(config)
    if algorithm.needs.flat_groups and "drop_zero_variance" not in builder.model_fields_set:
        plan = plan.model_copy(update={"drop_zero_variance": False})
    plan = plan.model_copy(update={"needs_logprobs": algorithm.needs.behaviour})
    if algorithm.needs.pairs:
        plan = _for_pairs(plan)
    job = _job_settings(adapter, num_versions=num_batches(plan)).model_copy(
        update={"kind": algorithm.kind, "algorithm": recorded(algorithm)}
    )
    if plan.gate is not None and config.validation is not None:  # the last good version is as old as a validation
        kept = config.validation.interval * plan.batches_per_epoch + 1
        job = job.model_copy(update={"keep_last": max(job.keep_last, kept)})
    job = job.model_copy(update={"opponents": _opponents(builder.league, plan, ids.model_group(run_id, name))})
    if config.is_external:
        plan = plan.model_copy(update={"min_generations": 1, "needs_logprobs": False, "drop_zero_variance": False})
        job = job.model_copy(update={"kind": EXTERNAL})
    group = ids.model_group(run_id, name)
    return JobSpec(ids.job_id(run_id, ids.TRAINING), group, job, plan, rollout_settings(config, run_id))


def _opponents(league: LeagueSettings | None, plan: PlanSettings, group: str) -> OpponentVersions | None:
    """The versions that tasks of a job may draw: the pool of the oldest task that can be open, and later versions."""
    if league is None:
        return None
    behind = plan.max_staleness + plan.batches_per_epoch + 1
    last = league.pool + -(-behind // league.every) if league.pool else 0
    frozen = tuple(frozen_player(one, group) for one in league.frozen)
    return OpponentVersions(every=league.every, last=last, frozen=frozen)


def _for_pairs(plan: PlanSettings) -> PlanSettings:
    """The plan of a job that compares answers to one prompt, which may all be in one rollout.

    So groups need not have differing rollout rewards (`algorithm.min_score_diff` applies to answers).
    """
    curriculum = plan.curriculum.model_copy(update={"min_reward_diff": 0.0})
    return plan.model_copy(update={"curriculum": curriculum})


def _warm_start_job(config: RunConfig, run_id: str, name: str) -> JobSpec:
    """SFT on demonstrations: they do not depend on the weights, so their staleness does not matter."""
    warm = config.adapter.warm_start or WarmStart()
    plan = PlanSettings(
        num_epochs=warm.num_epochs,
        tasks_per_epoch=warm.tasks_per_epoch,
        batches_per_epoch=warm.batches_per_epoch,
        num_generations=warm.num_generations,
        min_generations=1,
        max_staleness=warm.num_epochs * warm.batches_per_epoch,
        drop_zero_variance=False,
        revision=NEWEST_PLAN_REVISION,
    )
    algorithm = SftSettings(
        mini_batches=warm.mini_batches,
        max_tokens_per_micro_batch=config.adapter.algorithm.max_tokens_per_micro_batch,
    )
    job = _job_settings(config.adapter, num_versions=num_batches(plan)).model_copy(
        update={"kind": algorithm.kind, "algorithm": algorithm, "optimizer": warm.optimizer}
    )
    opponents = _training_job(config, run_id, name).job.opponents  # its versions enter the pool of the training
    job = job.model_copy(update={"opponents": opponents})
    rollout = rollout_settings(config, run_id).model_copy(update={"policy": "demonstration", "responses_per_step": 1})
    return JobSpec(ids.job_id(run_id, ids.WARM_START), ids.model_group(run_id, name), job, plan, rollout)


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
        revision=NEWEST_REVISION,
    )


def allowed_by(config: RunConfig, validation: RunConfig | None = None) -> tuple[str, ...]:
    """The names that records may use in the services of a run: those of the user's own configuration only.

    `validation`: the validation configuration, if it is a separate one.
    """
    named = {*named_by(*(rollout_settings(one, "") for one in (config, validation) if one is not None))}
    for adapter in (one.adapter for one in config.by_group().values()):
        named |= named_by_model(adapter.model.path) | named_by_algorithm(adapter.algorithm.name)
        named |= named_by_teacher(adapter.algorithm)
    return tuple(sorted(named))


def services_of(
    config: RunConfig, location: RunLocation, run_id: str | None = None, *, validation: RunConfig | None = None
) -> dict[str, ServiceSettings]:
    """Settings of every managed service by name, in the order in which they are stopped.

    `run_id`: the run that they serve; None: every run of the log. `validation`: see `allowed_by`; its modules too.
    """
    builder = config.builder
    runs = () if run_id is None else (run_id,)
    model_groups = tuple(ids.model_group(run, name) for run in runs for name in config.by_group())
    base: dict[str, Any] = {
        "bootstrap_servers": location.kafka.bootstrap_servers,
        "kafka": location.kafka.section,
        "artifact_uri": location.artifact_uri,
        "workspace": location.workspace,
        "num_partitions": builder.num_partitions,
        "allow": allowed_by(config, validation),
    }
    session: dict[str, Any] = {"session_timeout_s": builder.session_timeout_s}
    services: list[ServiceSettings] = []
    services += [
        ProducerSettings(
            **base,
            **session,
            name=f"producers-{number}",
            engine=ScriptedSettings() if config.is_external else builder.engine,  # nothing is sampled
            served_models=served_models(config, run_id),
            max_concurrent_rollouts=builder.max_concurrent_rollouts,
            pace=builder.pace(config.adapter.max_staleness),
            tick_interval_s=builder.tick_interval_s,
            gateway=builder.gateway.of_process(number) if "gateway" in builder.model_fields_set else None,
            modules=tuple(dict.fromkeys(builder.modules + (validation.builder.modules if validation else ()))),
            runs=runs,
        )
        for number in range(1, builder.num_producers + 1)
    ]
    if config.served is not None and run_id is not None:
        group = jobs_of(config, run_id)[-1].model_group
        served: dict[str, Any] = {"model_group": group, **dict(config.served), **_asked_of_answers(config, run_id)}
        services.append(EndpointSettings(**base, **served, name=ENDPOINT))
    services += [
        ProcessorSettings(**base, **session, name=f"processors-{number}")
        for number in range(1, builder.num_processors + 1)
    ]
    if not config.is_external:
        own: dict[str, Any] = {"threads": config.adapter.threads, "ranks": config.adapter.ranks}
        services.append(LearnerSettings(**base, **own, name="learner-1", model_groups=model_groups))
    services += [
        TrackerServiceSettings(**base, name=f"tracker-{number}", tracker=tracker, runs=runs)
        for number, tracker in enumerate(config.trainer.trackers, 1)
    ]
    return {service.name: service for service in (*services, MetricsSettings(**base, name="metrics-1"))}


def _asked_of_answers(config: RunConfig, run_id: str) -> dict[str, Any]:
    """Temperature and algorithm of the loss that compares answers of the run's endpoint; nothing if none does."""
    if config.is_external or config.environment not in MADE_ELSEWHERE:
        return {}
    algorithm = jobs_of(config, run_id)[-1].job.algorithm
    return {"temperature": algorithm.temperature, "algorithm": algorithm.name} if algorithm.needs.behaviour else {}


def kafka_block(builder: BuilderSection, env: Mapping[str, str]) -> dict[str, Any]:
    """The builder's `kafka:` block, which overrides ROLLSTREAM_KAFKA_*; `${NAME}` of secrets is not expanded."""
    return merged(from_environment(env), given(builder.kafka))


def artifact_uri(config: RunConfig, workspace: Path) -> str:
    """The artifact store's URI: as configured, else a folder of the workspace."""
    return config.adapter.artifact_uri or str((workspace / "artifacts").absolute())


MAX_GROUP = 768
"""Maximum trajectories of a group: so many fit into its GroupClosed, with the outcomes of three attempts at each."""
WRITTEN = "-01234567"
"""Suffix of the job's name in the ids of submitted groups that are not on the log yet: digits of their digest."""


def check_manifests(jobs: Iterable[JobSpec]) -> None:
    """Raises ConfigError for a job whose groups or batches could have more trajectories than fit into a record.

    Also for one whose groups do not fill their tree.
    """
    for spec in (spec for spec in jobs if not spec.is_frozen):
        check_tree(spec)
        group_size = spec.plan.num_generations * max(1, len(spec.rollout.agents))
        check_group(spec, group_size, "(num_generations x agents)")
        if spec.plan.planning == "submitted":
            continue
        num_trajectories = groups_per_batch(spec.plan) * group_size
        most = most_trajectories(spec)
        if num_trajectories > most:
            raise ConfigError(
                f"job {spec.job_id}: a batch of {num_trajectories} trajectories (tasks_per_epoch x num_generations, by "
                f"batches_per_epoch) exceeds the {most} that fit into a manifest; lower tasks_per_epoch or "
                f"num_generations, or raise batches_per_epoch and max_staleness"
            )


def check_tree(spec: JobSpec) -> None:
    """Raises ConfigError for a group whose rollouts are not the leaves of a tree with the branching asked for."""
    branching, num = spec.rollout.responses_per_step, spec.plan.num_generations
    if branching > 1 and (num < branching or branching ** ids.tree_depth(num, branching) != num):
        raise ConfigError(
            f"job {spec.job_id}: {num} rollouts per task do not fill a tree with {branching} answers to a prompt; set "
            f"num_generations to a power of responses_per_step, the number of levels that branch"
        )


def check_group(spec: JobSpec, size: int, made_of: str) -> None:
    """Raises ConfigError for a group of more trajectories than fit into its record."""
    if size > MAX_GROUP:
        raise ConfigError(
            f"job {spec.job_id}: a group of {size} trajectories {made_of} exceeds the maximum of {MAX_GROUP}; lower "
            f"num_generations"
        )


def check_submission(spec: JobSpec, num_trajectories: int) -> None:
    """Raises ConfigError for more trajectories than fit into the manifest of one submission."""
    most = most_trajectories(spec, WRITTEN)
    if num_trajectories > most:
        raise ConfigError(
            f"job {spec.job_id}: a submission of {num_trajectories} trajectories exceeds the {most} that fit into a "
            f"manifest; roll out fewer examples per epoch, or fewer generations of each"
        )


def most_trajectories(spec: JobSpec, behind_name: str = "") -> int:
    """Number of trajectories that fit into a manifest of the job; `behind_name`: part of ids after the job's name."""
    plan = spec.plan
    return most_members(
        spec.job_id + behind_name,
        spec.rollout.agents,
        epoch=plan.num_epochs,
        index=plan.tasks_per_epoch * (1 + plan.max_refills),
        member=plan.num_generations + plan.oversampling,
        max_staleness=plan.max_staleness,
    )
