"""What training left: every version's hash said once, its artifact and the checkpoints still what they were."""

import hashlib
import itertools
from pathlib import Path
from urllib.parse import quote

import orjson

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.harness.replay.report import MISSING, Report
from rollstream.harness.replay.source import RunEvents, of_type
from rollstream.learner.progress import GroupState, LogState, evolve
from rollstream.schemas.errors import ArtifactError
from rollstream.schemas.events import BatchPlanned, JobSubmitted, WeightsPublished


def log_state(events: RunEvents) -> LogState:
    """What a learner would know of the run's model groups; events of void terms do not count."""
    state = LogState()
    for received in events.by_topic.get("weights", ()):
        evolve(state, received)
    return state


def model_groups(events: RunEvents) -> list[str]:
    """Model groups of the run's jobs, in the order of the log."""
    jobs = of_type(events.by_topic.get("jobs", ()), JobSubmitted)
    return list(dict.fromkeys(job.model_group for job, _ in jobs))


def compare(events: RunEvents, artifacts: ArtifactStore, checkpoints: Path | None, report: Report) -> None:
    """Hold versions, artifacts and checkpoint files against the record. Artifacts that are gone are only counted."""
    state = log_state(events)
    for name in model_groups(events):
        group = state.group(name)
        _versions(name, group, report)
        for version, published in sorted(group.published.items()):
            _artifact(f"{name} v{version}", published, artifacts, report)
        if checkpoints is not None:
            _checkpoints(events, group, checkpoints / quote(name, safe=""), report)


def _versions(name: str, group: GroupState, report: Report) -> None:
    known = sorted(group.published)
    for before, after in itertools.pairwise(known):
        if after != before + 1:
            report.differ("weights", f"{name} v{before + 1}", MISSING, f"versions up to v{known[-1]}")
    for version, published in group.published.items():
        report.count("versions")
        trained = group.trained.get(version, published.weights_sha256)
        for what, sha256 in (("StepTrained", trained), ("artifact", published.artifact.sha256)):
            if sha256 != published.weights_sha256:
                report.differ("weights", f"{name} v{version}, {what}", published.weights_sha256, sha256)


def _artifact(what: str, published: WeightsPublished, artifacts: ArtifactStore, report: Report) -> None:
    try:
        artifacts.read(published.artifact)
    except ArtifactError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            report.count("artifacts gone")
        else:
            report.differ(
                "weights", f"{what}, artifact {published.artifact.uri}", published.artifact.sha256, str(error)
            )
    else:
        report.count("artifacts")


def _checkpoints(events: RunEvents, group: GroupState, folder: Path, report: Report) -> None:
    manifests = {
        (event.job_id, event.index): received.digest
        for event, received in of_type(events.by_topic.get("batches", ()), BatchPlanned)
    }
    for path in sorted(folder.glob("v*.safetensors")):
        report.count("checkpoints")
        data = path.read_bytes()
        found = hashlib.sha256(data).hexdigest()
        named = path.name.split(".")[1]
        if found != named:
            report.differ("checkpoints", str(path), named, found)
            continue
        position = orjson.loads(
            orjson.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["position"]
        )
        recorded = group.trained.get(position["version"])
        if recorded not in (None, position["step"]["weights_sha256"]):
            report.differ("checkpoints", f"{path} (weights)", str(recorded), position["step"]["weights_sha256"])
        last = manifests.get((position["job_id"], position["next_index"] - 1))
        if last not in (None, position["previous_sha256"]):
            report.differ("checkpoints", f"{path} (manifest)", str(last), position["previous_sha256"])
