"""From a file of recorded steps to a run that trains on them: its dataset, and what its configuration is to say."""

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from rollstream.harness.config import config_file
from rollstream.harness.config import overrides as given
from rollstream.harness.config.config_file import Loaded
from rollstream.harness.config.finetune_config import RECORDED, block_of
from rollstream.harness.config.settings import artifact_uri
from rollstream.harness.config.yaml_reading import read_yaml
from rollstream.harness.recorded.ingest import KEYS, BadLine, Ingested, read_lines
from rollstream.harness.recorded.recorded_tasks import inputs_of, stored
from rollstream.harness.workspace import EMBEDDED, Workspace, embedded_broker
from rollstream.producers.nat_selection import Selection
from rollstream.schemas.errors import ConfigError, DecodeError
from rollstream.schemas.recorded import RecordedGroup

FOLDER = "ingested"
"""Of the workspace: datasets of recorded rollouts, by the content of their files."""
TOPIC = "ingest"
"""What dead letters of lines name as their topic; the offset is the line's number."""

Overrides = tuple[tuple[str, str], ...]


class Prepared(NamedTuple):
    """What `finetune` is given."""

    ingested: Ingested
    dataset: Path
    overrides: Overrides


def prepare(file: Path, config: Path, workspace: Path, overrides: Overrides, *, key: str = KEYS[0]) -> Prepared:
    """Read the file and write the run's dataset; rollouts that are large go to the run's artifact store.

    The run has as many generations as the largest group has rollouts, and no epoch is longer than the dataset; what is
    only imitated is compared with nothing, so one rollout is enough. Raises ConfigError if nothing can be read or the
    configuration is for another environment.
    """
    raw = _read(file)
    written = read_yaml(config)
    given.apply(written, overrides)
    builder = _builder_of(written, config)
    overrides = (*overrides, (f"trajectory_builders.{builder}.environment", RECORDED))
    loaded = config_file.load(config, overrides)
    settings = loaded.config
    retokenise = settings.builder.environment_config.get("retokenise") is True
    ingested = read_lines(raw.splitlines(), selection_of(loaded), key=key, retokenise=retokenise)
    if not ingested.num_rollouts:
        told = f"; line {ingested.bad[0].number}: {ingested.bad[0].reason}" if ingested.bad else ""
        raise ConfigError(f"{file}: no rollout can be read from it{told}")
    place = Workspace(workspace)
    place.create()
    dataset = _write_dataset(file, ingested.groups, artifact_uri(settings, place.folder), place.folder)
    num_tasks = min(settings.adapter.tasks_per_epoch, len(ingested.groups))
    more = [
        (f"trajectory_builders.{builder}.num_generations", str(ingested.largest)),
        (f"trainer_adapters.{settings.finetuning.trainer_adapter}.tasks_per_epoch", str(num_tasks)),
    ]
    if settings.adapter.algorithm.name == "sft" and "min_generations" not in settings.builder.model_fields_set:
        more.append((f"trajectory_builders.{builder}.min_generations", "1"))
    return Prepared(ingested, dataset, (*overrides, *more))


def selection_of(loaded: Loaded) -> Selection:
    """What a configuration says of the calls to train on. A builder of preference pairs takes scored candidates."""
    finetuning = loaded.config.finetuning
    block: Any = block_of(loaded.finetune, "trajectory_builder")
    candidates = getattr(block, "ttc_step_name", None)
    return Selection(frozenset(finetuning.target_functions), finetuning.target_model, candidates)


def bury(bad: Sequence[BadLine], file: Path, config: Path, workspace: Path, overrides: Overrides) -> None:
    """Keep each bad line as a dead letter of the run's log. Raises LogError."""
    settings = config_file.load(config, overrides).config
    servers, uri = settings.builder.bootstrap_servers, artifact_uri(settings, Workspace(workspace).folder)
    if servers != EMBEDDED:
        asyncio.run(_bury(bad, file, servers, uri, settings.builder.num_partitions))
        return
    with embedded_broker(Workspace(workspace)) as (address, _):
        asyncio.run(_bury(bad, file, address, uri, settings.builder.num_partitions))


async def _bury(bad: Sequence[BadLine], file: Path, address: str, uri: str, num_partitions: int) -> None:
    from rollstream.eventlog.artifacts import ArtifactStore
    from rollstream.eventlog.kafka_log import KafkaLog

    log = KafkaLog(address, client_id="rollstream-ingest")
    try:
        await log.start()
        await log.ensure_topics(num_partitions=num_partitions)
        await send_letters(log, ArtifactStore(uri), bad, file)
    finally:
        await log.close()


async def send_letters(log: Any, artifacts: Any, bad: Sequence[BadLine], file: Path) -> None:
    """A dead letter for each bad line, in their order."""
    from rollstream.eventlog.dead_letters import send_dead_letter
    from rollstream.eventlog.log import Record

    for line in bad:
        record = Record(TOPIC, 0, line.number, str(file).encode(), line.raw, (), 0)
        error = DecodeError(f"{file} line {line.number}: {line.reason}")
        await send_dead_letter(log, record, service="ingest", stage="line", error=error, artifacts=artifacts)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error


def _builder_of(written: dict[str, Any], config: Path) -> str:
    """Name of the builder's block, which must be for recorded rollouts. Raises ConfigError."""
    finetuning = written.get("finetuning")
    name = finetuning.get("trajectory_builder") if isinstance(finetuning, dict) else None
    blocks = written.get("trajectory_builders")
    if not isinstance(name, str) or not isinstance(blocks, dict) or not isinstance(blocks.get(name), dict):
        config_file.resolve(written)  # says what is missing
        raise ConfigError(f"{config}: finetuning.trajectory_builder: must name a block of trajectory_builders")
    named = blocks[name].get("environment", RECORDED)
    if named != RECORDED:
        raise ConfigError(
            f"trajectory_builders.{name}.environment: is {named!r}, but ingest plays recorded rollouts; "
            f"set it to {RECORDED} or leave it out"
        )
    return name


def _write_dataset(file: Path, groups: Sequence[RecordedGroup], uri: str, workspace: Path) -> Path:
    """JSON lines of examples whose inputs hold their rollouts; equal content has an equal name."""
    from rollstream.eventlog.artifacts import ArtifactStore

    artifacts = ArtifactStore(uri)
    rows = [{"id": group.example_id, **inputs_of(stored(group, artifacts))} for group in groups]
    data = b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows)
    folder = workspace / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{file.stem}-{hashlib.sha256(data).hexdigest()[:12]}.jsonl"
    path.write_bytes(data)
    return path
