"""Settings of algorithms that weigh tokens by advantages: what they share, off-policy correction included, and those
with PPO's clipped objective, which differ in their advantages; `grpo` apart.
"""

from typing import Any, ClassVar, Literal, Self, cast

from pydantic import Field, FiniteFloat, model_validator

from rollstream.schemas.algorithm_settings import AlgorithmSettings, Needs
from rollstream.schemas.base import Settings, added

Advantage = Literal[
    "group_std", "group_mean", "leave_one_out", "max_rl", "gdpo", "batch_std", "batch_mean", "reinforce_pp_baseline",
    "group_mean_batch_std", "per_agent", "hierarchical", "rae", "none"
]  # fmt: skip
BATCH_WIDE = frozenset({"batch_std", "batch_mean"})
"""Estimators for which a whole batch is one group (a global baseline, as in REINFORCE++, arXiv 2501.03262)."""
TRAINS_ON_FLAT_GROUPS = BATCH_WIDE | {
    "group_mean_batch_std", "reinforce_pp_baseline", "hierarchical", "rae", "gdpo", "none"
}  # fmt: skip
"""Estimators by which a group of equal rewards may have advantages, or counts in those of the others."""
ALONE = BATCH_WIDE | {"rae", "none"}
"""Estimators by which a rollout without others of its task has an advantage; `hierarchical` may have one, too."""
_OF_STEPS = {"leave_one_out": "group_mean", "rae": "per_agent", "gdpo": "group_std", "max_rl": "group_std",
             "reinforce_pp_baseline": "group_std", "group_mean_batch_std": "group_std"}  # fmt: skip
"""Estimators of totals alone, and the settings to use for rewards of steps."""
DUAL_CLIP = 3.0
"""Bound of the ratio at negative advantages, unless the configuration gives another (arXiv 1912.09729, section 3)."""


class OffPolicySettings(Settings):
    """Correction for tokens that another policy sampled than the proximal one, before the batch's first optimizer step.

    The loss's ratio is then that to the proximal policy, and its tokens weigh w, the ratio of the proximal policy to
    the one that sampled: decoupled PPO (arXiv 2110.00641, equation 6), with TRL's modes and defaults.
    """

    level: Literal["token", "sequence"] = "sequence"
    """w of each token, or the product of a sequence's tokens for all of them."""
    mode: Literal["truncate", "mask"] = "mask"
    """Beyond a bound w becomes the bound (truncate) or 0 (mask). TRL's `token_mask` and the like name the level too."""
    clip_min: float | None = Field(default=None, ge=0)
    """Lower bound of w; None: there is none. IcePop (arXiv 2510.18855) masks tokens outside 0.5 to 5."""
    clip_max: float | None = Field(default=3.0, gt=0)
    """Upper bound of w; None: there is none."""
    reject: Literal["k1", "k2", "k3"] | None = None
    """Leave a sequence out by its mean estimate of the KL divergence between the two policies."""
    reject_above: float = Field(default=0.1, gt=0)
    """Threshold of that mean from which on a sequence is left out."""

    @model_validator(mode="before")
    @classmethod
    def _mode_may_name_the_level(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        given = cast("dict[str, Any]", value)
        level, _, mode = str(given.get("mode", "")).partition("_")
        if level not in ("token", "sequence") or not mode:
            return given
        if given.get("level", level) != level:
            raise ValueError(f"mode {level}_{mode} is of level {level}, not {given['level']}; give one of the two")
        return {**given, "level": level, "mode": mode}

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.clip_min is not None and self.clip_max is not None and self.clip_min >= self.clip_max:
            raise ValueError(f"clip_min {self.clip_min:g} is not below clip_max {self.clip_max:g}; lower clip_min")
        return self


class OverlongSettings(Settings):
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13)."""

    max_length: int = Field(ge=1)
    """Completion tokens of a rollout from which on 1 is subtracted from its reward."""
    buffer: int = Field(ge=1)
    """Over so many tokens before that, what is subtracted grows from 0 to 1."""

    @model_validator(mode="after")
    def _buffer_fits(self) -> Self:
        if self.buffer > self.max_length:
            raise ValueError(f"buffer {self.buffer} is longer than max_length {self.max_length}; lower buffer")
        return self


class PolicyGradientSettings(AlgorithmSettings):
    """Settings of an algorithm that weights tokens by the advantages of their rollouts. Derive from this class for
    another one.
    """

    OWN_AGGREGATION: ClassVar[str] = ""
    """Aggregation of an algorithm that leaves no choice of it; empty: `aggregation` chooses."""

    advantage: Advantage = "group_std"
    """group_*, leave_one_out: compared with the rollouts of the same task; batch_*: with all of the batch, so that one
    rollout a task is enough. All compare trajectories of the same agent; per_agent is group_std by the name of Dr. MAS
    (arXiv 2602.08847). hierarchical: agents that differ by a number at the end of their names (solver_1, solver_2) are
    compared within their rollout, all others as by group_std. rae: with the agent's own moving average (SPIRAL,
    arXiv 2506.24119), which goes on from batch to batch. max_rl: by the task's mean reward in place of the deviation
    (arXiv 2602.02710). gdpo: each of several rewards is normalised by itself first (arXiv 2601.05242).
    reinforce_pp_baseline: less the task's mean, then by the deviation of these differences in the batch
    (arXiv 2501.03262). group_mean_batch_std: the same by the deviation of the batch's rewards (arXiv 2508.08221). none:
    the reward as it is. A new run with `num_generations: 1` whose file does not say otherwise has batch_std in place of
    group_std, with a warning.
    """
    reward_weights: dict[str, FiniteFloat] = added({})
    """Weights by reward name, for gdpo; a reward without one has that of the run, see the builder's."""
    rae_decay: float = added(0.95, ge=0, lt=1)
    """Decay of that moving average: the share of it that is left after one more trajectory."""
    step_rewards: Literal["total", "process"] = added("total")
    """total: one advantage for all tokens of a member, from the sum of its rewards; process: process supervision, in
    which a token answers for the rewards of its own step and of those after it. Groups of equal sums are left out of
    streamed batches all the same, unless `drop_zero_variance` is off.
    """
    step_discount: float = added(1.0, gt=0, le=1)
    """process: factor of a later reward for each step of the agent's own that it is later; steps of tools and of other
    agents do not count. It is gamma times lambda of generalised advantage estimation (GAE, arXiv 1506.02438, equation
    16): without a critic only their product counts.
    """
    aggregation: Literal["tokens", "sequences", "constant"] = added("tokens")
    """The mean of a mini-batch's token losses over its tokens (DAPO, BNPO), over sequences of their means (GRPO), or
    their sum over sequences times `aggregation_length` (Dr. GRPO, arXiv 2503.20783).
    """
    aggregation_length: int | None = added(None, ge=1)
    off_policy: OffPolicySettings | None = added(None)
    off_policy_mask_threshold: float | None = added(None, gt=0)
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556, equation 9; TRL's name): tokens with a negative
    advantage have no policy gradient where the mean of log p of the sampling policy less that of the current one, over
    their sequence, is above it. None: no masking.
    """
    entropy_coefficient: float = Field(default=0.0, ge=0)
    mask_truncated: bool = added(False)
    """Do not train completions that ended at the token limit (finish_reason `length`)."""
    truncation_penalty: float = added(0.0, ge=0)
    """Subtracted from the reward of a member that has such a completion, before advantages are computed.
    Groups of equal rewards are rejected before; a new run that would is refused.
    """
    overlong: OverlongSettings | None = added(None)
    """Subtracted likewise, by length."""

    @model_validator(mode="after")
    def _estimator_fits_steps(self) -> Self:
        other = _OF_STEPS.get(self.advantage)
        if self.step_rewards == "process" and other:
            raise ValueError(f"advantage {self.advantage} compares totals, not steps; use {other} for step rewards")
        if self.advantage == "gdpo" and (self.truncation_penalty or self.overlong):
            why = "knows rewards by name, from which truncation_penalty and overlong are not subtracted"
            raise ValueError(f"advantage gdpo {why}; remove them, or choose another advantage")
        if (self.aggregation == "constant") != (self.aggregation_length is not None):
            raise ValueError("aggregation constant and aggregation_length belong together; give both or neither")
        return self

    @property
    def needs(self) -> Needs:
        """Behaviour log-probabilities; step rewards and groups of equal rewards as the advantages say."""
        return Needs(
            behaviour=True,
            proximal=self.off_policy is not None,
            entropy=self.entropy_coefficient > 0,
            step_rewards=self.step_rewards == "process",
            flat_groups=self.advantage in TRAINS_ON_FLAT_GROUPS,
            nonnegative_rewards=self.advantage == "max_rl",
            named_rewards=self.advantage == "gdpo",
            several_rollouts=self.step_rewards == "total" and self.advantage not in {*ALONE, "hierarchical"},
        )

    @property
    def corrects_off_policy(self) -> bool:
        return self.off_policy is not None

    @property
    def penalty(self) -> str:
        return "truncation_penalty" if self.truncation_penalty else "overlong" if self.overlong else ""

    def for_run(self, *, num_generations: int, temperature: float) -> Self:
        """One rollout a task has nothing to compare with but the batch."""
        chosen = super().for_run(num_generations=num_generations, temperature=temperature)
        is_open = self.advantage == "group_std" and "advantage" not in self.model_fields_set
        return chosen.model_copy(update={"advantage": "batch_std"}) if num_generations == 1 and is_open else chosen

    def unused(self) -> dict[str, tuple[str, ...]]:
        """Keys of an estimator that is not chosen."""
        found = super().unused()
        if self.advantage != "rae" and "rae_decay" in self.model_fields_set:
            found = {**found, f"advantage is {self.advantage}": ("rae_decay",)}
        if self.advantage != "gdpo" and self.reward_weights:
            found = {**found, f"advantage is {self.advantage}, not gdpo": ("reward_weights",)}
        if self.step_rewards == "total" and self.step_discount != 1:
            found = {**found, "step_rewards is total": ("step_discount",)}
        off_policy = self.off_policy
        if off_policy is not None and off_policy.reject is None and "reject_above" in off_policy.model_fields_set:
            found = {**found, "off_policy.reject is not given": ("off_policy.reject_above",)}
        aggregated = tuple(key for key in ("aggregation", "aggregation_length") if key in self.model_fields_set)
        if self.OWN_AGGREGATION and aggregated:
            found = {**found, self.OWN_AGGREGATION: aggregated}
        return found


class KlPenaltySettings(PolicyGradientSettings):
    """Settings of losses that may have a penalty for leaving the job's base version."""

    KL_FIELD: ClassVar[str | None] = "kl_coefficient"

    kl_coefficient: float = added(0.0, ge=0)
    """Weight of the KL divergence from the job's base version; 0 keeps no copy of that."""
    unbiased_kl: bool = added(False)
    """Weight that KL estimate by the token's importance ratio, which makes its gradient unbiased."""

    @property
    def needs(self) -> Needs:
        """The reference too, if the KL divergence from it counts."""
        return super().needs.model_copy(update={"reference": self.kl_coefficient > 0})

    def unused(self) -> dict[str, tuple[str, ...]]:
        found = super().unused()
        return (
            found if self.kl_coefficient or not self.unbiased_kl else {**found, "kl_coefficient is 0": ("unbiased_kl",)}
        )


class ClippedSettings(KlPenaltySettings):
    """Settings of PPO's clipped objective (arXiv 1707.06347, equation 7), with the bounds of DAPO and dual-clip PPO."""

    clip_low: float = Field(default=0.2, gt=0)
    clip_high: float = Field(default=0.28, gt=0)
    dual_clip: float | None = added(None, gt=1)
    """For a negative advantage A, the loss of a token is at most -dual_clip * A, whatever its ratio. A new run has 3
    unless its configuration says another number, or null for no bound.
    """

    def for_run(self, *, num_generations: int, temperature: float) -> Self:
        """Ratios are bounded unless the configuration says otherwise."""
        chosen = super().for_run(num_generations=num_generations, temperature=temperature)
        return chosen if "dual_clip" in self.model_fields_set else chosen.model_copy(update={"dual_clip": DUAL_CLIP})


class PpoSettings(ClippedSettings):
    """Proximal policy optimisation (arXiv 1707.06347) with GAE (arXiv 1506.02438) over steps, without a critic."""

    name: Literal["ppo"] = "ppo"  # pyright: ignore[reportIncompatibleVariableOverride]
    advantage: Literal["none", "group_mean", "group_std", "batch_mean", "batch_std"] = "none"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Normalisation of the rewards of steps before they are summed; none by default."""
    step_rewards: Literal["process"] = "process"  # pyright: ignore[reportIncompatibleVariableOverride]
    clip_high: float = Field(default=0.2, gt=0)
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of rewards by step of the agent's own."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """GAE's lambda, which trades bias for variance. The value of every step is 0, as there is no critic, so a later
    reward counts gamma times lambda less for each such step that it is later, and only the product matters.
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
