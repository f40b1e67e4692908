"""aiokafka's connection options from the connection settings: addresses, TLS and SASL; reads the files."""

import ssl
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from rollstream.schemas.errors import ConfigError
from rollstream.schemas.kafka import KafkaSettings


def client_options(kafka: KafkaSettings) -> dict[str, Any]:
    """Keyword arguments of every aiokafka client. Raises ConfigError naming a file that cannot be read or used."""
    options: dict[str, Any] = {
        "bootstrap_servers": kafka.bootstrap_servers,
        "security_protocol": kafka.security_protocol,
    }
    if kafka.uses_tls:
        options["ssl_context"] = _ssl_context(kafka)
    if kafka.uses_sasl:
        options |= {
            "sasl_mechanism": kafka.sasl_mechanism,
            "sasl_plain_username": kafka.username,
            "sasl_plain_password": _secret("password", kafka.password, kafka.password_file),
        }
    return options


def _ssl_context(kafka: KafkaSettings) -> ssl.SSLContext:
    """Trusts `ca_file`, else the system's authorities; sends the client's certificate, if there is one."""
    try:
        context = ssl.create_default_context(cafile=kafka.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"kafka.ca_file {kafka.ca_file} has no readable PEM certificates: {error}; give a file of PEM certificates"
        ) from error
    context.check_hostname = kafka.check_hostname
    if kafka.cert_file is not None:
        password = _secret("key_password", kafka.key_password, kafka.key_password_file)
        try:
            # An encrypted key without a password must fail; OpenSSL would ask for it on the terminal.
            context.load_cert_chain(kafka.cert_file, kafka.key_file, password or "")
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"kafka.cert_file {kafka.cert_file} and kafka.key_file {kafka.key_file or kafka.cert_file} cannot be "
                f"used ({error}); give a PEM certificate, the key that belongs to it, and its key_password"
            ) from error
    return context


def _secret(name: str, value: SecretStr | None, file: Path | None) -> str | None:
    """A secret from the settings, or from its file without the trailing newline. Raises ConfigError."""
    if file is None:
        return None if value is None else value.get_secret_value()
    try:
        found = file.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"kafka.{name}_file {file} cannot be read: {error}; correct its path or permissions"
        ) from error
    if not found:
        raise ConfigError(f"kafka.{name}_file {file} is empty; write the secret into it")
    return found
