"""The interface of an algorithm: settings, preparation of a batch, loss and metrics. No torch here."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollstream.schemas.algorithm_settings import AlgorithmSettings
from rollstream.schemas.events.rollouts import Completion, VersionSpan
from rollstream.schemas.revisions import NEWEST_REVISION

if TYPE_CHECKING:
    from rollstream.learner.algorithms.tokens import Losses, TokenBatch

TRUNCATED = "length"
"""Finish reason of a completion that ended at its token limit, as in OpenAI's API."""
OTHER_GROUP = -2
"""In place of the version that sampled a token: one of another model group, as in a what-if."""
Divisor = Literal["tokens", "sequences", "row_length", "constant"]
PerToken = float | NDArray[np.float32]
"""One number for all tokens of a row, or one a token (T,)."""


class KeptRow(NamedTuple):
    """The ids that top_p and top_k left to sample the tokens of a row from."""

    lengths: NDArray[np.int64]
    """(T,), how many each token had; 0: the whole vocabulary, as on prompts."""
    ids: NDArray[np.int32]
    """(M,), of all tokens one after another."""


@dataclass(frozen=True, slots=True)
class Row:
    """One training sequence."""

    token_ids: NDArray[np.int32]  # (T,)
    mask: NDArray[np.bool_]  # (T,), true on completion tokens that have a token before them
    logprobs: NDArray[np.float32]  # (T,), under the behaviour policy; 0 off the mask
    member: int = 0
    """Index of its member in the batch; of an answer that several gave, the first of those whose pairs it is in."""
    completions: tuple[Completion, ...] = ()
    kept: "KeptRow | None" = None
    """Ids that its tokens were sampled from, if its sampling was truncated."""
    sequence: int = 0
    """Index of its sequence in the trajectory."""
    scores: Mapping[str, NDArray[np.float32]] = field(default_factory=dict[str, NDArray[np.float32]])
    """(T,) by role, `reference` or `teacher`: recorded log-probabilities of its completion tokens."""
    model_group: str | None = None
    """The one that is trained, whose versions `versions` tells; None: those of any."""

    @property
    def num_completion_tokens(self) -> int:
        """Tokens that are trained on."""
        return int(self.mask.sum())

    @property
    def truncated(self) -> NDArray[np.bool_]:
        """(T,), true on completions that ended at the token limit."""
        found = np.zeros(len(self.token_ids), np.bool_)
        for part in self.completions:
            if part.finish_reason == TRUNCATED:
                found[part.start : part.start + part.length] = True
        return found

    @property
    def versions(self) -> NDArray[np.int64]:
        """(T,): weight version that sampled each token; -1 where none is known, as on prompts, OTHER_GROUP where it is
        one of another model group than `model_group`.
        """
        found = np.full(len(self.token_ids), -1, np.int64)
        for start, span in self._spans():
            is_own = self.model_group in (None, span.model_group)
            found[start : start + span.length] = span.version if is_own else OTHER_GROUP
        return found

    def _spans(self) -> Iterator[tuple[int, VersionSpan]]:
        for part in self.completions:
            at = part.start
            for span in part.spans:
                yield at, span
                at += span.length

    def by_step(self, values: Mapping[int, float]) -> NDArray[np.float32]:
        """(T,): each completion's tokens get the value of its step; 0 on prompts."""
        found = np.zeros(len(self.token_ids), np.float32)
        for part in self.completions:
            found[part.start : part.start + part.length] = values[part.step_index]
        return found


@dataclass(frozen=True, slots=True)
class Member:
    """One trajectory of a batch, with its rewards."""

    group_id: str = ""
    rollout_id: str = ""
    agent: str = ""
    reward: float = 0.0
    """The manifest's values for it."""
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    """Rewards by name, as recorded."""
    step_rewards: Mapping[int, float] = field(default_factory=dict[int, float])
    """Recorded for a step (weighted); it may be one without tokens, as a tool's."""
    steps: frozenset[int] = frozenset()
    """Steps that have tokens to train on."""
    is_truncated: bool = False
    """One of its completions ended at the token limit."""
    staleness: int = 0
    """Versions between the policy that sampled and the one that is trained."""


@dataclass(frozen=True, slots=True)
class BatchView:
    """One batch, whole: what `prepare` sees of it. Its mini-batches are parted afterwards."""

    rows: Sequence[Row]
    """Rows in the order of the manifest; with pairs, every different answer once."""
    members: Sequence[Member]
    """Members in the order of the manifest."""
    pairs: Sequence[tuple[int, int]] | None = None
    """Rows of the better and the worse answer; None where rows are token sequences."""
    score_diffs: Sequence[float] = ()
    """Difference of scores of each pair, above 0."""
    statistics: Mapping[str, float] = field(default_factory=dict[str, float])
    """`Prepared.statistics` of the job's previous batch; empty for its first."""
    revision: int = NEWEST_REVISION
    """Revision of the job, see `JobSettings.revision`."""


class Normaliser(NamedTuple):
    """The divisor of the sum of a mini-batch's losses.

    tokens: by the tokens that are trained on. sequences: token losses first by the length of their row, then by the
    number of rows; losses of rows or pairs by how many there are. row_length: by `value` for each row, whatever its
    length (or each pair). constant: by `value`, whatever the mini-batch has.
    """

    by: Divisor = "tokens"
    value: float = 1.0


@dataclass(frozen=True, slots=True)
class Prepared:
    """A batch as an algorithm prepared it. Lists are aligned with `BatchView.rows`; an empty one changes no row."""

    advantages: Sequence[PerToken] = ()
    keep: Sequence[NDArray[np.bool_]] = ()
    """(T,): which tokens of its mask are trained. A row without any is left out; one of a pair must keep some."""
    weights: Sequence[PerToken] = ()
    """Factors of token losses; no normaliser counts them."""
    components: Mapping[str, Sequence[PerToken]] = field(default_factory=dict[str, Sequence[PerToken]])
    """Weights of the rows or their tokens by component of the loss (`Losses.parts`), 0 where it does not count. Each
    component is divided by the number of a mini-batch's tokens where it counts, whatever the normaliser. Weights that
    are not for a component are passed on all the same, as `TokenBatch.components`.
    """
    normaliser: Normaliser = field(default_factory=Normaliser)
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Metrics of the batch, beside those of the losses."""
    statistics: Mapping[str, float] = field(default_factory=dict[str, float])
    """All that the next batch of the job is to know of it and of those before, by name."""


class Counts(NamedTuple):
    """The sizes of a batch that sums can be divided by."""

    tokens: int
    """Number of tokens that were trained on."""
    sequences: int
    """Rows; an answer of several pairs counts once a micro-batch."""
    pairs: int
    """0 where rows are token sequences."""


class Algorithm(ABC):
    """A way to train. An instance has no state: settings come with every call, and equal input gives equal output.

    What it carries from batch to batch (a moving average) are the `statistics` that `prepare` gets and returns. They
    are in checkpoints, so that a restart and a replay go on with them.
    """

    Settings: ClassVar[type[AlgorithmSettings]]
    """Its numbers, and by their `needs` what it needs."""

    def prepare(self, batch: BatchView, settings: Any) -> Prepared:
        """Advantages, kept tokens, weights and the normaliser. In numpy; once a batch, before any forward.

        Groups reach over mini-batches, so it sees the whole batch; the normaliser counts each mini-batch by itself.
        """
        return Prepared()

    @abstractmethod
    def loss(self, tokens: "TokenBatch", settings: Any) -> "Losses":
        """The losses of a micro-batch in torch, by token, row or pair, without their mean; and sums for the metrics.

        It is called once a micro-batch, and must be a sum over the micro-batches: it sees no other row.
        """

    @abstractmethod
    def metrics(self, sums: Mapping[str, float], counts: Counts) -> dict[str, float]:
        """Named metrics of a batch from the sums of its micro-batches; not asked for where nothing was trained."""
