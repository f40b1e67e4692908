"""Runs whose groups are closed by hand, for the shells of both processors."""

import orjson

from rollstream.processors.assemble.shell import AssembleShell
from rollstream.processors.host.app import Batch
from rollstream.schemas.events import (
    EpochStarted,
    JobStarted,
    RunStarted,
)
from rollstream.schemas.settings import PlanSettings, RolloutSettings
from tests.rigs.steps_rig import attempt, records_of, started

RUN = "run"


async def steps_batch(log, events, partition=0):
    """The events written to a steps partition and read back from it."""
    for event in events:
        await log.send(event, partition=partition)
    return Batch(partition, 1, await records_of(log, "steps", partition))


def run_events(store, *, num_examples=2, run=RUN):
    lines = b"\n".join(orjson.dumps({"example_id": f"x{i}", "inputs": {"i": i}}) for i in range(num_examples))
    common = {"run_id": run, "time_ms": 5}
    plan = PlanSettings(tasks_per_epoch=2, num_generations=2, min_generations=1)
    rollout = RolloutSettings(environment="none", agents={"agent": f"{run}/policy"})
    job = {"job_id": f"{run}/rl", "model_group": f"{run}/policy", "base_version": 3}
    return [
        RunStarted(
            **common,
            name=run,
            config={},
            seed=1,
            dataset=store.put_bytes(lines, ".jsonl"),
            num_examples=num_examples,
            num_partitions=1,
        ),
        JobStarted(**common, **job, plan=plan, rollout=rollout),
        EpochStarted(**common, job_id=f"{run}/rl", epoch=0),
    ]


async def close_groups(log, *, run=RUN, rewards=(0.0, 1.0)):
    """Both groups of the epoch, assembled."""
    shell = AssembleShell(log, None, service="p")
    events = []
    for index in range(2):
        low, high = rewards
        records = [*attempt(index, 0, reward=low, run=run), *attempt(index, 1, reward=high, run=run)]
        events += [started(index, run=run), *records]
    await shell.take(await steps_batch(log, events))
    await shell.drain()


async def groups_batch(log, first=0, *, generation=1):
    return Batch(0, generation, (await records_of(log, "groups"))[first:])


class Raising:
    """A fold that raises in the middle of chosen records, after it has changed its state."""

    def __init__(self, evolve, is_bad):
        self.evolve = evolve
        self.is_bad = is_bad

    def __call__(self, state, received, *more):
        answer = self.evolve(state, received, *more)
        if self.is_bad(received):
            raise ZeroDivisionError(f"division by zero at {received.position.offset}")
        return answer
