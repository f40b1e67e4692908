"""Checks of a run's models and sampling before it starts: devices, adapters, engines, temperature, and whether groups
are left to train on.

Engines of installed packages are looked up here, not when a file is read.
"""

import json
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from rollstream.harness.config.checks import check_builder, warn, warn_meaningless
from rollstream.harness.config.jobs import jobs_of, served_models
from rollstream.harness.config.resolve import ART_BUILDER, block_of, is_ours
from rollstream.harness.config.rewards import algorithm_of, check_agents
from rollstream.harness.config.unused_keys import of_engine
from rollstream.harness.runs.preflight import environment_of
from rollstream.schemas import ids
from rollstream.schemas.config import RunConfig
from rollstream.schemas.devices import device_of
from rollstream.schemas.engine_settings import EngineBlock, EngineSettings
from rollstream.schemas.errors import ConfigError, EnvironmentRunError, ModelError, describe
from rollstream.schemas.events.recorded import MADE_ELSEWHERE
from rollstream.schemas.finetuning import FinetuneConfig, adapter_path, builder_path
from rollstream.schemas.policy_gradient import ALONE
from rollstream.schemas.settings import JobSpec, ModelSettings, Sampling
from rollstream.schemas.variables import conceal, expand

ALL_LINEAR = "all-linear"
MAX_HEADER_BYTES = 100_000_000
"""Maximum size of a safetensors file's header, as its format has it."""
logger = logging.getLogger(__name__)


def check_engines(config: RunConfig) -> None:
    """Looks up the engines that the run's services are started with, and checks their settings, and the renderer's
    name. Raises ConfigError.
    """
    from rollstream.producers.engines.table import check_run
    from rollstream.producers.rollout import rendering

    if config.builder.services == "external":
        return
    try:
        rendering.check_name(config.builder.renderer)
    except EnvironmentRunError as error:
        raise ConfigError(f"{builder_path(config.finetuning)}.{error}") from error
    location = builder_path(config.finetuning, "engine")
    groups = adapter_path(config.finetuning, "model_groups")
    for name, served in served_models(config).items():
        if served.api_key_variable is not None and not os.environ.get(served.api_key_variable):
            raise ConfigError(f"{groups}.{name}.endpoint: the variable {served.api_key_variable} is not set; export it")
    engine = config.builder.engine
    known = engine if config.is_external else check_run(config, os.environ, location)
    _check_loads(location, known, f"name its server as {groups}.X.endpoint")
    _warn_unused(location, engine, known, config)
    if config.served is not None:
        location, engine = adapter_path(config.finetuning, "endpoint.engine"), config.served.engine
        known = _check_endpoint_engine(config, engine, location)
        _check_loads(location, known, "name an engine that does")
        _warn_unused(location, engine, known, config)


def _check_endpoint_engine(config: RunConfig, engine: EngineBlock, location: str) -> EngineSettings:
    """Check the endpoint's engine as that of a builder; requests have their own sampling, and ask for new versions."""
    from rollstream.producers.engines.table import check_run

    builder = config.builder.model_copy(update={"engine": engine, "sampling": Sampling(), "league": None})
    adapter = config.adapter.model_copy(update={"max_staleness": 0})
    try:
        return check_run(config.model_copy(update={"builder": builder, "adapter": adapter}), os.environ, location)
    except ConfigError as error:
        text = str(error).removeprefix(f"{builder_path(config.finetuning)}.")
        text = f"{location}{text.removeprefix('engine')}" if text.startswith("engine.") else text
        raise ConfigError(text if text.startswith(location) else f"{location}: {text}") from error


def _check_demonstrator(config: RunConfig, *, is_fork: bool) -> None:
    """Raises ConfigError for a warm start in an environment without a demonstrator. Recorded rollouts need none."""
    warm = config.adapter.warm_start
    if warm is None or (is_fork and not warm.in_forks):
        return
    if config.builder.services == "external" or config.environment in MADE_ELSEWHERE:
        return
    if not environment_of(config).has_demonstrator:
        raise ConfigError(
            f"{adapter_path(config.finetuning, 'warm_start')}: environment {config.environment} has no "
            "demonstrator; define demonstrate() in a class, or set environment_config.demonstrator where programs "
            "outside play, or remove warm_start"
        )


def check_models(config: RunConfig) -> None:
    """Raises ConfigError for a GPU that this machine does not have, or an adapter that fits no module of a local model.

    Raises it, too, for answers longer than a local model's positions. Leaves out what runs elsewhere.
    """
    if config.builder.services == "external" or config.is_external:
        return
    _check_device(config.builder.engine.needed_device, builder_path(config.finetuning, "engine.device"))
    if config.served is not None:
        location = adapter_path(config.finetuning, "endpoint.engine.device")
        _check_device(config.served.engine.needed_device, location)
    served = served_models(config)
    for name, one in config.by_group().items():
        model, location = one.adapter.model, config.group_path(name, "model")
        if name in config.trained():
            _check_device(model.device, f"{location}.device")
        folder = Path(str(expand(model.path, os.environ, location))).expanduser()
        if name not in served and folder.is_dir():
            check_adapter(model, folder, f"{location}.lora.target_modules")
            _check_positions(config, folder)


def _check_device(device: str, location: str) -> None:
    if device in ("auto", "cpu"):
        return
    import torch

    try:
        device_of(device, torch.cuda.device_count(), location)
    except ModelError as error:
        raise ConfigError(str(error)) from error


def check_adapter(model: ModelSettings, folder: Path, location: str) -> None:
    """Raises ConfigError if no module has a name of `lora.target_modules`; warns of the names that none has.

    The model is built, without weights, only if its files do not have the names.
    """
    targets = () if model.lora is None or model.lora.target_modules == ALL_LINEAR else model.lora.target_modules
    if not (unknown := _unknown(targets, _modules_in_files(folder))):
        return
    import torch

    from rollstream.learner.model.loading import empty_module

    plain = model.model_copy(update={"lora": None, "device": "cpu", "quantization": None})
    try:
        module = empty_module(plain, str(folder), torch.device("cpu"), seed=0)
    except ModelError as error:
        logger.info("the modules of %s are not known: %s", folder, error)
        return
    names = [name for name, _ in module.named_modules()]
    if not (unknown := _unknown(unknown, names)):
        return
    linear = (name for name, one in module.named_modules() if isinstance(one, torch.nn.Linear))
    known = sorted({name.rpartition(".")[2] for name in linear})
    message = f"{location}: model {folder} has no module {', '.join(unknown)}; its linear layers are {', '.join(known)}"
    if len(unknown) == len(targets):
        raise ConfigError(f"{message}; correct the names, or set all-linear")
    warn(message)


def _unknown(targets: Iterable[str], names: Iterable[str]) -> tuple[str, ...]:
    """Names that peft finds no module for: the end of a module's path."""
    paths = [f".{name}" for name in names]
    return tuple(target for target in targets if not any(path.endswith(f".{target}") for path in paths))


def _modules_in_files(folder: Path) -> set[str]:
    """Names of the modules that have weights in a folder's safetensors files."""
    names = set[str]()
    for file in folder.glob("*.safetensors"):
        with suppress(OSError, ValueError), file.open("rb") as opened:
            header = json.loads(opened.read(min(int.from_bytes(opened.read(8), "little"), MAX_HEADER_BYTES)))
            names |= {str(name).rpartition(".")[0] for name in header}
    return names


def _check_positions(config: RunConfig, folder: Path) -> None:
    """Raises ConfigError for answers longer than a model's positions; warns of those that leave a prompt no room.

    An answer always ends where the positions do.
    """
    wanted = config.builder.sampling.max_new_tokens
    try:
        written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        positions = {**written, **written.get("text_config", {})}.get("max_position_embeddings")
    except (OSError, ValueError, TypeError, AttributeError):
        return
    location = builder_path(config.finetuning, "sampling.max_new_tokens")
    if not isinstance(positions, int) or wanted < positions or config.environment in MADE_ELSEWHERE:
        return
    if wanted > positions:
        raise ConfigError(
            f"{location}: {wanted} is above the {positions} positions of model {folder}, which prompts and answers "
            "share; lower it by at least the length of the prompts"
        )
    warn(
        f"{location}: {wanted} are all positions of model {folder}, which prompt and answer share, so each answer may "
        "have fewer tokens; lower it by the length of the prompts"
    )


def reads_base_models(config: RunConfig) -> bool:
    """Whether an engine that the run starts reads base models on this machine. Raises ConfigError."""
    from rollstream.producers.engines.table import settings_of

    location = builder_path(config.finetuning, "engine")
    is_started = config.builder.services == "managed"
    return is_started and settings_of(config.builder.engine, os.environ, location).READS_BASE_MODELS


def check_groups(config: RunConfig, finetune: FinetuneConfig, *, is_fork: bool = False) -> None:
    """Raises ConfigError for a new run whose rollouts cannot be made, scored or compared as its file says, or would not
    be trained on.
    """
    check_builder(config)
    check_agents(config)
    _check_demonstrator(config, is_fork=is_fork)
    for name, one in config.trained().items():
        check_temperature(one, name)
    check_truncation(config)
    if config.builder.num_generations == 1 and not config.is_external:
        is_filtered = config.trainer.planning == "stream" or is_ours(block_of(finetune, "trainer"))
        for name, one in config.trained().items():
            _check_single(one, _specs(config)[name], is_filtered=is_filtered)
        if block_of(finetune, "trajectory_builder").type != ART_BUILDER:  # whose users expect it, as in ART
            _warn_default_advantage(config)


def _warn_default_advantage(config: RunConfig) -> None:
    """Warn that rewards are not compared as the default of `advantage` says."""
    for name, one in config.trained().items():
        key = config.group_path(name, "algorithm.advantage")
        written, used = (getattr(it, "advantage", "") for it in (one.adapter.algorithm, algorithm_of(one)))
        if written != used:
            warn(
                f"{key}: {used} in place of the default {written}, because num_generations is 1 and {written} compares "
                f"the rollouts of a task; write `advantage: {used}`, or raise num_generations"
            )


def _check_single(config: RunConfig, spec: JobSpec, *, is_filtered: bool) -> None:
    """Raises ConfigError for a job that compares the rollouts of a task, or rejects groups whose rewards do not differ,
    where a group is one rollout. `is_filtered`: rollstream's own curriculum filters the groups.
    """
    algorithm, curriculum = spec.job.algorithm, spec.plan.curriculum
    location = builder_path(config.finetuning)
    if algorithm.needs.several_rollouts:
        advantage = config.group_path(ids.name_of(spec.model_group), "algorithm.advantage")
        raise ConfigError(
            f"{location}.num_generations: is 1, but {algorithm.name} compares the rollouts of a task, so advantages "
            f"would all be 0; raise it, or set {advantage} to one of: {', '.join(sorted(ALONE))} (of an algorithm that "
            "has it, such as grpo)"
        )
    is_streamed, remedies = spec.plan.planning == "stream", list[str]()
    if is_streamed and spec.plan.drop_zero_variance:
        remedies.append(f"{location}.drop_zero_variance: false")
    is_alone = is_streamed or (len(config.agents) == 1 and not algorithm.needs.pairs)
    is_judged = is_filtered and is_alone and (curriculum.filter_single_group or (is_streamed and curriculum.steer))
    if is_judged and curriculum.enabled and curriculum.min_reward_diff:
        remedies.append("finetuning.curriculum_learning.min_reward_diff: 0")
    if remedies and spec.rollout.policy == "model":
        raise ConfigError(
            f"{location}.num_generations: is 1, so rewards of a task do not differ and all groups would be rejected; "
            f"raise it, or set {' and '.join(remedies)}"
        )


def check_temperature(config: RunConfig, group: str = ids.MODEL_GROUP) -> None:
    """Raises ConfigError if ratios would compare distributions of different temperatures, or greedy decoding.

    `sampling` does not apply to rollouts sampled elsewhere.
    """
    algorithm, sampled = config.adapter.algorithm, config.builder.sampling.temperature
    if not algorithm.needs.behaviour or config.environment in MADE_ELSEWHERE or config.endpoint is not None:
        return
    location = builder_path(config.finetuning, "sampling.temperature")
    if sampled == 0:
        raise ConfigError(
            f"{location}: 0 decodes greedily, so all rollouts of a task are equal and {algorithm.name} has no ratio to "
            "the sampling distribution; set it above 0 (validation may use 0 through --validation_config_file)"
        )
    if "temperature" in algorithm.model_fields_set and algorithm.temperature != sampled:
        raise ConfigError(
            f"{config.group_path(group, 'algorithm.temperature')}: {algorithm.temperature:g} "
            f"differs from the sampling temperature {location}: {sampled:g}, so ratios would not start at 1; remove "
            f"algorithm.temperature or set both to the same value"
        )


def check_truncation(config: RunConfig) -> None:
    """Raises ConfigError if groups with equal rewards are rejected before a penalty for their length is subtracted, or
    if the algorithm does not take the negative rewards that it makes.

    The penalty is meant for groups of which some members were truncated and none succeeded.
    """
    specs = _specs(config)
    for name, one in config.trained().items():
        _check_truncation(one, specs[name])


def _specs(config: RunConfig) -> dict[str, JobSpec]:
    """The job that trains each model group last, by the group's name."""
    return {ids.name_of(spec.model_group): spec for spec in jobs_of(config, "run")}


def _check_truncation(config: RunConfig, spec: JobSpec) -> None:
    algorithm = config.adapter.algorithm
    if not algorithm.penalty:
        return
    location = config.group_path(ids.name_of(spec.model_group), f"algorithm.{algorithm.penalty}")
    if algorithm.needs.nonnegative_rewards:
        raise ConfigError(f"{location}: makes rewards negative, which {algorithm.name} does not take; remove it")
    remedies: list[str] = []
    if spec.plan.planning == "stream" and spec.plan.drop_zero_variance:
        remedies.append(f"{builder_path(config.finetuning, 'drop_zero_variance')}: false")
    if spec.plan.curriculum.enabled and spec.plan.curriculum.min_reward_diff:
        remedies.append("finetuning.curriculum_learning.min_reward_diff: 0")
    if remedies:
        raise ConfigError(
            f"{location}: groups with equal rewards are rejected before it is subtracted; set "
            f"{' and '.join(remedies)}, or remove the penalty"
        )


def _check_loads(location: str, known: EngineSettings, remedy: str) -> None:
    if not known.LOADS_WEIGHTS:
        raise ConfigError(f"{location}: {known.kind} cannot load the weights of the run; {remedy}")


def _warn_unused(location: str, written: EngineSettings, known: EngineSettings, config: RunConfig) -> None:
    """Warn of keys without effect, by the class that an installed package has for its kind; those of a built-in kind
    are known when the file is read. Raises ConfigError.
    """
    if known is written:
        return
    values = written.model_dump()
    try:
        found = [(one.location, tuple(map(str, one.names)), str(one.why)) for one in of_engine(location, known, config)]
    except (Exception, SystemExit) as error:  # the package's code
        logger.info("engine %s cannot be asked for unused keys", written.kind, exc_info=error)
        message = f"{location}: kind {written.kind!r} cannot report its unused keys: {describe(error)}"
        raise ConfigError(conceal(f"{message}; correct the package", values, os.environ)) from error
    for where, names, why in found:
        warn_meaningless(where, names, conceal(why, values, os.environ))
