"""A run whose first cancellation is lost ends at a later signal, and one that a component cancels with an error."""

import asyncio
import os
import signal
from contextlib import suppress

import pytest

from rollstream.harness.finetune import Interrupted, _signals
from rollstream.schemas.errors import RunFailedError


async def _run_that_loses_a_cancellation() -> None:
    with _signals():
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()


async def _interrupt(times: int) -> None:
    run = asyncio.create_task(_run_that_loses_a_cancellation())
    for _ in range(times):
        await asyncio.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(10):
        await run


def test_the_third_signal_cancels_again() -> None:
    with pytest.raises(Interrupted):
        asyncio.run(_interrupt(3))


def test_the_handlers_of_signals_are_gone_when_nothing_is_left_to_cancel() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    async def scenario() -> None:
        with _signals():
            assert signal.getsignal(signal.SIGTERM) != before[1]
        assert signal.getsignal(signal.SIGTERM) == before[1]
        assert not asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)

    asyncio.run(scenario())
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_cancellation_without_a_signal_is_a_failure() -> None:
    async def scenario() -> None:
        with _signals():
            raise asyncio.CancelledError("Cancelled by cancel scope 7f")

    with pytest.raises(RunFailedError, match=r"cancelled the command; rollstream --debug shows where$"):
        asyncio.run(scenario())
