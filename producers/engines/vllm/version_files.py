"""Weight versions as files that a vLLM server reads, under names that are never used twice.

What vLLM drops or misreads in silence is refused here, in one line.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rollstream.eventlog.disk_space import is_outage
from rollstream.eventlog.files import beside, named_beside, own_number
from rollstream.producers.engines.model_cache import Shape, check_fit
from rollstream.producers.engines.vllm.base_model import BaseModel, shapes_in
from rollstream.schemas.errors import ModelError
from rollstream.schemas.events import WeightsPublished
from rollstream.schemas.variables import one_line

MAX_NAME = 100
_ODD = re.compile(r"[^A-Za-z0-9_.-]+")


class Client:
    """One of the processes that write below a folder: its id ends the names of its versions, so that several processes
    can share servers.

    The id derives from the folder's path and a number that a lock keeps for this process alone. A process that is
    started again in the place of one that ended has the same id.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ModelError if the folder cannot be written to, or has too many clients."""
        self._folder = folder
        number, self._lock = _locked(folder)
        self.id = hashlib.sha256(f"{folder.resolve()} {number}".encode()).hexdigest()[:8]

    def owns(self, name: str) -> bool:
        """Whether an adapter or a folder with this name was made by this client, or one before with its id."""
        return name.endswith(f"-{self.id}")

    def remove_leftovers(self) -> None:
        """Remove the files of a process before that was killed. No server is asked for their names any more."""
        for one in self._folder.iterdir():
            if self.owns(named_beside(one.name)):
                shutil.rmtree(one, ignore_errors=True)

    def close(self) -> None:
        """Let another process have the id."""
        self._lock.close()


def _locked(folder: Path) -> tuple[int, IO[str]]:
    try:
        return own_number(folder, ".client-{}.lock")
    except BlockingIOError as error:
        raise ModelError(f"folder {folder} is {error.strerror}; give some of them another engine.folder") from error
    except OSError as error:
        raise ModelError(
            f"folder {folder} cannot be written to: {error}; make room there, or set engine.folder"
        ) from error


@dataclass(frozen=True, eq=False)
class Version:
    """A weight version of a model group, as servers are given it."""

    published: WeightsPublished
    base: BaseModel
    name: str
    """`<group>-v<version>-<hash8>-<client8>`: of the adapter, or the label of full weights."""
    folder: Path
    path: Path
    """The artifact that its files are made of."""
    config: Mapping[str, Any] | None
    """Configuration of an adapter."""

    @property
    def is_lora(self) -> bool:
        """Whether it is an adapter above the base model."""
        return self.published.weights_format == "lora"

    @property
    def model(self) -> str:
        """Name of the model in requests."""
        return self.name if self.is_lora else self.base.path


def make_version(
    published: WeightsPublished, path: Path, base: BaseModel, *, folder: Path, client: str, max_lora_rank: int
) -> Version:
    """Check a version's artifact and write it below `folder`, where it stays until `remove`. `client`: id of the one
    that loads it. Raises ModelError.
    """
    where = f"weights {path} of {published.model_group} version {published.version}"
    shapes = shapes_in(path, where)
    name = f"{_plain(published.model_group)}-v{published.version}-{published.weights_sha256[:8]}-{client}"
    if published.weights_format == "lora":
        config = adapter_config(published.lora or {}, base, where, max_lora_rank)
        check_fit(_adapter_shapes(config, base), shapes, where)
    else:
        config = None
        check_fit(base.shapes, {name: shape for name, shape in shapes.items() if name not in base.tied}, where)
    version = Version(published, base, name, folder / name, path, config)
    try:
        restore(version)
    except OSError as error:
        if is_outage(error):
            raise OSError(f"{where} cannot be copied for now: {one_line(error)}") from error
        made = version.folder
        raise ModelError(
            f"{where} cannot be written to {made}: {error}; free space there, or set engine.folder"
        ) from error
    return version


def restore(version: Version) -> None:
    """Write its files where somebody removed them, if the artifact is still there."""
    if not version.folder.is_dir() and version.path.exists():
        with beside(version.folder) as temporary:
            _write(temporary, version.path, version.base, version.config)


def remove(version: Version) -> None:
    """Remove its files; nothing may use its name any more."""
    shutil.rmtree(version.folder, ignore_errors=True)


def adapter_config(recorded: Mapping[str, Any], base: BaseModel, where: str, max_lora_rank: int) -> dict[str, Any]:
    """The adapter's configuration for vLLM, from the settings that our learner uses; the other keys of the record are
    left out.

    Raises ModelError for tensors that vLLM does not know, or misinterprets.
    """
    modules, rank = recorded.get("target_modules"), recorded.get("r")
    refused = {
        "no LoRA": recorded.get("peft_type", "LORA") != "LORA",
        "without a list of target_modules": not isinstance(modules, list) or not modules,
        "without a rank": not isinstance(rank, int) or isinstance(rank, bool) or rank < 1,
        "with DoRA (use_dora)": recorded.get("use_dora"),
        "with modules_to_save": recorded.get("modules_to_save"),
        "with biases (bias, lora_bias)": recorded.get("bias", "none") != "none" or recorded.get("lora_bias"),
        "with target_parameters": recorded.get("target_parameters"),
        "with trainable_token_indices": recorded.get("trainable_token_indices"),
        "with rank_pattern or alpha_pattern": recorded.get("rank_pattern") or recorded.get("alpha_pattern"),
        "of chosen layers": any(recorded.get(key) for key in ("layers_to_transform", "layer_replication")),
    }
    if found := next((what for what, is_so in refused.items() if is_so), None):
        raise ModelError(f"{where}: vLLM cannot serve an adapter {found}; train one without, or use another engine")
    assert isinstance(modules, list)
    assert isinstance(rank, int)
    if odd := sorted(base.embeddings.intersection(name.rpartition(".")[2] for name in map(str, modules))):
        raise ModelError(f"{where}: the adapter targets {odd[0]}, which vLLM drops; leave it out of target_modules")
    if rank > max_lora_rank:
        raise ModelError(f"{where}: rank {rank} is above engine.max_lora_rank, {max_lora_rank}; raise that")
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": recorded.get("lora_alpha", rank),
        "target_modules": [str(name) for name in modules],
        "use_rslora": bool(recorded.get("use_rslora", False)),
        "bias": "none",
        "inference_mode": True,
        "base_model_name_or_path": base.path,
    }


def _adapter_shapes(config: Mapping[str, Any], base: BaseModel) -> dict[str, Shape]:
    rank, found = config["r"], {}
    for name in base.linears:
        if any(name == one or name.endswith(f".{one}") for one in config["target_modules"]):
            width_out, width_in = base.shapes[f"{name}.weight"]
            found[f"base_model.model.{name}.lora_A.weight"] = (rank, width_in)
            found[f"base_model.model.{name}.lora_B.weight"] = (width_out, rank)
    return found


def _write(folder: Path, path: Path, base: BaseModel, config: Mapping[str, Any] | None) -> None:
    folder.mkdir(parents=True)
    if config is not None:
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    elif Path(base.path).is_dir():
        for one in Path(base.path).glob("*.json"):
            if not one.name.endswith(".index.json"):
                shutil.copyfile(one, folder / one.name)
    _link(path, folder / ("model.safetensors" if config is None else "adapter_model.safetensors"))


def _link(path: Path, to: Path) -> None:
    """The artifact's own file under another name, so that it stays when the artifact is collected; else a copy."""
    try:
        os.link(path, to)
    except OSError:
        shutil.copyfile(path, to)


def _plain(model_group: str) -> str:
    return _ODD.sub("-", model_group)[-MAX_NAME:].strip("-.")
