"""Rollout engines, and how they follow published weights."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.producers.engines import base, table

__all__ = ["base", "table"]
