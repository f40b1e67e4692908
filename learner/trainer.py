"""Model and optimizer of one job between two manifests. Blocking; always used from the one thread that trains."""

import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rollstream.eventlog.files import HashedFile, base_sha256
from rollstream.learner.algorithms import off_policy, table
from rollstream.learner.algorithms.base import BatchView
from rollstream.learner.checkpoints.checkpoint import Checkpoint, CheckpointPosition, part
from rollstream.learner.model.collate import check_lengths, check_token_ids, holder_of
from rollstream.learner.model.loading import num_positions, warn_of_head
from rollstream.learner.model.memory import KeptBudget, MicroBatchBudget
from rollstream.learner.model.micro_batch import TrainRow
from rollstream.learner.model.optimizer import load_state_tensors, make_optimizer, sharding_of_state, state_tensors
from rollstream.learner.model.policy import PolicyModel, Reference, published_sha256
from rollstream.learner.model.ranks import Ranks, failing_the_job
from rollstream.learner.model.step import StepResult, micro_batch_tokens, shares_prefixes, train_batch
from rollstream.learner.model.tensor_file import from_bytes
from rollstream.learner.parallel.process_ranks import DROP, LOAD, ProcessRanks
from rollstream.learner.parallel.refusals import refused
from rollstream.learner.parallel.sharded_policy import ShardedPolicy, checkpointed, write_shards
from rollstream.learner.progress import TrainedStep, manifest_metrics, schedule_of
from rollstream.learner.scoring.index import ScoreAsked
from rollstream.learner.scoring.models import ScoringModels, compute_as_set
from rollstream.learner.scoring.scored_batch import asked_of, batch_of, encoded
from rollstream.learner.scoring.scores import NONE, Scores
from rollstream.schemas import ids
from rollstream.schemas.devices import own_threads
from rollstream.schemas.errors import ConfigError, RollstreamError
from rollstream.schemas.events import BatchPlanned, JobSubmitted, TrajectoryAssembled, WeightsPublished
from rollstream.schemas.permissions import NOTHING, Permissions
from rollstream.schemas.revisions import RATIOS_WITHOUT_DROPOUT_SINCE, SCORES_SINCE
from rollstream.schemas.settings import ModelSettings

logger = logging.getLogger(__name__)


class JobTrainer:
    """The state that one job changes from batch to batch."""

    def __init__(
        self,
        job: JobSubmitted,
        *,
        threads: int | None,
        permissions: Permissions = NOTHING,
        ranks: Ranks = Ranks(),  # noqa: B008 -- a process alone has no state
        budget: Path | None = None,
    ) -> None:
        """Load the job's algorithm and model. Raises ModelError, or ConfigError if kind and algorithm do not fit.

        Of several processes (`ranks`) the first one makes it, and the others `follow`. If one of them runs out of
        memory, all end, and the file `budget`, or for scores one beside it, has the micro-batches that they begin with
        again. Whatever else fails in one of them fails in all, or ends all.

        `threads`: used if the job does not say its own number; as many as torch takes by itself if neither does.
        `permissions`: the algorithms and models that it may name. Raises NotAllowedError for another one.
        """
        location = f"job {job.job_id}: algorithm"
        self._is_fork = job.fork is not None
        algorithm = table.settings_of(job.settings.algorithm, permissions, location)
        self._first_batch, num_versions = schedule_of(job)
        self._settings = job.settings.model_copy(update={"algorithm": algorithm, "num_versions": num_versions})
        self._algorithm = table.algorithm(algorithm.name, permissions, location)
        table.check_fits(algorithm, self._settings.kind, f"job {job.job_id}")
        if ranks.num > 1 and (what := refused(self._settings)):
            raise ConfigError(
                f"job {job.job_id}: {ranks.num} processes do not train with {what}; start the learner as one process, "
                "or change the job"
            )
        own = own_threads(torch.get_num_threads)  # by now: below, this thread is given a number
        self._threads = self._settings.threads or threads or own
        self._settings = self._settings.model_copy(update={"threads": self._threads})
        compute_as_set(self._settings)
        self._path = path = permissions.model_path(self._settings.model.path, f"job {job.job_id}: model.path")
        seed = ids.derive_seed(self._settings.seed, job.run_id, job.model_group, "adapters")
        ranks = ranks.of_job(job.job_id)
        with ranks.together(LOAD, job.model_dump_json().encode()):
            self.model = policy_of(self._settings.model, ranks, seed=seed, path=path)
        warn_of_head(self.model.settings, self.model.compute_dtype, is_plain=self.model.selects_logprobs)
        if self._settings.revision >= RATIOS_WITHOUT_DROPOUT_SINCE:
            self.model.use_dropout(not algorithm.needs.compares_logprobs)
        self.model.compute_as(self._settings.revision)
        self._optimizer = make_optimizer(self.model.trainable(), self._settings.optimizer)
        self._reference: Reference | None = None
        self.scoring = ScoringModels(self.model, self._settings, permissions, f"{location}.teacher")
        self._skipped_in_row = 0
        self.index: int | None = None
        """The newest manifest that was trained, or is; None before the first one of this process."""
        tokens = micro_batch_tokens(self._settings, self.model.device)
        self.budget = MicroBatchBudget(tokens, halves=ranks.num == 1, restarts=budget is not None)
        if budget is not None and ranks.num > 1:
            self.budget.keep(KeptBudget(budget, job.job_id))
            self.scoring.keep(KeptBudget(budget.with_name("scoring_tokens.json"), job.job_id))
        self._statistics: dict[str, float] = {}
        """Statistics of the algorithm over the batches so far."""
        self._held: dict[int, dict[str, Tensor]] = {}
        """States that `hold_state` has copied, by version."""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss computes log-probabilities under the job's base version, which `refer_to` must be given;
        since SCORES_SINCE, they are events, see `asked`.
        """
        return self._settings.algorithm.needs.reference and self._settings.revision < SCORES_SINCE

    def refer_to(self, weights: bytes, what: str) -> None:
        """Compare with these published weights. Raises ModelError naming `what`."""
        compute_as_set(self._settings)
        self._reference = Reference(self.model, weights, what, "refer_to")

    def check_fits(self, published: WeightsPublished) -> None:
        """Raises ConfigError if a version was trained with another tokenizer, or is an adapter of another base model.

        Its tensors may have the right shapes all the same.
        """
        own, path = self.model.adapter_config(), self._settings.model.path
        where = f"version {published.version} of {published.model_group}"
        if "" != published.tokenizer_sha256 != self.model.tokenizer_sha256 != "":
            raise ConfigError(
                f"{where} was trained with another tokenizer than that of model {path}; restore the tokenizer's files, "
                "or give the model.path that it was trained with"
            )
        if own is None or published.lora is None:
            return
        if not published.is_above(base_sha256(self._path, published.base_sha256), path):
            if published.base_model == path:
                raise ConfigError(f"{where} is an adapter of model {path} with other weights; restore its weight files")
            raise ConfigError(
                f"{where} is an adapter of model {published.base_model}, not of {path}; give that model.path, or train "
                f"on from `rollstream merge {ids.version_name(published.model_group, published.version)}`"
            )
        for name in ("r", "lora_alpha", "use_rslora", "use_dora"):
            if (recorded := published.lora.get(name, own[name])) != own[name]:
                raise ConfigError(
                    f"{where} is an adapter with {name} {recorded}, not {own[name]}; give model.lora as it was there"
                )

    def use_threads(self, threads: int) -> None:
        """Train with as many threads from now on, in each process, whatever the job says. 0: with those of its own."""
        with self.model.ranks.together("use_threads", str(threads).encode()):
            self._settings = self._settings.model_copy(update={"threads": threads or self._threads})
            compute_as_set(self._settings)

    def stand_at(self, base: WeightsPublished, weights: bytes, what: str) -> None:
        """Begin the job from its base version's weights, and compare with them where the loss does.

        Where they are those of the model's folder, that has been loaded already, and is more exact: what is published
        may be rounded to bfloat16. A fork's are its parent's. Raises ModelError naming `what`.
        """
        if self._is_fork or published_sha256(self.model) != base.weights_sha256:
            self.begin(weights, what)
        if self.needs_reference:
            self.refer_to(weights, what)

    def begin(self, weights: bytes, what: str) -> None:
        """Begin the job from published weights, with a new optimizer. Raises ModelError naming `what`."""
        compute_as_set(self._settings)
        self.model.load_weights(from_bytes(weights, what))
        self.reset()

    def take_over(self, published: dict[str, Tensor]) -> None:
        """Take over published weights in place of those that were trained again. Raises ModelError.

        Where rounding a value gives the published one, it stays: it is more exact, and small steps add up in it. Of
        several processes each has its shards alone, and takes over all values as published.
        """
        if self.model.publishes_exactly or self._settings.model.lora or self.model.ranks.num > 1:
            self.model.load_weights(published)
            return
        self.model.check_weights(published)
        with torch.no_grad():
            for name, value in self.model.weights().items():
                theirs = published[name].to(value.device)
                value.copy_(torch.where(self.model.as_published(value) == theirs, value, theirs.to(value.dtype)))

    def reset(self) -> None:
        """Know nothing of batches before."""
        with self.model.ranks.together("reset"):
            self._statistics = {}
            self._skipped_in_row = 0

    def resume(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint, of as many processes or of others. Raises OSError if its shards cannot be read."""
        path = (checkpoint.path or Path()).absolute()
        with self.model.ranks.together("resume", str(path).encode()):
            like = self._like() if self.model.ranks.num > 1 else None
            self.restore(checkpointed(path, checkpoint.tensors, like, self.model.ranks))

    def _like(self) -> dict[str, Tensor]:
        """Parameters whose sharding a state's tensors follow, by the tensors' names."""
        found = {f"weights/{name}": value for name, value in self.model.weights().items()}
        of_optimizer = sharding_of_state(self.model.trainable())
        return found | {f"optimizer/{name}": value for name, value in of_optimizer.items()}

    def write_shards(self, folder: Path) -> dict[str, str]:
        """Write the state of all processes into a folder; the sha256 of each file by name. Raises OSError."""
        ranks = self.model.ranks
        with ranks.together("write_shards", str(folder.absolute()).encode()):
            own = write_shards(self.state(), folder)
            return {
                name: sha256 for one in ranks.gathered(orjson.dumps(own)) for name, sha256 in orjson.loads(one).items()
            }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from the `state` of this job at another version, as a checkpoint has it."""
        compute_as_set(self._settings)
        self.model.load_weights(part(state, "weights"))
        offload = self._settings.optimizer.offload
        load_state_tensors(self._optimizer, self.model.trainable(), part(state, "optimizer"), offload)
        self._statistics = {name: float(value) for name, value in part(state, "statistics").items()}
        self._skipped_in_row = int(part(state, "optimizer_steps").get("skipped_in_row", 0))
        random = part(state, "random")
        torch.set_rng_state(random["cpu"])
        if self.model.device.type == "cuda" and "cuda" in random:
            torch.cuda.set_rng_state(random["cuda"], self.model.device)

    def checkpoint(
        self,
        position: CheckpointPosition,
        weights: HashedFile | None = None,
        state: Mapping[str, Tensor] | None = None,
    ) -> Checkpoint:
        """Everything to go on from: `state`, or what it is now. `weights`: the file of those of `published`."""
        found = dict(self.state() if state is None else state)
        if self.model.ranks.num > 1:
            return Checkpoint(position, found, write=self.write_shards)
        return Checkpoint(position, found, weights if self.model.publishes_exactly else None)

    def hold_state(self, version: int, wanted: Collection[int]) -> None:
        """Copy the state, which is that of `version`, if that is one of `wanted`; copies of versions not in it go.

        Copies are in main memory, or where its shards are.
        """
        with self.model.ranks.together("hold_state", orjson.dumps([version, sorted(wanted)])):
            self._held = {known: state for known, state in self._held.items() if known in wanted}
            if version in wanted:
                self._held[version] = {name: _copied(value.detach()) for name, value in self.state().items()}

    def return_to(self, version: int) -> bool:
        """Go on from the state that was held of a version. False if none is."""
        if version not in self._held:
            return False
        with self.model.ranks.together("return_to", str(version).encode()):
            self.restore(self._held[version])
        return True

    def state(self) -> dict[str, Tensor]:
        """Everything to go on from. Weights and moments are not copied: the next optimizer step changes them."""
        tensors = {f"weights/{name}": value for name, value in self.model.weights().items()}
        state = state_tensors(self._optimizer, self.model.trainable())
        tensors |= {f"optimizer/{name}": value for name, value in state.items()}
        kept = self._statistics.items()
        tensors |= {f"statistics/{name}": torch.tensor(value, dtype=torch.float64) for name, value in kept}
        if self._skipped_in_row:
            tensors["optimizer_steps/skipped_in_row"] = torch.tensor(self._skipped_in_row)
        tensors["random/cpu"] = torch.get_rng_state()
        if self.model.device.type == "cuda":
            tensors["random/cuda"] = torch.cuda.get_rng_state(self.model.device)
        return tensors

    def train(
        self,
        planned: BatchPlanned,
        trajectories: Sequence[TrajectoryAssembled],
        *,
        scores: Scores = NONE,
        micro_batch_tokens: Sequence[int] | None = None,
        first: Mapping[str, Any] | None = None,
        before_step: Callable[[], None] | None = None,
    ) -> StepResult:
        """Train on a manifest's trajectories, given in its order. Raises DecodeError, RunFailedError.

        `scores`: what is `asked`. `micro_batch_tokens`: as StepTrained has them of the same manifest, if it was trained
        before. `first`: the budget of the first of several processes, to its followers. `before_step`: is called before
        each optimizer step; until the first one `state` stays as it is.
        """
        compute_as_set(self._settings)
        self.index = planned.index
        self.budget.begin(micro_batch_tokens)
        if first is not None:
            self.budget.begin_as(first)
        self._check_token_ids(trajectories)
        batch = replace(self.batch(planned, trajectories, scores), statistics=self._statistics)
        ranks = self.model.ranks
        data = encoded(planned, trajectories, scores, self.budget.to_others()) if ranks.num > 1 else b""
        doing = failing_the_job(f"training on manifest {planned.index}", ranks)
        with self._calling(before_step), ranks.together("train", data), doing:
            result = train_batch(
                self.model,
                self._optimizer,
                batch,
                self._algorithm,
                self._settings,
                index=self._first_batch + planned.num_trained,
                seed=planned.seed,
                reference=self._reference,
                version=planned.trains_at_version,
                skipped_in_row=self._skipped_in_row,
                budget=self.budget,
                check=partial(self._check_lengths, trajectories),
            )
        self.model.clear_gradients(0)  # else they would lie beside what is published and scored before the next batch
        self._statistics = dict(result.statistics)
        self._skipped_in_row = result.skipped_in_row
        if not result.num_optimizer_steps and not result.skipped_in_row:
            what = "completion to train on" if batch.pairs is None else "preference pair"
            logger.warning(
                "batch=%s has no %s: version=%s changes nothing", planned.batch_id, what, planned.yields_version
            )
        off_policy.warn_of_mismatch(result.metrics, planned.trains_at_version, planned.model_group)
        metrics = {**result.metrics, **manifest_metrics(planned)}
        return replace(result, metrics=metrics, scores_sha256=scores.sha256)

    def train_known(
        self, known: TrainedStep | None, planned: BatchPlanned, trajectories: Sequence[TrajectoryAssembled], **how: Any
    ) -> StepResult:
        """`train` to the bits of `known`, its step before, if it has one: with as many threads. `how`: see `train`."""
        if known is None or not self._settings.model.deterministic:  # then published weights count, whatever the bits
            return self.train(planned, trajectories, **how)
        threads = known.threads if known.threads != self._settings.threads else 0
        if threads:
            self.use_threads(threads)
        try:
            return self.train(planned, trajectories, micro_batch_tokens=known.micro_batch_tokens, **how)
        finally:  # of other errors the processes do not learn from each other: they wait, until this one ends
            is_known_to_all = isinstance(sys.exception(), (RollstreamError, OSError, type(None)))
            if threads and is_known_to_all and not self.model.ranks.is_stuck:
                self.use_threads(0)

    @contextmanager
    def _calling(self, before_step: Callable[[], None] | None) -> Iterator[None]:
        """A context in which each optimizer step calls a function first."""
        if before_step is None:
            yield
            return
        hook = self._optimizer.register_step_pre_hook(lambda *_: before_step())
        try:
            yield
        finally:
            hook.remove()

    def _check_token_ids(self, trajectories: Sequence[TrajectoryAssembled]) -> None:
        for trajectory in trajectories:
            check_token_ids(trajectory, self.model.num_token_ids)

    def _check_lengths(self, trajectories: Sequence[TrajectoryAssembled], prepared: Sequence[TrainRow]) -> None:
        """Raises DecodeError for a row that is trained and has more tokens than the model has positions for."""
        rows = [replace(one.row, mask=one.mask) for one in prepared]
        shares = shares_prefixes(self.model, rows, self._settings)
        check_lengths(rows, num_positions(self.model.module), lambda row: holder_of(row, trajectories), shares=shares)

    def asked(
        self, planned: BatchPlanned, trajectories: Sequence[TrajectoryAssembled], base_sha256: str
    ) -> list[ScoreAsked]:
        """The scores that training on a manifest needs: of members that are trained, and for each scorer of the loss.

        `base_sha256`: hash of the weights of the job's base version. Raises DecodeError.
        """
        scorers = self.scoring.scorers(base_sha256)
        if not scorers:
            return []
        self._check_token_ids(trajectories)
        return asked_of(self._settings.algorithm, scorers, planned, trajectories, self._settings.revision)

    def batch(
        self, planned: BatchPlanned, trajectories: Sequence[TrajectoryAssembled], scores: Scores = NONE
    ) -> BatchView:
        """Rows or pairs, as the algorithm needs them."""
        return batch_of(self._settings.algorithm, planned, trajectories, scores, self._settings.revision)


def _copied(value: Tensor) -> Tensor:
    return value.clone() if isinstance(value, DTensor) else value.to("cpu", copy=True)


def drop(job: JobSubmitted, ranks: Ranks) -> None:
    """Have the other processes let go of a job's trainer, if they have one. If this one is stuck, all end."""
    if ranks.is_stuck:
        return
    with ranks.of_job(job.job_id).together(DROP):
        pass


def policy_of(settings: ModelSettings, ranks: Ranks, *, seed: int, path: str) -> PolicyModel:
    """The policy of this process, or its part of that of all."""
    if isinstance(ranks, ProcessRanks):
        return ShardedPolicy(settings, ranks, seed=seed, path=path)
    return PolicyModel(settings, seed=seed, path=path, shares_base=True)
