"""Tensors in shards as files of torch.distributed.checkpoint, to be read by any number of processes.

The files are safetensors: reading them runs no code, as reading torch's own format would.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor


def write_shards(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write what each process has into one folder, which all of them see. All must call it. Raises OSError."""
    state_dict_saver.save(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))


def read_shards(folder: Path, like: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """What `write_shards` has written, with as many processes as there were or others.

    `like`: tensors by name; the ones of such a name are in shards as these are, all others are whole. If it is given,
    all processes must call it. Raises OSError.
    """
    metadata = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    tensors = {name: _empty(found, (like or {}).get(name)) for name, found in sorted(metadata.items())}
    reader = HuggingFaceStorageReader(str(folder))
    with warnings.catch_warnings():  # of no process group, where this process alone reads
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        state_dict_loader.load(dict(tensors), storage_reader=reader, no_dist=like is None)
    return tensors


def _empty(found: Any, like: Tensor | None) -> Tensor:
    if isinstance(like, DTensor) and like.shape == found.size:
        return torch.zeros_like(like, dtype=found.properties.dtype)
    return torch.zeros(found.size, dtype=found.properties.dtype)
