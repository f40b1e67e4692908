"""What evaluating a dataset comes to: scores by example, and errors where there is none. Shaped as NAT's output is.

A missing score is never a number: it is an error with its reason.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollstream.processors.candidates import mean, rollout_rewards
from rollstream.schemas.errors import EnvironmentRunError
from rollstream.schemas.events import GroupClosed

REASONS_TOLD = 3


@dataclass(frozen=True, slots=True)
class EvaluationItem:
    """One example: its score, or why it has none."""

    id: str
    score: float | None
    error: str | None = None
    reasoning: Any = None


@dataclass(frozen=True, slots=True)
class EvaluatorOutput:
    """What one evaluator says of a dataset."""

    eval_output_items: tuple[EvaluationItem, ...]

    @property
    def average_score(self) -> float | None:
        """Mean over the examples that have a score."""
        scores = [item.score for item in self.eval_output_items if item.score is not None]
        return mean(scores) if scores else None


@dataclass(frozen=True, slots=True)
class EvaluationOutput:
    """What an evaluation run returns: (name of the evaluator, what it says), one or more."""

    evaluation_results: tuple[tuple[str, EvaluatorOutput], ...]
    workflow_interrupted: bool = False
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])


def item_of(group: GroupClosed) -> EvaluationItem:
    """The mean reward of a closed group's complete rollouts; without any, why there is none."""
    if group.members:
        return EvaluationItem(group.example_id, mean(rollout_rewards(group.members)))
    causes = sorted({attempt.cause or attempt.outcome for attempt in group.attempts})
    return EvaluationItem(group.example_id, None, group.void_cause or ", ".join(causes) or group.reason)


def validation_metrics(output: Any, reward: str | None) -> dict[str, Any]:
    """{avg_reward, min_reward, max_reward, num_examples} of the evaluator called `reward`, else of the first one.

    `output` is an `EvaluationOutput` or what NAT's evaluation returns. Raises EnvironmentRunError if an example has no
    score, naming some with their reasons, or if there is none at all.
    """
    results = list(output.evaluation_results)
    chosen = [found for name, found in results if name == reward] or [found for _, found in results[:1]]
    items: Sequence[Any] = chosen[0].eval_output_items if chosen else ()
    missing = [item for item in items if score_of(item) is None]
    if missing:
        told = "; ".join(f"{item.id}: {getattr(item, 'error', None) or 'no score'}" for item in missing[:REASONS_TOLD])
        raise EnvironmentRunError(f"{len(missing)} of {len(items)} examples have no score ({told})")
    if not items:
        raise EnvironmentRunError("nothing was evaluated")
    scores = [float(item.score) for item in items]
    return {
        "avg_reward": mean(scores),
        "min_reward": min(scores),
        "max_reward": max(scores),
        "num_examples": len(scores),
    }


def score_of(item: Any) -> float | None:
    """An evaluated item's score as a number; None if it has none, is none, or came with an error."""
    score = item.score
    if getattr(item, "error", None) or isinstance(score, bool) or not isinstance(score, int | float):
        return None
    return float(score) if math.isfinite(score) else None
