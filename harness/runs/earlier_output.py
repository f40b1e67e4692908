"""Checks `output_dir`, and moves the files of another run in it away when a run starts or goes on.

A folder never mixes two runs: the histories of a failed run would otherwise lie next to the model of another one.
"""

import itertools
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import orjson

from rollstream.eventlog.files import move, obstacle, write_whole
from rollstream.schemas.algorithm_settings import teacher_of
from rollstream.schemas.config import RunConfig
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.variables import expand

METRICS = "training_metrics.jsonl"
REWARDS = "reward_history.json"
VALIDATIONS = "validation_history.json"
CURRICULUM = "curriculum_state.json"
PLOT = "reward_plot.png"
GROUPS = "model_groups.json"
"""Names of the folders in `output_dir` that hold a run's models; only of a run that trains several model groups."""
OWNER = "run_id.txt"
"""The run that the other files of `output_dir` are of."""
EARLIER = "earlier"
"""Folder inside `output_dir`, with a number where there is one already: nothing is ever removed."""
WEIGHTS = ("model*.safetensors", "adapter_model.safetensors")
HISTORIES = (METRICS, REWARDS, VALIDATIONS, CURRICULUM, PLOT, GROUPS)
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


def check_output_dir(config: RunConfig) -> None:
    """Raises ConfigError if the output folder cannot be written, or is that of a base model or teacher of the run.

    A model that is trained in full would replace its files. Creates nothing.
    """
    folder = config.finetuning.output_dir
    if why := obstacle(folder):
        raise ConfigError(f"finetuning.output_dir: {folder} cannot be used: {why}; choose another folder")
    is_elsewhere = config.is_external or config.builder.services == "external"
    if is_elsewhere or all(one.adapter.model.lora is not None for one in config.trained().values()):
        return
    models = _bases(config) | _teachers(config)
    for one in (folder, *(folder / name for name in _groups(config))):
        if one.resolve() in models:
            raise ConfigError(
                f"finetuning.output_dir: {one} is the folder of a model or teacher of the run, whose files the trained "
                "model would replace; choose another folder"
            )


def take_output_dir(config: RunConfig, run_id: str, *, is_new: bool) -> Path | None:
    """Leave in `output_dir` no files of another run; returns the folder that they were moved to, None if none were.

    What was moved away of a run that goes on is moved back.
    """
    folder = config.finetuning.output_dir
    owner = _owner(folder)
    earlier = move_earlier_output(config) if is_new or owner not in (None, run_id) else None
    if not is_new and owner != run_id:  # none, too: a kill may have come in between
        _bring_back(folder, run_id)
    if _owner(folder) != run_id:  # moved away, too: a new run may have the id of another workspace's
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / OWNER, run_id.encode(), is_private=False)
    return earlier


def _owner(folder: Path) -> str | None:
    try:
        return (folder / OWNER).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None


def _bring_back(folder: Path, run_id: str) -> None:
    """Move a run's files back, the one that names the run last: after a kill the next call goes on."""
    for earlier in sorted(folder.glob(f"{EARLIER}*")):
        if _owner(earlier) == run_id:
            paths = [path for path in earlier.rglob("*") if path.is_file()]
            for path in sorted(paths, key=lambda path: path == earlier / OWNER):
                target = folder / path.relative_to(earlier)
                target.parent.mkdir(exist_ok=True)
                move(path, target)
            return


def move_earlier_output(config: RunConfig) -> Path | None:
    """Move model and histories of an earlier run into `earlier`, `earlier-2`, ...; returns that folder, None if there
    was nothing to move.

    Models of several model groups lie in a folder for each: those of this run's groups are moved, and those that an
    earlier run has listed. Other files stay, and so does every file of a folder that holds a base model of this run.
    """
    folder, bases = config.finetuning.output_dir, _bases(config)
    folders = [folder, *(folder / name for name in sorted({*_groups(config), *_listed(folder)}))]
    found = {one: _of_a_run(one) for one in folders if one.resolve() not in bases}
    if not any(found.values()):
        return None
    earlier = next(path for path in _names(folder) if not os.path.lexists(path))
    if folder in found and (folder / OWNER).is_file():
        found[folder].append(folder / OWNER)
    for one, paths in reversed(found.items()):
        target = earlier / one.relative_to(folder)
        if one != folder and (one.is_symlink() or os.path.ismount(one)):  # its files stay on their file system
            target = next(path for path in _names(one) if not os.path.lexists(path))
        for path in paths:
            target.mkdir(parents=True, exist_ok=True)
            move(path, target / path.name)
        if paths and one != folder:
            with suppress(OSError):  # it has files of others, too
                one.rmdir()
    return earlier


def list_groups(folder: Path, names: list[str]) -> None:
    """Name the folders of a run's model groups, so that a later run with other groups moves them. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / GROUPS, orjson.dumps(names), is_private=False)


def _groups(config: RunConfig) -> list[str]:
    """Folders that the run itself will write; none of a run that trains one model group."""
    trained = list(config.trained())
    return trained if len(trained) > 1 else []


def _listed(folder: Path) -> list[str]:
    """Names in `GROUPS`; whatever is not the name of a folder there is ignored."""
    try:
        names = orjson.loads((folder / GROUPS).read_bytes())
    except (OSError, ValueError):
        return []
    given: list[object] = names if isinstance(names, list) else []
    names = [name for name in given if isinstance(name, str) and name == Path(name).name]
    return [name for name in names if name not in ("", ".", "..")]


def _of_a_run(folder: Path) -> list[Path]:
    """A run's files in the order in which they are moved: those by which the others are known come last, because a kill
    may come in between.
    """
    weights, histories = _found(folder, WEIGHTS), _found(folder, HISTORIES)
    found = [*(_found(folder, BESIDE_WEIGHTS) if weights else ()), *histories, *weights]
    return sorted(found, key=lambda path: path.name == GROUPS)


def _names(folder: Path) -> Iterator[Path]:
    yield folder / EARLIER
    yield from (folder / f"{EARLIER}-{number}" for number in itertools.count(2))


def _bases(config: RunConfig) -> set[Path]:
    """Paths of the base models; without those that only external services know."""
    return _folders(one.adapter.model.path for one in config.by_group().values())


def _teachers(config: RunConfig) -> set[Path]:
    teachers = (teacher_of(one.adapter.algorithm) for one in config.trained().values())
    return _folders(one.path for one in teachers if one is not None and one.path)


def _folders(paths: Iterable[str]) -> set[Path]:
    found: set[Path] = set()
    for path in paths:
        with suppress(ConfigError):
            found.add(Path(str(expand(path, os.environ, "model.path"))).expanduser().resolve())
    return found


def _found(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})
