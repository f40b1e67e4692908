"""Looks after the embedded broker while a run goes on: one that dies is started again at its old address."""

import asyncio
import logging
from collections.abc import Callable

from rollstream.eventlog.broker import EmbeddedBroker
from rollstream.schemas.errors import BrokerError

CHECK_S = 0.25
MAX_RESTARTS = 5

logger = logging.getLogger(__name__)


async def keep_running(broker: EmbeddedBroker, say: Callable[[str], None]) -> None:
    """Watch until cancelled. Raises BrokerError if the broker will not start, or has died too often."""
    for _ in range(MAX_RESTARTS):
        while broker.is_running:
            await asyncio.sleep(CHECK_S)
        logger.warning("the broker died; starting it again")
        say("the broker died; it is started again")
        await asyncio.to_thread(broker.restart)
    while broker.is_running:
        await asyncio.sleep(CHECK_S)
    raise BrokerError(
        f"the broker of workspace {broker.workspace} died {MAX_RESTARTS + 1} times: see {broker.workspace}/broker"
    )
