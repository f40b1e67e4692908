"""The models that score for a job: each is loaded when it first has to, so never where events have what is needed."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from rollstream.learner.model import collate
from rollstream.learner.model.collate import TrainRow, rows_of
from rollstream.learner.model.memory import MicroBatchBudget
from rollstream.learner.model.policy import PolicyModel, Reference
from rollstream.learner.model.step import micro_batch_tokens
from rollstream.learner.scoring.scores import Logprobs, flat, scorers_of
from rollstream.schemas import tokens
from rollstream.schemas.events import TrajectoryAssembled
from rollstream.schemas.events.weights import Scorer
from rollstream.schemas.settings import JobSettings


class ScoringModels:
    """Reference of a job, beside its policy. Blocking; always used from the one thread that trains."""

    def __init__(self, policy: PolicyModel, settings: JobSettings) -> None:
        """`settings`: the job's, with the algorithm's own."""
        self._policy = policy
        self._settings = settings
        self._reference: Reference | None = None

    @property
    def is_idle(self) -> bool:
        """Whether the job's loss needs no scores."""
        return not self.scorers("")

    def scorers(self, base_sha256: str) -> tuple[Scorer, ...]:
        """Those that the job's loss needs. `base_sha256`: hash of the weights of its base version."""
        return scorers_of(self._settings, base_sha256)

    @property
    def lacks_base(self) -> bool:
        """Whether `take_base` must be called before `score`."""
        return self._reference is None

    def take_base(self, weights: bytes, what: str) -> None:
        """Take the weights of the job's base version, which are called `what` in an error. Raises ModelError."""
        self._reference = Reference(self._policy, weights, what)

    def score(self, scorer: Scorer, trajectories: Sequence[TrajectoryAssembled]) -> list[Logprobs]:
        """Log-probabilities (N,) of each trajectory's completion tokens, 0 where a sequence is not trained.

        Trajectories that begin alike should come together: what they have in common is computed once. Their bits depend
        on who comes together. Raises DecodeError, RunFailedError.
        """
        assert self._reference is not None
        rows: list[TrainRow] = []
        owners: list[tuple[int, int]] = []
        for member, trajectory in enumerate(trajectories):
            for row in rows_of(trajectory, needs_logprobs=scorer.over_kept, member=member):
                rows.append(TrainRow(row, row.mask))
                owners.append((member, row.sequence))
        found = self._logprobs(self._reference, rows, scorer.temperature)
        values = [[np.zeros(tokens.count(s.token_ids), np.float32) for s in one.sequences] for one in trajectories]
        for (member, sequence), row, logprobs_N in zip(owners, rows, found, strict=True):
            values[member][sequence][row.mask] = logprobs_N.cpu().numpy()
        return [flat(trajectory, of_it) for trajectory, of_it in zip(trajectories, values, strict=True)]

    def _logprobs(self, model: Reference, rows: Sequence[TrainRow], temperature: float) -> list[Tensor]:
        """By row, of the tokens on its mask."""
        longest = max((len(one.row.token_ids) for one in rows), default=0)
        shares = self._policy.shares_prefixes(longest)
        divide = collate.tree_micro_batches if shares else collate.micro_batches
        units = [(index,) for index in range(len(rows))]

        def computed(max_tokens: int) -> dict[int, Tensor]:
            found: dict[int, Tensor] = {}
            for one in divide(rows, units, max_tokens):
                logprobs_N = model.logprobs(one.to(self._policy.device), temperature=temperature)
                found |= zip(one.rows, logprobs_N.split(one.lengths), strict=True)
            return found

        budget = MicroBatchBudget(micro_batch_tokens(self._settings, self._policy.device))
        found = budget.run(computed, len(rows))
        return [found[index] for index in range(len(rows))]
