"""A safetensors file, written one tensor at a time: the whole of it is nowhere in memory."""

from collections.abc import Iterator, Mapping
from typing import Any

import orjson
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from rollstream.schemas.errors import ModelError

_TYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Types by torch's names with those of safetensors, in its order: wide types come first, so that every tensor is
aligned.
"""
_ORDER = {dtype: number for number, dtype in enumerate(_TYPES)}


def pieces(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, a tensor at a time: those that safetensors would write.

    Equal tensors and metadata of one entry give equal bytes. Raises KeyError for a type that it does not write.
    """
    names = sorted(tensors, key=lambda name: (_ORDER[tensors[name].dtype], name))
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in names:
        begin, end = end, end + tensors[name].nbytes
        shape = list(tensors[name].shape)
        header[name] = {"dtype": _TYPES[tensors[name].dtype], "shape": shape, "data_offsets": [begin, end]}
    written = orjson.dumps(header)
    written += b" " * (-len(written) % 8)
    yield len(written).to_bytes(8, "little") + written
    for name in names:
        flat = tensors[name].detach().cpu().contiguous().reshape(-1)
        yield flat.view(torch.uint8).numpy().data


def published_pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a file of weights as they are published."""
    return pieces(tensors, {"format": "pt"})


def to_bytes(tensors: dict[str, Tensor]) -> bytes:
    """One safetensors file, as weights are published; equal tensors give equal bytes."""
    return b"".join(published_pieces(tensors))


def from_bytes(data: bytes, what: str) -> dict[str, Tensor]:
    """Tensors of a safetensors file. Raises ModelError naming `what`."""
    try:
        return safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise ModelError(f"{what} is not a safetensors file: {error}; restore it from a copy") from error
