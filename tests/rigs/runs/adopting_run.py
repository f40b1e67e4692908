"""Recorded runs in which a version has the weights of an earlier one: by request, and by the evaluation gate."""

from rollstream.harness.config.dataset import Example
from rollstream.harness.runs.validation import Validation
from rollstream.schemas.events import RollbackRequested, RunStarted
from rollstream.schemas.settings import GateSettings
from tests.rigs.runs.recorded_run import GROUP, JOB, RUN, RecordedRun, rollouts_of


class RolledBackRun(RecordedRun):
    """Versions 3 and 6 are rollbacks to versions 1 and 3; the second comes while an epoch is under way."""

    num_epochs = 6

    def configuration(self):
        written = super().configuration()
        written["finetuning"]["num_epochs"] = self.num_epochs
        return written

    async def request(self, version: int, after: int) -> None:
        await self.log.send(
            RollbackRequested(
                run_id=RUN, time_ms=1, job_id=JOB, model_group=GROUP, version=version, after_version=after
            )
        )

    async def roll_out(self, task, version):
        if (task.epoch, task.index) == (4, 0):
            await self.request(3, after=5)
        await super().roll_out(task, task.min_version)

    async def _epoch(self, assembling, curating, *, version):
        await super()._epoch(assembling, curating, version=version)
        if version == 1:
            await self.request(1, after=2)
            await self._pump(curating, "groups")


class GatedRun(RecordedRun):
    """Version 1 fails its validation, so that version 2 has the weights of version 0."""

    def spec(self, written):
        spec = super().spec(written)
        gate = GateSettings(min_reward=0.5)
        return spec._replace(plan=spec.plan.model_copy(update={"gate": gate}))

    async def before(self, epoch, assembling, curating):
        if epoch == 0:
            (self.started,) = await self.events("groups", RunStarted)
        spec = self.spec(self.configuration())
        examples = [Example("v0", {"n": 0}), Example("v1", {"n": 1})]
        validation = Validation(self.started, spec, examples, spec.rollout)
        version = (0, 1, 3)[epoch]
        tasks = validation.tasks(epoch, min_version=version, time_ms=1)
        await self.log.send_all(tasks)
        for task in tasks:
            reward = 0.0 if epoch == 1 else 1.0
            await self.log.send_all(list(rollouts_of(task, version, reward=lambda member, reward=reward: reward)))
        await self._pump(assembling, "steps")
        await assembling.drain()
        await self._pump(curating, "groups")

    async def roll_out(self, task, version):
        if task.purpose == "train":
            await super().roll_out(task, task.min_version)
