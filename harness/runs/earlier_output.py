"""Moves the files of an earlier run in `output_dir` away when a new run starts.

A folder never mixes two runs: the histories of a failed run would otherwise lie next to the model of another one.
"""

import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from rollstream.eventlog.files import move
from rollstream.schemas.config import RunConfig
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.variables import expand

METRICS = "training_metrics.jsonl"
REWARDS = "reward_history.json"
VALIDATIONS = "validation_history.json"
CURRICULUM = "curriculum_state.json"
PLOT = "reward_plot.png"
EARLIER = "earlier"
"""Folder inside `output_dir`, with a number where there is one already: nothing is ever removed."""
WEIGHTS = ("model*.safetensors", "adapter_model.safetensors")
HISTORIES = (METRICS, REWARDS, VALIDATIONS, CURRICULUM, PLOT)
BESIDE_WEIGHTS = (
    "model.safetensors.index.json",
    "adapter_config.json",
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
)


def move_earlier_output(config: RunConfig, env: Mapping[str, str] = os.environ) -> Path | None:
    """Move model and histories of an earlier run into `earlier`, `earlier-2`, ...; returns that folder, None if there
    was nothing to move.

    Other files stay, and so does every file of a folder that holds this run's base model.
    """
    folder = config.finetuning.output_dir
    weights, histories = _found(folder, WEIGHTS), _found(folder, HISTORIES)
    if not (weights or histories) or _base(config, env) == folder.resolve():
        return None
    earlier = next(path for path in _names(folder) if not os.path.lexists(path))
    earlier.mkdir()
    for path in [*weights, *histories, *(_found(folder, BESIDE_WEIGHTS) if weights else ())]:
        move(path, earlier / path.name)
    return earlier


def _names(folder: Path) -> Iterator[Path]:
    yield folder / EARLIER
    yield from (folder / f"{EARLIER}-{number}" for number in itertools.count(2))


def _base(config: RunConfig, env: Mapping[str, str]) -> Path | None:
    """Path of the base model; None if only external services know it."""
    try:
        return Path(str(expand(config.adapter.model.path, env, "model.path"))).expanduser().resolve()
    except ConfigError:
        return None


def _found(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})
