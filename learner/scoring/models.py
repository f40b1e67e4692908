"""The models that score for a job: each is loaded when it first has to, so never where events have what is needed."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import orjson
import torch
from torch import Tensor

from rollstream.eventlog.failpoints import failpoint
from rollstream.learner.algorithms.base import KeptRow, Row
from rollstream.learner.model import collate
from rollstream.learner.model.collate import check_lengths, rows_of
from rollstream.learner.model.loading import num_positions
from rollstream.learner.model.memory import KeptBudget, MicroBatchBudget
from rollstream.learner.model.micro_batch import MicroBatch, TrainRow
from rollstream.learner.model.policy import PolicyModel, Reference, make_deterministic
from rollstream.learner.model.ranks import Ranks, failing_the_job, of_all
from rollstream.learner.model.step import micro_batch_tokens
from rollstream.learner.model.tree_attention import use_flash_attention
from rollstream.learner.scoring.index import scorers_of
from rollstream.learner.scoring.scores import Logprobs, flat
from rollstream.learner.scoring.served_teacher import ServedTeacher
from rollstream.learner.scoring.vocabulary import AS_SAMPLED, misfit, tokenizer_of
from rollstream.schemas import tokens
from rollstream.schemas.algorithm_settings import teacher_of
from rollstream.schemas.errors import ModelError
from rollstream.schemas.events import TrajectoryAssembled
from rollstream.schemas.events.weights import Scorer
from rollstream.schemas.permissions import Permissions
from rollstream.schemas.settings import JobSettings, ModelSettings


class TeacherModel:
    """A model that is only asked. It computes on the policy's device, in the type that the settings give."""

    def __init__(self, settings: ModelSettings, path: str) -> None:
        """`path`: what the settings' path stands for here. Raises ModelError naming what cannot be loaded."""
        with torch.random.fork_rng(devices=[]):
            self.model = PolicyModel(settings, seed=0, path=path, is_trained=False)
        self.model.module.eval().requires_grad_(requires_grad=False)

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch, *, temperature: float) -> Tensor:
        """Log-probabilities (N,) of the N tokens on the mask, row by row."""
        logprobs_N, _ = self.model.completion_terms(
            batch, temperature=temperature, entropy_needs_grad=False, entropy=False
        )
        return logprobs_N


class ScoringModels:
    """Reference and teacher of a job, beside its policy. Blocking; always used from the one thread that trains."""

    def __init__(self, policy: PolicyModel, settings: JobSettings, permissions: Permissions, location: str) -> None:
        """`settings`: the job's, with the algorithm's own; `permissions`: the teachers that it may name; `location`:
        where it does, for errors.
        """
        self._policy = policy
        self._settings = settings
        self._permissions = permissions
        self._location = location
        self._reference: Reference | None = None
        self._teacher: TeacherModel | None = None
        self._served: ServedTeacher | None = None
        self._tokenizer: Any = None
        self.budgets: dict[str, MicroBatchBudget] = {}
        """Budgets by the scorer's model. One that was halved stays so: scores are events, whatever the division was."""
        self._kept: KeptBudget | None = None

    def keep(self, kept: KeptBudget) -> None:
        """Continue with the stored number of tokens, and store it there when several processes halve it."""
        self._kept = kept

    @property
    def is_idle(self) -> bool:
        """Whether the job's loss needs no scores."""
        return not self.scorers("")

    def scorers(self, base_sha256: str) -> tuple[Scorer, ...]:
        """Those that the job's loss needs. `base_sha256`: hash of the weights of its base version."""
        return scorers_of(self._settings, base_sha256)

    def lacks_base(self, scorer: Scorer) -> bool:
        """Whether `take_base` must be called before `score`."""
        return not scorer.model and self._reference is None

    def take_base(self, weights: bytes, what: str) -> None:
        """Take the weights of the job's base version, which are called `what` in an error. Raises ModelError.

        Of several processes all take them, and rank 0 alone gives them.
        """
        compute_as_set(self._settings)
        self._reference = Reference(self._policy, weights, what)

    def score(
        self,
        scorer: Scorer,
        trajectories: Sequence[TrajectoryAssembled],
        contexts: Sequence[str] = (),
        first: Mapping[str, Any] | None = None,
    ) -> list[Logprobs]:
        """Log-probabilities (N,) of each trajectory's completion tokens, 0 where a sequence is not trained.

        `contexts`: the text that only the scorer sees, of each trajectory. Trajectories that begin alike should come
        together: what they have in common is computed once. Their bits depend on who comes together. `first`: see
        `JobTrainer.train`. Raises NotAllowedError, ModelError, DecodeError, RunFailedError.

        Of several processes all compute the policy's own earlier weights, and each gets the values of all; rank 0
        alone asks a teacher.
        """
        compute_as_set(self._settings)
        rows: list[Row] = []
        for member, trajectory in enumerate(trajectories):
            rows += rows_of(trajectory, needs_logprobs=scorer.over_kept, member=member)
        rows_with_context = [self._with_context(row, contexts[row.member]) if contexts else row for row in rows]
        ranks = Ranks() if scorer.model else self._policy.ranks
        if first is None and ranks.num > 1:
            first = self._budget(scorer, self._policy).to_others()
        data = encoded(scorer, trajectories, contexts, first) if first is not None else b""
        with ranks.together("score", data), failing_the_job(f"scoring by the {scorer.role}", ranks):
            found = self._found(scorer, rows_with_context, [one.trajectory_id for one in trajectories], first)
        values = [[np.zeros(tokens.count(s.token_ids), np.float32) for s in one.sequences] for one in trajectories]
        for row, logprobs_N in zip(rows, found, strict=True):
            values[row.member][row.sequence][row.mask] = logprobs_N
        return [flat(trajectory, of_it) for trajectory, of_it in zip(trajectories, values, strict=True)]

    def _found(
        self, scorer: Scorer, rows: Sequence[Row], names: Sequence[str], first: Mapping[str, Any] | None
    ) -> list[Logprobs]:
        """Log-probabilities of the tokens on the mask, by row. `names`: of the trajectories."""
        teacher = teacher_of(self._settings.algorithm)
        if scorer.model and teacher is not None and teacher.url:
            if scorer.temperature != 1 or any(row.kept is not None for row in rows):
                raise ModelError(f"{self._location}_url: {AS_SAMPLED}")
            found = self._served_teacher(scorer.model, teacher.url).logprobs([row.token_ids for row in rows])
            return [values_T[row.mask] for row, values_T in zip(rows, found, strict=True)]
        model, asked = self._model(scorer)
        for row in rows:
            if (largest := int(row.token_ids.max(initial=0))) >= model.num_token_ids:
                raise ModelError(
                    f"{self._location}: trajectory {names[row.member]} has token id {largest}, and "
                    f"{scorer.model or 'the model'} has {model.num_token_ids} ids; give a teacher with as many"
                )
        check_lengths(
            rows,
            num_positions(model.module),
            lambda row: f"trajectory {names[row.member]}, sequence {row.sequence}",
            shares=model.shares_prefixes(max((len(row.token_ids) for row in rows), default=0)),
            shorten="a shorter algorithm.context" if scorer.context else "",
        )
        budget = self._budget(scorer, model)
        budget.begin()
        if first is not None:
            budget.begin_as(first)
        of_rows = _logprobs(model, asked, [TrainRow(row, row.mask) for row in rows], scorer.temperature, budget)
        return [logprobs_N.float().cpu().numpy() for logprobs_N in of_rows]

    def _budget(self, scorer: Scorer, model: PolicyModel) -> MicroBatchBudget:
        """Tokens of the micro-batches of a scorer's model."""
        found = self.budgets.get(scorer.model)
        if found is None:
            found = MicroBatchBudget(micro_batch_tokens(self._settings, model.device), halves=model.ranks.num == 1)
            if self._kept is not None and model.ranks.num > 1:
                found.keep(self._kept)
            self.budgets[scorer.model] = found
        return found

    def _served_teacher(self, written: str, url: str) -> ServedTeacher:
        if self._served is None:
            self._permissions.check_url(url, f"{self._location}_url")
            path = self._permissions.model_path(written, self._location)
            if odd := misfit(self.policy_path, path):
                raise self._misfit(written, odd)
            self._served = ServedTeacher(url, path, tokenizer_of(self.policy_path))
        return self._served

    def _model(self, scorer: Scorer) -> tuple[PolicyModel, Reference | TeacherModel]:
        """The model that computes, and the scorer that asks it."""
        if not scorer.model:
            assert self._reference is not None
            return self._policy, self._reference
        if self._teacher is None:
            path = self._permissions.model_path(scorer.model, self._location)
            changes = {"path": scorer.model, "lora": None, "gradient_checkpointing": False, "quantization": None}
            teacher = TeacherModel(self._settings.model.model_copy(update=changes), path)
            self._check_vocabulary(teacher.model, scorer.model, path)
            teacher.model.may_fuse, teacher.model.copies_keys = self._policy.may_fuse, self._policy.copies_keys
            self._teacher = teacher
        return self._teacher.model, self._teacher

    def _check_vocabulary(self, teacher: PolicyModel, written: str, path: str) -> None:
        """Raises ModelError if a token id is not the same text to the teacher as to the policy."""
        odd = misfit(self.policy_path, path)  # of equal tokenizers, models may be padded to different sizes
        if odd is None and teacher.num_token_ids < self._policy.num_token_ids:
            odd = f"it has {teacher.num_token_ids} token ids, the model {self._policy.num_token_ids}"
        if odd:
            raise self._misfit(written, odd)

    def _misfit(self, written: str, odd: str) -> ModelError:
        return ModelError(
            f"{self._location}: teacher {written} has another vocabulary than model {self._settings.model.path}: "
            f"{odd}; give a teacher of the same model family"
        )

    @property
    def policy_path(self) -> str:
        """Local path for the job's `model.path`."""
        return self._permissions.model_path(self._settings.model.path, self._location)

    def _with_context(self, row: Row, context: str) -> Row:
        """The row behind a text: behind its beginning-of-sequence token, if it begins with one."""
        if self._tokenizer is None:
            self._tokenizer = tokenizer_of(self.policy_path)
        if self._tokenizer is None:
            raise ModelError(
                f"{self._location}: model {self._settings.model.path} has no tokenizer for the context; "
                "add its tokenizer's files to the model's folder"
            )
        ids = np.asarray(self._tokenizer.encode(context, add_special_tokens=False), np.int32)
        at = int(len(row.token_ids) > 0 and row.token_ids[0] == self._tokenizer.bos_token_id)
        kept = row.kept and KeptRow(np.insert(row.kept.lengths, at, np.zeros(len(ids), np.int64)), row.kept.ids)
        return replace(
            row,
            token_ids=np.concatenate([row.token_ids[:at], ids, row.token_ids[at:]]),
            mask=np.concatenate([row.mask[:at], np.zeros(len(ids), np.bool_), row.mask[at:]]),
            logprobs=np.concatenate([row.logprobs[:at], np.zeros(len(ids), np.float32), row.logprobs[at:]]),
            completions=(),
            kept=kept,
        )


def _logprobs(
    model: PolicyModel,
    asked: Reference | TeacherModel,
    rows: Sequence[TrainRow],
    temperature: float,
    budget: MicroBatchBudget,
) -> list[Tensor]:
    """Log-probabilities of the tokens on the mask, by row."""
    longest = max((len(one.row.token_ids) for one in rows), default=0)
    plain = collate.tree_micro_batches if model.shares_prefixes(longest) else collate.micro_batches
    units = [(index,) for index in range(len(rows))]
    lengths = [len(one.row.token_ids) for one in rows]

    def computed(max_tokens: int) -> dict[int, Tensor]:
        found: dict[int, Tensor] = {}
        micro_batches = model.ranks.divide(partial(plain, rows), lengths, units, max_tokens)
        with model.ranks.collective():
            for one in micro_batches:
                logprobs_N = asked.logprobs(one.to(model.device), temperature=temperature)
                if not one.is_filler:
                    found |= zip(one.rows, logprobs_N.split(one.lengths), strict=True)
        return found

    own = budget.run(computed, len(rows))
    failpoint("learner/within-scores-of-group")
    found = of_all(own, model.ranks, torch.device("cpu"))
    return [found[index] for index in range(len(rows))]


def compute_as_set(settings: JobSettings) -> None:
    """Set what torch has once a process as a job's settings say: another job may have been at work in between."""
    make_deterministic(settings.threads, deterministic=settings.model.deterministic)
    use_flash_attention(settings.model.flash_attention)


def encoded(
    scorer: Scorer,
    trajectories: Sequence[TrajectoryAssembled],
    contexts: Sequence[str],
    first: Mapping[str, Any],
) -> bytes:
    """Encode the arguments of `ScoringModels.score` for other processes."""
    events = [one.model_dump_json() for one in trajectories]
    scored = {"scorer": scorer.model_dump_json(), "events": events, "contexts": list(contexts), "first": first}
    return orjson.dumps(scored)


def decoded_arguments(data: bytes) -> tuple[Scorer, list[TrajectoryAssembled], list[str], dict[str, Any]]:
    """Decode the result of `encoded`."""
    found = orjson.loads(data)
    trajectories = [TrajectoryAssembled.model_validate_json(one) for one in found["events"]]
    return Scorer.model_validate_json(found["scorer"]), trajectories, found["contexts"], found["first"]
