"""Diagnoses refused connections and missing ACLs, with the remedy. aiokafka hides the cause of a failed start behind
"Unable to bootstrap", so this opens its own connection to find it.
"""

import asyncio
import ssl
from typing import Any

from aiokafka.conn import AIOKafkaConnection, collect_hosts
from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    GroupAuthorizationFailedError,
    IllegalSaslStateError,
    KafkaConnectionError,
    KafkaError,
    NoError,
    SaslAuthenticationFailed,
    TopicAuthorizationFailedError,
    UnsupportedSaslMechanismError,
)
from aiokafka.protocol.metadata import MetadataRequest

from rollstream.eventlog.kafka.security import client_options
from rollstream.schemas.errors import AccessDeniedError, LogError, with_causes
from rollstream.schemas.kafka import KafkaSettings

REQUEST_TIMEOUT_MS = 5_000
ATTEMPTS = 3
"""So often must a broker close the connection to count as one that speaks another protocol."""
BACKOFF_S = 0.2
CLOSE_TIMEOUT_S = 2.0
REMEDY = "allow it with kafka-acls; docs/security.md lists what each service needs"
OTHER_PROTOCOL = {
    "PLAINTEXT": "SASL_PLAINTEXT, SSL or SASL_SSL",
    "SASL_PLAINTEXT": "PLAINTEXT, SSL or SASL_SSL",
    "SSL": "PLAINTEXT, SASL_PLAINTEXT or SASL_SSL",
    "SASL_SSL": "PLAINTEXT, SASL_PLAINTEXT or SSL",
}
DENIED = (TopicAuthorizationFailedError, GroupAuthorizationFailedError, ClusterAuthorizationFailedError)


async def why_refused(kafka: KafkaSettings) -> LogError | None:
    """The reason why a client cannot connect: an AccessDeniedError if permanent, a LogError if a retry may help, None
    if it can.

    Raises ConfigError for a file that cannot be used.
    """
    options = client_options(kafka)
    addresses = collect_hosts(options.pop("bootstrap_servers"), randomize=False)
    found: LogError | None = None
    for host, port, _ in addresses:
        for attempt in range(ATTEMPTS):
            found = await _why_refused_at(kafka, host, port, options, is_last=attempt == ATTEMPTS - 1)
            if not isinstance(found, _CutOffError):
                break
            await asyncio.sleep(BACKOFF_S)
        if found is None or isinstance(found, AccessDeniedError):
            return found
    return found


class _CutOffError(LogError):
    """The broker closed the connection: it may be stopping, or its listener expects another protocol."""


async def _why_refused_at(
    kafka: KafkaSettings, host: str, port: int, options: dict[str, Any], *, is_last: bool
) -> LogError | None:
    server = f"Kafka at {host}:{port}"
    connection = AIOKafkaConnection(host, port, request_timeout_ms=REQUEST_TIMEOUT_MS, **options)
    try:
        await connection.connect()
        await connection.send(MetadataRequest([]))
    except SaslAuthenticationFailed:
        return AccessDeniedError(
            f"{server} refuses {kafka.principal}: wrong username or password for {kafka.sasl_mechanism}; correct "
            "kafka.username and kafka.password, or add the user (kafka-configs.sh)"
        )
    except UnsupportedSaslMechanismError:
        return AccessDeniedError(f"{server} does not support kafka.sasl_mechanism {kafka.sasl_mechanism}; set another")
    except (ssl.SSLError, KafkaConnectionError, ConnectionError) as error:
        found = _of_connection(kafka, server, error)
        return AccessDeniedError(str(found)) if is_last and isinstance(found, _CutOffError) else found
    except (IllegalSaslStateError, AssertionError, ValueError):
        return AccessDeniedError(_mismatch(kafka, server))
    except (OSError, TimeoutError, KafkaError) as error:
        return LogError(f"{server}: {error or 'no answer'}")
    finally:
        await _close(connection)
    return None


def _of_connection(kafka: KafkaSettings, server: str, error: Exception) -> LogError:
    """The error of a connection that was refused, closed or not trusted."""
    causes = list(with_causes(error))
    if untrusted := next((one for one in causes if isinstance(one, ssl.SSLCertVerificationError)), None):
        return AccessDeniedError(
            f"the certificate of {server} is not trusted ({untrusted.verify_message}); set kafka.ca_file to the "
            "authority that signed it, or connect to a host name in the certificate"
        )
    alert = next((one for one in causes if isinstance(one, ssl.SSLError) and "ALERT" in (one.reason or "")), None)
    if alert is not None:
        remedy = "another kafka.cert_file" if kafka.cert_file else "kafka.cert_file and kafka.key_file"
        return AccessDeniedError(
            f"{server} refuses the TLS connection ({alert.reason}): it requires a client certificate that it trusts; "
            f"set {remedy}"
        )
    is_refused = any(isinstance(one, ConnectionRefusedError) for one in causes)
    if is_refused:
        return LogError(f"{server}: connection refused")
    return _CutOffError(_mismatch(kafka, server))


def _mismatch(kafka: KafkaSettings, server: str) -> str:
    return (
        f"{server} does not speak {kafka.security_protocol} (it closes the connection); set kafka.security_protocol to "
        f"that of its listener: {OTHER_PROTOCOL[kafka.security_protocol]}"
    )


def denied(error: KafkaError, doing: str, kafka: KafkaSettings | None, operation: str) -> AccessDeniedError | None:
    """The error of an operation that the ACLs do not allow; None if `error` is another one."""
    if not isinstance(error, (*DENIED, NoError)):
        return None
    named = error.args[0] if error.args else ""
    names = ", ".join(sorted(named)) if isinstance(named, set | frozenset) else getattr(named, "topic", str(named))
    if isinstance(error, GroupAuthorizationFailedError):
        right = f"Read of group {names}"
    elif isinstance(error, ClusterAuthorizationFailedError):
        right = f"{operation or 'IdempotentWrite'} of the cluster"
    else:
        right = f"{operation or 'Describe'} of topic {names}".removesuffix(" ")
    who = "the client" if kafka is None else kafka.principal
    return AccessDeniedError(f"cannot {doing}: {who} lacks the right {right}; {REMEDY}")


async def _close(connection: AIOKafkaConnection) -> None:
    """Close a connection and its socket, if it has one."""
    closed: Any = connection.close()
    if connection._protocol is not None:  # pyright: ignore[reportPrivateUsage]
        await asyncio.wait({closed}, timeout=CLOSE_TIMEOUT_S)
