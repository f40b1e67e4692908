"""The point where a run branches off: the version of another run, and whether it fits. Reads log and artifacts, writes
nothing.

A fork begins a model group of its own at version 0, whose weights are those of the named version; its optimizer and
its window of rewards start empty. The parent is not changed.
"""

import asyncio
import os
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.files import base_sha256, tokenizer_sha256
from rollstream.eventlog.log import ReadableLog
from rollstream.eventlog.reading import MOST_RECORDS, read_events, read_to_end, unknown_run, unreadable_event
from rollstream.learner.progress import LogState, evolve
from rollstream.schemas import ids
from rollstream.schemas.config import RunConfig
from rollstream.schemas.errors import ArtifactError, ConfigError, StoreUnavailableError
from rollstream.schemas.events import RunStarted, WeightsCollected, WeightsPublished
from rollstream.schemas.events.training import ForkPoint
from rollstream.schemas.finetuning import adapter_path
from rollstream.schemas.settings import LoraSettings
from rollstream.schemas.variables import expand, variables_in

NAMED_RUNS = 10
"""Runs that an error names, the newest ones."""


def parse_fork(text: str) -> ForkPoint:
    """`RUN@VERSION`, or `RUN/GROUP@VERSION` of one of several model groups. Raises ConfigError."""
    found = ids.parsed_version(text)
    if found is None:
        raise ConfigError(f"--fork {text}: give a run and a version as RUN@VERSION, for example demo-1a2b3c@12")
    return ForkPoint(run_id=found[0], model_group=found[1], version=found[2])


async def check_fork(log: ReadableLog, artifacts: ArtifactStore, config: RunConfig, point: ForkPoint) -> None:
    """Raises ConfigError if the log has no such version, or a run of this configuration cannot begin from it.

    Each trained model group begins from the version of its own name, unless its section names another one.
    """
    groups = config.adapter.model_groups
    for name, one in config.trained().items():
        if name not in groups or groups[name].version is None:
            await _check_version(log, artifacts, one, point, name, f"--fork {format_fork(point)}")


async def check_versions(log: ReadableLog, artifacts: ArtifactStore, config: RunConfig) -> None:
    """Raises ConfigError for a model group whose section names a version that it cannot begin with."""
    location = adapter_path(config.finetuning, "model_groups")
    for name, one in config.by_group().items():
        section = config.adapter.model_groups.get(name)
        if section is not None and section.version is not None:
            point = parse_fork(section.version)
            await _check_version(log, artifacts, one, point, name, f"{location}.{name}.version: {format_fork(point)}")


async def _check_version(
    log: ReadableLog, artifacts: ArtifactStore, config: RunConfig, point: ForkPoint, name: str, location: str
) -> None:
    published, collected = await _published(log, point, name, location)
    wrong = await asyncio.to_thread(misfit, published, config)
    if wrong:
        raise ConfigError(f"{location}: {wrong}")
    try:
        await asyncio.to_thread(artifacts.check, published.artifact)
    except StoreUnavailableError as error:
        raise ConfigError(f"{location}: {error}") from error
    except ArtifactError as error:
        raise ConfigError(
            f"{location}: its weights were removed: {collected or error}; choose a version whose is_collected in "
            "weight_versions is false"
        ) from error


def format_fork(point: ForkPoint) -> str:
    """Format a fork point in the user's notation."""
    return ids.version_name(point.run_id, point.version, point.model_group)


async def _published(log: ReadableLog, point: ForkPoint, name: str, location: str) -> tuple[WeightsPublished, str]:
    """The version as the learner will find it, under a term that is not void, and who collected it when, if it was.

    Raises ConfigError naming what there is.
    """
    runs: dict[str, None] = {}
    state = LogState()
    collected = ""
    group = ids.model_group(point.run_id, point.model_group or name)
    async for received in read_events(log, ("groups", "weights"), skipped=MOST_RECORDS):
        if isinstance(received.event, RunStarted):
            runs[received.event.run_id] = None
        event = received.event
        if isinstance(event, WeightsCollected) and event.model_group == group and point.version in event.versions:
            collected = event.reason(received.timestamp_ms)
        evolve(state, received)
    if point.run_id not in runs:
        if unreadable := await _unreadable(log, point.run_id):
            raise ConfigError(f"{location}: {unknown_run(point.run_id, 0, unreadable=unreadable)}")
        known = ", ".join(list(runs)[-NAMED_RUNS:]) or "none yet"
        raise ConfigError(f"{location}: run {point.run_id} does not exist; known runs: {known}")
    versions = state.group(group).published
    others = sorted(ids.name_of(one) for one in state.groups if ids.run_of(one) == point.run_id and one != group)
    if not versions and others:
        raise ConfigError(
            f"{location}: run {point.run_id} has no model group {ids.name_of(group)}; it has {', '.join(others)}; name "
            f"one as {ids.version_name(point.run_id, point.version, 'GROUP')}"
        )
    if not versions:
        raise ConfigError(f"{location}: run {point.run_id} has published no version yet; wait for its first one")
    if point.version not in versions:
        kept = f"{min(versions)} to {max(versions)}"
        raise ConfigError(f"{location}: run {point.run_id} has no version {point.version}; choose one of {kept}")
    return versions[point.version], collected


async def _unreadable(log: ReadableLog, run_id: str) -> str:
    """The first record of a run in `groups` that is an event of another version, see `unreadable_event`; else empty."""
    async with aclosing(read_to_end(log, "groups")) as records:
        async for record in records:
            if record.key == run_id.encode() and (found := unreadable_event(record)):
                return found
    return ""


def misfit(published: WeightsPublished, config: RunConfig) -> str:
    """The reason why a run with this configuration cannot begin from these weights; empty if it can."""
    model = config.adapter.model
    wanted = "lora" if model.lora else "full"
    if published.weights_format != wanted:
        return f"it has {published.weights_format} weights, but the run trains {wanted} weights; change model.lora"
    theirs, ours = (local_path(path, model.path) for path in (published.base_model, model.path))
    is_same = published.base_model == model.path or _is_same_model(theirs, ours)
    found = base_sha256(ours, published.base_sha256) if published.base_sha256 else ""
    if not published.is_above(found, published.base_model if is_same else model.path):
        if is_same:
            return f"it is an adapter of model {model.path} with other weights; restore its weight files"
        return (
            f"it was trained from base model {published.base_model}, but the configuration has model.path {model.path}"
            "; give that one"
        )
    if "" != published.tokenizer_sha256 != tokenizer_sha256(ours) != "":
        return (
            f"it was trained with another tokenizer than that of model {model.path}; restore the tokenizer's files, or "
            "give the model.path that it was trained with"
        )
    return "" if model.lora is None else _other_adapter(published.lora or {}, model.lora)


def local_path(path: str, own: str) -> str:
    """A recorded model path with those `${NAME}` expanded that the user's `own` path names too."""
    return str(expand(path, os.environ)) if variables_in(path) <= variables_in(own) else path


def _is_same_model(one: str, other: str) -> bool:
    return one == other or Path(one).expanduser().resolve() == Path(other).expanduser().resolve()


def _other_adapter(found: Mapping[str, object], wanted: LoraSettings) -> str:
    """The first difference between adapters that changes the policy (dropout does not); empty if there is none."""
    modules, named = found.get("target_modules"), wanted.target_modules
    pairs = {
        "rank": (found.get("r"), wanted.rank),
        "alpha": (found.get("lora_alpha"), wanted.alpha),
        "target_modules": (sorted(modules) if isinstance(modules, list) else modules, sorted(named)),
        "use_rslora": (found.get("use_rslora", False), wanted.use_rslora),
        "use_dora": (found.get("use_dora", False), wanted.use_dora),
    }
    if isinstance(named, str):  # which modules these are is known once the model is loaded
        del pairs["target_modules"]
    for name, (theirs, ours) in pairs.items():
        if theirs != ours:
            return (
                f"its adapter has {name} {theirs}, but the configuration has model.lora.{name} {ours}; give the former"
            )
    return ""
