"""Checks that configuration values, which are stored as written, are JSON and contain no secrets in plain text.

Also refuses models that are not there, a teacher of another vocabulary, more rollouts than a record names, what a run's
planning does not support and what several processes do not train, and warns, once per process, of keys that are
accepted but have no effect.
"""

import json
import logging
import math
import os
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from rollstream.eventlog.attempts import Cause
from rollstream.harness.config.secret_texts import (
    is_secret,
    looks_random,
    secret_above,
    secret_in,
    secret_in_arguments,
    secret_in_command,
)
from rollstream.metrics.trackers.table import check_tracker
from rollstream.schemas import ids
from rollstream.schemas.algorithm_settings import AlgorithmSettings, teacher_of
from rollstream.schemas.base import Locator
from rollstream.schemas.config import RunConfig, TrainerSection
from rollstream.schemas.errors import ConfigError, ModelError
from rollstream.schemas.events.training import AttemptOutcome, GroupClosed, MemberRef
from rollstream.schemas.finetuning import FinetuneConfig, adapter_path, builder_path, trainer_path
from rollstream.schemas.permissions import COMMAND, URL, quoted
from rollstream.schemas.settings import JobSpec, Sampling
from rollstream.schemas.topics import TOPICS
from rollstream.schemas.variables import expand, one_line

MAX_DEPTH = 50
WITH_TEMPLATE = ("transformers", "vllm")
"""Kinds of engines that load the tokenizer of the model's folder."""
TEACHER_S = 20.0
"""Maximum seconds for the answer of a teacher's server."""


def check_values(value: Any, path: str = "", secret: str = "", only_random: bool = False) -> None:
    """Raises ConfigError naming a key that is not a string, a value that is not JSON, or a literal secret.

    `secret`: the enclosing key of a secret; `only_random`: under it, only random-looking values count as secrets.
    """
    if path.count(".") > MAX_DEPTH:
        raise ConfigError(f"{path[:60]}...: nested too deeply; check for an alias (*) that refers to itself")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ConfigError(f"{_join(path, key)}: the key {key!r} is not a string; put it in quotes")
            check_values(item, _join(path, key), *secret_above(key, secret))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            check_values(item, _join(path, index), secret, only_random)
        if (found := secret_in_arguments(value)) is not None:
            raise _literal(_join(path, found[0]), found[1])
    else:
        is_under = _may_be_secret(value, secret) and (not only_random or looks_random(str(value)))
        if is_under and is_secret(str(value), secret):
            raise _literal(path, secret)
        _check_scalar(value, path)


def _check_scalar(value: Any, path: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{path}: is {value}; give a finite number, a very large one for no limit")
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ConfigError(f"{path}: is {value}; give a number of at most 64 bits")
    if isinstance(value, str):
        is_command = value.startswith(COMMAND)
        name = secret_in_command(value.removeprefix(COMMAND)) if is_command else secret_in(value, path)
        if name is not None:
            raise _literal(path, name, is_command=is_command)
    if value is not None and not isinstance(value, (str, bool, int, float)):
        raise ConfigError(f"{path}: is a {type(value).__name__}; give text, a number, true, false, a list or a mapping")


def _literal(path: str, key: str, *, is_command: bool = False) -> ConfigError:
    name = re.sub(r"\W", "_", key).upper()
    remedy = f"write ${{{name}}} instead and set that environment variable"
    if is_command:  # its line is recorded as it is run
        remedy = f"let the program read {name} from a file"
    return ConfigError(f"{path}: secrets are not allowed in the file, which is stored with the run; {remedy}")


def _may_be_secret(value: Any, key: str) -> bool:
    is_number = isinstance(value, int) and not isinstance(value, bool) and re.search("passw|passphrase", key.lower())
    return bool(key) and (isinstance(value, str) or bool(is_number))


def _join(path: str, part: Any) -> str:
    return f"{path}.{part}" if path else str(part)


_logger = logging.getLogger(__name__)
_warned: set[str] = set()
_is_silent: ContextVar[bool] = ContextVar("_is_silent", default=False)


def warn_meaningless(location: str, names: Sequence[str], why: str) -> None:
    """Warn of keys at a path or `_type` that are accepted and ignored. Does nothing if `names` is empty."""
    if names:
        warn(f"{location}: {', '.join(names)}: accepted, but ignored here ({why})")


def warn(message: str) -> None:
    """Warn, once."""
    if message not in _warned and not _is_silent.get():
        _warned.add(message)
        _logger.warning("%s", message)


@contextmanager
def silence() -> Iterator[None]:
    """Drop warnings within: those of a configuration that is only tried."""
    token = _is_silent.set(True)
    try:
        yield
    finally:
        _is_silent.reset(token)


def forget() -> None:
    """Repeat every warning from now on."""
    _warned.clear()


def check_trackers(config: RunConfig) -> None:
    """Raises ConfigError for a tracker whose package or class is not there."""
    location = trainer_path(config.finetuning, "trackers")
    if config.builder.services == "external":
        names = ["trackers"] if config.trainer.trackers else []
        warn_meaningless(location.rpartition(".")[0], names, "with external services start `rollstream serve tracker`")
        return
    targets = [tracker.target() for tracker in config.trainer.trackers]
    for index, tracker in enumerate(config.trainer.trackers):
        check_tracker(tracker, f"{location}.{index}")
        if (first := targets.index(targets[index])) < index:
            raise ConfigError(f"{location}.{index}: is the same tracker as {location}.{first}; remove one of them")


def check_builder(config: RunConfig) -> None:
    """Raises ConfigError for a new run whose builder names a reward twice or no agent, or whose seed is too large.

    Recorded runs may have such keys.
    """
    location, rewards = builder_path(config.finetuning), config.builder.rewards
    twice = next((name for index, name in enumerate(rewards) if name in rewards[:index]), None)
    if twice is not None:
        raise ConfigError(
            f"{location}.rewards: {twice} is named twice and would count twice; name it once, and set its weight in "
            "reward_weights"
        )
    if not config.builder.agents:
        raise ConfigError(f"{location}.agents: is empty; name at least one agent, or leave the key out")
    if config.adapter.seed >= 2**63:
        raise ConfigError(
            f"{adapter_path(config.finetuning, 'seed')}: is {config.adapter.seed}, and the metrics "
            "hold numbers below 2^63; give a smaller one"
        )


def check_trainer(finetune: FinetuneConfig, trainer: TrainerSection) -> None:
    """Raises ConfigError for settings that a streamed run does not support."""
    location = trainer_path(finetune)
    wanted = {"early_stopping": trainer.early_stopping is not None, "validation_required": trainer.validation_required}
    names = [name for name, is_wanted in wanted.items() if is_wanted]
    if names and trainer.planning == "stream":
        raise ConfigError(
            f"{location}.{names[0]}: a streamed run does not support this; "
            "use planning: submitted with max_staleness: 0"
        )
    if trainer.evaluation_gate is None:
        return
    run = finetune.run_configuration
    if trainer.planning == "submitted":
        raise ConfigError(
            f"{location}.evaluation_gate: an epochwise run does not support this; "
            "use planning: stream, or early_stopping"
        )
    if run is None or not (run.validation_dataset or run.validation_config_file):
        raise ConfigError(
            f"{location}.evaluation_gate: the run has no validation to judge; give --validation_dataset or "
            "--validation_config_file"
        )


def check_model(path: str, location: str, engine: str = "") -> None:
    """Raises ConfigError naming `location` if `path` is a folder without a model, or does not exist locally.

    `engine`: the kind of engine that samples from it; those that load its tokenizer need a chat template.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{location}: {path} does not contain config.json; give a transformers folder")
        if engine in WITH_TEMPLATE and _lacks_template(folder):
            raise ConfigError(
                f"{location}: the tokenizer of {path} has no chat template, which writes messages as a prompt; add "
                "chat_template.jinja to the folder, for example that of the model's instruct version"
            )
        return
    if not is_hub_name(path):
        raise ConfigError(f"{location}: folder {path} does not exist; give a transformers folder or a hub name")


def is_hub_name(path: str) -> bool:
    """Whether a path that is not a folder can be the name of a model on the hub: NAME or OWNER/NAME.

    A path below a folder that exists here is not one, but a misspelt path.
    """
    parts = path.split("/")
    return len(parts) <= 2 and all(parts) and not path.startswith((".", "~")) and not Path(parts[0]).is_dir()


def check_hub(path: str, location: str) -> None:
    """Raises ConfigError naming `location` for a model that is not a folder, nor in the hub's cache, nor on the hub.

    Else services would find that, and the run would fail for good, also one that was resumed in another folder.
    """
    if Path(path).expanduser().is_dir():
        return
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        if not isinstance(try_to_load_from_cache(path, "config.json"), str):
            hf_hub_download(path, "config.json")
    except LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE forbids a download" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        raise ConfigError(
            f"{location}: {path} is neither a folder of {Path.cwd()} nor in the hub's cache {constants.HF_HUB_CACHE}, "
            f"and {why}; run `hf download {path}` where it can be, set HF_HOME to the cache that has it, or start the "
            "command in the folder that it is relative to"
        ) from error
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{location}: {path} is neither a folder of {Path.cwd()} nor to be had from the hub: {one_line(error)}; "
            "start the command in the folder that it is relative to, or correct it"
        ) from error


def _lacks_template(folder: Path) -> bool:
    """Whether a folder's tokenizer certainly has no chat template, as far as files say."""
    try:
        written: Any = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    has_file = any(folder.glob("chat_template*")) or any(folder.glob("additional_chat_templates/*"))
    return isinstance(written, dict) and "chat_template" not in written and not has_file


def check_teacher_settings(
    algorithm: AlgorithmSettings, sampling: Sampling, model: str, location: str, served: Container[str] = ()
) -> None:
    """Raises ConfigError naming `location` if the teacher of an algorithm is not a model, has another vocabulary, or is
    on a server that cannot score what is sampled.

    `model`: the path of the model that learns. `served`: names of model groups that endpoints serve.
    """
    teacher = teacher_of(algorithm)
    if teacher is None or not teacher.path:
        return
    from rollstream.learner.scoring.vocabulary import AS_SAMPLED, misfit

    if teacher.url and (algorithm.temperature, sampling.temperature, sampling.top_p, sampling.top_k) != (1, 1, 1, 0):
        raise ConfigError(f"{location}_url: {AS_SAMPLED}")
    if teacher.url and not URL.match(teacher.url):
        raise ConfigError(f"{location}_url: {quoted(teacher.url)} must be a URL like http://host:8000")

    if teacher.path in served:
        raise ConfigError(
            f"{location}: {teacher.path} is a model group that an endpoint serves; give the folder or hub name that "
            f"its server was started with, and the server as {location}_url: http://host:8000"
        )
    path = str(expand(teacher.path, os.environ, location))
    check_model(path, location)
    is_local = Path(model).expanduser().is_dir() and Path(path).expanduser().is_dir()
    if odd := misfit(model, path) if is_local else "":  # the learner looks at those of a hub
        raise ConfigError(
            f"{location}: {teacher.path} has another vocabulary than model {model}: {odd}; give a teacher of the same "
            "model family"
        )


def check_teacher(
    algorithm: AlgorithmSettings, sampling: Sampling, model: str, location: str, served: Container[str] = ()
) -> None:
    """The same, and raises ConfigError naming `location` if the teacher's server answers and cannot score prompts.

    A server that does not answer is accepted: it may be started with the run, and the learner asks it again.
    """
    check_teacher_settings(algorithm, sampling, model, location, served)
    teacher = teacher_of(algorithm)
    if teacher is None or not teacher.url:
        return
    from rollstream.learner.scoring.served_teacher import ServedTeacher
    from rollstream.learner.scoring.vocabulary import tokenizer_of

    path = str(expand(teacher.path, os.environ, location))
    try:
        no_answer = ServedTeacher(teacher.url, path, tokenizer_of(model)).check(TEACHER_S)
    except ModelError as error:
        raise ConfigError(f"{location}_url: {error}") from error
    if no_answer:
        warn(f"{location}_url: {no_answer}; the learner will ask it again")


def check_attempts(jobs: Iterable[JobSpec]) -> None:
    """Raises ConfigError for a job whose groups have more rollouts than the record of their closing can name.

    Further attempts do not count: `processors/assemble/bounds.py` leaves them out of a record that is too large.
    """
    limit = TOPICS[GroupClosed.TOPIC].max_record_bytes
    for spec in (spec for spec in jobs if not spec.is_frozen):
        size = _closing_bytes(spec)
        if size > limit:
            raise ConfigError(
                f"job {spec.job_id}: the closing of a group of {spec.plan.num_generations + spec.plan.oversampling} "
                f"rollouts would have {size} bytes, more than the {limit} of a record; lower num_generations or "
                "oversampling, or shorten the run's name"
            )


def _closing_bytes(spec: JobSpec) -> int:
    """Size of a group's closing that names one attempt of each rollout."""
    plan, agents = spec.plan, spec.rollout.agents or {"agent": ""}
    num_rollouts, num_attempts = plan.num_generations + plan.oversampling, spec.rollout.max_attempts
    num_tasks = plan.tasks_per_epoch * (1 + plan.max_refills)
    group_id = ids.group_id(ids.run_of(spec.job_id), ids.name_of(spec.job_id), plan.num_epochs, num_tasks)
    rollout_id = ids.rollout_id(group_id, num_rollouts, num_attempts)
    agent = max(agents, key=len)
    member = MemberRef(
        trajectory_id=ids.trajectory_id(rollout_id, agent),
        rollout_id=rollout_id,
        agent=agent,
        member=num_rollouts,
        digest="0" * 64,
        reward=-0.30000000000000004,
        num_tokens=10**5,
        num_completion_tokens=10**5,
        min_version=plan.num_epochs,
        max_version=plan.num_epochs,
    )
    outcome = AttemptOutcome(
        rollout_id=rollout_id, member=num_rollouts, attempt=num_attempts, outcome="failed", cause=Cause.ENGINE_ERROR
    )
    where = Locator(partition=10, offset=10**9)
    member_bytes = len(member.model_dump_json()) + len(where.model_dump_json()) + len(",,")
    outcome_bytes = len(outcome.model_dump_json()) + len(",")
    return plan.num_generations * len(agents) * member_bytes + num_rollouts * outcome_bytes


def check_ranks(config: RunConfig, jobs: Iterable[JobSpec]) -> None:
    """Raises ConfigError if a job of a run is none that the processes of its learner train, or there are too few GPUs.

    As many GPUs as processes are needed, or none at all.
    """
    num, location = config.adapter.ranks, adapter_path(config.finetuning, "ranks")
    if num == 1:
        return
    if config.is_external or config.builder.services == "external":
        raise ConfigError(
            f"{location}: the learner of this run is started elsewhere; start it by torchrun, remove this"
        )
    from rollstream.learner.parallel.refusals import refused

    devices: set[str] = set()
    for spec in jobs:
        devices.add(spec.job.model.device)
        if what := refused(spec.job):
            raise ConfigError(f"{location}: {num} processes do not train with {what}; set ranks: 1, or change the run")
    if devices == {"cpu"}:
        return
    import torch

    if 0 < (num_gpus := torch.cuda.device_count()) < num:
        raise ConfigError(
            f"{location}: {num} processes need a GPU each, and this machine has {num_gpus}; set ranks: {num_gpus}, or "
            "model.device: cpu"
        )
