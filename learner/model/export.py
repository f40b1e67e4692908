"""A published version as a folder that transformers or PEFT loads, with the base model's configuration and tokenizer.

A version's artifact already is the file that such a folder holds: with a base model in a folder it is copied, and torch
and transformers, whose import takes seconds at a run's end, are not loaded. A base model of the hub is built by
transformers first.
"""

import logging
import os
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from rollstream.eventlog.files import base_sha256, beside, write_whole
from rollstream.schemas import ids
from rollstream.schemas.devices import MODEL_LOADING
from rollstream.schemas.errors import ModelError
from rollstream.schemas.events import WeightsPublished
from rollstream.schemas.settings import LoraSettings, ModelSettings
from rollstream.schemas.variables import one_line

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
)
CONFIG_FILES = ("config.json", "generation_config.json", "*.py")
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}

logger = logging.getLogger(__name__)


def export_model(published: WeightsPublished, path_to_weights: Path, output_dir: Path) -> Path:
    """Leave a PEFT folder (lora) or a transformers folder (full) in `output_dir`; gives `output_dir`.

    `path_to_weights`: the version's safetensors file, verified. Raises ModelError if it or the base model's folder
    cannot be read.
    """
    published = _with_folder(published)
    base = Path(published.base_model)
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        if published.weights_format == "lora":
            _place_adapter(published, path_to_weights, output_dir)
        elif base.is_dir():
            _place_model(base, path_to_weights, output_dir)
        else:
            export_full(published.base_model, path_to_weights, output_dir)
        if base.is_dir():
            _copy(base, TOKENIZER_FILES, output_dir)
        else:
            export_tokenizer(published.base_model, output_dir)
    except OSError as error:
        raise ModelError(
            f"the model cannot be written to {output_dir}: {error}; free space there, or give another folder"
        ) from error
    return output_dir


def export_merged(published: WeightsPublished, path_to_weights: Path, output_dir: Path) -> None:
    """Make `output_dir` a whole transformers model of a version: an adapter is added to the weights of its base model.

    The sum is computed in float32 and stored in the base model's type. `output_dir` is not there or empty, and holds
    nothing if this fails. Raises ModelError if weights, adapter and base model do not fit, or cannot be read.
    """
    published = _with_folder(published)
    try:
        with beside(output_dir) as temporary:
            if published.weights_format == "lora":
                _save_merged(published, path_to_weights, temporary)
            else:
                export_model(published, path_to_weights, temporary)
    except OSError as error:
        raise ModelError(
            f"the model cannot be written to {output_dir}: {error}; free space there, or give another folder"
        ) from error


def _with_folder(published: WeightsPublished) -> WeightsPublished:
    """A version whose base model's folder is not below `~`, also in what PEFT reads: transformers and PEFT leave it."""
    base_model = os.path.expanduser(published.base_model)
    if base_model == published.base_model:
        return published
    lora = None if published.lora is None else {**published.lora, "base_model_name_or_path": base_model}
    return published.model_copy(update={"base_model": base_model, "lora": lora})


def _save_merged(published: WeightsPublished, path_to_weights: Path, folder: Path) -> None:
    import torch
    from transformers import AutoConfig
    from transformers.utils.logging import disable_progress_bar

    from rollstream.learner.model.loading import inner
    from rollstream.learner.model.policy import PolicyModel
    from rollstream.learner.model.tensor_file import from_bytes

    disable_progress_bar()
    where = f"weights {path_to_weights} of {ids.version_name(published.model_group, published.version)}"
    settings = ModelSettings(path=published.base_model, lora=_lora_of(published.lora or {}, where), device="cpu")
    policy = PolicyModel(settings, seed=0)
    if not published.is_above(base_sha256(published.base_model, published.base_sha256), published.base_model):
        raise ModelError(
            f"{where} are an adapter of other weights than those of model {published.base_model}; restore its weight "
            "files, or give the base model that it was trained on"
        )
    policy.load_weights(from_bytes(path_to_weights.read_bytes(), where))
    base = AutoConfig.from_pretrained(published.base_model, trust_remote_code=False)
    _untie_adapted(inner(policy.module))
    merged: Any = policy.module.merge_and_unload(safe_merge=True)
    merged.to(base.dtype or torch.float32).save_pretrained(folder)
    export_tokenizer(published.base_model, folder)


def _untie_adapted(model: Any) -> None:
    """Give a head that is tied to the embeddings a weight of its own if one of them has an adapter, whose sum with the
    weight is not for the other.
    """
    import torch

    parts = model.get_output_embeddings(), model.get_input_embeddings()
    head, embeddings = (getattr(one, "base_layer", one) for one in parts)
    if (head, embeddings) == parts or head.weight is not embeddings.weight:
        return
    head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False


def _lora_of(recorded: Mapping[str, Any], where: str) -> LoraSettings:
    """The adapter that a record describes. Raises ModelError for one that the learner does not train."""
    for key in ("modules_to_save", "target_parameters", "rank_pattern", "alpha_pattern", "layers_to_transform"):
        if recorded.get(key):
            raise ModelError(
                f"{where}: {key} of its adapter is {recorded[key]}, which cannot be merged here; merge it with PEFT"
            )
    try:
        return LoraSettings(
            rank=recorded["r"],
            alpha=recorded["lora_alpha"],
            target_modules=tuple(recorded["target_modules"]),
            use_rslora=recorded.get("use_rslora", False),
            use_dora=recorded.get("use_dora", False),
        )
    except (KeyError, TypeError, ValueError) as error:
        reason = one_line(error)
        raise ModelError(
            f"{where}: its adapter's configuration cannot be read: {reason}; merge it with PEFT"
        ) from error


def _place_adapter(published: WeightsPublished, path_to_weights: Path, output_dir: Path) -> None:
    _copy_whole(path_to_weights, output_dir / "adapter_model.safetensors")
    config = orjson.dumps(published.lora, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS)
    write_whole(output_dir / "adapter_config.json", config, is_private=False)


def _place_model(base: Path, path_to_weights: Path, output_dir: Path) -> None:
    if not (base / "config.json").is_file():
        raise ModelError(f"model {base} has no config.json any more; put the base model's folder back to export")
    _copy(base, CONFIG_FILES, output_dir)
    config = orjson.loads((output_dir / "config.json").read_bytes())
    dtype = _dtype(path_to_weights)
    if dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = dtype
    data = orjson.dumps(config, option=orjson.OPT_INDENT_2)
    write_whole(output_dir / "config.json", data, is_private=False)
    _copy_whole(path_to_weights, output_dir / "model.safetensors")


def _dtype(path: Path) -> str | None:
    """The type of a safetensors file's first tensor, by its header; None if transformers has no name for it."""
    with path.open("rb") as file:
        size: int = struct.unpack("<Q", file.read(8))[0]
        header: dict[str, dict[str, Any]] = orjson.loads(file.read(size))
    found = next((entry["dtype"] for name, entry in header.items() if name != "__metadata__"), None)
    return DTYPES.get(found or "")


def _copy(base: Path, patterns: tuple[str, ...], output_dir: Path) -> None:
    for pattern in patterns:
        for path in sorted(base.glob(pattern)):
            if path.is_file():
                _copy_whole(path, output_dir / path.name)


def _copy_whole(source: Path, target: Path) -> None:
    """A reader finds the file that was there before, or all of this one."""
    with beside(target) as temporary:
        shutil.copyfile(source, temporary)


def export_full(base_model: str, path_to_weights: Path, output_dir: Path) -> None:
    """Save weights over a hub model's architecture. Raises ModelError if they do not fit."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from rollstream.learner.model.tensor_file import from_bytes

    disable_progress_bar()
    tensors = from_bytes(path_to_weights.read_bytes(), str(path_to_weights))
    dtype = next((value.dtype for value in tensors.values()), torch.float32)
    try:
        config = AutoConfig.from_pretrained(base_model, trust_remote_code=False)
        with MODEL_LOADING:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (OSError, ValueError) as error:
        raise ModelError(f"model {base_model} cannot be exported: {one_line(error)}; restore its files") from error
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    found = model.load_state_dict(tensors, strict=False)
    if found.unexpected_keys or set(found.missing_keys) - tied:
        odd = sorted({*found.unexpected_keys, *found.missing_keys} - tied)[:3]
        raise ModelError(
            f"weights {path_to_weights} do not fit model {base_model} ({', '.join(odd)}); restore "
            "the model that they were trained from"
        )
    model.tie_weights()
    model.save_pretrained(output_dir)


def export_tokenizer(base_model: str, output_dir: Path) -> None:
    """Save a hub model's tokenizer, if it has one."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(base_model, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        logger.warning("model %s has no tokenizer to export: %s", base_model, one_line(error))
        return
    tokenizer.save_pretrained(output_dir)
