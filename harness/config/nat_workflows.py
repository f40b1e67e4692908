"""A workflow of NeMo Agent Toolkit's as the agent of a run: which one a file names, and which sections NAT reads.

With the extra `nat` installed, `workflow._type` may be a function that any installed NAT package registers. NAT's own
runtime then runs it in the process of `finetune`, its evaluators score it, and the run's endpoint answers the llms of
the file that refer to the model in training. NAT is imported only for a name that is not ours.
"""

import importlib.util
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError

from rollstream.harness.services.addresses import is_this_machine, is_unspecified
from rollstream.producers.rollout import registry
from rollstream.schemas.config import BuilderSection, ConfigFile, ForeignBlock, RunConfig
from rollstream.schemas.errors import ConfigError, first_invalid
from rollstream.schemas.finetuning import FinetuneConfig, adapter_path, builder_path
from rollstream.schemas.permissions import CODE, NOTHING, Permissions
from rollstream.schemas.services import LOOPBACK, EndpointSection
from rollstream.schemas.variables import expand

SECTIONS = (
    *("general", "functions", "function_groups", "middleware", "llms", "embedders", "memory", "object_stores"),
    *("retrievers", "ttc_strategies", "authentication"),
)
"""Sections of a file that NAT reads for its workflow, beside `workflow` and `eval`."""
PLAYED_BY = ("rollstream", "openpipe_art_traj_builder")
"""Builders that play a NAT workflow."""
OPENAI = "openai"
DEFAULTS = {"temperature": 1.0, "top_p": 1.0}
"""Sampling defaults of the run's endpoint."""


def workflow_of(block: Any, file: Any, endpoint: str | None) -> str | None:
    """The `_type` of the NAT workflow that a builder's block runs; None if an environment or a server does.

    Raises ConfigError for one of our builders that cannot.
    """
    workflow = getattr(file, "workflow", None)
    is_free = hasattr(block, "section") and block.environment is None and endpoint is None
    if not is_free or not isinstance(file, ConfigFile) or not isinstance(workflow, ForeignBlock):
        return None
    if not _is_nats(workflow.type):
        return None
    if block.type not in PLAYED_BY:
        raise ConfigError(
            f"trajectory_builders: _type {block.type!r} cannot run the NAT workflow {workflow.type}; use one of "
            f"{', '.join(PLAYED_BY)}, or serve the workflow and give --endpoint"
        )
    return workflow.type


def served_by(adapter: Any, nat_workflow: str | None) -> EndpointSection | None:
    """The adapter with an endpoint for a NAT workflow's requests to the model in training, on any free port by
    default."""
    section: EndpointSection | None = getattr(adapter, "endpoint", None)
    return EndpointSection(port=0) if section is None and nat_workflow is not None else section


def with_temperature(builder: BuilderSection, llms: Iterable[Mapping[str, Any]]) -> BuilderSection:
    """The builder with the sampling temperature of the llms, so that the loss compares equal distributions."""
    found = {_number(block, "temperature") for block in llms if block.get("temperature") is not None}
    if len(found) != 1 or "temperature" in builder.sampling.model_fields_set:
        return builder
    sampling = builder.sampling.model_copy(update={"temperature": found.pop()})
    return builder.model_copy(update={"sampling": sampling})


def check_sampling(config: RunConfig, finetune: FinetuneConfig) -> None:
    """Raises ConfigError for llms of a NAT workflow whose answers the loss cannot compare with one distribution: greedy
    decoding, differing temperatures, and temperatures that contradict the builder's or the algorithm's block. The
    workflow may be run by us or by another package's builder.
    """
    run, algorithm, sampling = finetune.run_configuration, config.adapter.algorithm, config.builder.sampling
    if not algorithm.needs.behaviour or run is None:
        return
    file: Any = run.config_file
    adapter = file.trainer_adapters[config.finetuning.trainer_adapter]
    llms = trained_llms(file, adapter) if config.nat_workflow is not None else asked_llms(finetune)
    for key in DEFAULTS if llms else ():
        found = {f"llms.{name}.{key}": _number(block, key) for name, block in llms.items()}
        if key == "temperature" and "temperature" in algorithm.model_fields_set:
            found[adapter_path(config.finetuning, "algorithm.temperature")] = algorithm.temperature
        if key in sampling.model_fields_set:
            location = builder_path(config.finetuning, f"sampling.{key}")
            found[location] = getattr(sampling, key)
        _check_equal(found, algorithm.name)


def _check_equal(found: Mapping[str, float], algorithm: str) -> None:
    (location, value), *others = found.items()
    for other, its in others:
        if its != value:
            raise ConfigError(
                f"{location}: {value:g} differs from {other}: {its:g} (the default is 1), but "
                f"{algorithm} compares all answers with one distribution; set both to the same value"
            )
    if value == 0:
        raise ConfigError(
            f"{location}: 0 decodes greedily, so all rollouts of a task are equal and {algorithm} has no ratio to the "
            "sampling distribution; set it above 0"
        )


def _number(block: Mapping[str, Any], key: str) -> float:
    """A number of an llm's block that NAT has parsed."""
    value = block.get(key)
    return DEFAULTS[key] if value is None else float(value)


def hint(environment: str) -> str:
    """A hint for the error about an unknown environment, which may be a NAT workflow."""
    if environment.startswith(CODE) or _is_environment(environment):
        return ""
    if _is_nats(environment):
        return f"; a NAT package registers a workflow of this name: write workflow: {{_type: {environment}}}"
    if _is_installed():
        return "; no installed NAT package registers such a workflow either"
    return "; workflows of NAT packages need the extra nat: pip install '.[nat,learner]' in rollstream's checkout"


def check(file: ConfigFile, reward: str | None, *, has_dataset: bool, validates_by_file: bool) -> None:
    """Raises ConfigError if a run of a NAT workflow is incomplete, or NAT refuses its sections of the file."""

    if reward is None or reward not in file.eval.evaluators:
        known = ", ".join(sorted(file.eval.evaluators)) or "none"
        raise ConfigError(
            f"finetuning.reward_function.name: is {reward!r}; name one of eval.evaluators, which score a NAT "
            f"workflow ({known})"
        )
    if not has_dataset:
        raise ConfigError("eval.general.dataset: missing; a NAT workflow needs a dataset of examples")
    if validates_by_file:
        raise ConfigError(
            "validation_config_file: a NAT workflow is validated by the run's own file; give --validation_dataset"
        )
    config_of(sections_of(file))


def sections_of(file: ConfigFile) -> dict[str, Any]:
    """The sections of a file that NAT reads, with `${ENV}` expanded, without the dataset and our components."""
    assert file.workflow is not None
    evaluators = {name: block.model_dump(mode="json", by_alias=True) for name, block in file.eval.evaluators.items()}
    general = {"max_concurrency": file.eval.general.max_concurrency}
    written: dict[str, Any] = {name: getattr(file, name) for name in SECTIONS if getattr(file, name)}
    written["workflow"] = file.workflow.model_dump(mode="json", by_alias=True)
    written["eval"] = {"general": general, "evaluators": evaluators}
    expanded: Any = expand(written, os.environ)
    return expanded


def asked_llms(finetune: FinetuneConfig) -> dict[str, dict[str, Any]]:
    """The llms, by name, through which another package's builder samples the model in training: those with the
    adapter's endpoint as `base_url`, or those with `target_model` as model. Empty if the adapter has its own server.
    """
    run = finetune.run_configuration
    file: Any = None if run is None else run.config_file
    if run is None or run.endpoint is not None or hasattr(_block(file, finetune, "trajectory_builder"), "section"):
        return {}
    adapter = _block(file, finetune, "trainer_adapter")
    if not hasattr(adapter, "section") or served_by(adapter, None) is None:
        return {}
    blocks = _blocks(getattr(file, "llms", None) or {})
    target = finetune.target_model
    chosen = {name: block for name, block in blocks.items() if target is not None and _model_of(block) == target}
    return chosen or {name: block for name, block in _leading(blocks, adapter).items() if block.get("base_url")}


def _block(file: Any, finetune: FinetuneConfig, role: str) -> Any:
    return getattr(file, f"{role}s").get(getattr(finetune, role))


def _blocks(llms: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Blocks of llms as in the file, also if NAT has parsed them."""
    read = {name: block.model_dump() if isinstance(block, BaseModel) else block for name, block in llms.items()}
    return {name: block for name, block in read.items() if isinstance(block, dict)}


def trained_llms(file: ConfigFile, adapter: Any) -> dict[str, dict[str, Any]]:
    """The llms that refer to the model in training, by name: by its model name, its endpoint's `model_name`, an ART
    backend's `name` or `base_model`, or the port of the endpoint or of the backend. A `base_url` must have one of their
    addresses or one of this machine. Raises ConfigError if there are none, or if the type of one cannot be redirected
    to the endpoint.
    """
    known = _known_models(adapter)
    found = _leading(_blocks(file.llms), adapter)
    if not found:
        raise ConfigError(
            f"llms: none refers to the model in training; set the model_name of one to one of {sorted(known)}"
        )
    for name, block in found.items():
        if block.get("_type") != OPENAI:
            kind = block.get("_type")
            raise ConfigError(f"llms.{name}._type: is {kind!r}; for the model in training use {OPENAI}")
    return found


def _known_models(adapter: Any) -> set[str]:
    """Names of the model in training: its path, its endpoint's model name, and those of an ART backend."""
    served, backend = served_by(adapter, ""), getattr(adapter, "backend", None)
    known = {adapter.section().model.path, *([served.model_name] if served is not None else [])}
    return known | ({str(getattr(backend, key)) for key in ("name", "base_model")} if backend is not None else set())


def _leading(llms: Mapping[str, dict[str, Any]], adapter: Any) -> dict[str, dict[str, Any]]:
    """The `llms` that refer to the model in training."""
    served, backend = served_by(adapter, ""), getattr(adapter, "backend", None)
    ports = {getattr(backend, "port", None), served.port if served is not None else None} - {None, 0}
    hosts = {*LOOPBACK, getattr(backend, "ip", None), served.host if served is not None else None} - {None}
    known = _known_models(adapter)
    return {name: block for name, block in llms.items() if _leads_there(block, known, ports, hosts)}


class Called(NamedTuple):
    """Model names that the llms of the model in training use at the endpoint."""

    names: dict[str, str]
    """Model names by llm."""
    target: str | None
    """The name of those whose calls are trained on; none: all calls of the workflow."""


def called(llms: Mapping[str, Mapping[str, Any]], target_model: str | None, name: str, other_name: str) -> Called:
    """Names by which the llms call the model.

    If `target_model` is the model of some `llms`, they use `name` and the others `other_name`, so that their calls can
    be distinguished at the endpoint, which has one model. Otherwise all use `name`.
    """
    chosen = {llm for llm, block in llms.items() if target_model is not None and _model_of(block) == target_model}
    if not chosen:
        return Called(dict.fromkeys(llms, name), target_model)
    return Called({llm: name if llm in chosen else other_name for llm in llms}, name)


def _model_of(block: Mapping[str, Any]) -> Any:
    return block.get("model_name", block.get("model"))


def _is_nats(name: str) -> bool:
    """Whether an installed NAT package registers this function and no environment has this name."""
    if name.startswith(CODE) or _is_environment(name) or not _is_installed():
        return False

    return name in function_types()


def _is_installed() -> bool:
    try:
        return find_spec("nat.plugins.eval") is not None
    except ModuleNotFoundError:
        return False


def _is_environment(name: str) -> bool:
    try:
        registry.environment(name, Permissions(frozenset({name})))
    except ConfigError:
        return False
    return True


def _leads_there(block: Mapping[str, Any], known: set[str], ports: set[int], hosts: set[str]) -> bool:
    """A model of the same name at another host does not count."""
    url = block.get("base_url")
    is_known = _model_of(block) in known
    if not isinstance(url, str):
        return is_known
    try:
        host, port = urlsplit(url).hostname, urlsplit(url).port
    except ValueError:  # the port is not a number
        return False
    if host is None or not (is_known or port in ports):
        return False
    return host in hosts or (any(map(is_unspecified, hosts)) and is_this_machine(host))


PACKAGES = {
    "nat.plugins.eval": "'nvidia-nat-eval==1.9.*'",
    "tqdm": "tqdm",
    "langchain_core": "langchain-core",
}
"""Modules that NAT's `run_eval()` imports, with their names in pip. It declares neither tqdm nor langchain-core."""
PROFILER = {"nat.plugins.profiler": "'nvidia-nat-profiler==1.9.*'"}
"""Without it NAT records no step of a language model, and says nothing of that."""


def function_types() -> frozenset[str]:
    """The `_type` of every function that installed NAT packages register, `<package>/<name>` included."""
    from nat.cli.type_registry import GlobalTypeRegistry

    _discover()
    found = GlobalTypeRegistry.get().get_registered_functions()
    return frozenset(name for info in found for name in (info.config_type.static_type(), info.full_type))


def config_of(sections: Mapping[str, Any]) -> Any:
    """NAT's configuration of these sections. Raises ConfigError with NAT's message."""
    from nat.data_models.config import Config

    check_installed(has_llms=bool(sections.get("llms")))
    _discover()
    Config.rebuild_annotations()
    Config.model_rebuild(force=True)  # NAT leaves out sections whose types were registered after its first use
    try:
        return Config.model_validate(sections)
    except ValidationError as error:
        raise ConfigError(f"NAT refuses the file: {first_invalid(error)}; correct this key") from error


def check_installed(*, has_llms: bool, is_there: Callable[[str], bool] | None = None) -> None:
    """Raises ConfigError with the pip command if NAT's evaluation would lack a package.

    `has_llms`: of a configuration with language models.
    """
    needed = PACKAGES | (PROFILER if has_llms else {})
    missing = _missing(needed, is_there or _is_there)
    if missing:
        names = ", ".join(missing)
        raise ConfigError(
            f"NAT's evaluation needs {names}, which NAT does not install; run pip install "
            f"{' '.join(needed[name] for name in missing)}"
        )


def _missing(modules: Iterable[str], is_there: Callable[[str], bool]) -> list[str]:
    return [name for name in modules if not is_there(name)]


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _discover() -> None:
    from nat.runtime.loader import PluginTypes, discover_and_register_plugins

    discover_and_register_plugins(PluginTypes.CONFIG_OBJECT)


REMOTE = "remote_workflow"
MARGIN_S = 10.0
"""Seconds of a rollout beside the endpoint's answer."""


def at_endpoint(builder: BuilderSection, finetune: FinetuneConfig) -> BuilderSection:
    """The builder with the environment `remote_workflow`, if an endpoint is given; else the builder unchanged.

    Keys of `environment_config` that this environment accepts are kept. Unset time limits follow the endpoint's.
    """
    run = finetune.run_configuration
    if run is None or run.endpoint is None:
        return builder
    config: dict[str, Any] = {key: value for key, value in builder.environment_config.items() if key in _parameters()}
    config |= {
        "endpoint": run.endpoint,
        "endpoint_timeout": float(run.endpoint_timeout),
        "target_functions": list(finetune.target_functions),
        "target_model": finetune.target_model,
        "result_json_path": run.result_json_path,
    }
    changes: dict[str, Any] = {"environment": REMOTE, "environment_config": config}
    rollout_s = run.endpoint_timeout + MARGIN_S
    if "rollout_timeout_s" not in builder.model_fields_set:
        changes["rollout_timeout_s"] = max(builder.rollout_timeout_s, rollout_s)
    if "group_timeout_s" not in builder.model_fields_set:
        changes["group_timeout_s"] = max(builder.group_timeout_s, 2 * rollout_s)
    return builder.model_copy(update=changes)


def _parameters() -> set[str]:
    return set(inspect.signature(registry.environment(REMOTE, NOTHING)).parameters)
