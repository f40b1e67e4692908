"""A whole run on a log in memory whose rollouts are made by the real producers, with a script in place of a model."""

import asyncio
import contextlib

from rollstream.harness.config import file as config_file
from rollstream.harness.config.jobs import allowed_by
from rollstream.producers.engines.scripted import ScriptedEngine
from rollstream.producers.service import run as produce
from rollstream.schemas.services import ProducerSettings
from tests.rigs.runs.recorded_run import RecordedRun

WAIT_S = 0.005


class ProducedRun(RecordedRun):
    """Two epochs of a given configuration."""

    num_epochs = 2

    def __init__(self, folder, model, written, examples, script):
        super().__init__(folder, model)
        self._written, self._examples = written, examples
        self._engine = ScriptedEngine(script)

    def configuration(self):
        return self._written

    def examples(self):
        return self._examples

    async def roll_out(self, task, version):
        """The producers do."""

    async def _pump(self, shell, topic):
        await asyncio.sleep(WAIT_S)
        await super()._pump(shell, topic)

    async def record(self):
        """Run to the end, then stop the producers."""
        settings = ProducerSettings(
            bootstrap_servers="none",
            artifact_uri=str(self.folder / "artifacts"),
            workspace=self.folder,
            name="producers-1",
            num_partitions=2,
            allow=allowed_by(config_file.resolve(self._written).config),
        )
        producing = asyncio.create_task(produce(settings, self.log, self._engine))
        try:
            return await super().record()
        finally:
            producing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await producing
