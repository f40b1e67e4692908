"""Settings of the algorithms that share PPO's clipped objective and differ in their advantages; `grpo` apart."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from rollstream.schemas.algorithm_settings import Needs, PolicyGradientSettings
from rollstream.schemas.base import added

DUAL_CLIP = 3.0
"""Bound of the ratio at negative advantages, unless the configuration gives another (arXiv 1912.09729, section 3)."""


class ClippedSettings(PolicyGradientSettings):
    """Of PPO's clipped objective (arXiv 1707.06347, equation 7), with the bounds of DAPO and dual-clip PPO."""

    KL_FIELD: ClassVar[str | None] = "kl_coefficient"

    clip_low: float = Field(default=0.2, gt=0)
    clip_high: float = Field(default=0.28, gt=0)
    dual_clip: float | None = added(None, gt=1)
    """Where the advantage A is negative, the loss of a token is at most -dual_clip * A, whatever its ratio. A new run
    has 3 unless its configuration says another number, or null for no bound.
    """
    kl_coefficient: float = added(0.0, ge=0)
    """Weight of the KL divergence from the job's base version; 0 keeps no copy of that."""
    unbiased_kl: bool = added(False)
    """Weight that KL estimate by the importance ratio, which makes its gradient unbiased."""

    @property
    def needs(self) -> Needs:
        """The reference too, if the KL divergence from it counts."""
        return super().needs.model_copy(update={"reference": self.kl_coefficient > 0})

    def for_run(self, *, num_generations: int, temperature: float) -> Self:
        """Ratios are bounded unless the configuration says otherwise."""
        chosen = super().for_run(num_generations=num_generations, temperature=temperature)
        return chosen if "dual_clip" in self.model_fields_set else chosen.model_copy(update={"dual_clip": DUAL_CLIP})

    def unused(self) -> dict[str, tuple[str, ...]]:
        found = super().unused()
        return (
            found if self.kl_coefficient or not self.unbiased_kl else {**found, "kl_coefficient is 0": ("unbiased_kl",)}
        )


class PpoSettings(ClippedSettings):
    """Proximal policy optimisation (arXiv 1707.06347) with GAE (arXiv 1506.02438) over steps, without a critic."""

    name: Literal["ppo"] = "ppo"  # pyright: ignore[reportIncompatibleVariableOverride]
    advantage: Literal["none", "group_mean", "group_std", "batch_mean", "batch_std"] = "none"  # pyright: ignore[reportIncompatibleVariableOverride]
    """What is done to the rewards of steps before they are summed: nothing, unless the configuration asks for it."""
    step_rewards: Literal["process"] = "process"  # pyright: ignore[reportIncompatibleVariableOverride]
    clip_high: float = Field(default=0.2, gt=0)
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of rewards by step."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """GAE's lambda, which trades bias for variance. The value of every step is 0, as there is no critic, so a later
    reward counts gamma times lambda less for each step that it is later, and only the product matters.
    """

    def unused(self) -> dict[str, tuple[str, ...]]:
        found = super().unused()
        is_given = "step_rewards" in self.model_fields_set
        return {**found, "ppo always has step rewards": ("step_rewards",)} if is_given else found

    @model_validator(mode="after")
    def _discounts_by_its_own_names(self) -> Self:
        if "step_discount" in self.model_fields_set and self.step_discount != 1:
            raise ValueError("step_discount: ppo has gamma and gae_lambda in its place; give those")
        return self


class ReinforcePpSettings(ClippedSettings):
    """REINFORCE++ (arXiv 2501.03262): advantages normalised over the tokens of the whole batch."""

    name: Literal["reinforce_pp"] = "reinforce_pp"  # pyright: ignore[reportIncompatibleVariableOverride]
    advantage: Literal["batch_std", "reinforce_pp_baseline"] = "batch_std"  # pyright: ignore[reportIncompatibleVariableOverride]
    """reinforce_pp_baseline: less the mean reward of the task's rollouts first."""
    clip_high: float = Field(default=0.2, gt=0)
    unbiased_kl: Literal[False] = added(False)  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def needs(self) -> Needs:
        """A group of equal rewards counts in the batch's mean."""
        return super().needs.model_copy(update={"flat_groups": self.advantage == "batch_std"})


class RaeSettings(ClippedSettings):
    """Role-conditioned advantage estimation, for self-play (SPIRAL, arXiv 2506.24119)."""

    name: Literal["rae"] = "rae"  # pyright: ignore[reportIncompatibleVariableOverride]
    advantage: Literal["rae"] = "rae"  # pyright: ignore[reportIncompatibleVariableOverride]
    step_rewards: Literal["total"] = added("total")  # pyright: ignore[reportIncompatibleVariableOverride]
    clip_high: float = Field(default=0.2, gt=0)


class MaxRlSettings(ClippedSettings):
    """Maximum likelihood reinforcement learning (arXiv 2602.02710)."""

    name: Literal["max_rl"] = "max_rl"  # pyright: ignore[reportIncompatibleVariableOverride]
    advantage: Literal["max_rl"] = "max_rl"  # pyright: ignore[reportIncompatibleVariableOverride]
    step_rewards: Literal["total"] = added("total")  # pyright: ignore[reportIncompatibleVariableOverride]


class GdpoSettings(ClippedSettings):
    """Several rewards, each normalised apart from the others (GDPO, arXiv 2601.05242)."""

    name: Literal["gdpo"] = "gdpo"  # pyright: ignore[reportIncompatibleVariableOverride]
    advantage: Literal["gdpo"] = "gdpo"  # pyright: ignore[reportIncompatibleVariableOverride]
    step_rewards: Literal["total"] = added("total")  # pyright: ignore[reportIncompatibleVariableOverride]
