"""The Faust worker that hosts both shells."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.processors.host import app, folding

__all__ = ["app", "folding"]
