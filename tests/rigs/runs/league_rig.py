"""A league on a log in memory: published versions, an engine that names any cell, and a worker that plays tasks."""

import asyncio

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.learner.collection import collected
from rollstream.learner.retention import Stored
from rollstream.processors.assemble import fold as assembly
from rollstream.producers.attempt import record_rollout
from rollstream.producers.engines.scripted import ScriptedEngine
from rollstream.producers.group_execution import WorkerContext
from rollstream.producers.league.opponents import OpponentWeights
from rollstream.producers.slots import Slots
from rollstream.producers.worker import RolloutWorker
from rollstream.schemas import ids
from rollstream.schemas.events import WeightsPublished
from rollstream.schemas.league import LeagueSettings
from rollstream.schemas.permissions import NOTHING
from tests.producers import worker_rig as r

RUN, GROUP = "run-1", "run-1/policy"
SEATS = {"X": GROUP, "O": GROUP}


def new_engine():
    """Names any cell, and every version another one."""
    return ScriptedEngine(lambda prompt, rng, version: (str(rng.randrange(9)), -1.0))


class League:
    """A log with published versions, a scripted engine that names any free cell, and a worker."""

    def __init__(self, folder):
        self.log = MemoryLog(num_partitions=1)
        self.artifacts = ArtifactStore(str(folder / "artifacts"))
        self.engine = new_engine()
        self.opponents = self.new_opponents()

    def new_opponents(self):
        return OpponentWeights(self.log, self.artifacts, self.engine, permissions=NOTHING, retry_s=0.02)

    async def publish(self, *versions, group=GROUP, term=1):
        event = artifact = None
        for version in versions:
            artifact = self.artifacts.put_bytes(f"{group} {version} {term}".encode())
            event = WeightsPublished(
                run_id=ids.run_of(group),
                time_ms=100 + version,
                model_group=group,
                job_id=f"{group}-job",
                batch_id=None,
                version=version,
                parent=None if version == 0 else version - 1,
                term=term,
                weights_sha256=artifact.sha256,
                weights_format="full",
                base_model="none",
                artifact=artifact,
            )
            await self.log.send(event)
        assert event is not None
        assert artifact is not None
        await self.engine.load(event, self.artifacts.fetch(artifact))
        return event

    async def collect(self, event):
        await self.log.send(collected([Stored(GROUP, event.version, event.artifact)], GROUP, time_ms=200_000, by="gc"))
        self.artifacts.remove(event.artifact)

    def worker(self, name="producer-1", log=None):
        producer = WorkerContext(
            log=log or self.log,
            engine=self.engine,
            weights=r.Weights(99),
            rollout=record_rollout,
            dead_letter=lambda record, error: asyncio.sleep(0),
            slots=Slots(8),
            runs=frozenset(),
            name=name,
            opponents=self.opponents,
        )
        return RolloutWorker(producer, tick_interval_s=r.TICK_S, commit_interval_s=r.COMMIT_S)


def task(index, version, **league):
    league = {"latest_ratio": 0.0, "every": 1} | league
    return r.task(
        index,
        num_rollouts=2,
        min_version=version,
        environment="tic_tac_toe_self_play",
        environment_config={"illegal_penalty": 0.0},
        agents=SEATS,
        max_attempts=1,
        league=LeagueSettings(**league),
    )


async def play(league, *tasks):
    working = asyncio.create_task(league.worker().run())
    for one in tasks:
        await league.log.send(one)
    await r.wait_until(lambda: r.all_settled(league.log, len(tasks)))
    working.cancel()
    await asyncio.wait({working})


async def close_groups(league):
    """Fold `steps` as assembly does, and write what closes."""
    state = assembly.initial()
    for received in await r.records(league.log, "steps"):
        for closing in assembly.evolve(state, received):
            await league.log.send(closing.closed)
