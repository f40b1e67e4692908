"""The parts of an export that only the model hub's client can give: a base model that is no local folder."""

import logging
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from rollstream.learner.model import from_bytes
from rollstream.schemas.errors import ModelError

logger = logging.getLogger(__name__)


def export_full(base_model: str, path_to_weights: Path, output_dir: Path) -> None:
    """Save weights over a hub model's architecture. Raises ModelError if they do not fit."""
    disable_progress_bar()
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


def export_tokenizer(base_model: str, output_dir: Path) -> None:
    """Save a hub model's tokenizer, if it has one."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(base_model)
    except (OSError, ValueError, KeyError) as error:
        logger.warning("model %s has no tokenizer to export: %s", base_model, " ".join(str(error).split())[:200])
        return
    tokenizer.save_pretrained(output_dir)
