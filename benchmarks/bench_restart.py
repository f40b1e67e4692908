"""Start-to-ready and memory of every service by the length of the log; restarts and rebalances while work flows.

    python benchmarks/bench_restart.py --rollouts 10000 100000 1000000 --changes 20 --output bench.json

The log has ended runs of 4,096 rollouts and, between them, one open run with a tenth of all rollouts. A start of
processors counts from the new process to the first manifest that is planned after it, a rebalance is the longest pause
between two manifests after a worker has come or gone; half of the starts follow a SIGKILL, so that the group first
waits for the dead member's session.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

import history
import orjson
import psutil
from bench_pipeline import producer

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.broker.broker import EmbeddedBroker
from rollstream.eventlog.broker.credentials import environment
from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.eventlog.log import TopicPartition, partition_of
from rollstream.schemas.events import BatchPlanned, EpochSealed
from rollstream.schemas.kafka import KafkaSettings
from rollstream.schemas.topics import TOPICS

PARTITIONS = 6
PROCESSORS, PRODUCERS = "rollstream-processors", "rollstream-producers"
"""Consumer groups."""
RUN_EPOCHS = 8
RUN_ROLLOUTS = RUN_EPOCHS * history.EPOCH_GROUPS * 8
OPEN_SHARE = 0.1
GROUPS_PER_S = 40.0
SESSION_S = 6.0
UP_WITHIN_S = 90.0
END_WITHIN_S = 40.0
WATCH_S = 6.0
SERVICES = {
    "processors": {"session_timeout_s": SESSION_S},
    "producers": {"engine": {"kind": "scripted"}},
    "learner": {},
    "metrics": {},
    "endpoint": {"engine": {"kind": "scripted"}, "model_group": f"{history.OPEN}/policy"},
}


class Service:
    """A service process, as `rollstream serve` starts it."""

    def __init__(self, kind: str, kafka: KafkaSettings, workspace: Path, name: str) -> None:
        self.kind, self.path = kind, workspace / f"{name}.log"
        settings = workspace / f"{name}.settings"
        settings.write_bytes(orjson.dumps(SERVICES[kind]))
        command = [sys.executable, "-m", "rollstream.harness.cli.main", "serve", kind, "--name", name]
        env = os.environ | {
            **environment(kafka),
            "ROLLSTREAM_ARTIFACT_URI": str(workspace / "artifacts"),
            "ROLLSTREAM_WORKSPACE": str(workspace),
            "ROLLSTREAM_NUM_PARTITIONS": str(PARTITIONS),
        }
        self.begun = time.perf_counter()
        with self.path.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, "--settings", str(settings)], stdout=output, stderr=subprocess.STDOUT, env=env
            )

    async def ready(self) -> float:
        """Seconds until its log says ready."""
        while b"ready" not in self.path.read_bytes():
            self.check()
            if time.perf_counter() > self.begun + 600:
                raise SystemExit(f"{self.kind} is not ready:\n{self.path.read_text()[-2000:]}")
            await asyncio.sleep(0.05)
        return time.perf_counter() - self.begun

    def check(self) -> None:
        """End the benchmark if the process has ended."""
        if self.process.poll() is not None:
            raise SystemExit(f"{self.kind} ended with {self.process.returncode}:\n{self.path.read_text()[-2000:]}")

    @property
    def rss_mb(self) -> float:
        """Resident memory."""
        return psutil.Process(self.process.pid).memory_info().rss / 2**20

    async def end(self, number: int = signal.SIGTERM) -> None:
        """Signal it and wait until it is gone."""
        self.process.send_signal(number)
        try:
            await asyncio.to_thread(self.process.wait, END_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.process.kill()  # a projector in the middle of a long catch-up
            await asyncio.to_thread(self.process.wait)


class Flow:
    """The open run's work: groups at a steady rate, epoch after epoch, and the times at which manifests appear."""

    def __init__(self, log: KafkaLog, epoch: int, batches_end: int) -> None:
        self.planned: list[float] = []
        self._log, self._epoch, self._from = log, epoch, batches_end
        self._sealed = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled."""
        await asyncio.gather(self._work(), self._watch())

    async def _work(self) -> None:
        due = time.perf_counter()
        while True:
            await self._log.send(history.epoch_started(history.OPEN, self._epoch))
            self._sealed.clear()
            for index in range(history.EPOCH_GROUPS):
                events = list(history.group_steps(history.OPEN, self._epoch, index))
                partition = partition_of(events[0].key, PARTITIONS)
                await asyncio.gather(*(self._log.send(one, partition=partition) for one in events))
                due = max(due + 1 / GROUPS_PER_S, time.perf_counter() - 1.0)
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await self._sealed.wait()
            self._epoch += 1

    async def _watch(self) -> None:
        reader = await self._log.reader({TopicPartition("batches", 0): self._from})
        seen: set[str] = set()
        while True:
            for record in await reader.poll(timeout_s=1.0):
                event = codec.decode(record).event
                if event.event_id in seen:
                    continue
                seen.add(event.event_id)
                if isinstance(event, BatchPlanned):
                    self.planned.append(time.perf_counter())
                elif isinstance(event, EpochSealed) and event.epoch == self._epoch:
                    self._sealed.set()

    async def next_after(self, moment: float, within_s: float) -> float | None:
        """Seconds from a moment to the first manifest after it; None if none comes in time."""
        while time.perf_counter() < moment + within_s:
            after = [at for at in self.planned[-1000:] if at > moment]
            if after:
                return after[0] - moment
            await asyncio.sleep(0.02)
        return None


async def fill(
    log: KafkaLog, kafka: KafkaSettings, store: ArtifactStore, rollouts: int, topics: Collection[str]
) -> int:
    """A log of so many rollouts with every group's commits at its end; the open run's next epoch."""
    lines = b"\n".join(
        orjson.dumps({"example_id": name, "inputs": inputs}) for name, inputs in history.EXAMPLES.items()
    )
    dataset = store.put_bytes(lines, ".jsonl")
    ended = max(1, round(rollouts * (1 - OPEN_SHARE) / RUN_ROLLOUTS))
    epochs = max(1, round(rollouts * OPEN_SHARE / (history.EPOCH_GROUPS * 8)))
    template = history.lines_of(
        topics, history.run_events(history.TEMPLATE, RUN_EPOCHS, dataset, PARTITIONS, ends=True)
    )
    opened = iter(history.lines_of(topics, history.run_events(history.OPEN, epochs, dataset, PARTITIONS, ends=False)))
    share = -(-epochs * len(template) // RUN_EPOCHS // ended)
    async with producer(kafka) as client:
        for number in range(ended):
            some = [line for _, line in zip(range(share), opened, strict=False)]
            await history.send(client, iter(some), PARTITIONS)
            await history.send(client, history.renamed(template, number), PARTITIONS)
        await history.send(client, opened, PARTITIONS)
    ends = {topic: await log.end_offsets(topic) for topic in ("tasks", "steps", "groups")}
    metadata = json.dumps({"v": 1, "begin": 0, "runs": {history.OPEN: {}}})
    at_end = {("steps", n): (end, "") for n, end in ends["steps"].items()}
    await history.commit(kafka, PROCESSORS, at_end | {("groups", 0): (ends["groups"][0], metadata)})
    metadata = {n: json.dumps({"steps": end}) for n, end in ends["steps"].items()}
    await history.commit(kafka, PRODUCERS, {("tasks", n): (end, metadata[n]) for n, end in ends["tasks"].items()})
    return epochs


async def starts_of_services(kafka: KafkaSettings, workspace: Path, kinds: Collection[str]) -> dict[str, float]:
    """Seconds from start to ready of every service by itself, and its memory some seconds later.

    Each is started twice: the first start finds nothing in the workspace, the second what the first one kept there.
    """
    found: dict[str, float] = {}
    for kind in kinds:
        for start in ("first", "ready"):
            service = Service(kind, kafka, workspace, f"{kind}-1")
            found[f"{kind}_{start}_s"] = round(await service.ready(), 2)
            await asyncio.sleep(3)
            service.check()
            found[f"{kind}_rss_mb"] = round(service.rss_mb, 1)
            await service.end()
    return found


async def restarts(kafka: KafkaSettings, workspace: Path, flow: Flow, changes: int) -> list[float | None]:
    """Seconds from each start of the only worker to its first manifest."""
    seconds: list[float | None] = []
    for number in range(changes):
        worker = Service("processors", kafka, workspace, "worker-1")
        seconds.append(await flow.next_after(worker.begun, UP_WITHIN_S))
        await asyncio.sleep(1)
        worker.check()
        await worker.end(signal.SIGKILL if number % 2 else signal.SIGTERM)
    return seconds


async def rebalances(kafka: KafkaSettings, workspace: Path, flow: Flow, changes: int) -> list[float | None]:
    """The longest pause between manifests after each coming or going of a second worker."""
    stays, comes = Service("processors", kafka, workspace, "worker-1"), None
    await flow.next_after(stays.begun, UP_WITHIN_S)
    pauses: list[float | None] = []
    for _ in range(changes):
        moment = time.perf_counter()
        if comes is None:
            comes = Service("processors", kafka, workspace, "worker-2")
            await comes.ready()
        else:
            await comes.end()
            comes = None
        await asyncio.sleep(WATCH_S)
        is_up = await flow.next_after(time.perf_counter(), UP_WITHIN_S) is not None
        stays.check()
        times = [moment, *[at for at in flow.planned if at > moment]]
        gaps = [after - before for before, after in itertools.pairwise(times)]
        pauses.append(max(gaps) if is_up else None)
    for worker in (stays, comes):
        if worker is not None:
            await worker.end()
    return pauses


def summary(name: str, seconds: list[float | None]) -> dict[str, object]:
    """Number of starts that succeeded, with median and maximum of their times."""
    up = [one for one in seconds if one is not None]
    found: dict[str, object] = {f"{name}_up": f"{len(up)} of {len(seconds)}"}
    if up:
        found |= {f"{name}_median_s": round(statistics.median(up), 2), f"{name}_max_s": round(max(up), 2)}
    return found


async def measure(
    workspace: Path, kafka: KafkaSettings, rollouts: int, options: argparse.Namespace
) -> dict[str, object]:
    """One log: every service's start, then restarts and rebalances of processors while work flows."""
    async with KafkaLog(kafka) as log:
        await log.ensure_topics(num_partitions=PARTITIONS)
        begun = time.perf_counter()
        epoch = await fill(log, kafka, ArtifactStore(str(workspace / "artifacts")), rollouts, options.topics)
        groups = (await log.end_offsets("groups"))[0]
        found: dict[str, object] = {"rollouts": rollouts, "records_of_groups": groups}
        found["fill_s"] = round(time.perf_counter() - begun, 1)
        found |= await starts_of_services(kafka, workspace, options.services)
        flow = Flow(log, epoch, (await log.end_offsets("batches"))[0])
        working = asyncio.create_task(flow.run())
        found |= summary("starts", await restarts(kafka, workspace, flow, options.changes))
        found |= summary("rebalances", await rebalances(kafka, workspace, flow, options.changes))
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working
    return found


def main() -> None:
    """Print and keep the figures, one row a length of the log."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--changes", type=int, default=6, help="starts, and as many rebalances")
    parser.add_argument("--services", nargs="*", default=list(SERVICES), help="whose starts are measured")
    parser.add_argument("--topics", nargs="+", default=list(TOPICS), help="what the recorded runs leave in the log")
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    rows = []
    for rollouts in arguments.rollouts:
        with tempfile.TemporaryDirectory() as folder, EmbeddedBroker(Path(folder)) as broker:
            row = asyncio.run(measure(Path(folder), broker.kafka, rollouts, arguments))
        print(json.dumps(row, indent=2), flush=True)
        rows.append(row)
    if arguments.output:
        arguments.output.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
