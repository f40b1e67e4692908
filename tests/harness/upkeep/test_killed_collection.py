"""A collection that is killed leaves nothing that the next one does not find."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.failpoints import Killed
from rollstream.eventlog.log import Encoded, Position
from rollstream.harness.upkeep.collecting import find, remove
from rollstream.learner.collection import MAX_VERSIONS
from rollstream.schemas.base import Event
from rollstream.schemas.settings import ArtifactRef
from tests.harness.upkeep.gc_rig import log_of, run

VERSIONS = 2 * MAX_VERSIONS + 50
KEPT = [0, 100, 200, 300, 400, VERSIONS - 2, VERSIONS - 1]


class KillingLog:
    """A log whose user is killed once `num_sends` events are acknowledged."""

    def __init__(self, log: Any, num_sends: int) -> None:
        self._log = log
        self._num_sends = num_sends

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    async def send(self, event: Event | Encoded, **options: Any) -> Position:
        position = await self._log.send(event, **options)
        self._num_sends -= 1
        if self._num_sends == 0:
            raise Killed("send")
        return position


class KillingStore(ArtifactStore):
    """A store whose user is killed at its removal `num_removals`."""

    num_removals = 0

    def remove(self, ref: ArtifactRef) -> None:
        self.num_removals -= 1
        if self.num_removals == 0:
            raise Killed("remove")
        super().remove(ref)


@pytest.mark.parametrize("num_sends", [1, 2, 3])
@pytest.mark.parametrize("num_removals", [1, 30])
def test_a_collection_after_kills_removes_all_that_is_unneeded(
    tmp_path: Path, num_sends: int, num_removals: int
) -> None:
    async def scenario() -> None:
        store = KillingStore(str(tmp_path / "artifacts"))
        log = await log_of(store, run("r", versions=VERSIONS))
        unneeded = await find(log, store, tmp_path)
        assert len(unneeded.weights) == VERSIONS - len(KEPT)
        killing: Any = KillingLog(log, num_sends)
        with pytest.raises(Killed):
            await remove(killing, store, unneeded)
        store.num_removals = num_removals
        with pytest.raises(Killed):
            await remove(log, store, await find(log, store, tmp_path))
        await remove(log, store, await find(log, store, tmp_path))
        assert len(store.listing()) == len(KEPT)

    asyncio.run(scenario())
