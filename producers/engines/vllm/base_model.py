"""Description of a base model, read from its folder without its weights: tokenizer, end tokens, limits, and shapes.

vLLM drops tensors that it does not know, and its workers crash on a file that does not fit; therefore versions are
checked here before they are given to a server.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from rollstream.eventlog.disk_space import is_outage
from rollstream.producers.engines.chat_tokenizer import check_folder, load_tokenizer
from rollstream.producers.engines.model_cache import Shape, named_unreadable
from rollstream.schemas.devices import MODEL_LOADING
from rollstream.schemas.errors import ModelError
from rollstream.schemas.variables import one_line


@dataclass(frozen=True, eq=False)
class BaseModel:
    """A transformers folder or hub name."""

    path: str
    tokenizer: Any
    end_ids: tuple[int, ...]
    max_length: int | None
    """Most tokens of a sequence; None if the model says nothing."""
    num_token_ids: int
    shapes: Mapping[str, Shape]
    """Shapes of its tensors by name, without tied duplicates."""
    tied: frozenset[str]
    linears: frozenset[str]
    """Names of its linear modules."""
    embeddings: frozenset[str]
    """Last parts of the names of its input and output embeddings."""


def read_base_model(path: str) -> BaseModel:
    """Raises ModelError that names the folder and the missing file, OSError if its disk or the hub may be back."""
    check_folder(path)
    tokenizer = load_tokenizer(path)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        with MODEL_LOADING, torch.device("meta"):
            module: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        if is_outage(error):
            raise OSError(f"model {path} cannot be read for now: {one_line(error)}") from error
        raise ModelError(f"model {path} cannot be read: {one_line(error)}; restore its files") from error
    tied = frozenset(getattr(module, "all_tied_weights_keys", None) or ())
    names = {module_of: name for name, module_of in module.named_modules()}
    ends = (module.get_input_embeddings(), module.get_output_embeddings())
    return BaseModel(
        path=path,
        tokenizer=tokenizer,
        end_ids=_end_ids(path, tokenizer),
        max_length=getattr(config.get_text_config(), "max_position_embeddings", None),
        num_token_ids=len(module.get_input_embeddings().weight),
        shapes={name: tuple(value.shape) for name, value in module.state_dict().items() if name not in tied},
        tied=tied,
        linears=frozenset(name for name, one in module.named_modules() if isinstance(one, torch.nn.Linear)),
        embeddings=frozenset(names[one].rpartition(".")[2] for one in ends if one in names),
    )


def shapes_in(path: Path, where: str) -> dict[str, Shape]:
    """Shapes of a safetensors file's tensors by name. Raises like `read_weights`."""
    with (
        named_unreadable(where),
        safetensors.safe_open(path, framework="pt") as file,  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    ):
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def _end_ids(path: str, tokenizer: Any) -> tuple[int, ...]:
    try:
        configured: Any = GenerationConfig.from_pretrained(path).eos_token_id
    except (OSError, ValueError):
        configured = None
    more = configured if isinstance(configured, list) else () if configured is None else (configured,)
    return tuple(sorted({tokenizer.eos_token_id, *more}))
