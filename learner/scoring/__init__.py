"""Log-probabilities under a reference or a teacher: computed once, kept as events, read from there to train with."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.learner.scoring import index, scored_batch, scores, served_teacher, vocabulary

__all__ = ["index", "scored_batch", "scores", "served_teacher", "vocabulary"]
