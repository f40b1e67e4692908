"""Hosts and ports that servers are to listen at, checked before a run."""

import socket
from typing import Any

import pytest

from rollstream.harness.config import file as config_file
from rollstream.harness.runs.preflight import check_endpoint, check_gateway
from rollstream.harness.services.addresses import check_port
from rollstream.schemas.errors import ConfigError


@pytest.mark.parametrize("host", ["192.0.2.1", "unknown.invalid", "a..b"])
@pytest.mark.parametrize("port", [0, 22951])
def test_a_host_that_is_not_this_machine_is_named_whatever_the_port(
    written: dict[str, Any], host: str, port: int
) -> None:
    written["trajectory_builders"]["b"]["gateway"] = {"host": host, "port": port}
    written["trainer_adapters"]["a"]["endpoint"] = {"host": host, "port": port}
    config = config_file.resolve(written).config
    with pytest.raises(
        ConfigError, match=rf"^trajectory_builders\.b\.gateway\.host: {host} cannot be used \(.*this mach"
    ):
        check_gateway(config)
    with pytest.raises(ConfigError, match=rf"^trainer_adapters\.a\.endpoint\.host: {host} cannot be used \("):
        check_endpoint(config, is_new=False)


def test_a_port_in_use_is_named_with_its_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^x\.port: producers-1: port {port} of 127\.0\.0\.1 cannot be used"):
            check_port("127.0.0.1", port, "x", "producers-1: ")
    for host in ("127.0.0.1", "localhost", "0.0.0.0"):
        check_port(host, 0, "x")
