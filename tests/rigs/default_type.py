"""Torch's default type, as it is in the whole process while another thread loads a model."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def default_type(dtype: torch.dtype) -> Iterator[None]:
    """Let tensors of no stated type be of this one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
