"""What can be known to be wrong before a run begins: folders, files in use, environment, rewards."""

import importlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rollstream.harness.extras import check_learner
from rollstream.harness.reward_choice import check_evaluators, check_examples, check_reward, place_of
from rollstream.schemas.config import RunConfig
from rollstream.schemas.environment import conceal
from rollstream.schemas.errors import ConfigError

if TYPE_CHECKING:
    from rollstream.producers.environment import Environment

QUERY_S = 2.0
"""So long a query of the metrics file may keep it from a run that begins."""


def check_places(config: RunConfig) -> None:
    """Raises ConfigError if libraries or the model folder are missing or the output folder cannot be written."""
    if config.builder.services == "managed":
        check_learner()
        check_model(config.adapter.model.path, f"trainer_adapters.{config.finetuning.trainer_adapter}.model.path")
    folder = config.finetuning.output_dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"finetuning.output_dir: {folder} cannot be made: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"finetuning.output_dir: {folder} is not writable")


def check_model(path: str, place: str) -> None:
    """Raises ConfigError naming `place` if `path` is a folder without a model, or looks like a folder and is none."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{place}: {path} has no config.json; give a transformers folder")
        return
    parts = path.split("/")
    is_hub_name = len(parts) <= 2 and all(parts) and not path.startswith((".", "~")) and not Path(parts[0]).is_dir()
    if not is_hub_name:
        raise ConfigError(f"{place}: there is no folder {path}; give a transformers folder or a hub name")


def check_result(path: Path | None) -> None:
    """Raises ConfigError if the result could not be written when the run is over."""
    if path is None:
        return
    is_writable = os.access(path, os.W_OK) if path.is_file() else os.access(path.absolute().parent, os.W_OK | os.X_OK)
    if path.is_dir() or not is_writable:
        raise ConfigError(f"--result_json_path {path}: no file can be written there; give another")


def check_metrics(config: RunConfig, workspace: Path) -> None:
    """Raises MetricsFileError if the metrics could not be written: the file stays in use, or is no database."""
    from rollstream.metrics.database import FileInUseError, connect, metrics_file

    path = metrics_file(workspace)
    if config.builder.services != "managed" or not path.exists():
        return
    deadline = time.monotonic() + QUERY_S
    is_free = False
    while not is_free:
        try:
            connect(path, read_only=False).close()
            is_free = True
        except FileInUseError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def check_datasets(config: RunConfig, *, is_new: bool) -> None:
    """Reads what a run reads later: its dataset, if it is new, and what it validates by. Raises ConfigError."""
    from rollstream.harness.config.config_file import validation_config

    validation = validation_config(config)
    if is_new:
        _check_dataset(config, "eval.general.dataset or --dataset")
    if validation is not None and config.validation is not None:
        is_named = config.validation.dataset is not None
        file = "validation_dataset" if is_named else f"validation_config_file {config.validation.config}"
        _check_dataset(validation, file)


def _check_dataset(config: RunConfig, place: str) -> None:
    from rollstream.harness import dataset

    if config.dataset is None:
        return
    try:
        examples = dataset.read_dataset(config.dataset)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error
    check_examples(config, examples, f"dataset {config.dataset.file_path}")


def check_names(config: RunConfig) -> None:
    """Imports the user's modules and looks the environment and the rewards up. Raises ConfigError.

    With external services nothing is imported here: the names need only be known there.
    """
    if config.builder.services == "external":
        check_evaluators(config)
        return
    check_rewards(config)
    environment_of(config)


def check_rewards(config: RunConfig) -> None:
    """Imports the user's modules and looks the rewards up, for who gives rewards. Raises ConfigError."""
    check_evaluators(config)
    for module in config.builder.modules:
        with users_code(f"trajectory_builders.{config.finetuning.trajectory_builder}.modules: {module}", config):
            importlib.import_module(module)
    for name in config.reward_functions:
        with users_code(f"{place_of(config, name)}: reward {name}", config):
            check_reward(config, name)


def environment_of(config: RunConfig) -> "Environment":
    """The run's environment, as its producers build it. Raises ConfigError."""
    from rollstream.producers.registry import build_environment

    place = f"workflow or trajectory_builders.{config.finetuning.trajectory_builder}.environment"
    with users_code(f"{place}: environment {config.environment}", config):
        try:
            return build_environment(config.environment, config.builder.environment_config, os.environ)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from error


@contextmanager
def users_code(place: str, config: RunConfig) -> Iterator[None]:
    """Where the user's own code runs before a run: whatever it raises is a ConfigError, without secrets."""
    try:
        yield
    except (Exception, SystemExit) as error:
        told = str(error) if isinstance(error, ConfigError) else f"{place}: {type(error).__name__}: {error}"
        raise ConfigError(conceal(told, dict(config.builder.environment_config), os.environ)) from error
