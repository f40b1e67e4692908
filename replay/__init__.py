"""Replay of a run from its topics or an export: verified, trained again, or changed (what-if)."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.replay import assembly, completeness, fork, report, source, training, verify, weights, whole

__all__ = ["assembly", "completeness", "fork", "report", "source", "training", "verify", "weights", "whole"]
