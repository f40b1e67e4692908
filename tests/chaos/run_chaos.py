"""Real chaos: real processes on a real broker are killed in the middle of a workload; the oracle judges what is left.

    python -m tests.chaos.run_chaos [--steps 100000] [--seed 0] [--kills 3] [--workers 2] [--no-failpoints]

Prints seed and schedule first, then every kill, then what came of it; exits 1 if anything is missing, doubled or
different.
"""

import argparse
import asyncio
import logging
import random
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from rollstream.eventlog.failpoints import FAILPOINTS
from rollstream.eventlog.log import TopicPartition
from rollstream.metrics.projection.connection import metrics_file
from rollstream.metrics.projection.database import Database
from rollstream.metrics.projection.projector import Projector
from rollstream.schemas.topics import TOPICS
from tests.chaos import chaos_workload
from tests.chaos.chaos_compare import Comparison, compare, read_all
from tests.chaos.chaos_oracle import Expected, expect
from tests.chaos.chaos_workload import PARTITIONS, Line, Workload
from tests.chaos.cluster import PROBE, Cluster, Feeder, patiently

FIRST, LAST = 0.2, 0.85
"""Share of the records that are committed before the first and the last fault."""
AHEAD = 0.12
"""Share of the records that are written beyond a fault's place."""
RESUME_TIMEOUT_S = 120.0
DONE_TIMEOUT_S = 600.0
MAX_HIT = 3


@dataclass(frozen=True)
class Fault:
    """One kill: by whom or where, and after which share of the records."""

    share: float
    victim: str
    """A service, `broker`, or a failpoint."""
    hit: int = 0
    """Hit of the failpoint; 0 for a kill from outside."""

    def __str__(self) -> str:
        return f"at {self.share:.0%} {self.victim}" + (f" (hit {self.hit})" if self.hit else "")


@dataclass
class Outcome:
    """Result of a run of chaos."""

    comparison: Comparison
    resume_s: dict[str, list[float]] = field(default_factory=dict)
    num_kills: int = 0
    metrics_problems: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        return self.comparison.problems + self.metrics_problems


def schedule(seed: int, *, kills: int, workers: int, with_failpoints: bool) -> list[Fault]:
    """The faults by the share at which they come; the seed alone decides."""
    rng = random.Random(seed)
    victims = [f"processors-{number + 1}" for number in range(workers)] + ["metrics-1"]
    planned = [(victim, 0) for victim in victims for _ in range(kills)] + [("broker", 0)]
    if with_failpoints:
        ours = [name for name in FAILPOINTS if name.startswith(("assemble/", "curate/", "metrics/"))]
        planned += [(name, rng.randint(1, MAX_HIT)) for name in ours]
    rng.shuffle(planned)
    pace = (LAST - FIRST) / max(1, len(planned) - 1)
    return [Fault(FIRST + number * pace, *one) for number, one in enumerate(planned)]


async def run(workspace: Path, workload: Workload, faults: list[Fault], *, workers: int) -> Outcome:
    """Feed the workload, do the faults, wait for the end, and compare."""
    cluster = Cluster(workspace, workers=workers)
    outcome = Outcome(Comparison())
    feeding = None
    try:
        await cluster.start()
        await cluster.log.send_all(workload.run_events(cluster.store))
        feeder = Feeder(cluster.log, workload)
        feeding = asyncio.create_task(feeder.run())
        for number, fault in enumerate(faults):
            feeder.share = max(feeder.share, fault.share + AHEAD)
            await _wait_until(cluster, feeder, workload, fault.share)
            feeder.share = max(feeder.share, faults[number + 1].share + AHEAD if faults[number + 1 :] else 1.0)
            seconds = await _strike(cluster, feeder, fault)
            outcome.num_kills += 1
            outcome.resume_s.setdefault(fault.victim, []).append(seconds)
            cluster.supervisor.progressed()
            print(f"killed {fault}: resumed after {seconds:.1f} s", flush=True)
        feeder.share = 1.0
        await feeding
        await _until_done(cluster)
        await cluster.stop()
        expected = expect(await _as_written(cluster, workload))
        outcome.comparison = await compare(cluster.log, workload, expected)
        outcome.metrics_problems = await _metrics_problems(cluster, expected)
    finally:
        if feeding is not None:
            feeding.cancel()
        await cluster.close()
    return outcome


async def _wait_until(cluster: Cluster, feeder: Feeder, workload: Workload, share: float) -> None:
    """Until so much is committed; a group that stays open may hold that up, then more is written."""
    still_since, before = time.monotonic(), -1
    while True:
        cluster.check()
        committed = sum((await patiently(cluster.committed)).values())
        if committed >= share * workload.num_records:
            return
        if committed != before or not feeder.is_waiting:
            still_since, before = time.monotonic(), committed
        elif time.monotonic() - still_since > 3:
            feeder.share += 0.05
            still_since = time.monotonic()
        await asyncio.sleep(0.2)


async def _strike(cluster: Cluster, feeder: Feeder, fault: Fault) -> float:
    """Kill; seconds until what is written to every partition after that has been read, or projected."""
    letters = (await cluster.log.end_offsets("dlq"))[0]
    began = time.monotonic()
    if fault.hit:
        await cluster.kill_at(fault.victim, fault.hit, lambda: _nudge(cluster, feeder, fault))
        began = time.monotonic()
    else:
        await cluster.kill(fault.victim)
    probes = await cluster.probe(str(fault))
    ends = await patiently(cluster.num_records)
    while not await patiently(lambda: _has_resumed(cluster, fault, probes, letters, ends)):
        cluster.check()
        if time.monotonic() - began > RESUME_TIMEOUT_S:
            raise TimeoutError(f"{fault}: not resumed after {RESUME_TIMEOUT_S:.0f} s, see {cluster.workspace}/logs")
        await asyncio.sleep(0.1)
    return time.monotonic() - began


async def _nudge(cluster: Cluster, feeder: Feeder, fault: Fault) -> None:
    feeder.share += 0.01
    await cluster.probe(f"{fault}, {feeder.share:.2f}")


async def _has_resumed(cluster: Cluster, fault: Fault, probes: set[bytes], letters: int, ends: int) -> bool:
    if fault.victim.startswith("metrics"):
        return (await asyncio.to_thread(cluster.projected) or 0) >= ends
    return probes <= await cluster.letters(letters)


async def _until_done(cluster: Cluster) -> None:
    async with asyncio.timeout(DONE_TIMEOUT_S):
        while not await patiently(cluster.is_done):
            cluster.check()
            await asyncio.sleep(0.3)


async def _as_written(cluster: Cluster, workload: Workload) -> list[list[Line]]:
    """The lines in the order in which the log has them: a writer that lost its broker may have written one twice."""
    known = {(line.key, line.value): line for lines in workload.partitions for line in lines}
    probe = PROBE.encode()
    written: list[list[Line]] = [[] for _ in range(PARTITIONS)]
    for record in await read_all(cluster.log, "steps"):
        assert record.offset == len(written[record.partition])
        is_probe = (record.value or b"").startswith(probe)
        line = Line(record.key, record.value) if is_probe else known[record.key, record.value]
        written[record.partition].append(line)
    for lines, planned in zip(written, workload.partitions, strict=True):
        assert len(lines) >= len(planned)
    return written


async def _metrics_problems(cluster: Cluster, expected: Expected) -> list[str]:
    """Differences between the killed projector's file and an undisturbed projection of the log."""
    path = metrics_file(cluster.workspace)
    again = path.with_name("again.duckdb")
    database = await asyncio.to_thread(Database, again)
    projector = Projector(cluster.log, database)
    projector.stop()
    await projector.run()
    database.close()
    (rows, offsets, attempts), (wanted, _, _) = (
        await asyncio.to_thread(_tables, path),
        await asyncio.to_thread(_tables, again),
    )
    ends = {topic: await cluster.log.end_offsets(topic) for topic in TOPICS}
    at_end = {TopicPartition(topic, number): end for topic in ends for number, end in ends[topic].items() if end}
    problems = [f"metrics: table {name} differs" for name in wanted if rows[name] != wanted[name]]
    if offsets != at_end:
        problems.append(f"metrics: offsets {offsets} are not the ends {at_end}")
    if attempts[0] != attempts[1] or attempts[0] < len(expected.trajectories) / 2:
        problems.append(f"ledger: {attempts[0]} outcomes of {attempts[1]} attempts")
    return problems


def _tables(path: Path) -> tuple[dict, dict, tuple[int, int]]:
    """Rows by table, offsets, and the ledger's rows beside its attempts."""
    database = Database(path)
    try:
        cursor = database.cursor()
        names = cursor.execute("SELECT table_name FROM duckdb_tables() WHERE schema_name = 'log'").fetchall()
        rows = {name: cursor.execute(f'SELECT * FROM log."{name}" ORDER BY ALL').fetchall() for (name,) in names}
        ledger = cursor.execute("SELECT count(*), count(DISTINCT rollout_id) FROM outcomes").fetchone()
        return rows, {where: offset for where, offset in database.offsets().items() if offset}, ledger or (0, 0)
    finally:
        database.close()


def report(workload: Workload, outcome: Outcome) -> None:
    """Print the outcome in a few lines."""
    result = outcome.comparison
    seconds = [one for some in outcome.resume_s.values() for one in some]
    print(f"kills {outcome.num_kills}, events {result.num_events}, {workload.num_records} records of steps")
    print(
        f"missing {len(result.missing)}, doubled after dedup {len(result.doubled)}, different {len(result.different)}"
    )
    print(f"raw duplicates {result.num_repeats} ({result.repeats_percent:.2f} %)")
    print(f"seconds to resume: median {sorted(seconds)[len(seconds) // 2]:.1f}, longest {max(seconds):.1f}")
    for name, some in sorted(outcome.resume_s.items()):
        print(f"  {name}: {', '.join(f'{one:.1f}' for one in some)}")
    for problem in outcome.problems[:20]:
        print(f"PROBLEM {problem}")
    print("chaos: " + ("FAILED" if outcome.problems else "nothing lost, nothing doubled"))


def main() -> int:
    """Run by the arguments; 0 if the oracle has no objection."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000, help="step events (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of workload and schedule (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=3, help="of each process (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processors (default: %(default)s)")
    parser.add_argument("--no-failpoints", action="store_true", help="only kills from outside")
    parser.add_argument("--workspace", type=Path, help="kept; default: a new one, removed if all is well")
    given = parser.parse_args()
    began = time.monotonic()
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # what it says of a broker that is away
    logging.getLogger("rollstream.harness.services.supervisor").setLevel(logging.ERROR)
    faults = schedule(given.seed, kills=given.kills, workers=given.workers, with_failpoints=not given.no_failpoints)
    print(f"seed {given.seed}, {given.steps} step events; schedule:")
    print("\n".join(f"  {fault}" for fault in faults), flush=True)
    workspace = given.workspace or Path(tempfile.mkdtemp(prefix="rollstream-chaos-")) / ".rollstream"
    workload = chaos_workload.make(given.steps, given.seed)
    outcome = asyncio.run(run(workspace, workload, faults, workers=given.workers))
    report(workload, outcome)
    print(f"took {time.monotonic() - began:.0f} s; workspace {workspace}")
    if not outcome.problems and given.workspace is None:
        shutil.rmtree(workspace.parent)
    return 1 if outcome.problems else 0


if __name__ == "__main__":
    sys.exit(main())
