"""Turns a file of recorded steps into the dataset and the configuration overrides of a run."""

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.files import write_whole
from rollstream.harness.config import file as config_file
from rollstream.harness.config.dataset import ID_KEY, MAX_INPUT_BYTES
from rollstream.harness.config.file import Loaded
from rollstream.harness.config.jobs import artifact_uri
from rollstream.harness.config.resolve import block_of
from rollstream.harness.config.rewards import check_rewarded
from rollstream.harness.config.yaml import apply_overrides, read_yaml
from rollstream.harness.recorded.lines import KEYS, BadLine, Ingested, read_lines
from rollstream.harness.recorded.tasks import MAX_INLINE_BYTES, inputs_of, stored
from rollstream.harness.runs.run_context import broker_of_run
from rollstream.harness.services.workspace import Workspace
from rollstream.producers.traces.spans import Selection
from rollstream.schemas.errors import ConfigError, DecodeError
from rollstream.schemas.events.recorded import RECORDED, RecordedGroup
from rollstream.schemas.finetuning import adapter_path
from rollstream.schemas.kafka import KafkaSettings

FOLDER = "ingested"
"""Folder of the workspace for datasets of recorded rollouts, by the content of their files."""

ROW_BYTES = 8 * 1024
"""Bytes of a row beside an example's own inputs and its rollouts."""

Overrides = tuple[tuple[str, str], ...]


class PreparedIngest(NamedTuple):
    """The arguments of `finetune`"""

    ingested: Ingested
    dataset: Path
    overrides: Overrides


def prepare(file: Path, config: Path, workspace: Path, overrides: Overrides, *, key: str = KEYS[0]) -> PreparedIngest:
    """Read the file and write the run's dataset; large rollouts go to the run's artifact store. num_generations is the
    size of the largest group, or 1 for SFT, and an epoch is at most the dataset. Raises ConfigError if no rollout can
    be read, none could have a reward, or the configuration is for another environment.
    """
    raw = _read(file)
    written = read_yaml(config)
    apply_overrides(written, overrides)
    builder = _builder_of(written, config)
    overrides = (*overrides, *_without_dataset(written), (f"trajectory_builders.{builder}.environment", RECORDED))
    loaded = config_file.load(config, overrides)
    settings = loaded.config
    retokenise = settings.builder.environment_config.get("retokenise") is True
    ingested = read_lines(raw.splitlines(), selection_of(loaded), key=key, retokenise=retokenise)
    if not ingested.num_rollouts:
        first_bad = (
            f"; correct line {ingested.bad[0].number}: {ingested.bad[0].reason}" if ingested.bad else "; add one"
        )
        raise ConfigError(f"{file} contains no usable rollout{first_bad}")
    if settings.finetuning.reward_function is not None:
        rollouts = (one.rollout for group in ingested.groups for one in group.members if one.rollout is not None)
        check_rewarded(settings, rollouts, str(file))
    layout = Workspace(workspace)
    layout.create()
    uri = artifact_uri(settings, layout.folder)
    dataset, id_key = _write_dataset(file, ingested.groups, uri, layout.folder)
    num_tasks = min(settings.adapter.tasks_per_epoch, len(ingested.groups))
    more = [
        (f"trajectory_builders.{builder}.num_generations", str(ingested.largest)),
        (adapter_path(settings.finetuning, "tasks_per_epoch"), str(num_tasks)),
    ]
    if settings.adapter.algorithm.is_imitation and "min_generations" not in settings.builder.model_fields_set:
        more.append((f"trajectory_builders.{builder}.min_generations", "1"))
    return PreparedIngest(ingested, dataset, (*overrides, *id_key, *more))


def _without_dataset(written: dict[str, Any]) -> Overrides:
    """The override that removes the file's own dataset, whose `id_key`, `structure` and `filter` are not for ours."""
    general: Any = written.get("eval")
    general = general.get("general") if isinstance(general, dict) else None
    has_dataset = isinstance(general, dict) and general.get("dataset") is not None
    return (("eval.general.dataset", "null"),) if has_dataset else ()


def selection_of(loaded: Loaded) -> Selection:
    """The selection of calls to train on. A builder of preference pairs takes scored candidates."""
    finetuning = loaded.config.finetuning
    block: Any = block_of(loaded.finetune, "trajectory_builder")
    candidates = getattr(block, "ttc_step_name", None)
    return Selection(frozenset(finetuning.target_functions), finetuning.target_model, candidates)


def dead_letter_lines(bad: Sequence[BadLine], file: Path, config: Path, workspace: Path, overrides: Overrides) -> None:
    """Write a dead letter for each bad line to the run's log. Raises LogError."""
    settings = config_file.load(config, overrides).config
    with broker_of_run(settings, Workspace(workspace)) as (kafka, _):
        uri = artifact_uri(settings, Workspace(workspace).folder)
        asyncio.run(_send_dead_letter(bad, file, kafka, uri, settings.builder.num_partitions))


async def _send_dead_letter(
    bad: Sequence[BadLine], file: Path, kafka: KafkaSettings, uri: str, num_partitions: int | None
) -> None:
    from rollstream.eventlog.kafka.log import KafkaLog

    async with KafkaLog(kafka, client_id="rollstream-ingest") as log:
        await log.ensure_topics(num_partitions=num_partitions)
        await send_letters(log, ArtifactStore(uri), bad, file)


async def send_letters(log: Any, artifacts: Any, bad: Sequence[BadLine], file: Path) -> None:
    """Send a dead letter for each bad line, in order."""
    from rollstream.eventlog.dead_letters import LINES, send_dead_letter
    from rollstream.eventlog.log import Record

    for line in bad:
        record = Record(LINES, 0, line.number, str(file).encode(), line.raw, (), 0)
        error = DecodeError(f"{file} line {line.number}: {line.reason}")
        await send_dead_letter(log, record, service="ingest", stage="line", error=error, artifacts=artifacts)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}; correct its path or permissions") from error


def _builder_of(written: dict[str, Any], config: Path) -> str:
    """Name of the builder's block, whose environment must be `recorded`. Raises ConfigError."""
    finetuning = written.get("finetuning")
    name = finetuning.get("trajectory_builder") if isinstance(finetuning, dict) else None
    blocks = written.get("trajectory_builders")
    if not isinstance(name, str) or not isinstance(blocks, dict) or not isinstance(blocks.get(name), dict):
        config_file.resolve(written)  # raises an error that names the missing key
        raise ConfigError(f"{config}: finetuning.trajectory_builder: must name a block of trajectory_builders")
    named = blocks[name].get("environment", RECORDED)
    if named != RECORDED:
        raise ConfigError(
            f"trajectory_builders.{name}.environment: is {named!r}, but ingest uses recorded rollouts; set it to "
            f"{RECORDED} or remove it"
        )
    return name


def _write_dataset(file: Path, groups: Sequence[RecordedGroup], uri: str, workspace: Path) -> tuple[Path, Overrides]:
    """Write the examples, with rollouts in their inputs, as JSON lines; the file name depends only on the content.

    Returns also the override that names the key of the examples' ids, if an input has the default one's name.
    """
    small = asyncio.run(_all_fitting(groups, ArtifactStore(uri)))
    names = {name for group in small for name in group.inputs}
    id_key = ID_KEY
    while id_key in names:
        id_key = f"_{id_key}"
    rows = [{id_key: group.example_id, **inputs_of(group)} for group in small]
    data = b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows)
    path = workspace / FOLDER / f"{file.stem}-{hashlib.sha256(data).hexdigest()[:12]}.jsonl"
    write_whole(path, data, is_private=False)
    section = orjson.dumps({"file_path": str(path), "id_key": id_key}).decode()
    return path, () if id_key == ID_KEY else (("eval.general.dataset", section),)


async def _all_fitting(groups: Sequence[RecordedGroup], artifacts: ArtifactStore) -> list[RecordedGroup]:
    """The groups as they fit into rows: where an example's own inputs are large, its rollouts are stored apart."""
    fitting: list[RecordedGroup] = []
    for group in groups:
        left = MAX_INPUT_BYTES - len(orjson.dumps(group.inputs)) - ROW_BYTES
        fitting.append(await stored(group, artifacts, max_bytes=min(MAX_INLINE_BYTES, left)))
    return fitting
