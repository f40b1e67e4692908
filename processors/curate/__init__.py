"""Closed groups to manifests and tasks: a pure fold and its shell."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.processors.curate import candidates, curriculum, fold, gate, shell, state, tasks

__all__ = ["candidates", "curriculum", "fold", "gate", "shell", "state", "tasks"]
