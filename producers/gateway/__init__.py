"""Gateway at which programs outside the producers process play rollouts."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.producers.gateway import played

__all__ = ["played"]
