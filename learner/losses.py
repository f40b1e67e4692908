"""What a loss is: a function of the completion tokens of a micro-batch, and the table of losses by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rollstream.learner import grpo, sft
from rollstream.learner.token_batch import TokenBatch, TokenLosses
from rollstream.schemas.settings import AlgorithmSettings


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A loss, what it needs, and what its sums over a batch say."""

    loss: Callable[[TokenBatch, AlgorithmSettings], TokenLosses]
    needs_logprobs: bool
    """Of the behaviour policy; without them there are no advantages either."""
    metrics: Callable[[Mapping[str, float], int], dict[str, float]]
    """Sums over all completion tokens and their count, to named metrics."""


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(grpo.losses, needs_logprobs=True, metrics=grpo.metrics),
    "sft": Algorithm(sft.losses, needs_logprobs=False, metrics=sft.metrics),
}
