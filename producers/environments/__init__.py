"""Built-in environments, one file each."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.producers.environments import remote_workflow

__all__ = ["remote_workflow"]
