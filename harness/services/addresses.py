"""Addresses of this machine, as the URLs of a configuration name them, and ports that servers of it may take."""

import errno
import ipaddress
import socket

from rollstream.schemas.errors import ConfigError


def is_unspecified(host: str) -> bool:
    """Whether a server at this address listens on all addresses of its machine (`0.0.0.0`, `::`)."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a host name
        return False


def url_host(host: str) -> str:
    """The host part of a URL to a server at this address; for one on all addresses, this machine's."""
    if is_unspecified(host):
        return "[::1]" if ":" in host else "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def check_port(host: str, port: int, location: str, whose: str = "") -> None:
    """Raises ConfigError if no server can listen there. `location`: the section with `host` and `port`; `whose`: the
    process that listens, for messages. Port 0 is any free one.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        is_host = isinstance(error, (socket.gaierror, UnicodeError)) or error.errno == errno.EADDRNOTAVAIL
        if is_host:
            remedy = "give an address or a name of this machine"
            raise ConfigError(f"{location}.host: {host} cannot be used ({reason}); {remedy}") from error
        raise ConfigError(
            f"{location}.port: {whose}port {port} of {host} cannot be used ({reason}); set another"
        ) from error


def is_this_machine(host: str) -> bool:
    """Whether a name or an address refers to this machine. May query a name server; sends nothing else."""
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):  # unknown or invalid name
        return False
    return any(_is_own(family, address) for family, _, _, _, address in found)


def _is_own(family: int, address: tuple[object, ...]) -> bool:
    """Whether packets to an address would have that address as their source."""
    host = ipaddress.ip_address(str(address[0]).partition("%")[0])
    if host.is_loopback or host.is_unspecified:
        return True
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # connecting a datagram socket sends nothing
            return bool(probe.getsockname()[0] == address[0])
    except OSError:  # no route
        return False
