"""The endpoint of a run, seen from the harness: whether its port is free, and which weight version it answers with."""

import socket

from rollstream.harness.progress import Progress
from rollstream.harness.settings import ENDPOINT
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.services import EndpointSection


def check_port(section: EndpointSection) -> None:
    """Raises ConfigError if the endpoint's port is in use or its host is none of this machine's."""
    with socket.socket(socket.AF_INET6 if ":" in section.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((section.host, section.port))
        except OSError as error:
            raise ConfigError(
                f"trainer_adapters: endpoint.port {section.port} of {section.host} cannot be used ({error.strerror}); "
                "set another"
            ) from error


def served_version(progress: Progress) -> int:
    """The version that a run's endpoint answers with; -1 before the first."""
    return progress.loaded.get(ENDPOINT, -1)
