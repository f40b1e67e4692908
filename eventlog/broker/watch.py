"""Watches the embedded broker during a run and restarts it at its old address if it dies."""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from rollstream.eventlog.broker.restarts import FIRST_BACKOFF_S, Restarts
from rollstream.eventlog.disk_space import disk_of
from rollstream.schemas.errors import BrokerError, BrokerLostError

CHECK_S = 0.25
STEADY_S = 60.0
"""A broker that ran for so long counts as whole again: its earlier deaths are forgiven."""
MIN_FREE_BYTES = 16 * 1024 * 1024
"""Free disk space below which a broker is not started again: it would only die once more."""

logger = logging.getLogger(__name__)


class Broker(Protocol):
    """The watched broker: a started `EmbeddedBroker`, or that of another command, which is taken over once it ended."""

    @property
    def workspace(self) -> Path:
        """The broker's workspace."""
        ...

    @property
    def is_running(self) -> bool:
        """Whether it is still running."""
        ...

    def restart(self) -> None:
        """Restart it. Raises BrokerError, and the call can be repeated; BrokerLostError if it is of no use."""
        ...

    def call_off_restart(self) -> None:
        """Have `restart` in another thread raise BrokerError soon."""
        ...


async def keep_running(
    broker: Broker,
    notify: Callable[[str], None],
    *,
    first_backoff_s: float = FIRST_BACKOFF_S,
    steady_s: float = STEADY_S,
    min_free_bytes: int = MIN_FREE_BYTES,
    check_s: float = CHECK_S,
) -> None:
    """Watch until cancelled; a restart ends before. Raises BrokerError if the broker died, or did not start, too often
    in a row, BrokerLostError if it died because its data were removed.

    An exit because of a full disk does not count: the broker is restarted once there is free space.
    """
    watch = _Watch(broker, notify, Restarts(first_backoff_s), min_free_bytes, check_s)
    while True:
        began = time.monotonic()
        while broker.is_running:
            await asyncio.sleep(check_s)
        if time.monotonic() - began >= steady_s:
            watch.restarts.reset()
        await watch.restart()


class _Watch:
    """A broker and its restart count."""

    def __init__(
        self, broker: Broker, notify: Callable[[str], None], restarts: Restarts, min_free_bytes: int, check_s: float
    ) -> None:
        self.restarts = restarts
        self._broker = broker
        self._notify = notify
        self._min_free_bytes = min_free_bytes
        self._check_s = check_s

    async def restart(self) -> None:
        """Restart the broker, with retries. Raises BrokerError after too many attempts."""
        reason = "the broker died"
        while True:
            had_to_wait = await self._wait_for_disk()
            wait_s = self.restarts.first_backoff_s if had_to_wait else self.restarts.add()
            if self.restarts.are_too_many:
                raise BrokerError(
                    f"the broker of workspace {self._broker.workspace} exited {self.restarts.count} times in a row, "
                    f"last: {reason}; see {self._broker.workspace}/broker/broker.log"
                )
            logger.warning("%s; restarting it in %.1f s", reason, wait_s)
            self._notify(f"{reason}; restarting it")
            await asyncio.sleep(wait_s)
            try:
                await self._restarted()
            except BrokerLostError:
                raise
            except BrokerError as error:
                reason = f"the broker did not restart ({error})"
            else:
                return

    async def _restarted(self) -> None:
        """Restart it in a thread, which has ended when this ends: it would go on after a cancellation otherwise."""
        restarting = asyncio.create_task(asyncio.to_thread(self._broker.restart))
        try:
            await asyncio.shield(restarting)
        except asyncio.CancelledError:
            self._broker.call_off_restart()
            await asyncio.wait({restarting})
            if not restarting.cancelled():
                restarting.exception()  # retrieved: nobody else asks for it
            raise

    async def _wait_for_disk(self) -> bool:
        """Wait for enough disk space for a broker; returns whether it had to wait."""
        folder = self._broker.workspace / "broker"  # may be on a disk other than the workspace's
        has_waited = False
        while (disk := disk_of(folder)).free_bytes < self._min_free_bytes:
            if not has_waited:
                message = (
                    f"paused: the disk of {disk.folder} is full: the broker needs {self._min_free_bytes:,} bytes, "
                    f"{disk.free_bytes:,} are free; it will be restarted when there is space"
                )
                logger.error("%s", message)
                self._notify(message)
            has_waited = True
            await asyncio.sleep(self._check_s)
        return has_waited
