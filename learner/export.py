"""A published version as a folder that transformers or PEFT loads, with the base model's tokenizer."""

import logging
from pathlib import Path

import orjson
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rollstream.learner.model import from_bytes
from rollstream.schemas.errors import ModelError
from rollstream.schemas.events import WeightsPublished

logger = logging.getLogger(__name__)


def export_model(published: WeightsPublished, path_to_weights: Path, output_dir: Path) -> Path:
    """Leave a PEFT folder (lora) or a transformers folder (full) in `output_dir`; gives `output_dir`.

    `path_to_weights`: the version's safetensors file, verified. Raises ModelError if it or the base model's folder
    cannot be read.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    if published.weights_format == "lora":
        (output_dir / "adapter_model.safetensors").write_bytes(path_to_weights.read_bytes())
        config = orjson.dumps(published.lora, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS)
        (output_dir / "adapter_config.json").write_bytes(config)
    else:
        _export_full(published.base_model, path_to_weights, output_dir)
    _export_tokenizer(published.base_model, output_dir)
    return output_dir


def _export_full(base_model: str, path_to_weights: Path, output_dir: Path) -> None:
    tensors = from_bytes(path_to_weights.read_bytes(), str(path_to_weights))
    dtype = next((value.dtype for value in tensors.values()), torch.float32)
    try:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base_model), dtype=dtype)
    except (OSError, ValueError) as error:
        raise ModelError(f"model {base_model} cannot be exported: {' '.join(str(error).split())[:300]}") from error
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    found = model.load_state_dict(tensors, strict=False)
    if found.unexpected_keys or set(found.missing_keys) - tied:
        odd = sorted({*found.unexpected_keys, *found.missing_keys} - tied)[:3]
        raise ModelError(f"weights {path_to_weights} do not fit model {base_model}: {', '.join(odd)}")
    model.tie_weights()
    model.save_pretrained(output_dir)


def _export_tokenizer(base_model: str, output_dir: Path) -> None:
    try:
        tokenizer = AutoTokenizer.from_pretrained(base_model)
    except (OSError, ValueError, KeyError) as error:
        logger.warning("model %s has no tokenizer to export: %s", base_model, " ".join(str(error).split())[:200])
        return
    tokenizer.save_pretrained(output_dir)
