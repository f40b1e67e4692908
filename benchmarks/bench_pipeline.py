"""Steps in, manifests out, through Kafka and Faust; beside it raw aiokafka on the same records, in the same run.

    python benchmarks/bench_pipeline.py --groups 1000 --repeats 3 --workers 1 2 --output bench.json

A repeat is one fresh workspace and broker. `steps_per_s` counts from the first record sent to the last BatchPlanned
read.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiokafka
import orjson
import psutil
from workload import STEPS_PER_GROUP, group_events

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.broker.broker import EmbeddedBroker
from rollstream.eventlog.broker.credentials import environment
from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.eventlog.kafka.security import client_options
from rollstream.eventlog.log import LogReader, TopicPartition, partition_of
from rollstream.schemas.events import EpochSealed, EpochStarted, JobStarted, RunEnded, RunStarted
from rollstream.schemas.kafka import KafkaSettings
from rollstream.schemas.settings import PlanSettings, RolloutSettings
from rollstream.schemas.topics import TOPICS

PARTITIONS = 6
GROUPS_PER_BATCH = 8
RUN = "bench"


def encoded_groups(num_groups: int) -> list[list[tuple[int, bytes, bytes, list[tuple[str, bytes]]]]]:
    """(partition, key, value, headers) of every record, by group."""
    groups = []
    for index in range(num_groups):
        records = []
        for event in group_events(RUN, index):
            made = codec.encode(event)
            partition = partition_of(event.key, PARTITIONS)
            records.append((partition, made.key, made.value, list(made.headers)))
        groups.append(records)
    return groups


def producer(kafka: KafkaSettings) -> aiokafka.AIOKafkaProducer:
    """A producer with rollstream's own settings."""
    return aiokafka.AIOKafkaProducer(
        **client_options(kafka),
        acks="all",
        enable_idempotence=True,
        linger_ms=5,
        max_batch_size=262_144,
        max_request_size=9 * 1024 * 1024,
        compression_type="lz4",
    )


async def send_groups(
    client: aiokafka.AIOKafkaProducer, groups: list, *, steps_per_s: float | None = None
) -> dict[int, float]:
    """Send all records; returns by group index when its last record was acknowledged (perf_counter seconds)."""
    acknowledged: dict[int, float] = {}
    topic = TOPICS["steps"].name
    begun = time.perf_counter()
    pending: list[asyncio.Future] = []
    for index, records in enumerate(groups):
        if steps_per_s is not None:
            due = begun + index * STEPS_PER_GROUP / steps_per_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
        future = None
        for partition, key, value, headers in records:
            future = await client.send(topic, value, key=key, partition=partition, headers=headers)
        assert future is not None
        future.add_done_callback(lambda _, i=index: acknowledged.__setitem__(i, time.perf_counter()))
        pending.append(future)
    await asyncio.gather(*pending)
    return acknowledged


async def raw_limit(kafka: KafkaSettings, groups: list) -> float:
    """Steps a second of plain aiokafka, connected before the clock starts: produce, then consume, the same records."""
    total = sum(len(records) for records in groups)
    partitions = [aiokafka.TopicPartition(TOPICS["steps"].name, p) for p in range(PARTITIONS)]
    consumer = aiokafka.AIOKafkaConsumer(**client_options(kafka), auto_offset_reset="earliest")
    await consumer.start()
    consumer.assign(partitions)
    await consumer.seek_to_beginning(*partitions)
    async with producer(kafka) as client:
        begun = time.perf_counter()
        await send_groups(client, groups)
        seen = 0
        while seen < total:
            batch = await consumer.getmany(timeout_ms=1000, max_records=10_000)
            seen += sum(len(records) for records in batch.values())
        seconds = time.perf_counter() - begun
    await consumer.stop()
    return len(groups) * STEPS_PER_GROUP / seconds


async def start_run(log: KafkaLog, store: ArtifactStore, num_groups: int) -> None:
    """The events that make curate plan the groups: one epoch, a batch for every eight groups."""
    lines = b"\n".join(orjson.dumps({"example_id": f"example-{i}", "inputs": {}}) for i in range(100))
    dataset = store.put_bytes(lines, ".jsonl")
    plan = PlanSettings(
        tasks_per_epoch=num_groups,
        batches_per_epoch=num_groups // GROUPS_PER_BATCH,
        max_staleness=num_groups,
        num_generations=8,
    )
    common = {"run_id": RUN, "time_ms": 0}
    await log.send_all(
        [
            RunStarted(
                **common,
                name=RUN,
                config={},
                seed=0,
                dataset=dataset,
                num_examples=100,
                num_partitions=PARTITIONS,
            ),
            JobStarted(
                **common,
                job_id=f"{RUN}/rl",
                model_group=f"{RUN}/policy",
                base_version=0,
                plan=plan,
                rollout=RolloutSettings(environment="none", agents={"agent": f"{RUN}/policy"}),
            ),
            EpochStarted(**common, job_id=f"{RUN}/rl", epoch=0),
        ]
    )


def start_workers(kafka: KafkaSettings, workspace: Path, num_workers: int) -> list[subprocess.Popen]:
    """Processor processes, as `rollstream serve processors` starts them."""
    workers = []
    for index in range(num_workers):
        log = (workspace / f"processors-{index}.log").open("wb")
        command = [
            sys.executable,
            "-m",
            "rollstream.harness.cli.main",
            "serve",
            "processors",
            "--name",
            f"processors-{index}",
        ]
        env = os.environ | {
            **environment(kafka),
            "ROLLSTREAM_ARTIFACT_URI": str(workspace / "artifacts"),
            "ROLLSTREAM_WORKSPACE": str(workspace),
            "ROLLSTREAM_NUM_PARTITIONS": str(PARTITIONS),
        }
        workers.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env))
    return workers


async def wait_ready(workspace: Path, num_workers: int) -> None:
    """Until every worker's log says ready."""
    for index in range(num_workers):
        path = workspace / f"processors-{index}.log"
        deadline = time.monotonic() + 60
        while b"ready" not in path.read_bytes():
            if time.monotonic() > deadline:
                raise SystemExit(f"worker {index} is not ready:\n{path.read_text()[-2000:]}")
            await asyncio.sleep(0.1)
    await asyncio.sleep(20)  # the last rebalance: within the measured time it costs seconds


async def manifests(reader: LogReader, num_groups: int, planned: dict[int, float]) -> None:
    """Until EpochSealed; notes by group index when the manifest that holds it was read."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        for record in await reader.poll(timeout_s=1.0):
            event = codec.decode(record).event
            now = time.perf_counter()
            for member in getattr(event, "members", ()):
                planned.setdefault(int(member.group_id.rsplit("/t", 1)[1]), now)
            if isinstance(event, EpochSealed):
                await reader.close()
                return
    raise SystemExit(f"no EpochSealed after 300 s; {len(planned)} of {num_groups} groups planned")


async def topic_bytes(log: KafkaLog, topics: tuple[str, ...]) -> int:
    """Value bytes in the given topics."""
    total = 0
    for topic in topics:
        start = {TopicPartition(topic, p): 0 for p in await log.begin_offsets(topic)}
        ends = await log.end_offsets(topic)
        reader = await log.reader(start)
        while any(reader.position(where) < ends[where.partition] for where in start):
            total += sum(len(record.value or b"") for record in await reader.poll(timeout_s=1.0))
        await reader.close()
    return total


async def one_pass(groups: list, num_workers: int, steps_per_s: float | None) -> dict[str, float]:
    """One run of the pipeline on a fresh workspace: throughput, CPU seconds, latencies, bytes."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedBroker(Path(folder)) as broker:
        kafka = broker.kafka
        workspace = Path(folder)
        async with KafkaLog(kafka) as log:
            await log.ensure_topics(num_partitions=PARTITIONS)
            store = ArtifactStore(str(workspace / "artifacts"))
            workers = start_workers(kafka, workspace, num_workers)
            try:
                await wait_ready(workspace, num_workers)
                await start_run(log, store, len(groups))
                await asyncio.sleep(1)
                planned: dict[int, float] = {}
                cpu = sum(cpu_seconds(worker.pid) for worker in workers)
                reader = await log.reader({TopicPartition("batches", 0): 0})
                async with producer(kafka) as client:
                    begun = time.perf_counter()
                    watching = asyncio.create_task(manifests(reader, len(groups), planned))
                    acknowledged = await send_groups(client, groups, steps_per_s=steps_per_s)
                    await watching
                result = figures(groups, begun, acknowledged, planned)
                result["worker_cpu_s"] = sum(cpu_seconds(worker.pid) for worker in workers) - cpu
                steps = await topic_bytes(log, ("steps",))
                result["bytes_ratio"] = (steps + await topic_bytes(log, ("trajectories", "groups", "batches"))) / steps
                await log.send(RunEnded(run_id=RUN, time_ms=0, cause="completed"))
            finally:
                stop(workers)
    return result


def figures(groups: list, begun: float, acknowledged: dict, planned: dict) -> dict[str, float]:
    """Throughput, and latency from the acknowledged RolloutEnded that completes a batch to its manifest."""
    seconds = max(planned.values()) - begun
    batches: dict[float, float] = {}
    for index, at in planned.items():
        batches[at] = max(batches.get(at, 0.0), acknowledged[index])
    waits = sorted(at - last for at, last in batches.items())
    return {
        "steps_per_s": len(groups) * STEPS_PER_GROUP / seconds,
        "groups_per_s": len(groups) / seconds,
        "p50_ms": 1000 * statistics.median(waits),
        "p99_ms": 1000 * waits[min(len(waits) - 1, int(0.99 * len(waits)))],
    }


def cpu_seconds(pid: int) -> float:
    """User and system seconds of a process so far."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def stop(workers: list[subprocess.Popen]) -> None:
    """SIGTERM, then SIGKILL after 15 seconds."""
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            worker.send_signal(signal.SIGTERM)
    for worker in workers:
        try:
            worker.wait(15)
        except subprocess.TimeoutExpired:
            worker.kill()


async def limit_pass(groups: list) -> float:
    """The raw limit on a fresh broker."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedBroker(Path(folder)) as broker:
        kafka = broker.kafka
        async with KafkaLog(kafka) as log:
            await log.ensure_topics(num_partitions=PARTITIONS)
        return await raw_limit(kafka, groups)


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """Median of every figure."""
    return {name: round(statistics.median(row[name] for row in rows), 2) for name in rows[0]}


def main() -> None:
    """Interleave limit and passes, print and keep the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args()
    groups = encoded_groups(args.groups)
    limits: list[float] = []
    full: dict[int, list[dict[str, float]]] = {count: [] for count in args.workers}
    half: list[dict[str, float]] = []
    for _ in range(args.repeats):
        limits.append(asyncio.run(limit_pass(groups)))
        for count in args.workers:
            full[count].append(asyncio.run(one_pass(groups, count, None)))
        rate = full[args.workers[0]][-1]["steps_per_s"] / 2
        half.append(asyncio.run(one_pass(groups, args.workers[0], rate)))
    report = {
        "cores": os.cpu_count(),
        "groups": args.groups,
        "steps": args.groups * STEPS_PER_GROUP,
        "raw_aiokafka_steps_per_s": round(statistics.median(limits)),
        "pipeline": {f"{count} workers": medians(rows) for count, rows in full.items()},
        "half_load": medians(half),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if args.output:
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
