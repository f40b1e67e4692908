"""A weight follower on a log in memory, with an engine that can refuse, hang and take its time."""

import asyncio
import threading
from pathlib import Path

import pytest

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.codec import decode
from rollstream.eventlog.log import TopicPartition
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.producers.engines.scripted import ScriptedEngine
from rollstream.producers.engines.weight_follower import WeightFollower
from rollstream.schemas.errors import ModelError
from rollstream.schemas.events import LearnerClaimed, WeightsLoaded
from rollstream.schemas.permissions import NOTHING
from tests.producers.conftest import published

GROUP, OTHER, THIRD = "run-1/policy", "run-2/policy", "run-3/policy"


class Engine(ScriptedEngine):
    """The scripted engine, which can forget, refuse, hang and take its time."""

    def __init__(self):
        super().__init__()
        self.refused = set()
        self.unloaded = []
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.may_unload = asyncio.Event()
        self.may_unload.set()
        self.hanging = set()
        """Model groups of which nothing is loaded while they are here."""

    async def load(self, published, path):
        await self.may_load.wait()
        while published.model_group in self.hanging:
            await asyncio.sleep(0.005)
        if published.version in self.refused:
            raise ModelError(f"version {published.version} does not fit")
        await super().load(published, path)

    async def unload(self, model_group):
        if model_group in self.refused:
            raise ModelError("the rollout engine failed")
        self.unloaded.append(model_group)
        await self.may_unload.wait()
        del self._versions[model_group]


class SlowStore(ArtifactStore):
    """A store that waits before it looks for a file."""

    def __init__(self, uri):
        super().__init__(uri)
        self.is_asked, self.may_fetch = threading.Event(), threading.Event()
        self.may_fetch.set()

    def fetch(self, ref):
        if not self.may_fetch.is_set():
            self.is_asked.set()
            self.may_fetch.wait(10)
        return super().fetch(ref)


class Rig:
    """A log in memory, an artifact store, an engine and a follower that runs."""

    def __init__(self, folder: Path):
        self.log = MemoryLog(num_partitions=2)
        self.artifacts = ArtifactStore(str(folder / "artifacts"))
        self.engine = Engine()
        self.follower = WeightFollower(
            self.log, self.artifacts, self.engine, engine_id="engine-0", permissions=NOTHING, retry_s=0.02
        )

    async def publish(self, version, *, group=GROUP, term=1, is_broken=False):
        artifact = self.artifacts.put_bytes(f"{group} {version} {term}".encode())
        changes = {"run_id": group.split("/")[0], "time_ms": 100 + version, "term": term, "artifact": artifact}
        event = published(version, group).model_copy(update=changes | {"weights_sha256": artifact.sha256})
        if is_broken:
            self.artifacts.fetch(artifact).write_bytes(b"torn")
        await self.log.send(event)

    async def claim(self, term, group=GROUP):
        await self.log.send(
            LearnerClaimed(run_id=group.split("/")[0], time_ms=1, model_group=group, term=term, learner=f"l{term}")
        )

    async def loaded(self):
        reader = await self.log.reader({TopicPartition("weights", 0): -1})
        events = [decode(record).event for record in await reader.poll(timeout_s=0)]
        return [event for event in events if isinstance(event, WeightsLoaded)]

    def files(self):
        return [path for path in Path(self.artifacts.uri).rglob("*") if path.is_file()]

    async def finish_pending(self):
        """Let the follower do all that it can do now."""
        for _ in range(25):
            await asyncio.sleep(0.01)

    def versions(self):
        return [(event.model_group, event.version) for event in self.engine.loaded]


def play(tmp_path, story):
    """Play a story with a follower that does not run yet: `story(rig, start)`."""

    async def main():
        rig, running = Rig(tmp_path), []

        async def start():
            running.append(asyncio.create_task(rig.follower.run()))
            await rig.finish_pending()

        async with asyncio.timeout(10):
            await story(rig, start)
        for task in running:
            assert not task.done(), task
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
