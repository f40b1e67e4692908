"""The OpenAI-compatible endpoint of a model group."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.producers.openai import keys, server

__all__ = ["keys", "server"]
