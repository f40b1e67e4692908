"""Gradient checkpointing: the activations within a layer are computed again in the backward pass."""

import contextlib
from collections.abc import Iterator
from typing import Any

from transformers.modeling_layers import GradientCheckpointingLayer

from rollstream.schemas.errors import ModelError


def enable(model: Any, path: str) -> None:
    """Let a transformers model (without adapters around it) compute so while it trains.

    Raises ModelError if it cannot, or if it has dropout outside of modules, which would then be on in every loss.
    """
    config = model.get_decoder().config
    dropout = {name: value for name, value in vars(config).items() if "drop" in name and isinstance(value, float)}
    if odd := next((name for name, value in dropout.items() if value > 0), None):
        raise ModelError(
            f"model {path}: gradient_checkpointing does not go with its {odd} of {dropout[odd]:g}; "
            f"set {odd} to 0 in its config.json, or leave gradient_checkpointing off"
        )

    def contexts() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        """Of the forward pass, and of the second one within the backward pass, when the first has ended."""
        return contextlib.nullcontext(), _attention(config, config._attn_implementation)

    try:
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    except ValueError as error:
        raise ModelError(f"model {path}: {error} Leave gradient_checkpointing off.") from error


def keep(model: Any) -> None:
    """Compute so although the model is in evaluation mode: transformers asks a layer whether it is trained."""
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


@contextlib.contextmanager
def _attention(config: Any, name: str) -> Iterator[None]:
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before
