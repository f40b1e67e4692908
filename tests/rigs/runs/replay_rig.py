"""A recorded run to tamper with, and the replays' findings."""

import asyncio
import copy

from rollstream.learner.tiny_model import make_tiny_model
from rollstream.replay.completeness import compare_named
from rollstream.replay.report import Report, compare_log
from rollstream.replay.source import read_run
from rollstream.replay.training import train
from rollstream.replay.verify import verify
from tests.rigs.runs.recorded_run import RecordedRun


def record(folder):
    """A whole run of three epochs."""
    make_tiny_model(folder / "model", seed=0)
    return asyncio.run(RecordedRun(folder, folder / "model").record())


def tampered(recorded):
    """The same run whose log is a copy; its files are not."""
    changed = copy.copy(recorded)
    changed.log = copy.copy(recorded.log)
    changed.log._store = copy.copy(recorded.log._store)
    changed.log._store._partitions = {where: copy.copy(kept) for where, kept in recorded.log._store._partitions.items()}
    for kept in changed.log._store._partitions.values():
        kept.records = list(kept.records)
    return changed


def verified(run, **options):
    async def go():
        events = await read_run(run.log, "replayed")
        report = Report()
        compare_log(events, report)
        report.add(await verify(run.log, events, run.artifacts, checkpoints=run.checkpoints, **options))
        compare_named(events, report)
        return report

    return asyncio.run(go())


def trained(run, **options):
    async def go():
        events = await read_run(run.log, "replayed")
        report = await train(run.log, events, run.artifacts, **options)
        compare_named(events, report)
        return report

    return asyncio.run(go())


def named(run):
    async def go():
        report = Report()
        compare_named(await read_run(run.log, "replayed"), report)
        return report

    return asyncio.run(go())


def only_difference(report):
    assert len(report.differences) >= 1, report.counts
    return str(report.differences[0])
