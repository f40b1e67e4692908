"""Settings of the built-in algorithms, a union tagged by `algorithm.name`.

Their losses are in `rollstream.learner.algorithms`, one file an algorithm.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import Discriminator, Field, ModelWrapValidatorHandler, PrivateAttr, Tag, model_validator

from rollstream.schemas.algorithm_settings import (
    DEFAULT,
    URL_WITHOUT_TEACHER,
    AlgorithmSettings,
    CustomSettings,
    DistillationSettings,
    Needs,
    PairSettings,
)
from rollstream.schemas.base import added
from rollstream.schemas.policy_gradient import (
    ClippedSettings,
    GdpoSettings,
    KlPenaltySettings,
    MaxRlSettings,
    PolicyGradientSettings,
    PpoSettings,
    RaeSettings,
    ReinforcePpSettings,
)

_CUSTOM = "custom"
_ONCE_SHARED = frozenset({
    "clip_low", "clip_high", "dual_clip", "advantage", "step_rewards", "entropy_coefficient", "kl_coefficient",
    "unbiased_kl", "mask_truncated", "truncation_penalty", "beta", "exhaustive_pairs", "min_score_diff",
    "max_pairs_per_turn", "sft_weight", "average_logprobs",
})  # fmt: skip
"""Fields that the settings of every algorithm had while there was one class for all. Records and configuration files
still hold them, so the algorithms of that time accept them all.
"""


class _BuiltIn(AlgorithmSettings):
    """An algorithm of the time when all had the same fields: it accepts those of the others."""

    _others: tuple[str, ...] = PrivateAttr(default=())
    """Keys of other algorithms that were given."""

    @model_validator(mode="wrap")
    @classmethod
    def _without_others(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(value, dict):
            return handler(value)
        written = cast("dict[str, Any]", value)
        others = {name: given for name, given in written.items() if name in _ONCE_SHARED - cls.model_fields.keys()}
        made = handler({name: given for name, given in written.items() if name not in others})
        made._others = tuple(others)
        return made

    def __eq__(self, other: object) -> bool:
        """Equal fields: keys that have no effect make no difference."""
        return type(other) is type(self) and vars(self) == vars(other)

    def unused(self) -> dict[str, tuple[str, ...]]:
        found = super().unused()
        return {**found, f"{self.name} does not use it": self._others} if self._others else found


class GrpoSettings(_BuiltIn, ClippedSettings):
    """Group relative policy optimisation, with the bounds of DAPO and dual-clip PPO."""

    name: Literal["grpo"] = "grpo"  # pyright: ignore[reportIncompatibleVariableOverride]


class CispoSettings(KlPenaltySettings):
    """Clipped importance-sampling weights on a plain policy gradient (MiniMax-M1, arXiv 2506.13585)."""

    name: Literal["cispo"] = "cispo"  # pyright: ignore[reportIncompatibleVariableOverride]
    clip_high: float = Field(default=4.0, gt=0)
    """A token's weight is its ratio, at most 1 + clip_high."""


class GspoSettings(KlPenaltySettings):
    """Group sequence policy optimisation (arXiv 2507.18071)."""

    OWN_AGGREGATION: ClassVar[str] = "gspo is the mean over sequences"
    name: Literal["gspo"] = "gspo"  # pyright: ignore[reportIncompatibleVariableOverride]
    clip_low: float = Field(default=3e-4, gt=0)
    clip_high: float = Field(default=4e-4, gt=0)
    dual_clip: float | None = added(None, gt=1)
    """For a negative advantage A, the loss of a sequence is at most -dual_clip * A. None, as in the paper: no bound, so
    one token of a large ratio may outweigh a batch.
    """

    @model_validator(mode="after")
    def _is_corrected_by_sequence(self) -> Self:
        if self.off_policy is not None and self.off_policy.level != "sequence":
            raise ValueError("off_policy.level: gspo has one ratio a sequence; use level sequence")
        return self


class DppoSettings(KlPenaltySettings):
    """Divergence proximal policy optimisation (arXiv 2602.04879)."""

    name: Literal["dppo"] = "dppo"  # pyright: ignore[reportIncompatibleVariableOverride]
    divergence: Literal["binary_tv", "binary_kl"] = "binary_tv"
    """Total variation or KL divergence between two policies that only know "this token" and "another one"."""
    delta: float = Field(default=0.15, gt=0)
    """A token that moves away from the sampling policy beyond it has no gradient. Unless it is given: the paper's, 0.15
    for binary_tv and 0.05 for binary_kl; records always have it.
    """
    ratio_max: float = Field(default=20.0, gt=1)
    """Bound of a token's ratio."""

    @model_validator(mode="before")
    @classmethod
    def _delta_goes_by_divergence(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        written = cast("dict[str, Any]", value)
        is_left_open = written.get("divergence") == "binary_kl" and "delta" not in written
        return {**written, "delta": 0.05} if is_left_open else written


class SapoSettings(KlPenaltySettings):
    """Soft adaptive policy optimisation (arXiv 2511.20347)."""

    name: Literal["sapo"] = "sapo"  # pyright: ignore[reportIncompatibleVariableOverride]
    aggregation: Literal["tokens", "sequences", "constant"] = "sequences"
    temperature_positive: float = Field(default=1.0, gt=0)
    temperature_negative: float = Field(default=1.05, gt=0)
    """Rate at which the gradient of a token with a negative advantage fades as its ratio leaves 1."""


class VespoSettings(KlPenaltySettings):
    """Variational sequence-level soft policy optimisation (VESPO), by TRL's names and defaults."""

    name: Literal["vespo"] = "vespo"  # pyright: ignore[reportIncompatibleVariableOverride]
    k_positive: float = Field(default=2.0, ge=0)
    lambda_positive: float = Field(default=3.0, ge=0)
    k_negative: float = Field(default=3.0, ge=0)
    lambda_negative: float = Field(default=2.0, ge=0)


class SftSettings(_BuiltIn):
    """Supervised fine-tuning."""

    name: Literal["sft"] = "sft"  # pyright: ignore[reportIncompatibleVariableOverride]
    mask_truncated: bool = added(False)
    """Do not train completions that ended at the token limit (finish_reason `length`)."""

    @property
    def needs(self) -> Needs:
        """Tokens alone."""
        return Needs(rewards=False)


class DpoSettings(_BuiltIn, PairSettings):
    """Direct preference optimisation."""

    KL_FIELD: ClassVar[str | None] = "beta"

    name: Literal["dpo"] = "dpo"  # pyright: ignore[reportIncompatibleVariableOverride]
    beta: float = added(0.1, gt=0)
    """Weight of a log-ratio to the reference; the larger it is, the nearer the policy stays to the reference."""
    sft_weight: float = added(0.0, ge=0)
    """Weight of the chosen answer's mean negative log-likelihood in the loss."""
    average_logprobs: bool = added(False)
    """An answer's log-probability is the mean over its tokens instead of their sum."""
    loss_type: Literal["sigmoid", "ipo"] = added("sigmoid")
    """ipo: the margin of log-ratios is drawn to 1 / (2 beta) (arXiv 2310.12036); usually with `average_logprobs`."""
    label_smoothing: float = added(0.0, ge=0, lt=0.5)
    """Share of pairs that are taken for the wrong way round (conservative DPO); of sigmoid only."""

    @model_validator(mode="after")
    def _smoothing_fits(self) -> Self:
        if self.loss_type == "ipo" and self.label_smoothing:
            raise ValueError("label_smoothing is for loss_type sigmoid; remove it, or choose sigmoid")
        return self


class KtoSettings(AlgorithmSettings):
    """Kahneman-Tversky optimisation (arXiv 2402.01306): rollouts are good or bad, without pairs."""

    KL_FIELD: ClassVar[str | None] = "beta"

    name: Literal["kto"] = "kto"  # pyright: ignore[reportIncompatibleVariableOverride]
    beta: float = Field(default=0.1, gt=0)
    reward_threshold: float = 0.5
    """Rollouts of this reward or more are desirable."""
    desirable_weight: float = Field(default=1.0, ge=0)
    undesirable_weight: float = Field(default=1.0, ge=0)
    reference_point: Literal["zero", "sampled"] = added("zero")
    """sampled: the batch's estimate of the KL divergence from the reference, by the policy that sampled it."""

    @property
    def needs(self) -> Needs:
        """Rewards and the reference; a group in which every rollout is good trains too."""
        return Needs(reference=True, behaviour=self.reference_point == "sampled", flat_groups=True)


class OpdSettings(DistillationSettings):
    """On-policy distillation: the reverse KL divergence from a teacher on the policy's own samples."""

    name: Literal["opd"] = "opd"  # pyright: ignore[reportIncompatibleVariableOverride]
    teacher: str = Field(min_length=1)
    ratio_max: float = Field(default=20.0, gt=1)
    """Bound of a token's ratio."""


class OpsdSettings(DistillationSettings):
    """On-policy self-distillation: the teacher is the policy itself, as it began, with privileged context."""

    name: Literal["opsd"] = "opsd"  # pyright: ignore[reportIncompatibleVariableOverride]
    context: str = Field(min_length=1)
    ratio_max: float = Field(default=20.0, gt=1)
    """Bound of a token's ratio."""


class MixSettings(PolicyGradientSettings):
    """Reinforcement, imitation of good rollouts and distillation in one batch, each the mean over its own tokens."""

    OWN_AGGREGATION: ClassVar[str] = "mix is the mean over the tokens of each component"
    name: Literal["mix"] = "mix"  # pyright: ignore[reportIncompatibleVariableOverride]
    rl: float = Field(default=1.0, ge=0)
    """Weight of the policy gradient, as `cispo` has it, and of its entropy bonus."""
    clip_high: float = Field(default=4.0, gt=0)
    """A token's ratio counts as 1 + clip_high at most, here and in `ref_kl`."""
    ce: float = Field(default=0.0, ge=0)
    """Weight of the cross-entropy of tokens of good rollouts, and of those that the policy did not sample."""
    ce_threshold: float = 1.0
    """Rollouts of this reward or more are good."""
    ref_kl: float = Field(default=0.0, ge=0)
    """Weight of the reverse KL divergence from the teacher, as of `opd`; without one, from the job's base version."""
    teacher: str = ""
    context: str = ""
    teacher_url: str = added("")

    @model_validator(mode="after")
    def _url_has_a_teacher(self) -> Self:
        if self.teacher_url and not self.teacher:
            raise ValueError(URL_WITHOUT_TEACHER)
        return self

    @property
    def needs(self) -> Needs:
        """A teacher or the reference, if the divergence counts; good rollouts train without a worse one beside them."""
        needs, is_taught = super().needs, bool(self.teacher or self.context)
        changes = {"teacher": self.ref_kl > 0 and is_taught, "reference": self.ref_kl > 0 and not is_taught}
        alone = {"flat_groups": True, "several_rollouts": False} if self.ce > 0 or self.ref_kl > 0 else {}
        return needs.model_copy(update=changes | alone)

    def unused(self) -> dict[str, tuple[str, ...]]:
        """Keys of components that have no weight."""
        found = super().unused()
        own = {"rl": ("entropy_coefficient",), "ref_kl": ("teacher", "context", "teacher_url"), "ce": ("ce_threshold",)}
        for why in (name for name in own if not getattr(self, name)):
            given = tuple(key for key in own[why] if key in self.model_fields_set)
            found = {**found, f"{why} is 0": given} if given else found
        return found


class ExpertIterationSettings(AlgorithmSettings):
    """Supervised fine-tuning on the model's own rollouts, selected by the reward of the agent that trains on them."""

    name: Literal["expert_iteration"] = "expert_iteration"  # pyright: ignore[reportIncompatibleVariableOverride]
    selection: Literal["threshold", "weighted"] = "threshold"
    """threshold: rollouts of `reward_threshold` or more, all alike; weighted: every rollout, by its share of reward."""
    reward_threshold: float = 0.9
    weighting_minimum: float | None = None
    """Reward of weight 0, and of those below it; none: the lowest one of the agent in the batch."""
    weighting_epsilon: float = Field(default=0.01, ge=0)
    """Weight that is spread evenly over all rollouts, beside 1 that is shared by reward."""
    mask_truncated: bool = False
    """Do not train completions that ended at the token limit (finish_reason `length`)."""

    @property
    def needs(self) -> Needs:
        """Rewards; a group in which every rollout is good trains too."""
        return Needs(flat_groups=True)

    def unused(self) -> dict[str, tuple[str, ...]]:
        is_weighted = self.selection == "weighted"
        vain = {"reward_threshold"} if is_weighted else {"weighting_minimum", "weighting_epsilon"}
        found = tuple(sorted(vain & self.model_fields_set))
        return {f"selection is {self.selection}": found} if found else {}


class MaltSettings(PairSettings):
    """DPO on the tree of a task's rollouts: an answer is worth the mean reward of the rollouts that have it."""

    KL_FIELD: ClassVar[str | None] = "beta"
    loss_type: ClassVar[str] = "sigmoid"
    label_smoothing: ClassVar[float] = 0.0

    name: Literal["malt"] = "malt"  # pyright: ignore[reportIncompatibleVariableOverride]
    beta: float = Field(default=0.1, gt=0)
    """Weight of a log-ratio to the reference; the larger it is, the nearer the policy stays to the reference."""
    sft_weight: float = Field(default=0.0, ge=0)
    """Weight of the chosen answer's mean negative log-likelihood in the loss."""
    average_logprobs: bool = False
    """An answer's log-probability is the mean over its tokens instead of their sum."""
    pair_selection: Literal["positive_negative", "interval"] = "positive_negative"
    """positive_negative: the chosen answer is worth `midpoint` or more, the rejected one less; interval: the values
    differ by `min_score_diff` or more, wherever they are.
    """
    midpoint: float = 0.0
    """Between the rewards of success and failure."""
    min_score_diff: float = Field(default=0.1, ge=0)
    """A smaller difference of values makes no pair."""
    max_pairs_per_turn: int | None = Field(default=1, ge=1)
    """Maximum number of pairs for one node; those with the largest differences are kept. null: all pairs."""
    reference: Literal["iteration", "base"] = "iteration"
    """The policy that sampled the batch's epoch, or the job's base version."""

    @property
    def needs(self) -> Needs:
        """Pairs, and the log-probabilities of the reference."""
        is_base = self.reference == "base"
        return super().needs.model_copy(update={"reference": is_base, "proximal": not is_base})

    @property
    def compares_rollouts(self) -> bool:
        """The value of a node is the expected reward of the rollouts through it."""
        return True

    def refusal(self, chosen: float, rejected: float) -> str:
        """As in the base class; with `positive_negative`, each answer must be on its side of the midpoint."""
        is_split = chosen >= self.midpoint > rejected
        return "" if self.pair_selection == "interval" or is_split else "on one side of the midpoint"


BUILT_IN: dict[str, type[AlgorithmSettings]] = {
    "grpo": GrpoSettings,
    "sft": SftSettings,
    "dpo": DpoSettings,
    "expert_iteration": ExpertIterationSettings,
    "malt": MaltSettings,
    "cispo": CispoSettings,
    "gspo": GspoSettings,
    "dppo": DppoSettings,
    "sapo": SapoSettings,
    "vespo": VespoSettings,
    "kto": KtoSettings,
    "opd": OpdSettings,
    "opsd": OpsdSettings,
    "mix": MixSettings,
    "ppo": PpoSettings,
    "reinforce_pp": ReinforcePpSettings,
    "rae": RaeSettings,
    "max_rl": MaxRlSettings,
    "gdpo": GdpoSettings,
}
OF_PAIRS = tuple(name for name, kind in BUILT_IN.items() if issubclass(kind, PairSettings))
"""Names of the built-in algorithms that train on pairs."""


def _tag(value: Any) -> str:
    if isinstance(value, Mapping):
        name = cast("Mapping[str, Any]", value).get("name", DEFAULT)
    else:
        name = getattr(value, "name", DEFAULT)
    return name if isinstance(name, str) and name in BUILT_IN else _CUSTOM


Algorithm = Annotated[
    Annotated[GrpoSettings, Tag("grpo")]
    | Annotated[SftSettings, Tag("sft")]
    | Annotated[DpoSettings, Tag("dpo")]
    | Annotated[ExpertIterationSettings, Tag("expert_iteration")]
    | Annotated[MaltSettings, Tag("malt")]
    | Annotated[CispoSettings, Tag("cispo")]
    | Annotated[GspoSettings, Tag("gspo")]
    | Annotated[DppoSettings, Tag("dppo")]
    | Annotated[SapoSettings, Tag("sapo")]
    | Annotated[VespoSettings, Tag("vespo")]
    | Annotated[KtoSettings, Tag("kto")]
    | Annotated[OpdSettings, Tag("opd")]
    | Annotated[OpsdSettings, Tag("opsd")]
    | Annotated[MixSettings, Tag("mix")]
    | Annotated[PpoSettings, Tag("ppo")]
    | Annotated[ReinforcePpSettings, Tag("reinforce_pp")]
    | Annotated[RaeSettings, Tag("rae")]
    | Annotated[MaxRlSettings, Tag("max_rl")]
    | Annotated[GdpoSettings, Tag("gdpo")]
    | Annotated[CustomSettings, Tag(_CUSTOM)],
    Discriminator(_tag),
]
"""`algorithm` in a configuration and in a job."""


def recorded(settings: AlgorithmSettings) -> AlgorithmSettings:
    """Settings as a job's event carries them: whoever reads it need not have the algorithm."""
    if type(settings) in (CustomSettings, *BUILT_IN.values()):
        return settings
    values = settings.model_dump(mode="json")
    common = {name: values.pop(name) for name in AlgorithmSettings.model_fields if name in values}
    return CustomSettings(**common, options=values, declared=settings.needs)
