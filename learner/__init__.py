"""Batches in, weight versions out: collate, losses, step, checkpoint, worker."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.learner import (
        collection,
        inbox,
        progress,
        retention,
        retrain,
        tiny_model,
        untrained,
        versions,
        worker,
    )

__all__ = [
    "collection",
    "inbox",
    "progress",
    "retention",
    "retrain",
    "tiny_model",
    "untrained",
    "versions",
    "worker",
]
