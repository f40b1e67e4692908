"""A custom trainer: the built-in one, which ends the run once the mean reward has been high enough for some epochs."""

from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field, FiniteFloat

from rollstream.harness import register_trainer
from rollstream.harness.components.trainer import RollstreamTrainer
from rollstream.harness.config.components import RollstreamTrainerConfig


class GoodEnoughTrainerConfig(RollstreamTrainerConfig, name="good_enough_trainer"):
    """All fields of the built-in trainer, and two more."""

    enough: FiniteFloat = 0.9
    """A mean reward that is good enough."""
    num_epochs_in_a_row: int = Field(default=3, ge=1)


class GoodEnoughTrainer(RollstreamTrainer):
    """Ends a run once its rewards are good enough. The rewards are kept over restarts, so a resumed run ends where an
    undisturbed one would.
    """

    def __init__(self, trainer_config: GoodEnoughTrainerConfig, **kwargs: Any) -> None:
        super().__init__(trainer_config, **kwargs)
        self._config = trainer_config

    def reason_to_end(self, epoch: int) -> str | None:
        """The base class's reason, or that the last epochs were good enough."""
        means = [row["avg_reward"] for row in self.reward_history][-self._config.num_epochs_in_a_row :]
        is_long_enough = len(means) == self._config.num_epochs_in_a_row
        if is_long_enough and all(mean is not None and mean >= self._config.enough for mean in means):
            return f"the mean reward was at least {self._config.enough:g} for {len(means)} epochs"
        return super().reason_to_end(epoch)


@register_trainer(config_type=GoodEnoughTrainerConfig)
async def build_good_enough_trainer(config: GoodEnoughTrainerConfig, builder: Any) -> AsyncIterator[GoodEnoughTrainer]:
    """The registered function."""
    yield GoodEnoughTrainer(config)
