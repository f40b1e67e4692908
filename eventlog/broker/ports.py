"""Ports of servers on this machine's loopback: free ones, and whether a Kafka broker answers at one."""

import random
import socket
import struct
from pathlib import Path

from rollstream.eventlog.broker.credentials import HOST
from rollstream.schemas.errors import BrokerError


def answers(port: int) -> bool:
    """Whether a Kafka broker serves requests on a loopback port (it answers ApiVersions)."""
    request = struct.pack(">hhih", 18, 0, 1, -1)
    try:
        with socket.create_connection((HOST, port), timeout=2.0) as connection:
            connection.sendall(struct.pack(">i", len(request)) + request)
            reply = connection.recv(10, socket.MSG_WAITALL)
    except OSError:
        return False
    return len(reply) == 10 and struct.unpack(">iih", reply)[1:] == (1, 0)


def free_ports(count: int) -> list[int]:
    """Free ports outside the system's ephemeral range.

    A client that retries a port of that range while its broker is down may connect to itself (TCP simultaneous open)
    and then block the broker's address.
    """
    candidates = random.sample(_unassigned_ports(), 200)
    ports = [port for port in candidates if is_free(port)][:count]
    if len(ports) < count:
        raise BrokerError(
            f"no free port found on {HOST} in 200 attempts; stop processes that hold ports, and start again"
        )
    return ports


def _unassigned_ports() -> range:
    try:
        lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError):
        lowest = 32768
    return range(10240, lowest) if lowest > 11264 else range(10240, 65536)


def is_free(port: int) -> bool:
    """Whether a server could listen at a port now."""
    with socket.socket() as candidate:
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            candidate.bind((HOST, port))
        except (OSError, OverflowError):
            return False
    return True
