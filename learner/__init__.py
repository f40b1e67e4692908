"""Batches in, weight versions out: collate, losses, step, checkpoint, worker."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.learner import (
        collection,
        inbox,
        library_versions,
        progress,
        retention,
        retrain,
        tiny_model,
        untrained,
        worker,
    )

__all__ = [
    "collection",
    "inbox",
    "library_versions",
    "progress",
    "retention",
    "retrain",
    "tiny_model",
    "untrained",
    "worker",
]
