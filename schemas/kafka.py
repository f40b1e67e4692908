"""Settings for connections to Kafka: addresses, TLS, SASL, and the names and replicas of topics. One object serves
every client.

Values only: no file is read here, and nothing connects. Secrets are `SecretStr`, so that no repr or log shows them; in
a `kafka:` block they are written as `${NAME}`, which `connection` expands.
"""

import ipaddress
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    SecretStr,
    SerializationInfo,
    ValidationError,
    model_validator,
)

from rollstream.schemas.base import UserPath
from rollstream.schemas.errors import ConfigError, first_invalid
from rollstream.schemas.settings import Settings
from rollstream.schemas.topics import PREFIX, SUFFIX, TOPICS
from rollstream.schemas.variables import VARIABLE, expand

VARIABLE_PREFIX = "ROLLSTREAM_KAFKA_"
"""`ROLLSTREAM_KAFKA_USERNAME` is `username` of the `kafka:` block, and so on."""
HIDDEN = "**********"
_REVEAL = "reveal_secrets"
_SERVER = re.compile(r"(\[(?P<inside>[^\s\[\],]+)\]|[^\s:/\[\],]+)(:(?P<port>[0-9]+))?")
"""host or host:port; an IPv6 address is in brackets before a port."""
SECRETS = ("password", "key_password")
"""Fields whose `${NAME}` is expanded only where a client connects."""


def _written(value: SecretStr | None, info: SerializationInfo) -> str | None:
    """A secret as JSON has it: a `${NAME}` as it is, the secret itself only where `with_secrets` asks for it."""
    if value is None:
        return None
    text = value.get_secret_value()
    context: dict[str, Any] = info.context or {}
    is_shown = bool(context.get(_REVEAL)) or VARIABLE.fullmatch(text) is not None
    return text if is_shown else HIDDEN


def _is_server(text: str) -> bool:
    found = _SERVER.fullmatch(text)
    if found is None:
        return _is_ipv6(text)
    return 0 < int(found["port"] or 9092) < 1 << 16 and (found["inside"] is None or _is_ipv6(found["inside"]))


def _is_ipv6(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).version == 6
    except ValueError:
        return False


def _servers(value: str) -> str:
    """Raises ValueError naming the server that is not host:port."""
    for server in value.split(","):
        if not _is_server(server.strip()):
            raise ValueError(f"{server.strip()!r} is not host:port; give host:port, several separated by commas")
    return value


Servers = Annotated[str, AfterValidator(_servers)]
"""Bootstrap servers: host:port, several separated by commas. The port may be left out: 9092."""
Secret = Annotated[SecretStr, PlainSerializer(_written, when_used="json-unless-none")]


class KafkaSection(Settings):
    """A `kafka:` block beside `bootstrap_servers`: what is left out comes from ROLLSTREAM_KAFKA_*, else the default."""

    model_config = ConfigDict(hide_input_in_errors=True)

    security_protocol: Literal["PLAINTEXT", "SASL_PLAINTEXT", "SSL", "SASL_SSL"] = "PLAINTEXT"
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "SCRAM-SHA-512"
    username: str | None = None
    password: Secret | None = None
    password_file: UserPath | None = None
    """A file that holds the password, read whenever a client is made; in place of `password`."""
    ca_file: UserPath | None = None
    """PEM certificates of the authorities that brokers are trusted by; none: the system's."""
    cert_file: UserPath | None = None
    """PEM certificate (chain) of this client, where brokers ask for one."""
    key_file: UserPath | None = None
    """PEM private key of `cert_file`; none: it is in that file."""
    key_password: Secret | None = None
    key_password_file: UserPath | None = None
    check_hostname: bool = True
    """Whether a broker's certificate must name the host that was connected to."""
    topic_prefix: str = Field(default=PREFIX, pattern=r"^[A-Za-z0-9._-]{1,200}$")
    group_prefix: str = Field(default="rollstream", pattern=r"^[A-Za-z0-9._-]{1,200}$")
    """Consumer groups are `PREFIX-producers` and `PREFIX-processors`."""
    replication_factor: int | None = Field(default=None, ge=1)
    """Replicas of each partition; none: 3, or as many as there are brokers."""
    min_insync_replicas: int | None = Field(default=None, ge=1)
    """Replicas that must have a record before it is acknowledged; none: 2 of three replicas, else 1."""


class KafkaSettings(KafkaSection):
    """All that a client needs to connect, checked as a whole."""

    bootstrap_servers: Servers
    """host:port, several separated by commas."""

    @property
    def uses_sasl(self) -> bool:
        """Whether a client logs in by name and password."""
        return self.security_protocol.startswith("SASL")

    @property
    def uses_tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.security_protocol.endswith("SSL")

    @property
    def section(self) -> KafkaSection:
        """The same without the addresses."""
        return KafkaSection(**{name: getattr(self, name) for name in KafkaSection.model_fields})

    @property
    def principal(self) -> str:
        """Name by which Kafka's ACLs know this client."""
        if self.uses_sasl:
            return f"User:{self.username}"
        if self.uses_tls and self.cert_file is not None:
            return f"the certificate {self.cert_file}"
        return "User:ANONYMOUS"

    def topic_name(self, short: str) -> str:
        """Name in Kafka of a topic of the table."""
        return f"{self.topic_prefix}{short}{SUFFIX}"

    def short_name(self, name: str) -> str | None:
        """Short name of a topic in Kafka; None if the topic does not belong to this log."""
        short = name.removeprefix(self.topic_prefix).removesuffix(SUFFIX)
        return short if short in TOPICS and self.topic_name(short) == name else None

    def group(self, service: str) -> str:
        """Consumer group of a service."""
        return f"{self.group_prefix}-{service}"

    @classmethod
    def of(cls, found: "KafkaSettings | str") -> "KafkaSettings":
        """The settings themselves; a bare host:port means neither TLS nor SASL."""
        return found if isinstance(found, KafkaSettings) else cls(bootstrap_servers=found)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        """Raises ValueError naming what is missing, or what means nothing with the security protocol."""
        for name in SECRETS:
            if getattr(self, name) is not None and getattr(self, f"{name}_file") is not None:
                raise ValueError(f"{name} and {name}_file are both given; give one of them")
        has_password = self.password is not None or self.password_file is not None
        if self.uses_sasl and (not self.username or not has_password):
            missing = "password or password_file" if self.username else "username"
            raise ValueError(f"security_protocol {self.security_protocol} needs {missing}; add it")
        if not self.uses_sasl and (self.username is not None or has_password):
            raise ValueError(
                f"username and password are not used with security_protocol {self.security_protocol}; "
                "set SASL_SSL or SASL_PLAINTEXT"
            )
        if not self.uses_tls and (self.ca_file or self.cert_file or self.key_file):
            raise ValueError(
                f"ca_file, cert_file and key_file are not used with security_protocol {self.security_protocol}; "
                "set SSL or SASL_SSL"
            )
        if self.key_file is not None and self.cert_file is None:
            raise ValueError("key_file needs cert_file, the certificate that the key belongs to; add it")
        if self.min_insync_replicas is not None and self.min_insync_replicas > (self.replication_factor or 3):
            raise ValueError(
                f"min_insync_replicas {self.min_insync_replicas} is more than replication_factor "
                f"{self.replication_factor or 3}, so records could not be written; lower it"
            )
        return self


def from_environment(env: Mapping[str, str]) -> dict[str, Any]:
    """Read ROLLSTREAM_KAFKA_* into the form of a `kafka:` block; secrets stay references to their variables.

    Raises ConfigError for a variable with that prefix that is not one of them.
    """
    found: dict[str, Any] = {}
    for variable in sorted(name for name in env if name.startswith(VARIABLE_PREFIX) and env[name]):
        field = variable.removeprefix(VARIABLE_PREFIX).lower()
        if field not in KafkaSection.model_fields:
            known = ", ".join(f"{VARIABLE_PREFIX}{name.upper()}" for name in KafkaSection.model_fields)
            raise ConfigError(f"{variable}: unknown variable; known variables: {known}")
        found[field] = f"${{{variable}}}" if field in SECRETS else env[variable]
    return found


def connection(
    bootstrap_servers: str, block: Mapping[str, Any], env: Mapping[str, str] | None, *, location: str = "kafka"
) -> KafkaSettings:
    """Settings of a `kafka:` block, the `${NAME}` of its secrets expanded (none: they are). Raises ConfigError."""
    values = dict(block) if env is None else expanded(block, env, location=location)
    try:
        return KafkaSettings.model_validate({**values, "bootstrap_servers": bootstrap_servers})
    except ValidationError as error:
        raise ConfigError(str(first_invalid(error, location))) from None


def expanded(block: Mapping[str, Any], env: Mapping[str, str], *, location: str = "kafka") -> dict[str, Any]:
    """A block with the `${NAME}` of its secrets expanded. Raises ConfigError for a variable that is not set."""
    return {
        name: expand(value, env, f"{location}.{name}") if name in SECRETS else value for name, value in block.items()
    }


def merged(*blocks: Mapping[str, Any]) -> dict[str, Any]:
    """Blocks over one another, the last one winning; a secret also wins over the file that a block below it names."""
    found: dict[str, Any] = {}
    for block in blocks:
        for name in SECRETS:
            if name in block or f"{name}_file" in block:
                found = {key: value for key, value in found.items() if key not in (name, f"{name}_file")}
        found |= block
    return found


def renamed(kafka: KafkaSettings, block: Mapping[str, Any]) -> KafkaSettings:
    """The same connection with the names of topics and groups that a block gives. Raises ConfigError."""
    names = {name: block[name] for name in ("topic_prefix", "group_prefix") if name in block}
    return connection(kafka.bootstrap_servers, {**given(kafka), **names}, None)


def given(section: KafkaSection) -> dict[str, Any]:
    """The block that a section was made of, with secrets as they were given."""
    return json.loads(section.model_dump_json(exclude_unset=True, exclude_none=True, context={_REVEAL: True}))


def storable(block: Mapping[str, Any]) -> dict[str, Any]:
    """A block as a file may hold it: of secrets only `${NAME}`, and absolute paths."""
    found = {name: str(Path(block[name]).absolute()) if name.endswith("_file") else block[name] for name in block}
    return {name: value for name, value in found.items() if name not in SECRETS or VARIABLE.fullmatch(value)}


def with_secrets(model: BaseModel, **options: Any) -> str:
    """JSON with secrets in plain text (`options` of `model_dump_json`): for the standard input of a child process, or
    to make the same settings again in this one. It is never logged or stored.
    """
    return model.model_dump_json(context={_REVEAL: True}, **options)
