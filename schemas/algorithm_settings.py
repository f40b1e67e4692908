"""Base classes for the settings of algorithms, and `Needs`, the requirements of an algorithm on a run.

Questions that arise before training (which rollouts are planned, what a configuration must agree with) are answered
here, so that no caller depends on an algorithm's name.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, TypeVar, cast, get_origin

from pydantic import Field, JsonValue, model_validator

from rollstream.schemas.base import Settings, added
from rollstream.schemas.variables import REFERENCE

T = TypeVar("T")
JobKind = Literal["rl", "sft", "dpo"]
PREFERENCES: Literal["dpo"] = "dpo"
"""Kind of the jobs that train on pairs, whatever their algorithm is called."""
ENTRY_POINTS = "rollstream.algorithms"
"""Entry point group of the algorithms of installed packages."""
DEFAULT = "grpo"
CONTEXT_KEY = re.compile(r"\{(\w+)\}")
"""A reference to a key of the task's inputs within a context."""
_BRACES = re.compile(r"\{([^{}]+)\}")


class Needs(Settings):
    """Requirements of an algorithm on a run, a batch and a model."""

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
    nonnegative_rewards: bool = added(False)
    """A reward below 0 fails the job."""
    named_rewards: bool = added(False)
    """Recorded rewards count by name, and not only the manifest's reward."""
    several_rollouts: bool = added(False)
    """Rollouts of a task are compared with each other alone, so that a single one teaches nothing."""

    @property
    def compares_logprobs(self) -> bool:
        """Whether the loss has ratios to other log-probabilities, which were computed without dropout."""
        return self.behaviour or self.reference or self.proximal or self.teacher


class AlgorithmSettings(Settings):
    """Settings common to all algorithms. Derive from this class for an algorithm of your own."""

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
    """Temperature of the behaviour policy, so that ratios compare equal distributions."""
    calculate_entropy: bool = added(True)
    """Record `policy/entropy` (verl's name). Off: computed only where the loss has an entropy bonus."""

    @property
    def needs(self) -> Needs:
        """The algorithm's requirements under these settings."""
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
        """Whether it trains on rollouts of any policy, whatever their rewards."""
        return self.kind == "sft"

    @property
    def pair_settings(self) -> "PairSettings | None":
        """Settings for the selection of pairs; None if the algorithm trains on rows."""
        return None

    @property
    def corrects_off_policy(self) -> bool:
        """Whether losses are weighted for tokens that another policy sampled, see `OffPolicySettings`."""
        return False

    @property
    def penalty(self) -> str:
        """The key by which something is subtracted from rewards before they are compared; "" if none is given."""
        return ""

    def for_run(self, *, num_generations: int, temperature: float) -> Self:
        """Return a copy with the defaults of a new run filled in. `temperature`: of its rollouts' sampling."""
        if self.needs.behaviour and temperature > 0 and "temperature" not in self.model_fields_set:
            return self.model_copy(update={"temperature": temperature})
        return self

    def texts(self) -> dict[str, Any]:
        """Free texts among the given settings, and lists and dicts that may contain some: a job's event carries them as
        they are written.
        """
        free = (name for name, field in type(self).model_fields.items() if get_origin(field.annotation) is not Literal)
        own = [name for name in free if name in self.model_fields_set - AlgorithmSettings.model_fields.keys()]
        return {name: value for name in own if isinstance(value := getattr(self, name), str | list | dict)}

    def unused(self) -> dict[str, tuple[str, ...]]:
        """Keys that were given but have no effect, by reason."""
        return {}


class PairSettings(AlgorithmSettings):
    """Settings of an algorithm that compares answers to the same prompt. Derive from this class for another one."""

    exhaustive_pairs: bool = added(True)
    """Every two answers to a prompt whose scores differ are a pair; else only the best with the worst."""
    min_score_diff: float = added(0.0, ge=0)
    """A smaller difference of scores makes no pair; equal scores never do."""
    max_pairs_per_turn: int | None = added(None, ge=1)
    """Maximum number of pairs for one prompt; those with the largest differences are kept. None: all pairs."""

    @property
    def needs(self) -> Needs:
        """Pairs; all answers may be of one rollout, so groups of equal rewards train too."""
        return Needs(pairs=True, reference=True, flat_groups=True)

    @property
    def pair_settings(self) -> "PairSettings":
        """Themselves."""
        return self

    @property
    def compares_rollouts(self) -> bool:
        """Answers are scored by the rewards of their rollouts alone; else by the finest score that all of them have."""
        return False

    def refusal(self, chosen: float, rejected: float) -> str:
        """The reason why two answers, `chosen` with the higher score, do not form a pair; "" if they do."""
        return ""


URL_WITHOUT_TEACHER = "teacher_url needs teacher: the model that the server was started with; add it"


class DistillationSettings(AlgorithmSettings):
    """Settings of an algorithm that learns from a teacher's log-probabilities of the tokens that the policy sampled.
    Derive from this class for an algorithm of your own.
    """

    teacher: str = ""
    """A transformers folder or a hub name with the policy's vocabulary, never trained, and loaded only where a token is
    scored that no event has a score of; empty: the policy as it was at the job's base version."""
    context: str = ""
    """Text that only the teacher sees, before each sequence (behind its beginning-of-sequence token); `{KEY}` stands
    for a value of the task's inputs.
    """
    teacher_url: str = added("")
    """`http://host:port` of a server with the teacher that scores prompts (vLLM); it is not loaded then."""

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
    """Requirements that the algorithm declared when the job was created."""

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
        """The declared requirements."""
        return self.declared


class Teacher(NamedTuple):
    """The teacher that an algorithm learns from, see `DistillationSettings`."""

    path: str
    context: str
    url: str

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the task's inputs that the context refers to."""
        return tuple(dict.fromkeys(CONTEXT_KEY.findall(self.context)))

    @property
    def unfilled(self) -> tuple[str, ...]:
        """Texts in braces that the context keeps as they are, because they are neither words nor variables."""
        texts = dict.fromkeys(_BRACES.findall(REFERENCE.sub("", self.context)))
        return tuple(text for text in texts if text not in self.keys)


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
