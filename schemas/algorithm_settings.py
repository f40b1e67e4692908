"""What every algorithm's settings have, what an algorithm needs of a run, and bases for settings of one's own.

What is asked before training (which rollouts are planned, what a configuration must agree with) is asked here, so that
nobody has to know a name.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, TypeVar, cast, get_origin

from pydantic import Field, FiniteFloat, JsonValue, model_validator

from rollstream.schemas.base import Settings, added

T = TypeVar("T")
JobKind = Literal["rl", "sft", "dpo"]
PREFERENCES: Literal["dpo"] = "dpo"
"""Kind of the jobs that train on pairs, whatever their algorithm is called."""
Advantage = Literal[
    "group_std", "group_mean", "leave_one_out", "max_rl", "gdpo", "batch_std", "batch_mean", "reinforce_pp_baseline",
    "per_agent", "hierarchical", "rae", "none"
]  # fmt: skip
BATCH_WIDE = frozenset({"batch_std", "batch_mean"})
"""Estimators for which a whole batch is one group (a global baseline, as in REINFORCE++, arXiv 2501.03262)."""
TRAINS_ON_FLAT_GROUPS = BATCH_WIDE | {"hierarchical", "rae", "gdpo", "none"}
"""Estimators by which a group of equal rewards may have advantages."""
_OF_STEPS = {"leave_one_out": "group_mean", "rae": "per_agent", "gdpo": "group_std", "max_rl": "group_std",
             "reinforce_pp_baseline": "group_std"}  # fmt: skip
"""Estimators of totals alone, and what to use for the rewards of steps."""
DEFAULT = "grpo"
CONTEXT_KEY = re.compile(r"\{(\w+)\}")
"""Where a context names a key of the task's inputs."""


class Needs(Settings):
    """What an algorithm needs of a run, a batch and a model."""

    rewards: bool = True
    """Off: rewards play no part, so a rollout without a score is as good as any."""
    behaviour: bool = False
    """Log-probabilities under the policy that sampled, at the temperature of the settings."""
    reference: bool = False
    """Log-probabilities under the job's base version."""
    proximal: bool = False
    """Log-probabilities under the policy as it was before the batch's first optimizer step."""
    teacher: bool = False
    """Log-probabilities under a teacher."""
    versions: bool = False
    """The weight version that sampled each token."""
    entropy: bool = False
    """The gradient of the policy's entropy."""
    pairs: bool = False
    """Rows are answers to one prompt, in pairs of a better and a worse one; else one row a token sequence."""
    step_rewards: bool = False
    """Rewards of single steps count, and not only their sum."""
    flat_groups: bool = False
    """A group of equal rewards trains too."""


class AlgorithmSettings(Settings):
    """What every algorithm has. Derive from it for an algorithm of your own."""

    KL_FIELD: ClassVar[str | None] = None
    """The field that says how near the policy stays to the reference (ART's `beta`)."""

    name: str = DEFAULT
    mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps in one pass over a batch."""
    num_iterations: int = added(1, ge=1)
    """Passes over a batch (GRPO's mu, PPO's epochs), each with mini-batches of its own."""
    max_tokens_per_micro_batch: int | None = Field(default=None, ge=1)
    """Tokens of a forward, shared beginnings counted once. None: 2,048 on the CPU (more is slower), else 16,384."""
    temperature: float = Field(default=1.0, gt=0)
    """Of the behaviour policy, so that ratios compare equal distributions."""

    @property
    def needs(self) -> Needs:
        """What the algorithm needs with these settings."""
        return Needs()

    @property
    def kind(self) -> JobKind:
        """Kind of the jobs that train by it."""
        if self.needs.pairs:
            return PREFERENCES
        return "rl" if self.needs.rewards or self.needs.behaviour else "sft"

    def trains(self, job_kind: str) -> bool:
        """Whether jobs of a kind may train by it: those on preferences by pairs, all others by rows."""
        return self.needs.pairs == (job_kind == PREFERENCES)

    @property
    def is_imitation(self) -> bool:
        """Whether it trains on rollouts of anybody, whatever they were worth."""
        return self.kind == "sft"

    def for_run(self, *, num_generations: int, temperature: float) -> Self:
        """With what the configuration of a new run leaves open. `temperature`: rollouts are sampled at it."""
        if self.needs.behaviour and temperature > 0 and "temperature" not in self.model_fields_set:
            return self.model_copy(update={"temperature": temperature})
        return self

    def texts(self) -> dict[str, Any]:
        """Free texts that were given, and what may hold some: a job's event carries them as they are written."""
        free = (name for name, field in type(self).model_fields.items() if get_origin(field.annotation) is not Literal)
        own = [name for name in free if name in self.model_fields_set - AlgorithmSettings.model_fields.keys()]
        return {name: value for name in own if isinstance(value := getattr(self, name), str | list | dict)}

    def unused(self) -> dict[str, tuple[str, ...]]:
        """Keys that were given in vain, by the reason why they change nothing."""
        return {}


class OffPolicySettings(Settings):
    """Correction for tokens that another policy sampled than the proximal one, before the batch's first optimizer step.

    The loss's ratio is then that to the proximal policy, and its tokens weigh w, the ratio of the proximal policy to
    the one that sampled: decoupled PPO (arXiv 2110.00641, equation 6), with TRL's modes and defaults.
    """

    level: Literal["token", "sequence"] = "sequence"
    """w of each token, or the product of a sequence's tokens for all of them."""
    mode: Literal["truncate", "mask"] = "mask"
    """Beyond a bound w becomes the bound (truncate) or 0 (mask)."""
    clip_min: float | None = Field(default=None, ge=0)
    """Lower bound of w; None: there is none. IcePop (arXiv 2510.18855) masks tokens outside 0.5 to 5."""
    clip_max: float = Field(default=3.0, gt=0)
    reject: Literal["k1", "k2", "k3"] | None = None
    """Leave a sequence out by its mean estimate of the KL divergence between the two policies."""
    reject_above: float = Field(default=0.1, gt=0)
    """That mean, from which on a sequence is left out."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.clip_min is not None and self.clip_min >= self.clip_max:
            raise ValueError(f"clip_min {self.clip_min:g} is not below clip_max {self.clip_max:g}")
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
            raise ValueError(f"buffer {self.buffer} is longer than max_length {self.max_length}")
        return self


class PolicyGradientSettings(AlgorithmSettings):
    """Of an algorithm that weighs tokens by the advantages of their rollouts. Derive from it for another one."""

    advantage: Advantage = "group_std"
    """group_*, leave_one_out: compared with the rollouts of the same task; batch_*: with all of the batch, so that one
    rollout a task is enough. All compare trajectories of the same agent; per_agent is group_std by the name of Dr. MAS
    (arXiv 2602.08847). hierarchical: agents that differ by a number at the end of their names (solver_1, solver_2) are
    compared within their rollout, all others as by group_std. rae: with the agent's own moving average (SPIRAL,
    arXiv 2506.24119), which goes on from batch to batch. max_rl: by the task's mean reward in place of the deviation
    (arXiv 2602.02710). gdpo: each of several rewards is normalised by itself first (arXiv 2601.05242).
    reinforce_pp_baseline: less the task's mean, then by the deviation of the batch (arXiv 2501.03262). none: the
    reward as it is.
    """
    reward_weights: dict[str, FiniteFloat] = added({})
    """gdpo: weight by reward name; of one that is not named: 1."""
    rae_decay: float = added(0.95, ge=0, lt=1)
    """Of that moving average: what is left of it after one more trajectory."""
    step_rewards: Literal["total", "process"] = added("total")
    """total: one advantage for all tokens of a member, from the sum of its rewards; process: process supervision, in
    which a token answers for the rewards of its own step and of those after it. Groups of equal sums are left out of
    batches all the same, unless `drop_zero_variance` is off.
    """
    step_discount: float = added(1.0, gt=0, le=1)
    """process: factor of a later reward for each step that it is later. It is gamma times lambda of generalised
    advantage estimation (GAE, arXiv 1506.02438, equation 16): without a critic only their product counts.
    """
    aggregation: Literal["tokens", "sequences", "constant"] = added("tokens")
    """The mean of a mini-batch's token losses over its tokens (DAPO, BNPO), over sequences of their means (GRPO), or
    their sum over sequences times `aggregation_length` (Dr. GRPO, arXiv 2503.20783).
    """
    aggregation_length: int | None = added(None, ge=1)
    off_policy: OffPolicySettings | None = added(None)
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
        )

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
        return found


class PairSettings(AlgorithmSettings):
    """Of an algorithm that compares answers to the same prompt. Derive from it for another one."""

    exhaustive_pairs: bool = added(True)
    """Every two answers to a prompt whose scores differ are a pair; else only the best with the worst."""
    min_score_diff: float = added(0.0, ge=0)
    """A smaller difference of scores makes no pair; equal scores never do."""
    max_pairs_per_turn: int | None = added(None, ge=1)
    """Of one prompt, so many pairs with the largest differences."""

    @property
    def needs(self) -> Needs:
        """Pairs; all answers may be of one rollout, so groups of equal rewards train too."""
        return Needs(pairs=True, reference=True, flat_groups=True)

    @property
    def compares_rollouts(self) -> bool:
        """Answers are scored by the rewards of their rollouts alone; else by the finest score that all of them have."""
        return False

    def refusal(self, chosen: float, rejected: float) -> str:
        """Why answers of these scores, the first the higher, are not a pair; "" if they are."""
        return ""


URL_WITHOUT_TEACHER = "teacher_url needs teacher: the model that the server was started with"


class DistillationSettings(AlgorithmSettings):
    """Of an algorithm that learns from a teacher's log-probabilities of what the policy sampled. Derive your own."""

    teacher: str = ""
    """A transformers folder or a hub name with the policy's vocabulary, never trained, and loaded only where a token is
    scored that no event has a score of; empty: the policy as it was at the job's base version."""
    context: str = ""
    """Text that only the teacher sees, before each sequence (behind its beginning-of-sequence token); `{KEY}` stands
    for a value of the task's inputs.
    """
    teacher_url: str = added("")
    """`http://host:port` of a vLLM server with the teacher, which is not loaded then."""

    @property
    def needs(self) -> Needs:
        """The teacher; groups of equal rewards train too."""
        return Needs(rewards=False, behaviour=True, teacher=True, flat_groups=True)

    @model_validator(mode="after")
    def _teacher_differs(self) -> Self:
        if not self.teacher and not self.context:
            raise ValueError("give teacher, context or both: without them the policy would learn from itself")
        if self.teacher_url and not self.teacher:
            raise ValueError(URL_WITHOUT_TEACHER)
        return self


class CustomSettings(AlgorithmSettings):
    """Settings of an algorithm from elsewhere, `python:module.Name` or an entry point's name, as data.

    Keys that are not common to all algorithms are its `options`, whether they are written below that or beside `name`.
    The learner's table makes the algorithm's own settings of them.
    """

    name: str  # pyright: ignore[reportGeneralTypeIssues]
    options: dict[str, JsonValue] = Field(default_factory=dict)
    declared: Needs = Field(default_factory=Needs)
    """What the algorithm said that it needs when the job was made."""

    @model_validator(mode="before")
    @classmethod
    def _options_apart(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        written = cast("dict[str, Any]", value)
        own = {name: given for name, given in written.items() if name in cls.model_fields}
        options = {name: given for name, given in written.items() if name not in cls.model_fields}
        return {**own, "options": {**own.get("options", {}), **options}} if options else own

    @property
    def needs(self) -> Needs:
        """As declared."""
        return self.declared


class Teacher(NamedTuple):
    """Whom an algorithm learns from, see `DistillationSettings`."""

    path: str
    context: str
    url: str

    @property
    def keys(self) -> tuple[str, ...]:
        """Of the task's inputs, that the context names."""
        return tuple(dict.fromkeys(CONTEXT_KEY.findall(self.context)))


def teacher_of(settings: AlgorithmSettings) -> Teacher | None:
    """The teacher that settings name; None if they need or name none."""
    if not settings.needs.teacher:
        return None
    given = settings.options if isinstance(settings, CustomSettings) else vars(settings)
    found = Teacher(*(str(given.get(key, "")) for key in ("teacher", "context", "teacher_url")))
    return found if any(found) else None


class PairRule(Protocol):
    """Settings of the selection."""

    @property
    def exhaustive_pairs(self) -> bool:
        """Whether every better and worse answer form a pair; else only the best and the worst."""
        ...

    @property
    def min_score_diff(self) -> float:
        """Minimum difference of the two scores."""
        ...

    @property
    def max_pairs_per_turn(self) -> int | None:
        """Maximum number of pairs, those with the largest differences; None: all."""
        ...


def pairs_by_score(
    answers: Sequence[T],
    rule: PairRule,
    *,
    score: Callable[[T], float],
    tie_break: Callable[[T], Any],
    refusal: Callable[[T, T], str] = lambda chosen, rejected: "",
) -> tuple[list[tuple[T, T]], Counter[str]]:
    """(chosen, rejected) of one turn, the largest differences first, and the number of pairs dropped by reason.

    `tie_break`: orders answers of equal score. `refusal`: why two answers do not form a pair, "" if they do.
    """
    ranked = sorted(answers, key=lambda answer: (-score(answer), tie_break(answer)))
    pairs = list(combinations(ranked, 2)) if rule.exhaustive_pairs else [(ranked[0], ranked[-1])]
    dropped: Counter[str] = Counter()
    found: list[tuple[T, T]] = []
    for chosen, rejected in pairs:
        diff = score(chosen) - score(rejected)
        if diff <= 0:
            reason = "equal scores"
        elif diff < rule.min_score_diff:
            reason = "less than min_score_diff"
        else:
            reason = refusal(chosen, rejected)
        if reason:
            dropped[reason] += 1
        else:
            found.append((chosen, rejected))
    found.sort(key=lambda pair: (score(pair[1]) - score(pair[0]), tie_break(pair[0]), tie_break(pair[1])))
    kept = found[: rule.max_pairs_per_turn]
    dropped["more than max_pairs_per_turn"] += len(found) - len(kept)
    return kept, +dropped
