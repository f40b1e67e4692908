"""Data models of the finetuning harness, ours to NAT's and back: the same names, fields and JSON, other classes.

Never for FinetuneConfig: theirs may hold itself (`repair`), and its fields are read where it lies.
"""

from typing import Any

from pydantic import BaseModel

from rollstream.schemas import finetuning


def as_ours(value: Any) -> Any:
    """A model, or models in lists, of our classes; what is ours already is given back as it is."""
    return _of(finetuning, value)


def as_nats(value: Any) -> Any:
    """The same of NAT's classes."""
    from nat.data_models import finetuning as nats

    return _of(nats, value)


def _of(module: Any, value: Any) -> Any:
    if isinstance(value, list):
        return [_of(module, item) for item in value]
    if not isinstance(value, BaseModel):
        return value
    kind = getattr(module, type(value).__name__, None)
    if kind is None or isinstance(value, kind):
        return value
    return kind.model_validate(value.model_dump())
