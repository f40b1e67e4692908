"""Training of one model by several processes, which torchrun starts: each has a shard of it and some of the rows."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.learner.parallel import launch, process_ranks, refusals

__all__ = ["launch", "process_ranks", "refusals"]
