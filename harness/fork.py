"""Where a run branches off: which version of which run, and whether it fits. Reads log and artifacts, writes nothing.

A fork begins a model group of its own at version 0, whose weights are those of the named version; its optimizer and
its window of rewards begin anew. Nothing of the parent is changed.
"""

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import EventLog
from rollstream.harness.config.settings import MODEL_GROUP
from rollstream.harness.runs import read_events
from rollstream.learner.progress import LogState, evolve
from rollstream.schemas import ids
from rollstream.schemas.config import RunConfig
from rollstream.schemas.errors import ArtifactError, ConfigError
from rollstream.schemas.events import RunStarted, WeightsPublished
from rollstream.schemas.events_training import ForkPoint
from rollstream.schemas.settings import LoraSettings

NAMED_RUNS = 10
"""Runs that an error names, the newest ones."""


def parse_fork(text: str) -> ForkPoint:
    """`RUN@VERSION`. Raises ConfigError."""
    found = re.fullmatch(r"(?P<run>[^@\s]+)@v?(?P<version>[0-9]{1,18})", text)
    if found is None:
        raise ConfigError(f"--fork {text}: give a run and a version as RUN@VERSION, for example demo-1a2b3c@12")
    return ForkPoint(run_id=found["run"], version=int(found["version"]))


async def check_fork(log: EventLog, artifacts: ArtifactStore, config: RunConfig, point: ForkPoint) -> None:
    """Raises ConfigError if the log has no such version, or a run of this configuration cannot begin from it."""
    published = await _published(log, point)
    wrong = misfit(published, config)
    if wrong:
        raise ConfigError(f"--fork {told(point)}: {wrong}")
    try:
        await asyncio.to_thread(artifacts.fetch, published.artifact)
    except ArtifactError as error:
        raise ConfigError(f"--fork {told(point)}: its weights are gone: {error}") from error


def told(point: ForkPoint) -> str:
    """As the user writes it."""
    return f"{point.run_id}@{point.version}"


async def _published(log: EventLog, point: ForkPoint) -> WeightsPublished:
    """The version as the learner will find it: under a term that is not void. Raises ConfigError naming what is."""
    runs: dict[str, None] = {}
    state = LogState()
    async for received in read_events(log, ("groups", "weights")):
        if isinstance(received.event, RunStarted):
            runs[received.event.run_id] = None
        evolve(state, received)
    if point.run_id not in runs:
        known = ", ".join(list(runs)[-NAMED_RUNS:]) or "none yet"
        raise ConfigError(f"--fork {told(point)}: no run is called {point.run_id}; known runs: {known}")
    versions = state.group(ids.model_group(point.run_id, MODEL_GROUP)).published
    if not versions:
        raise ConfigError(f"--fork {told(point)}: run {point.run_id} has published no version yet")
    if point.version not in versions:
        kept = f"{min(versions)} to {max(versions)}"
        raise ConfigError(f"--fork {told(point)}: run {point.run_id} has no version {point.version}, it has {kept}")
    return versions[point.version]


def misfit(published: WeightsPublished, config: RunConfig) -> str:
    """Why a run of this configuration cannot begin from these weights; empty if it can."""
    model = config.adapter.model
    wanted = "lora" if model.lora else "full"
    if published.weights_format != wanted:
        return f"it has {published.weights_format} weights, the configuration trains {wanted} ones (model.lora)"
    if not _is_same_model(published.base_model, model.path):
        return f"it was trained from base model {published.base_model}, the configuration has model.path {model.path}"
    if model.lora is not None:
        return _other_adapter(published.lora or {}, model.lora)
    return ""


def _is_same_model(one: str, other: str) -> bool:
    return one == other or Path(one).expanduser().resolve() == Path(other).expanduser().resolve()


def _other_adapter(found: Mapping[str, object], wanted: LoraSettings) -> str:
    """What decides the policy that an adapter's weights are; dropout does not."""
    modules = found.get("target_modules")
    pairs = {
        "rank": (found.get("r"), wanted.rank),
        "alpha": (found.get("lora_alpha"), wanted.alpha),
        "target_modules": (sorted(modules) if isinstance(modules, list) else modules, sorted(wanted.target_modules)),
    }
    for name, (theirs, ours) in pairs.items():
        if theirs != ours:
            return f"its adapter has {name} {theirs}, the configuration has model.lora.{name} {ours}"
    return ""
