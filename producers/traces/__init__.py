"""Other frameworks' traces read as recorded steps."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.producers.traces import logprobs, messages, spans

__all__ = ["logprobs", "messages", "spans"]
