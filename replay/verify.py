"""`replay --verify`: every stage's recorded input folded again, every digest compared. Writes nothing."""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import Position, ReadableLog, Received, Record, format_position
from rollstream.eventlog.reading import read_to_end
from rollstream.processors.curate import fold as curate
from rollstream.processors.curate.candidates import mean
from rollstream.processors.curate.tasks import Dataset, load_dataset
from rollstream.processors.host.folding import FaultyRuns
from rollstream.replay import assembly, weights
from rollstream.replay.report import MISSING, Report, first_field
from rollstream.replay.source import RunEvents, Source, of_type
from rollstream.schemas import ids
from rollstream.schemas.base import Event, Locator
from rollstream.schemas.errors import ConfigError, DecodeError, first_error
from rollstream.schemas.events import (
    BatchPlanned,
    EpochSealed,
    EpochStarted,
    GroupClosed,
    JobStarted,
    RunEnded,
    RunStarted,
    TaskCancelled,
    TaskRequested,
)

OnProgress = Callable[[str], None]


async def verify(
    log: ReadableLog,
    events: RunEvents,
    artifacts: ArtifactStore,
    *,
    epoch: int | None = None,
    checkpoints: Path | None = None,
    has_checkpoints: bool = False,
    source: Source | None = None,
    workers: int = 1,
    on_progress: OnProgress = lambda _: None,
) -> Report:
    """Fold assembly and curation again and hold trajectories, manifests, weights and checkpoints against the record.

    `epoch`: steps and trajectories of this epoch only; what is small is verified whole. `checkpoints`: the folder that
    holds a folder a model group; `has_checkpoints`: the run was trained there. `source`: for `workers` processes that
    open the log for themselves. Raises TruncatedError if something is no longer kept, ArtifactError if
    the dataset is gone.
    """
    report = Report()
    groups = of_type(events.by_topic.get("groups", ()), GroupClosed)
    batches = of_type(events.by_topic.get("batches", ()), BatchPlanned)
    if epoch is not None:
        groups = [one for one in groups if one[0].epoch == epoch]
        batches = [one for one in batches if one[0].epoch == epoch]
        if not groups and not batches:
            raise ConfigError(f"run {events.run_id} has closed no group of epoch {epoch}; give another --epoch")
    parts = assembly.ranges(events.run_id, (event for event, _ in groups), events.dead)
    on_progress(f"assembly: {len(groups)} groups in {len(parts)} partitions")
    if source is not None and workers > 1 and len(parts) > 1:
        try:
            async with asyncio.TaskGroup() as both:
                folding = both.create_task(assembly.fold_in_processes(source, parts, workers, on_progress))
                comparing = both.create_task(_compare_others(log, events, artifacts, groups, batches, on_progress))
        except BaseExceptionGroup as failed:
            raise first_error(failed) from failed
        folded, others = folding.result(), comparing.result()
    else:
        folded = [await assembly.fold(log, part) for part in parts]
        others = await _compare_others(log, events, artifacts, groups, batches, on_progress)
    tasks = {task.group_id: task for task, _ in of_type(events.by_topic.get("tasks", ()), TaskRequested)}
    assembly.compare(groups, folded, report, tasks)
    weights.compare_sampled(events, {name: by for part in folded for name, by in part.versions.items()}, report)
    report.add(others)
    on_progress("weights and checkpoints")
    await weights.compare(log, events, artifacts, checkpoints, report, has_checkpoints=has_checkpoints)
    await weights.compare_scores(log, events, report)
    return report


async def _compare_others(
    log: ReadableLog,
    events: RunEvents,
    artifacts: ArtifactStore,
    groups: list[tuple[GroupClosed, Received]],
    batches: list[tuple[BatchPlanned, Received]],
    on_progress: OnProgress,
) -> Report:
    """Curation and trajectories, which do not wait for assembly."""
    report = Report()
    on_progress("curation")
    if events.started.is_what_if:  # its manifests are of its parent's groups
        compare_seals(events, report)
    else:
        compare_curation(events, {events.run_id: dataset_of(events, artifacts)}, report)
    on_progress("trajectories and manifests")
    await compare_trajectories(log, groups, batches, report)
    return report


def compare_curation(events: RunEvents, datasets: curate.Datasets, report: Report) -> None:
    """Fold the run's records of `groups` again and hold requests, manifests, rejections and seals against the record.

    Records that an open run has not sent yet are not a difference; those that an ended run lacks are, except
    answers to its end: after a `stop` nobody may have been there to give them.
    """
    made, at_the_end = _curated(events, datasets)
    for event_id, event in made.items():
        report.count("curated events")
        recorded = events.by_id.get(event_id)
        if recorded is None:
            if event_id in at_the_end:
                report.count("answers to the run's end that are not sent yet")
            elif events.has_ended and not isinstance(event, RunEnded):
                what = f"{event_id} in {events.held(event.TOPIC)}"
                report.differ("curate", what, MISSING, codec.content_digest(event))
        elif recorded.digest != codec.content_digest(event) and not isinstance(event, RunEnded):
            path, ours, theirs = first_field(recorded.event, event)
            report.differ("curate", f"{event_id}: {path}", ours, theirs)
    of_harness = _groups_of_harness(events)
    for received in [*events.by_topic.get("batches", ()), *events.by_topic.get("tasks", ())]:
        if received.event.event_id in made:
            continue
        if isinstance(received.event, TaskRequested | TaskCancelled) and received.event.group_id in of_harness:
            report.count("task records that the harness wrote")
        else:
            report.differ("curate", received.event.event_id, received.digest, MISSING)


def compare_seals(events: RunEvents, report: Report) -> None:
    """Hold seals against the manifests before them, as far as these determine them, without folding any groups."""
    num_before: dict[str, int] = {}
    means: dict[tuple[str, int], list[list[float]]] = {}
    newest: dict[str, EpochSealed] = {}
    for received in events.by_topic.get("batches", ()):
        match received.event:
            case BatchPlanned() as planned:
                num_before[planned.job_id] = num_before.get(planned.job_id, 0) + 1
                if planned.adopts is None:
                    means.setdefault((planned.job_id, planned.epoch), []).append(_group_means(planned))
            case EpochSealed() as seal:
                newest[seal.job_id] = seal
                of_epoch = means.get((seal.job_id, seal.epoch), [])
                trained = [reward for of_manifest in of_epoch for reward in of_manifest]
                follows = {
                    "num_trained_groups": len(trained),
                    "num_batches": len(of_epoch),
                    "next_batch_index": num_before.get(seal.job_id, 0),
                    "filtered_avg_reward": mean(trained) if trained else None,
                }
                _compare_seal(seal, follows, report)
            case _:
                pass
    for job_id, seal in newest.items():
        if ids.event_id("job_submitted", job_id) in events.by_id:  # it is sent when all seals are
            _compare_seal(seal, {"is_last": True}, report)


def _compare_seal(seal: EpochSealed, follows: dict[str, int | float | None], report: Report) -> None:
    report.count("fields of seals", len(follows))
    for name, value in follows.items():
        if getattr(seal, name) != value:
            report.differ("curate", f"{seal.event_id}: {name}", str(getattr(seal, name)), str(value))


def _group_means(planned: BatchPlanned) -> list[float]:
    """Mean reward of each group of a manifest."""
    groups = itertools.groupby(planned.members, key=lambda member: member.group_id)
    return [mean([member.reward for member in members]) for _, members in groups]


def _groups_of_harness(events: RunEvents) -> set[str]:
    """Groups whose tasks the harness asked for itself: validation, and those of jobs that submissions decide."""
    jobs = of_type(events.by_topic.get("groups", ()), JobStarted)
    submitted = {job.job_id for job, _ in jobs if job.plan.planning == "submitted"}
    tasks = of_type(events.by_topic.get("tasks", ()), TaskRequested)
    return {task.group_id for task, _ in tasks if task.purpose == "validation" or task.job_id in submitted}


def _curated(events: RunEvents, datasets: curate.Datasets) -> tuple[dict[str, Event], set[str]]:
    """Events that curation derives again, by event id, and the ids of those that answer the run's end."""
    state, faulty = curate.initial(), FaultyRuns()
    if events.refused_at is not None:
        state.refused[events.run_id] = events.refused_at
    poison = deque(received.position.offset for received in events.poison)
    made: dict[str, Event] = {}
    at_the_end: set[str] = set()
    for received in events.by_topic.get("groups", ()):
        while poison and poison[0] < received.position.offset:
            faulty.add(events.run_id)
            poison.popleft()
        if faulty.passes_over(received.event):
            continue
        if isinstance(received.event, RunStarted):
            faulty.begin(events.run_id)
        if isinstance(received.event, RunEnded):
            faulty.end(events.run_id)
        for event in curate.evolve(state, received, datasets):
            made.setdefault(event.event_id, event)
            if isinstance(received.event, RunEnded):
                at_the_end.add(event.event_id)
    return made, at_the_end


async def compare_trajectories(
    log: ReadableLog,
    groups: list[tuple[GroupClosed, Received]],
    batches: list[tuple[BatchPlanned, Received]],
    report: Report,
) -> None:
    """Compare the record at every locator of a closed group or a manifest with the digest named there."""
    wanted: dict[tuple[int, int], list[tuple[str, str, str]]] = {}
    for event, _ in groups:
        _want(wanted, event.event_id, event.locators, ((m.trajectory_id, m.digest) for m in event.members))
    for event, _ in batches:
        _want(wanted, event.event_id, event.locators, ((m.trajectory_id, m.digest) for m in event.members))
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    present = await log.end_offsets("trajectories")
    for partition, offset in wanted:
        if partition not in present:
            continue
        starts[partition] = min(starts.get(partition, offset), offset)
        ends[partition] = max(ends.get(partition, 0), offset + 1)
    if starts:
        async for record in read_to_end(log, "trajectories", starts, ends):
            named = wanted.pop((record.partition, record.offset), None)
            if named is not None:
                _compare_record(record, named, report)
    for (partition, offset), named in wanted.items():
        where = Position("trajectories", partition, offset)
        report.differ("trajectories", f"{named[0][1]} at {format_position(where)}", named[0][2], MISSING)


def _compare_record(record: Record, named: list[tuple[str, str, str]], report: Report) -> None:
    """Hold one record against everything that names it: the name's source, trajectory and digest."""
    report.count("trajectories")
    try:
        found = codec.decode(record)
    except DecodeError as error:
        report.differ("trajectories", f"{named[0][1]} at {format_position(record.position)}", "an event", str(error))
        return
    for by, trajectory_id, digest in named:
        if (found.event.event_id, found.digest) != (ids.event_id("trajectory_assembled", trajectory_id), digest):
            what = f"{trajectory_id} at {format_position(record.position)}, named by {by}"
            report.differ("trajectories", what, digest, f"{found.event.event_id} {found.digest}")


def _want(
    wanted: dict[tuple[int, int], list[tuple[str, str, str]]],
    by: str,
    locators: tuple[Locator, ...],
    members: Iterable[tuple[str, str]],
) -> None:
    for locator, (trajectory_id, digest) in zip(locators, members, strict=False):
        wanted.setdefault((locator.partition, locator.offset), []).append((by, trajectory_id, digest))


def dataset_of(events: RunEvents, artifacts: ArtifactStore) -> Dataset:
    """Inputs by example id; empty if no epoch began. Raises ArtifactError."""
    has_begun = any(isinstance(one.event, EpochStarted) for one in events.by_topic.get("groups", ()))
    return load_dataset(artifacts, events.started) if has_begun else {}
