"""The credentials of the embedded broker: one user, whose random password is in a file of the workspace.

Clients authenticate with SCRAM-SHA-512, so even a process that takes over the port of a dead broker does not learn the
password. The broker authenticates at its own controller with PLAIN and the same password from its configuration file,
because SCRAM credentials are stored in the controller's metadata. They are set there whenever the workspace has no
password file: at its first start, and at the first start after a version without a password.
"""

import base64
import hashlib
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

from rollstream.eventlog.files import write_whole
from rollstream.eventlog.private import read_private
from rollstream.schemas.errors import BrokerError
from rollstream.schemas.kafka import VARIABLE_PREFIX, KafkaSettings

HOST = "127.0.0.1"
USER = "rollstream"
MECHANISM = "SCRAM-SHA-512"
ITERATIONS = 4096
"""Kafka's least. More would slow down guessing, which a random password of 256 bits needs no protection from."""
TIMEOUT_S = 5.0
_SASL_HANDSHAKE, _SASL_AUTHENTICATE, _ALTER_USER_SCRAM_CREDENTIALS = 17, 36, 51
_SCRAM_SHA_512 = 2


def password_file(folder: Path) -> Path:
    """File of the broker's password; it exists once the broker knows the password."""
    return folder / "password"


def block(folder: Path) -> dict[str, str]:
    """The `kafka:` block with the credentials of the broker in a folder."""
    return {
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": MECHANISM,
        "username": USER,
        "password_file": str(password_file(folder).absolute()),
    }


def connection(folder: Path, bootstrap_servers: str) -> KafkaSettings:
    """Connection settings of the broker in a folder."""
    return KafkaSettings.model_validate({**block(folder), "bootstrap_servers": bootstrap_servers})


def environment(kafka: KafkaSettings) -> dict[str, str]:
    """The same as environment variables, for services and commands of another workspace."""
    assert kafka.password_file is not None, "a broker that is embedded has one"
    names = block(kafka.password_file.parent)
    found = {f"{VARIABLE_PREFIX}{name.upper()}": value for name, value in names.items()}
    return {"ROLLSTREAM_BOOTSTRAP_SERVERS": kafka.bootstrap_servers, **found}


class Credentials:
    """The password of the broker in a folder, and whether the broker already knows it."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError if the file cannot be read."""
        self._file = password_file(folder)
        known = (read_private(self._file) or "").strip()
        self.are_known = len(known) >= 32 and known.isalnum()
        self.password = known if self.are_known else secrets.token_hex(32)

    def forget(self) -> None:
        """Remove the file, because the broker's storage is new and lacks the password. Raises OSError."""
        self._file.unlink(missing_ok=True)
        self.are_known = False

    def make_known(self, port: int, controller_port: int, deadline: float, pause: Callable[[], None]) -> None:
        """Set the password in the running broker, then save it.

        After a crash in between, the next start creates another. Raises BrokerError if the broker has not accepted it
        by `deadline` (monotonic clock), and what `pause` raises, which is called between two attempts.
        """
        if self.are_known:
            return
        salt = os.urandom(24)
        _retry_until(deadline, lambda: self._alter(controller_port, salt), pause)
        _retry_until(deadline, lambda: _check_salt(port, salt), pause)
        write_whole(self._file, f"{self.password}\n")
        self.are_known = True

    def _alter(self, controller_port: int, salt: bytes) -> None:
        salted = hashlib.pbkdf2_hmac("sha512", self.password.encode(), salt, ITERATIONS)
        credential = _compact(USER.encode()) + struct.pack(">bi", _SCRAM_SHA_512, ITERATIONS)
        credential += _compact(salt) + _compact(salted) + b"\0"
        nothing_deleted, one_set = b"\x01", b"\x02"
        with _connect(controller_port) as controller:
            _log_in(controller, "PLAIN", f"\0{USER}\0{self.password}".encode())
            body = nothing_deleted + one_set + credential + b"\0"
            reply = _ask(controller, _ALTER_USER_SCRAM_CREDENTIALS, 0, b"\0" + body)[1:]
        name_end = 4 + 1 + 1 + len(USER)  # throttle time, number of results, length of the name
        code = struct.unpack_from(">h", reply, name_end)[0]
        if code:
            raise BrokerError(f"the broker's controller refuses the password (Kafka error {code})")


def _retry_until(deadline: float, attempt: Callable[[], None], pause: Callable[[], None]) -> None:
    """Retry until `deadline`, because a newly elected controller or a lagging broker refuses it at first."""
    while True:
        try:
            attempt()
        except (BrokerError, OSError) as error:
            if time.monotonic() > deadline:
                raise BrokerError(
                    f"cannot set the broker's password: {error}; see broker/broker.log of the workspace, "
                    "then start again"
                ) from error
            pause()
        else:
            return


def _check_salt(port: int, salt: bytes) -> None:
    """Raises BrokerError if the broker does not use these credentials yet."""
    nonce = secrets.token_hex(16)
    with _connect(port) as broker:
        answer = _log_in(broker, MECHANISM, f"n,,n={USER},r={nonce}".encode())
    if f"s={base64.b64encode(salt).decode()}" not in answer.decode("ascii", "replace").split(","):
        raise BrokerError(f"the broker on port {port} does not know the new password yet")


def _log_in(connected: socket.socket, mechanism: str, first: bytes) -> bytes:
    """The answer to the first message of a SASL login. Raises BrokerError if the login is refused."""
    name = mechanism.encode()
    _check(_ask(connected, _SASL_HANDSHAKE, 1, struct.pack(">h", len(name)) + name))
    reply = _check(_ask(connected, _SASL_AUTHENTICATE, 0, struct.pack(">i", len(first)) + first))
    message_length = max(0, struct.unpack_from(">h", reply)[0])
    return reply[2 + message_length + 4 :]


def _check(reply: bytes) -> bytes:
    code = struct.unpack_from(">h", reply)[0]
    if code:
        raise BrokerError(f"the broker refuses the login (Kafka error {code})")
    return reply[2:]


def _ask(connected: socket.socket, api_key: int, version: int, body: bytes) -> bytes:
    """The body of the answer to one request of Kafka's protocol. Raises OSError."""
    request = struct.pack(">hhih", api_key, version, 1, -1) + body
    connected.sendall(struct.pack(">i", len(request)) + request)
    size = struct.unpack(">i", _receive(connected, 4))[0]
    return _receive(connected, size)[4:]


def _receive(connected: socket.socket, size: int) -> bytes:
    found = connected.recv(size, socket.MSG_WAITALL)
    if len(found) < size:
        raise ConnectionResetError("the broker closed the connection")
    return found


def _compact(content: bytes) -> bytes:
    assert len(content) < 127, "longer ones need a length of two bytes"
    return bytes([len(content) + 1]) + content


def _connect(port: int) -> socket.socket:
    return socket.create_connection((HOST, port), timeout=TIMEOUT_S)
