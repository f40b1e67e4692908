"""Checks of a run's engines before it starts: those of installed packages are looked up here, not when its file is
read.
"""

import logging
import os

from rollstream.harness.config.checks import warn_meaningless
from rollstream.harness.config.jobs import served_models
from rollstream.harness.config.unused_keys import of_engine
from rollstream.schemas.config import RunConfig
from rollstream.schemas.engine_settings import EngineSettings
from rollstream.schemas.errors import ConfigError, describe
from rollstream.schemas.variables import conceal

logger = logging.getLogger(__name__)


def check_engines(config: RunConfig) -> None:
    """Looks up the engines that the run's services are started with, and checks their settings. Raises ConfigError."""
    from rollstream.producers.engines.table import check_run, settings_of

    if config.builder.services == "external":
        return
    location = f"trajectory_builders.{config.finetuning.trajectory_builder}.engine"
    groups = f"trainer_adapters.{config.finetuning.trainer_adapter}.model_groups"
    for name, served in served_models(config).items():
        if served.api_key_variable is not None and not os.environ.get(served.api_key_variable):
            raise ConfigError(f"{groups}.{name}.endpoint: the variable {served.api_key_variable} is not set; export it")
    engine = config.builder.engine
    known = engine if config.is_external else check_run(config, os.environ, location)
    _check_loads(location, known, f"name its server as {groups}.X.endpoint")
    _warn_unused(location, engine, known, config)
    if config.served is not None:
        location, engine = f"trainer_adapters.{config.finetuning.trainer_adapter}.endpoint.engine", config.served.engine
        known = settings_of(engine, os.environ, location)
        _check_loads(location, known, "name an engine that does")
        _warn_unused(location, engine, known, config)


def reads_base_models(config: RunConfig) -> bool:
    """Whether an engine that the run starts reads base models on this machine. Raises ConfigError."""
    from rollstream.producers.engines.table import settings_of

    location = f"trajectory_builders.{config.finetuning.trajectory_builder}.engine"
    is_started = config.builder.services == "managed"
    return is_started and settings_of(config.builder.engine, os.environ, location).READS_BASE_MODELS


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
