"""CPU seconds that 1,000 recorded steps cost the producer, the assembler and the projector.

    python benchmarks/bench_step_cost.py --groups 200 --repeats 5

Processor time of this process alone: the broker is another one. The producer's pass records the workload's attempts
through journal, outbox and writer into Kafka, as a rollout does, many at a time; generation is not in it. Rewards,
starts and ends are counted with the steps that they belong to.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from workload import EVENTS_PER_GROUP, MEMBERS, STEPS_PER_GROUP, group_events

from rollstream.eventlog import codec
from rollstream.eventlog.broker.broker import EmbeddedBroker
from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.eventlog.log import Record, partition_of
from rollstream.metrics.projection.database import Database
from rollstream.metrics.projection.projector import project
from rollstream.processors.assemble import fold as assembly
from rollstream.producers.clock import EventClock
from rollstream.producers.rollout.journal import Journal
from rollstream.producers.steps_writer import Outbox, StepsWriter
from rollstream.schemas.base import Event
from rollstream.schemas.events import (
    GroupStarted,
    RewardRecorded,
    RolloutEnded,
    RolloutStarted,
    StepRecorded,
    TaskRequested,
)
from rollstream.schemas.settings import RolloutSettings

PARTITIONS = 6
POLL_RECORDS = 2000
ATTEMPTS_AT_ONCE = 64
OWN_FIELDS = {"kind", "v", "run_id", "time_ms", "group_id", "rollout_id", "step_index"}
"""Fields that the journal itself gives a step."""


def attempts_of(num_groups: int) -> list[tuple[GroupStarted, list[Event]]]:
    """Start of the group and own events, start and end included, of each attempt."""
    found: list[tuple[GroupStarted, list[Event]]] = []
    for index in range(num_groups):
        events = list(group_events("bench", index))
        group, per_member = events[0], (len(events) - 1) // MEMBERS
        assert isinstance(group, GroupStarted)
        found += [(group, events[1 + m * per_member : 1 + (m + 1) * per_member]) for m in range(MEMBERS)]
    return found


async def record(
    group: GroupStarted, events: list[Event], writers: dict[int, StepsWriter], task: TaskRequested
) -> None:
    """One attempt, its calls in turn, as a session records them."""
    writer = writers[partition_of(group.key.encode(), PARTITIONS)]
    started = events[0]
    assert isinstance(started, RolloutStarted)

    async with Outbox(writer) as outbox:
        journal = Journal(task, started.rollout_id, outbox.put, writer.clock)
        await journal.begin(member=started.member, attempt=0, seed=started.seed)
        for event in events[1:]:
            if isinstance(event, StepRecorded):
                fields = {name: value for name, value in vars(event).items() if name not in OWN_FIELDS}
                await journal.record_step(journal.open_step(), began_ms=0, **fields)
                await asyncio.sleep(0)  # the environment's turn
            elif isinstance(event, RewardRecorded):
                await journal.record_reward(name=event.name, value=event.value, step_index=None, agent=None)
            elif isinstance(event, RolloutEnded):
                await journal.end("", {})


async def produce(num_groups: int) -> float:
    """CPU seconds of this process for all attempts, on a fresh broker."""
    attempts = attempts_of(num_groups)
    with tempfile.TemporaryDirectory() as folder, EmbeddedBroker(Path(folder)) as broker:
        async with KafkaLog(broker.kafka) as log:
            await log.ensure_topics(num_partitions=PARTITIONS)
            writers = {p: StepsWriter(log, p, EventClock(0), 0) for p in range(PARTITIONS)}
            tasks = {group.group_id: task_of(group) for group, _ in attempts}
            free = asyncio.Semaphore(ATTEMPTS_AT_ONCE)

            async def one(group: GroupStarted, events: list[Event]) -> None:
                async with free:
                    await record(group, events, writers, tasks[group.group_id])

            begun = time.process_time()
            async with asyncio.TaskGroup() as running:
                for group, events in attempts:
                    running.create_task(one(group, events))
            return time.process_time() - begun


def task_of(group: GroupStarted) -> TaskRequested:
    """The request of a group."""
    return TaskRequested(
        run_id=group.run_id,
        time_ms=0,
        group_id=group.group_id,
        example_id=group.example_id,
        job_id=group.job_id,
        epoch=group.epoch,
        index=group.index,
        inputs={},
        num_rollouts=group.size,
        minimum=group.minimum,
        seed=group.seed,
        min_version=0,
        settings=RolloutSettings(environment="none", agents=group.agents),
    )


def records_of(num_groups: int) -> list[Record]:
    """The records of all groups, in one partition."""
    records: list[Record] = []
    for index in range(num_groups):
        for event in group_events("bench", index):
            made = codec.encode(event)
            records.append(Record("steps", 0, len(records), made.key, made.value, made.headers, 0))
    return records


def assemble(records: list[Record]) -> float:
    """CPU seconds of decoding and folding all records."""
    state, closed = assembly.initial(), 0
    begun = time.process_time()
    for one in records:
        closed += len(assembly.evolve(state, codec.decode(one, num_partitions=1)))
    spent_s = time.process_time() - begun
    assert closed == len(records) // EVENTS_PER_GROUP
    return spent_s


def project_all(records: list[Record]) -> float:
    """CPU seconds of projecting all records into a fresh metrics file, a poll at a time."""
    with tempfile.TemporaryDirectory() as folder:
        database = Database(Path(folder) / "metrics.duckdb")
        begun = time.process_time()
        for first in range(0, len(records), POLL_RECORDS):
            database.write(project(records[first : first + POLL_RECORDS], {"steps": 1}), {})
        spent_s = time.process_time() - begun
        database.close()
    return spent_s


def main() -> None:
    """Interleave the three, print and keep the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args()
    records = records_of(args.groups)
    passes: dict[str, list[float]] = {"producer": [], "assembler": [], "projector": []}
    for _ in range(args.repeats):
        passes["producer"].append(asyncio.run(produce(args.groups)))
        passes["assembler"].append(assemble(records))
        passes["projector"].append(project_all(records))
    thousands = args.groups * STEPS_PER_GROUP / 1000
    costs = {name: round(statistics.median(spent) / thousands, 4) for name, spent in passes.items()}
    report = {"cores": os.cpu_count(), "steps": args.groups * STEPS_PER_GROUP, "cpu_s_per_1000_steps": costs}
    text = json.dumps(report, indent=2)
    print(text)
    if args.output:
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
