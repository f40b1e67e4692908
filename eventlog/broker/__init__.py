"""The embedded Kafka broker: installation, credentials, process and watch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.eventlog.broker import broker, credentials, guard, lock, ports, restarts, watch

__all__ = ["broker", "credentials", "guard", "lock", "ports", "restarts", "watch"]
