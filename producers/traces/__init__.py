"""Other frameworks' traces read as recorded steps."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.producers.traces import framework_logprobs, messages, spans

__all__ = ["framework_logprobs", "messages", "spans"]
