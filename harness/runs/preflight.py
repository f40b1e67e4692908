"""Checks before a run starts: folders, files in use, environment, rewards.

The endpoint of a run, seen from the harness: whether its port is free, its API key, which weight version it has.
"""

import logging
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rollstream.harness.config import nat_workflows
from rollstream.harness.config.checks import check_hub, check_model, check_ranks, check_teacher, check_trackers
from rollstream.harness.config.jobs import ENDPOINT, jobs_of, served_models
from rollstream.harness.config.rewards import (
    check_agents,
    check_evaluators,
    check_examples,
    check_new_evaluators,
    check_reward,
    check_reward_names,
    path_of,
    permissions_of,
    warn_weights,
)
from rollstream.harness.runs.earlier_output import check_output_dir
from rollstream.harness.runs.progress import Progress
from rollstream.harness.services.addresses import check_port, is_this_machine, is_unspecified
from rollstream.harness.services.optional_dependencies import check_learner, check_quantized
from rollstream.harness.services.outputs import can_write
from rollstream.producers.league.draw import check_league
from rollstream.schemas.config import RunConfig
from rollstream.schemas.errors import ArtifactError, ConfigError, describe
from rollstream.schemas.events.recorded import MADE_ELSEWHERE
from rollstream.schemas.finetuning import adapter_path, builder_path
from rollstream.schemas.permissions import COMMAND
from rollstream.schemas.services import LOOPBACK
from rollstream.schemas.users_code import import_module
from rollstream.schemas.variables import VARIABLE, as_written, conceal, expand

if TYPE_CHECKING:
    from rollstream.harness.config.dataset import Example
    from rollstream.harness.config.file import Loaded
    from rollstream.producers.rollout.environment import Environment

QUERY_S = 2.0
"""Seconds that a starting run waits for a query to release the metrics file."""
ANSWER_S = 10.0
"""Maximum seconds for the server of a remote workflow to list its routes."""
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Ignores proxies, as rollouts do."""

logger = logging.getLogger(__name__)


def check_paths(config: RunConfig) -> None:
    """Raises ConfigError if libraries or the model folder are missing, the learner's processes cannot train a job, no
    artifact store has the given URI, or the output folder cannot be used. Creates nothing.
    """
    if config.builder.services == "managed" and not config.is_external:
        check_learner()
        for name, one in config.by_group().items():
            where = config.group_path(name, "model.path")
            path = str(expand(one.adapter.model.path, os.environ, where))
            check_model(path, where, config.builder.engine.kind)
            check_hub(path, where)
            check_quantized(one.adapter, partial(config.group_path, name))
            at = config.group_path(name, "algorithm.teacher")
            check_teacher(one.adapter.algorithm, config.builder.sampling, path, at, served_models(config))
    check_ranks(config, jobs_of(config, "run"))
    _check_store(config)
    check_output_dir(config)


def _check_store(config: RunConfig) -> None:
    from rollstream.eventlog.artifacts import ArtifactStore

    uri, location = config.adapter.artifact_uri, adapter_path(config.finetuning, "artifact_uri")
    try:
        is_of_process = uri is not None and ArtifactStore(uri).is_of_process  # connects to nothing
    except ArtifactError as error:
        raise ConfigError(f"{location}: {error}") from error
    if is_of_process:
        raise ConfigError(f"{location}: {uri} is in the memory of each process alone; give a folder or a shared store")


def check_result(path: Path | None) -> None:
    """Raises ConfigError if the result file could not be written at the end of the run."""
    if path is not None and not can_write(path):
        raise ConfigError(f"--result_json_path {path} is not writable; give another path")


def check_metrics(config: RunConfig, workspace: Path, cluster_id: str | None = None) -> None:
    """Raises MetricsFileError if the run would lose its metrics: the file remains locked, is damaged, or is of another
    cluster than `cluster_id`. Waits up to QUERY_S for a query to end.
    """
    from rollstream.metrics.projection.connection import FileInUseError, metrics_file
    from rollstream.metrics.rebuild import check_file

    path = metrics_file(workspace)
    if config.builder.services != "managed" or not path.exists():
        return
    deadline = time.monotonic() + QUERY_S
    while True:
        try:
            return check_file(path, cluster_id)
        except FileInUseError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def check_datasets(config: RunConfig, *, is_new: bool) -> "list[Example] | None":
    """Reads the dataset of a new run and the validation dataset. Raises ConfigError.

    Returns the examples of the former, None if the run is resumed or has no dataset.
    """
    from rollstream.harness.config.file import validation_config

    validation = validation_config(config)
    examples = _check_dataset(config, "eval.general.dataset or --dataset") if is_new else None
    if validation is not None and config.validation is not None:
        if config.validation.config is not None:
            _check_validation(config, validation, config.validation.config, is_new=is_new)
        is_named = config.validation.dataset is not None
        file = "validation_dataset" if is_named else f"validation_config_file {config.validation.config}"
        _check_dataset(validation, file, is_new=is_new)
        for name in validation.by_group().keys() - config.by_group().keys():
            known = ", ".join(config.by_group())
            raise ConfigError(f"{file}: agents: model group {name} is not one of the run; choose one of: {known}")
    return examples


def _check_validation(config: RunConfig, validation: RunConfig, path: Path, *, is_new: bool) -> None:
    """Imports the modules of the validation's own file, and checks that of a new run. Raises ConfigError."""
    from rollstream.harness.config.file import load

    is_known_here = config.builder.services != "external"
    try:
        if is_new:
            check_command(load(path))
            check_reward_names(validation)
            check_new_evaluators(validation)
            (check_rewards if is_known_here else check_evaluators)(validation)
            check_agents(validation)
        elif is_known_here:
            _import_modules(validation)
    except ConfigError as error:
        raise ConfigError(f"validation_config_file {path}: {error}") from error


def _check_dataset(config: RunConfig, location: str, *, is_new: bool = True) -> "list[Example] | None":
    from rollstream.harness.config import dataset

    if config.dataset is None:
        return None
    try:
        examples = dataset.read_dataset(config.dataset)
    except ConfigError as error:
        raise ConfigError(f"{location}: {error}") from error
    where = f"dataset {config.dataset.file_path}"
    check_examples(config, examples, where, is_new=is_new)
    if config.builder.services != "external":  # else the environment is known there
        check_inputs(config, examples, where)
    return examples


def check_inputs(config: RunConfig, examples: "Iterable[Example]", where: str) -> None:
    """Raises ConfigError naming `where` and the first example that lacks what the environment requires."""
    environment = environment_of(config)
    try:
        with users_code(f"environment {config.environment}", config):
            for example in examples:
                environment.check_inputs(example.inputs, example.example_id)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def check_workflow(config: RunConfig) -> None:
    """Raises ConfigError if the server at `--endpoint` does not run a workflow.

    An unreachable server is accepted: it may wait for the run's own endpoint before it starts.
    """
    from rollstream.producers.environments.remote_workflow import PATHS, base_url

    if config.endpoint is None:
        return
    url = base_url(str(expand(config.endpoint, os.environ, "endpoint")))
    try:
        is_there = any(_has(f"{url}{path}") for path in PATHS)
    except OSError as error:
        logger.warning("--endpoint %s is not reachable yet: %s", config.endpoint, error)
        return
    if not is_there:
        raise ConfigError(
            f"--endpoint {config.endpoint}: the server returned 404 for {' and '.join(PATHS)}; give the address of a "
            "NAT server (`nat serve`), such as http://localhost:8000"
        )


def _has(url: str) -> bool:
    """Whether a server has a route for any method.

    Most servers answer 405, not 404, for another method of an existing route.
    """
    return any(_status(url, method) != 404 for method in ("OPTIONS", "POST"))


def _status(url: str, method: str) -> int:
    """Status of an empty request, which runs no workflow.

    Raises OSError if the server does not answer. User and password of the URL are left out, because urllib takes them
    for a part of the host name.
    """
    parts = urlsplit(url)
    address = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    request = urllib.request.Request(address, b"" if method == "POST" else None, method=method)
    try:
        with _DIRECT.open(request, timeout=ANSWER_S) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


def check_names(config: RunConfig, *, is_new: bool = True) -> None:
    """Imports the user's modules and looks the environment and the rewards up. Raises ConfigError.

    With external services nothing is imported here: the names are resolved there.
    """
    if is_new:
        check_reward_names(config)
        check_new_evaluators(config)
    warn_weights(config)
    check_trackers(config)
    if config.builder.services == "external":
        check_evaluators(config)
        return
    _import_modules(config)
    environment = environment_of(config)
    with users_code(f"environment {config.environment}: required_agents()", config):
        environment.check_agents(config.builder.agents)
    if config.builder.league is not None:
        location = builder_path(config.finetuning, "league")
        if config.environment in MADE_ELSEWHERE:
            raise ConfigError(f"{location}: rollouts of {config.environment} are sampled elsewhere; remove it")
        trained = [agent for agent, group in config.agents.items() if group in config.trained()]
        check_league(config.builder.league, location, config.agents, environment.SCRIPTED, trained=trained)
    check_rewards(config)


def check_command(loaded: "Loaded") -> None:
    """Raises ConfigError for a command with `${NAME}`: tasks carry the whole line, so its values would be recorded."""
    config = loaded.config
    sections = {key: loaded.written.get(key) for key in ("workflow", "trajectory_builders")}
    written = as_written(config.environment, sections, os.environ)
    if config.environment.startswith(COMMAND) and written != config.environment:
        raise ConfigError(
            f"workflow or {builder_path(config.finetuning, 'environment')}: {written}: tasks "
            "carry the whole command, so no variable is allowed in it; write it out, and let the program read a secret "
            "from a file"
        )


def check_rewards(config: RunConfig) -> None:
    """Imports the user's modules and looks the rewards up, unless rewards are external. Raises ConfigError."""
    check_evaluators(config)
    _import_modules(config)
    for name in config.reward_functions:
        with users_code(f"{path_of(config, name)}: reward {name}", config):
            check_reward(config, name)


def _import_modules(config: RunConfig) -> None:
    for module in config.builder.modules:
        location = builder_path(config.finetuning, "modules")
        with users_code(location, config):
            import_module(module, location)


def environment_of(config: RunConfig) -> "Environment":
    """The run's environment, as its producers build it. Raises ConfigError."""
    from rollstream.producers.rollout.registry import build_environment

    location = f"workflow or {builder_path(config.finetuning, 'environment')}"
    with users_code(f"{location}: environment {config.environment}", config):
        try:
            return build_environment(config.environment, config.builder.environment_config, permissions_of(config))
        except ConfigError as error:
            raise ConfigError(f"{location}: {error}{nat_workflows.hint(config.environment)}") from error


@contextmanager
def users_code(location: str, config: RunConfig) -> Iterator[None]:
    """Turns any exception of user code that runs before a run into a ConfigError, with secrets concealed.

    Logs the traceback of an exception of user code.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if not isinstance(error, ConfigError) or error.__cause__ is not None:
            logger.info("%s cannot be used", location, exc_info=error)
        message = str(error) if isinstance(error, ConfigError) else f"{location}: {describe(error)}"
        raise ConfigError(conceal(message, dict(config.builder.environment_config), os.environ)) from error


UNSPECIFIED = ("0.0.0.0", "::")
"""Hosts of a URL that lead to this machine."""


def check_endpoint(config: RunConfig, *, is_new: bool = True) -> None:
    """Raises ConfigError if the configured endpoint cannot be started: with external services, or on a port in use, or,
    in a new run, without its API key.
    """
    if config.served is None:
        return
    location = adapter_path(config.finetuning, "endpoint")
    if config.builder.services == "external":
        raise ConfigError(
            f"{location}: services are external, so no endpoint is started here; run `rollstream serve endpoint` on "
            "their host"
        )
    if config.served.token is not None and VARIABLE.fullmatch(config.served.token) is None:
        raise ConfigError(
            f"{location}.token: secrets are not allowed in the file, which is stored with the run; "
            "write ${NAME} and set that environment variable"
        )
    if is_new:
        _check_token(config)
    check_port(config.served.host, config.served.port, location)


def _check_token(config: RunConfig) -> None:
    from rollstream.producers.openai.keys import check_token

    assert config.served is not None
    try:
        check_token(config.served, os.environ)
    except ConfigError as error:
        raise ConfigError(f"{adapter_path(config.finetuning)}.{error}") from error


def check_gateway(config: RunConfig) -> None:
    """Raises ConfigError if the producers' gateways cannot listen at their host, or on their ports, which follow one
    another.
    """
    builder, location = config.builder, builder_path(config.finetuning, "gateway")
    for number in range(1, builder.num_producers + 1) if builder.services == "managed" else ():
        section = builder.gateway.of_process(number)
        check_port(section.host, section.port, location, f"producers-{number}: ")


def token_of(config: RunConfig, workspace: Path, env: Mapping[str, str]) -> str | None:
    """The API key that requests to the run's endpoint must send; None if it needs none. Raises ConfigError."""
    from rollstream.producers.openai.keys import section_token

    return None if config.served is None else section_token(config.served, workspace, ENDPOINT, env)


def access_line(config: RunConfig, workspace: Path, env: Mapping[str, str]) -> str:
    """The address of the run's endpoint and the file of its API key, never the key itself; empty without an
    endpoint."""
    from rollstream.producers.openai.keys import given_token, token_file

    served = config.served
    if served is None or config.builder.services == "external":
        return ""
    if not served.requires_token:
        key = "without an API key"
    elif given_token(served, env):
        key = "API key as set"
    else:
        key = f"API key in {token_file(workspace, ENDPOINT)}"
    port = f":{served.port}" if served.port else f", port in {workspace / f'{ENDPOINT}.json'}"
    return f"endpoint {served.host}{port}, {key}"


def is_at_endpoint(config: RunConfig, url: str) -> bool:
    """Whether a URL leads to the run's endpoint; if it listens on all addresses, by any name of this machine."""
    served = config.served
    with suppress(ValueError):  # the port is not a number
        parts = urlsplit(url)
        if served is not None and parts.hostname is not None and parts.port == served.port:
            if is_unspecified(served.host):
                return is_this_machine(parts.hostname)
            return parts.hostname in ({*LOOPBACK, *UNSPECIFIED} if served.host in LOOPBACK else {served.host})
    return False


def is_served(config: RunConfig, progress: Progress, version: int) -> bool:
    """Whether the run's endpoint serves at least this version, or the run has no endpoint."""
    return config.served is None or progress.loaded.get(ENDPOINT, -1) >= version
