"""Checks of the results of training: each version has one hash, and its artifact, checkpoints and scores match their
records.
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import quote

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import ReadableLog, Received
from rollstream.eventlog.reading import decode_or_none, read_to_end
from rollstream.learner import retention
from rollstream.learner.checkpoints.checkpoint_files import checkpoints_in, inspect
from rollstream.learner.progress import GroupState, LogState, evolve
from rollstream.learner.reading.members import check_members, fetch_records
from rollstream.learner.retention import WeightNeeds
from rollstream.learner.scoring.index import ScoreAsked, digest_of, scorers_of
from rollstream.replay.report import MISSING, Report
from rollstream.replay.source import RunEvents, of_type
from rollstream.schemas import ids
from rollstream.schemas.errors import ArtifactError, DecodeError
from rollstream.schemas.events import (
    BatchPlanned,
    GroupClosed,
    JobSubmitted,
    ReferenceScored,
    StepTrained,
    TaskRequested,
    WeightsCollected,
    WeightsLoaded,
    WeightsPublished,
)
from rollstream.schemas.settings import EXTERNAL, JobSettings


def log_state(events: RunEvents) -> LogState:
    """State of the run's model groups as a learner would read it; events of void terms do not count."""
    state = LogState()
    for received in (*events.by_topic.get("weights", ()), *events.later.get("weights", ())):
        evolve(state, received)
    return state


def model_groups(events: RunEvents) -> list[str]:
    """Model groups of the run's jobs that a learner trains, in the order of the log."""
    jobs = of_type(events.by_topic.get("jobs", ()), JobSubmitted)
    return list(dict.fromkeys(job.model_group for job, _ in jobs if job.settings.kind != EXTERNAL))


def versions_used(events: RunEvents) -> dict[str, dict[int, str]]:
    """Versions that tokens were sampled with or an engine has loaded, each with the id of an event that shows it, by
    model group.
    """
    used: dict[str, dict[int, str]] = {}
    for loaded, _ in of_type(events.by_topic.get("weights", ()), WeightsLoaded):
        used.setdefault(loaded.model_group, {}).setdefault(loaded.version, loaded.event_id)
    for closed, _ in of_type(events.by_topic.get("groups", ()), GroupClosed):
        task = events.by_id.get(ids.event_id("task_requested", closed.group_id))
        if task is None or not isinstance(task.event, TaskRequested) or closed.policy != "model":
            continue
        for member in closed.members:
            model_group = task.event.settings.agents.get(member.agent)
            if model_group is not None and member.num_completion_tokens:
                used.setdefault(model_group, {}).setdefault(member.max_version, closed.event_id)
    return used


async def compare(
    log: ReadableLog,
    events: RunEvents,
    artifacts: ArtifactStore,
    checkpoints: Path | None,
    report: Report,
    *,
    has_checkpoints: bool = False,
) -> None:
    """Hold versions, artifacts and checkpoint files against the record.

    Artifacts that were collected are only counted, and so are those that are gone without a record of it, unless they
    are of versions that every collection keeps. An export (`checkpoints` is None) need not hold those either. A learner
    that goes on may have collected them since the log was read; the log has the record before the file is removed.
    `has_checkpoints`: the run was trained where `checkpoints` is, so all are there that no pruning removes.
    """
    state, needs = log_state(events), _needs(events)
    collected = _collected(events.by_topic.get("weights", ()))
    gone: dict[tuple[str, int], WeightsPublished] = {}
    for name in model_groups(events):
        group = state.group(name)
        _versions(name, group, report)
        _origins(events, name, group, report)
        for version, published in sorted(group.published.items()):
            if (name, version) in collected:
                report.count("artifacts collected")
            elif _is_gone(f"{name} v{version}", published, artifacts, report):
                gone[name, version] = published
        if checkpoints is not None:
            folder = checkpoints / quote(name, safe="")
            _checkpoints(events, name, group, folder, report)
            if has_checkpoints:
                _kept_checkpoints(events, name, folder, report)
    since = _collected(await _weights_since(log, events)) if gone else set[tuple[str, int]]()
    for (name, version), published in gone.items():
        if (name, version) in since:
            report.count("artifacts collected")
        elif checkpoints is not None and version in needs.group(name).kept(()):
            missing = f"{MISSING}: the file is gone, and no collection removes it"
            what = f"{name} v{version}, artifact {published.artifact.uri}"
            report.differ("weights", what, published.artifact.sha256, missing)
        else:
            report.count("artifacts gone")


async def compare_scores(log: ReadableLog, events: RunEvents, report: Report) -> None:
    """Note steps whose scores are not what they were, or are missing. No model scores anything.

    A manifest's trajectories are read only if its members have other scores than its step names: not all of them need
    be trained. Raises TruncatedError if one is gone.
    """
    state = log_state(events)
    weights = events.by_topic.get("weights", ())
    scored = {received.position.offset: received for _, received in of_type(weights, ReferenceScored)}
    if scored:
        report.count("scores", len(scored))
    for step, _ in of_type(weights, StepTrained):
        group = state.group(step.model_group)
        is_void = not group.counts(step)
        planned = events.by_id.get(ids.event_id("batch_planned", step.batch_id))
        job = events.by_id.get(ids.event_id("job_submitted", step.job_id))
        if is_void or planned is None or job is None:
            continue
        assert isinstance(planned.event, BatchPlanned)
        assert isinstance(job.event, JobSubmitted)
        asked = _may_be_asked(planned.event, job.event, group)
        found = _digest(asked, planned.event, group, scored)
        if found != step.scores_sha256 and asked:
            asked = await _asked(log, planned.event, job.event, asked)
            found = _digest(asked, planned.event, group, scored)
        if found != step.scores_sha256:
            named = f"ReferenceScored of {step.batch_id}, named by {step.event_id}"
            report.differ("weights", named, step.scores_sha256 or MISSING, found or MISSING)


def compare_sampled(events: RunEvents, versions: Mapping[tuple[str, int], str], report: Report) -> None:
    """Note versions that tokens were sampled with and that are not published. `versions`: as `assembly.Folded` has."""
    state, own = log_state(events), set(model_groups(events))
    for (name, version), by in sorted(versions.items()):
        if name in own and version not in state.group(name).published:
            report.differ("weights", ids.version_event("weights_published", name, version), f"named by {by}", MISSING)


def _may_be_asked(planned: BatchPlanned, job: JobSubmitted, group: GroupState) -> list[ScoreAsked]:
    """Scores of all of a manifest's members: those that its step was trained with, and maybe more."""
    base = group.published.get(job.base_version)
    if base is None or planned.adopts is not None:
        return []
    scorers = scorers_of(job.settings, base.weights_sha256)
    return [ScoreAsked(member, scorer) for scorer in scorers for member in range(len(planned.members))]


async def _asked(
    log: ReadableLog, planned: BatchPlanned, job: JobSubmitted, possible: list[ScoreAsked]
) -> list[ScoreAsked]:
    """Those that a manifest's step was trained with; all that are possible if its trajectories do not tell.

    They do not if the algorithm is somebody's own and trains on pairs: its code, which is not run here, chose them.
    """
    from rollstream.learner.scoring.scored_batch import asked_of  # with torch, which few verifications need

    settings = job.settings.algorithm
    if settings.needs.pairs and settings.pair_settings is None:
        return possible
    try:
        trajectories = check_members(planned, await fetch_records(log, planned))
        scorers = list(dict.fromkeys(one.scorer for one in possible))
        return asked_of(settings, scorers, planned, trajectories, job.settings.revision)
    except DecodeError:
        return possible  # the comparison of trajectories has noted it


def _digest(
    asked: Iterable[ScoreAsked], planned: BatchPlanned, group: GroupState, scored: Mapping[int, Received]
) -> str:
    """Digest of the events with those scores; members without one needed none."""
    offsets = [offset for one in asked for offset in group.scores.offsets(one.wanted(planned))]
    return digest_of([scored[offset].digest for offset in offsets if offset in scored])


def _needs(events: RunEvents) -> WeightNeeds:
    """Artifacts that a collection would keep of the run, according to its own records."""
    needs = WeightNeeds()
    for topic in ("groups", "jobs", "weights"):
        for received in events.by_topic.get(topic, ()):
            retention.evolve(needs, received)
    return needs


def _kept_checkpoints(events: RunEvents, name: str, folder: Path, report: Report) -> None:
    """Note checkpoints that no pruning removes and that are gone. Learners may go on while this reads."""
    jobs = [job for job, _ in of_type(events.by_topic.get("jobs", ()), JobSubmitted) if job.model_group == name]
    steps = [step for step, _ in of_type(events.by_topic.get("weights", ()), StepTrained) if step.model_group == name]
    due = {step.version for job in jobs for step in steps if step.job_id == job.job_id and _is_due(job, step)}
    present = [version for version, _ in checkpoints_in(folder)]
    missing = sorted(_unpruned([job.settings for job in jobs], due, present) - set(present))
    if missing and not present:
        report.differ("checkpoints", str(folder), f"checkpoints up to v{missing[-1]}", MISSING)
    for version in missing if present else ():
        report.differ("checkpoints", f"{folder}/v{version:08d}.*", f"the checkpoint of v{version}", MISSING)


def _is_due(job: JobSubmitted, step: StepTrained) -> bool:
    index, settings = step.version - job.base_version, job.settings
    return index % settings.checkpoint_every == 0 or index - step.num_adopted == settings.num_versions


def _unpruned(settings: list[JobSettings], due: set[int], present: list[int]) -> set[int]:
    """Those of the versions due that are among the newest `keep_last` files or that every `keep_every` divides."""
    if not settings:
        return set()
    files = sorted([*present, *due.difference(present)])  # one version may have several files
    newest = files[-min(one.keep_last for one in settings) :]
    return {v for v in due if v in newest or all(v % one.keep_every == 0 for one in settings)}


def _versions(name: str, group: GroupState, report: Report) -> None:
    known = sorted(group.published)
    for before, after in itertools.pairwise(known):
        if after != before + 1:
            report.differ("weights", f"{name} v{before + 1}", MISSING, f"versions up to v{known[-1]}")
    for version, published in group.published.items():
        report.count("versions")
        trained = group.step_of(version) or published
        for what, sha256 in (("StepTrained", trained.weights_sha256), ("artifact", published.artifact.sha256)):
            if sha256 != published.weights_sha256:
                report.differ("weights", f"{name} v{version}, {what}", published.weights_sha256, sha256)


def _origins(events: RunEvents, name: str, group: GroupState, report: Report) -> None:
    """Hold job, manifest and adopted version of a version against its step, those of a base version against its job."""
    origins: dict[int, tuple[str, str | None, int | None]] = {}
    for step, _ in of_type(events.by_topic.get("weights", ()), StepTrained):
        if step.model_group == name and group.counts(step):
            origins.setdefault(step.version, (step.job_id, step.batch_id, step.adopts))
    for job, _ in of_type(events.by_topic.get("jobs", ()), JobSubmitted):
        if job.model_group == name:
            origins.setdefault(job.base_version, (job.job_id, None, None))
    for version, published in sorted(group.published.items()):
        origin = (published.job_id, published.batch_id, published.adopts)
        if version in origins and origin != origins[version]:
            what = f"{published.event_id}: job_id, batch_id, adopts"
            report.differ("weights", what, ", ".join(map(str, origin)), ", ".join(map(str, origins[version])))


def _collected(weights: Iterable[Received]) -> set[tuple[str, int]]:
    """Model group and version of every artifact that a collection removed, or is about to remove."""
    return {
        (event.model_group, version) for event, _ in of_type(weights, WeightsCollected) for version in event.versions
    }


async def _weights_since(log: ReadableLog, events: RunEvents) -> list[Received]:
    """Events in `weights` behind those of `events`, up to its present end."""
    starts = {partition: end for partition, (_, end) in events.kept.get("weights", {}).items()}
    since = [decode_or_none(record) async for record in read_to_end(log, "weights", starts)]
    return [received for received in since if received is not None]


def _is_gone(what: str, published: WeightsPublished, artifacts: ArtifactStore, report: Report) -> bool:
    """Whether there is no file of an artifact; if there is one, hold it against its digest."""
    try:
        artifacts.check(published.artifact)
    except ArtifactError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return True
        report.differ("weights", f"{what}, artifact {published.artifact.uri}", published.artifact.sha256, str(error))
    else:
        report.count("artifacts")
    return False


def _is_ahead(events: RunEvents, group: GroupState, version: int, job_id: str) -> bool:
    """Whether a job's checkpoint may have a version that the log lacks: a learner saves before it publishes.

    It may have been killed in between, or go on while this reads.
    """
    job = events.by_id.get(ids.event_id("job_submitted", job_id))
    base_version = job.event.base_version if job is not None and isinstance(job.event, JobSubmitted) else -1
    of_job = (number for number, published in group.published.items() if published.job_id == job_id)
    newest = max(of_job, default=base_version)
    is_done = ids.event_id("job_succeeded", job_id) in events.by_id
    most = newest + (0 if is_done else 1) if events.has_ended else math.inf
    return newest < version <= most


def _checkpoints(events: RunEvents, name: str, group: GroupState, folder: Path, report: Report) -> None:
    manifests = {
        (event.job_id, event.index): received.digest
        for event, received in of_type(events.by_topic.get("batches", ()), BatchPlanned)
    }
    for _, path in checkpoints_in(folder):
        try:
            found, position = inspect(path)
        except FileNotFoundError:
            continue  # its learner goes on, and has removed it since
        report.count("checkpoints")
        if position is None:
            report.differ("checkpoints", str(path), path.name.split(".")[1], found)
            continue
        step = group.step(position["version"], position["job_id"])
        recorded = None if step is None else step.weights_sha256
        if recorded is None and not _is_ahead(events, group, position["version"], position["job_id"]):
            missing = ids.version_event("step_trained", name, position["version"])
            report.differ("checkpoints", f"{missing}, named by {path}", position["step"]["weights_sha256"], MISSING)
        elif recorded is None:
            report.count("checkpoints that the log does not have yet")
        if recorded not in (None, position["step"]["weights_sha256"]):
            report.differ("checkpoints", f"{path} (weights)", recorded or MISSING, position["step"]["weights_sha256"])
        last = manifests.get((position["job_id"], position["next_index"] - 1))
        if last not in (None, position["previous_sha256"]):
            report.differ("checkpoints", f"{path} (manifest)", str(last), position["previous_sha256"])
