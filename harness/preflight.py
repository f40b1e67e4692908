"""What can be known to be wrong before a run begins: model folder, output folder, environment, rewards."""

import importlib
import os
from pathlib import Path

from rollstream.schemas.config import RunConfig
from rollstream.schemas.errors import ConfigError


def check_places(config: RunConfig) -> None:
    """Raises ConfigError if the model folder is missing or the output folder cannot be written."""
    if config.builder.services == "managed":
        check_model(config.adapter.model.path)
    folder = config.finetuning.output_dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"finetuning.output_dir: {folder} cannot be made: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"finetuning.output_dir: {folder} is not writable")


def check_model(path: str) -> None:
    """Raises ConfigError if `path` is a folder without a model, or looks like a folder and is none."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model.path: {path} has no config.json; give a transformers folder")
        return
    parts = path.split("/")
    is_hub_name = len(parts) <= 2 and all(parts) and not path.startswith((".", "~")) and not Path(parts[0]).is_dir()
    if not is_hub_name:
        raise ConfigError(f"model.path: there is no folder {path}; give a transformers folder or a hub name")


def check_names(config: RunConfig) -> None:
    """Imports the user's modules and looks the environment and the rewards up. Raises ConfigError.

    With external services nothing is imported here: the names need only be known there.
    """
    if config.builder.services == "external":
        return
    from rollstream.producers.registry import build_environment, reward

    for module in config.builder.modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(f"trajectory_builders: modules: {module} cannot be imported: {error}") from error
    try:
        build_environment(config.environment, config.builder.environment_config, os.environ)
    except (ValueError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"environment_config of {config.environment}: {error}") from error
    for name in config.reward_functions:
        reward(name)
