"""The endpoint of a run, seen from the harness: whether its port is free, and which weight version it has."""

import socket

from rollstream.harness.config.settings import ENDPOINT
from rollstream.harness.progress import Progress
from rollstream.schemas.config import RunConfig
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.services import EndpointSection


def check_endpoint(config: RunConfig) -> None:
    """Raises ConfigError if an endpoint is wanted that cannot be started: of external services, or on a used port."""
    if config.served is None:
        return
    if config.builder.services == "external":
        raise ConfigError(
            "trainer_adapters: endpoint: services are external, so nothing is started here; "
            "run `rollstream serve endpoint` where they run"
        )
    _check_port(config.served)


def _check_port(section: EndpointSection) -> None:
    with socket.socket(socket.AF_INET6 if ":" in section.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((section.host, section.port))
        except OSError as error:
            raise ConfigError(
                f"trainer_adapters: endpoint.port {section.port} of {section.host} cannot be used ({error.strerror}); "
                "set another"
            ) from error


def is_served(config: RunConfig, progress: Progress, version: int) -> bool:
    """Whether the run's endpoint answers with at least this version, or there is none to answer."""
    return config.served is None or progress.loaded.get(ENDPOINT, -1) >= version
