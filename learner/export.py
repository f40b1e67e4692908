"""A published version as a folder that transformers or PEFT loads, with the base model's configuration and tokenizer.

A version's artifact already is the file that such a folder holds, so a base model in a folder needs no torch.
"""

import shutil
import struct
from pathlib import Path
from typing import Any

import orjson

from rollstream.schemas.errors import ModelError
from rollstream.schemas.events import WeightsPublished

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


def export_model(published: WeightsPublished, path_to_weights: Path, output_dir: Path) -> Path:
    """Leave a PEFT folder (lora) or a transformers folder (full) in `output_dir`; gives `output_dir`.

    `path_to_weights`: the version's safetensors file, verified. Raises ModelError if it or the base model's folder
    cannot be read.
    """
    base = Path(published.base_model)
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        if published.weights_format == "lora":
            _place_adapter(published, path_to_weights, output_dir)
        elif base.is_dir():
            _place_model(base, path_to_weights, output_dir)
        else:
            from rollstream.learner.export_hub import export_full

            export_full(published.base_model, path_to_weights, output_dir)
        if base.is_dir():
            _copy(base, TOKENIZER_FILES, output_dir)
        else:
            from rollstream.learner.export_hub import export_tokenizer

            export_tokenizer(published.base_model, output_dir)
    except OSError as error:
        raise ModelError(f"the model cannot be written to {output_dir}: {error}") from error
    return output_dir


def _place_adapter(published: WeightsPublished, path_to_weights: Path, output_dir: Path) -> None:
    shutil.copyfile(path_to_weights, output_dir / "adapter_model.safetensors")
    config = orjson.dumps(published.lora, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS)
    (output_dir / "adapter_config.json").write_bytes(config)


def _place_model(base: Path, path_to_weights: Path, output_dir: Path) -> None:
    if not (base / "config.json").is_file():
        raise ModelError(f"model {base} has no config.json any more; put the base model's folder back to export")
    _copy(base, CONFIG_FILES, output_dir)
    config = orjson.loads((output_dir / "config.json").read_bytes())
    dtype = _dtype(path_to_weights)
    if dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = dtype
    (output_dir / "config.json").write_bytes(orjson.dumps(config, option=orjson.OPT_INDENT_2))
    shutil.copyfile(path_to_weights, output_dir / "model.safetensors")


def _dtype(path: Path) -> str | None:
    """What a safetensors file's first tensor is, by its header; None if transformers has no name for it."""
    with path.open("rb") as file:
        size: int = struct.unpack("<Q", file.read(8))[0]
        header: dict[str, dict[str, Any]] = orjson.loads(file.read(size))
    found = next((entry["dtype"] for name, entry in header.items() if name != "__metadata__"), None)
    return DTYPES.get(found or "")


def _copy(base: Path, patterns: tuple[str, ...], output_dir: Path) -> None:
    for pattern in patterns:
        for path in sorted(base.glob(pattern)):
            if path.is_file():
                shutil.copyfile(path, output_dir / path.name)
