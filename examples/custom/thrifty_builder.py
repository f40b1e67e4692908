"""A custom trajectory builder: the built-in one, with a price for each sampled token, and a limit on their number."""

import logging
from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field

from rollstream.harness import register_trajectory_builder
from rollstream.harness.components.builder import RollstreamTrajectoryBuilder
from rollstream.harness.config.components import RollstreamTrajectoryBuilderConfig
from rollstream.schemas.finetuning import Trajectory, TrajectoryCollection

logger = logging.getLogger(__name__)


class ThriftyBuilderConfig(RollstreamTrajectoryBuilderConfig, name="thrifty_builder"):
    """All fields of the built-in builder, and two more."""

    price_per_token: float = Field(default=0.01, ge=0)
    """Taken off a trajectory's reward for every token that the model said in it."""
    max_tokens: int = Field(default=64, ge=1)
    """Trajectories in which it said more are not trained on."""
    min_group: int = Field(default=2, ge=1)
    """Groups of which fewer are left are not trained on: there is nothing to compare."""


class ThriftyBuilder(RollstreamTrajectoryBuilder):
    """Short answers earn more, endless ones nothing. What is left out stays on the log and in the ledger."""

    def __init__(self, trajectory_builder_config: ThriftyBuilderConfig) -> None:
        super().__init__(trajectory_builder_config)
        self._config = trajectory_builder_config

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        """Ours, priced and thinned. The rewards that are recorded stay what they are: only copies are changed."""
        collection = await super().finalize(run_id, meta)
        priced = [
            [self._priced(one) for one in group if num_sampled_tokens(one) <= self._config.max_tokens]
            for group in collection.trajectories
        ]
        kept = [group for group in priced if len(group) >= self._config.min_group]
        num_all, num_kept = (sum(map(len, groups)) for groups in (collection.trajectories, kept))
        self.log_progress(run_id, {**(meta or {}), "num_trajectories": num_all, "num_left_out": num_all - num_kept})
        return TrajectoryCollection(trajectories=kept, run_id=run_id)

    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """One line with the ids by which it is found again."""
        logger.info(
            "run=%s epoch=%s trajectories=%s left_out=%s",
            run_id,
            metrics.get("epoch"),
            metrics.get("num_trajectories"),
            metrics.get("num_left_out"),
        )

    def _priced(self, trajectory: Trajectory) -> Trajectory:
        cost = self._config.price_per_token * num_sampled_tokens(trajectory)
        metadata = {**(trajectory.metadata or {}), "reward_before_price": trajectory.reward}
        return trajectory.model_copy(update={"reward": trajectory.reward - cost, "metadata": metadata})


def num_sampled_tokens(trajectory: Trajectory) -> int:
    """Number of tokens of a trajectory that the model sampled; messages of others have none."""
    answers = [getattr(item, "logprobs", None) for item in trajectory.episode]
    return sum(len(answer.get("token_ids", ())) for answer in answers if isinstance(answer, dict))


@register_trajectory_builder(config_type=ThriftyBuilderConfig)
async def build_thrifty_builder(config: ThriftyBuilderConfig, builder: Any) -> AsyncIterator[ThriftyBuilder]:
    """The registered function: an async generator that yields one component. It connects to nothing."""
    yield ThriftyBuilder(config)
