"""Training on one batch: rows in, a changed model and metrics out. No files, no log, no clock but for durations."""

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from rollstream.learner.algorithms import off_policy
from rollstream.learner.algorithms.base import Algorithm, BatchView, Counts, Normaliser, Row
from rollstream.learner.model import collate
from rollstream.learner.model.aggregation import backward, divisors, fetched, share_of, without_loss
from rollstream.learner.model.memory import MicroBatchBudget, in_optimizer_step
from rollstream.learner.model.micro_batch import MicroBatch, TrainRow, Unit, moved
from rollstream.learner.model.optimizer import learning_rate, set_learning_rate, steps_together, take_step
from rollstream.learner.model.policy import PolicyModel, Reference
from rollstream.learner.model.ranks import of_all, whole
from rollstream.schemas import ids
from rollstream.schemas.errors import RunFailedError
from rollstream.schemas.revisions import (
    COMPARES_SINCE,
    COUNTS_AGES_SINCE,
    COUNTS_PAIRS_SINCE,
    LAST_STEP_TRAINS_SINCE,
    SHARES_PREFIXES_SINCE,
    SIZES_BY_DEVICE_SINCE,
)
from rollstream.schemas.settings import JobSettings

logger = logging.getLogger(__name__)

ENTROPY = "policy/entropy"
CPU_TOKENS, GPU_TOKENS = 2048, 16384
"""Default tokens of a micro-batch. A CPU is fastest if they fit its caches: see docs/performance.md."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of training on a batch."""

    num_optimizer_steps: int
    num_tokens: int
    """Unpadded tokens that went through the model."""
    metrics: dict[str, float]
    seconds: dict[str, float]
    """collate, forward_backward, optimizer."""
    threads: int
    """CPU threads that torch computed with: they decide the order of sums, so bits."""
    statistics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Statistics of the algorithm over its batches so far."""
    skipped_in_row: int = 0
    """Optimizer steps that were skipped one after the other, up to the last one."""
    micro_batch_tokens: tuple[int, ...] = ()
    """See `StepTrained.micro_batch_tokens`."""
    scores_sha256: str = ""
    """See `StepTrained.scores_sha256`."""
    ranks: int = 1
    """Processes that trained together: they too decide the order of sums."""
    device: str = ""
    """The GPU's name, or cpu."""


def adopted(model: PolicyModel, seconds: dict[str, float]) -> StepResult:
    """The result of a rollback: no optimizer step."""
    threads, device = torch.get_num_threads(), device_name(model.device)
    return StepResult(0, 0, {}, seconds, threads, ranks=model.ranks.num, device=device)


@dataclass(slots=True)
class _Taken:
    """The optimizer steps of a batch so far."""

    budget: MicroBatchBudget
    skipped_in_row: int
    num_skipped: int = 0
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Sums over all its micro-batches."""
    norms: list[float] = field(default_factory=list[float])
    rates: list[float] = field(default_factory=list[float])
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("collate", "forward_backward", "optimizer"), 0.0)
    )


@dataclass(frozen=True, slots=True)
class _Work:
    """State that the mini-batches of a batch have in common."""

    model: PolicyModel
    algorithm: Algorithm
    normaliser: Normaliser
    settings: JobSettings
    reference: Reference | None
    divide: Callable[[Sequence[Unit], int], Sequence[MicroBatch]]
    taken: _Taken


def train_batch(
    model: PolicyModel,
    optimizer: torch.optim.Optimizer,
    batch: BatchView,
    algorithm: Algorithm,
    settings: JobSettings,
    *,
    index: int,
    seed: int,
    reference: Reference | None = None,
    version: int | None = None,
    skipped_in_row: int = 0,
    budget: MicroBatchBudget | None = None,
    check: Callable[[list[TrainRow]], None] | None = None,
) -> StepResult:
    """Take the optimizer steps of a batch, one a mini-batch of each pass, if anything is left. Blocking.

    `index`: batches of the job before it, for the learning-rate schedule. `check` raises if the model cannot take a
    row. `seed` decides the mini-batches and dropout. `reference`: what the loss compares with, if it does. `version`:
    of the weights, which tokens' versions are compared with. A step whose loss or gradient is not finite is skipped;
    `skipped_in_row`: those before this batch. `budget`: of the micro-batches, as the job says without it. Raises
    RunFailedError if more than `optimizer.max_skipped_steps` in a row are not finite, or memory is too small for a row.
    """
    chosen = settings.algorithm
    prepared = algorithm.prepare(batch := replace(batch, revision=settings.revision), chosen)
    rows, units = collate.prepared_rows(batch, prepared, check)
    passes = [collate.mini_batches(units, chosen.mini_batches, one) for one in _seeds(seed, chosen.num_iterations)]
    parts = [part for one in passes for part in one]
    compares = version is not None and chosen.needs.behaviour and settings.revision >= COMPARES_SINCE
    divide = _dividing(model, rows, units, settings, versions=chosen.needs.versions or compares)
    budget = budget or MicroBatchBudget(micro_batch_tokens(settings, model.device), halves=model.ranks.num == 1)
    taken = _Taken(budget, skipped_in_row)
    work = _Work(model, algorithm, prepared.normaliser, settings, reference, divide, taken)
    needs_proximal = chosen.needs.proximal and len(parts) > 1  # before a single step the policy is its own proximal
    proximal = _proximal(model, passes[0], divide, settings, taken) if needs_proximal else None
    planned = chosen.mini_batches * chosen.num_iterations
    last_step = settings.num_versions * planned - (1 if settings.revision < LAST_STEP_TRAINS_SINCE else 0)
    for number, part in enumerate(parts):
        compared = version if compares and number == 0 else None
        gradients = partial(_gradients, work, part, ids.derive_seed(seed, number), proximal, compared)
        began, collated = time.monotonic(), taken.seconds["collate"]
        sums = taken.budget.run(gradients, len(part))
        backed = time.monotonic()
        rate = learning_rate(settings.optimizer, index * planned + number, last_step)
        with in_optimizer_step(taken.budget):
            _take(model, optimizer, rate, sums, settings, taken)
        taken.seconds["forward_backward"] += backed - began - (taken.seconds["collate"] - collated)
        taken.seconds["optimizer"] += time.monotonic() - backed
    if settings.revision < SHARES_PREFIXES_SINCE:
        taken.sums.pop(_COMPUTED, None)
    metrics = {**prepared.metrics, **_ages(rows, units, version if compares else None, settings)}
    result = _result(taken, algorithm, batch, metrics, len(units) * chosen.num_iterations, settings)
    return replace(
        result,
        statistics=prepared.statistics,
        skipped_in_row=taken.skipped_in_row,
        micro_batch_tokens=taken.budget.of_batch(),
        ranks=model.ranks.num,
        device=device_name(model.device),
    )


def device_name(device: torch.device) -> str:
    """Name of a device, as far as it decides bits: the GPU's name, or cpu."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _ages(
    rows: Sequence[TrainRow], units: Sequence[Unit], version: int | None, settings: JobSettings
) -> dict[str, float]:
    """Number of trained tokens by age, see `off_policy.ages`; empty if none are compared."""
    if version is None or settings.revision < COUNTS_AGES_SINCE:
        return {}
    trained = [rows[index] for index in sorted({index for unit in units for index in unit})]
    return off_policy.ages(((one.row.versions, one.mask) for one in trained), version)


def _seeds(seed: int, num_iterations: int) -> list[int]:
    """Seeds that determine the mini-batches of each pass."""
    return [seed, *(ids.derive_seed(seed, "pass", number) for number in range(1, num_iterations))]


def _dividing(
    model: PolicyModel, rows: Sequence[TrainRow], units: Sequence[Unit], settings: JobSettings, *, versions: bool
) -> Callable[[Sequence[Unit], int], list[MicroBatch]]:
    """A function that makes the micro-batches of this process. `versions`: include those that sampled each token."""
    shares = shares_prefixes(model, (rows[index].row for unit in units for index in unit), settings)
    plain = partial(collate.tree_micro_batches if shares else collate.micro_batches, rows, versions=versions)
    return partial(model.ranks.divide, plain, [len(one.row.token_ids) for one in rows])


def shares_prefixes(model: PolicyModel, rows: Iterable[Row], settings: JobSettings) -> bool:
    """Whether a job computes rows as a prefix tree."""
    longest = max((len(row.token_ids) for row in rows), default=0)
    return settings.revision >= SHARES_PREFIXES_SINCE and model.shares_prefixes(longest)


def micro_batch_tokens(settings: JobSettings, device: torch.device) -> int:
    """Maximum tokens of a micro-batch: as set in the job, else the fastest number for the device."""
    given = settings.algorithm.max_tokens_per_micro_batch
    if given is not None:
        return given
    return CPU_TOKENS if device.type == "cpu" and settings.revision >= SIZES_BY_DEVICE_SINCE else GPU_TOKENS


def _gradients(
    work: _Work,
    part: Sequence[Unit],
    seed: int,
    proximal: Mapping[int, Tensor] | None,
    version: int | None,
    max_tokens: int,
) -> dict[str, float]:
    """Gradients of one mini-batch, summed over micro-batches of so many tokens; the sums of its loss, and `_counted`.

    `version`: of the weights, where these tokens are compared with the policies that sampled them.
    """
    torch.manual_seed(work.model.ranks.seed(seed))
    began = time.monotonic()
    micro_batches = work.divide(part, max_tokens)
    work.taken.seconds["collate"] += time.monotonic() - began
    model, settings, reference = work.model, work.settings, work.reference
    model.clear_gradients(len(micro_batches))
    divided = divisors(micro_batches, work.normaliser, model.ranks)
    chosen = settings.algorithm
    sums: dict[str, float] = defaultdict(float)
    found_sums: dict[str, Tensor] = {}
    with model.ranks.collective():
        for micro_batch in micro_batches:
            batch = micro_batch.to(model.device)
            scores = {role: batch.on_mask(values) for role, values in batch.scores.items()}
            if reference is not None:
                scores["reference"] = reference.logprobs(batch, temperature=chosen.temperature)
            logprobs_N, entropies_N = model.completion_terms(
                batch,
                temperature=chosen.temperature,
                entropy_needs_grad=chosen.needs.entropy,
                entropy=chosen.needs.entropy or chosen.calculate_entropy,
            )
            tokens = batch.as_tokens(logprobs_N, entropies_N, scores)._replace(revision=settings.revision)
            if proximal is not None:
                tokens = tokens._replace(proximal_N=torch.cat([proximal[row] for row in batch.rows]))
            elif chosen.needs.proximal:
                tokens = tokens._replace(proximal_N=logprobs_N.detach())
            aged = None if version is None else _aged(micro_batch, version, model.device)
            seen_sums = {} if batch.is_filler else found_sums
            share = model.ranks.tried(
                partial(share_of, tokens, aged, work.algorithm, chosen, work.normaliser, divided, seen_sums),
                partial(without_loss, logprobs_N),
            )
            backward(share * 0.0 if batch.is_filler else share, chosen.name)
            for name, value in _counted(micro_batch).items() if not batch.is_filler else ():
                sums[name] += value
    return model.ranks.summed(sums | fetched(found_sums))


def _aged(micro_batch: MicroBatch, version: int, device: torch.device) -> off_policy.AgedTokens:
    """`micro_batch`: in main memory, where indices are found without waiting for the device."""
    assert micro_batch.versions is not None
    versions_N = micro_batch.on_mask(micro_batch.versions).numpy()
    return moved(off_policy.aged_tokens(versions_N, micro_batch.lengths, version), device)


@torch.no_grad()
def _proximal(
    model: PolicyModel,
    parts: Sequence[Sequence[Unit]],
    divide: Callable[[Sequence[Unit], int], Sequence[MicroBatch]],
    settings: JobSettings,
    taken: _Taken,
) -> dict[int, Tensor]:
    """Log-probabilities of the tokens before the first step, by row: of all rows, because later passes are divided
    between the processes in other ways.
    """
    began = time.monotonic()
    temperature = settings.algorithm.temperature

    def computed(max_tokens: int) -> dict[int, Tensor]:
        found: dict[int, Tensor] = {}
        for part in parts:
            micro_batches = divide(part, max_tokens)
            with model.ranks.collective():
                for one in micro_batches:
                    batch = one.to(model.device)
                    logprobs_N, _ = model.completion_terms(
                        batch, temperature=temperature, entropy_needs_grad=False, entropy=False
                    )
                    if not batch.is_filler:
                        found |= zip(batch.rows, logprobs_N.split(batch.lengths), strict=True)
        return found

    own = taken.budget.run(computed, max(map(len, parts), default=0))
    proximal = of_all(own, model.ranks, model.device)
    taken.seconds["forward_backward"] += time.monotonic() - began
    return proximal


_SEQUENCES, _TOTAL, _COMPLETION, _PADDED = "tokens/sequences", "tokens/total", "tokens/completion", "tokens/padding"
_COMPUTED, _PAIRS = "tokens/computed", "tokens/pairs"


def _counted(batch: MicroBatch) -> dict[str, float]:
    """Counts of a micro-batch, by the name of the metric that sums them up; of pairs there is none."""
    return {
        _SEQUENCES: len(batch.lengths),
        _TOTAL: batch.num_tokens,
        _COMPLETION: sum(batch.lengths),
        _PADDED: 0 if batch.tree is not None else batch.num_computed - batch.num_tokens,
        _COMPUTED: batch.num_computed,
        _PAIRS: len(batch.chosen),
    }


def _result(
    taken: _Taken,
    algorithm: Algorithm,
    batch: BatchView,
    metrics: dict[str, float],
    num_units: int,
    settings: JobSettings,
) -> StepResult:
    """Result with all metrics of the batch. Raises RunFailedError if one is not finite."""
    chosen = settings.algorithm
    counted = {name: float(taken.sums.get(name, 0.0)) for name in (_SEQUENCES, _TOTAL, _COMPLETION, _PADDED)}
    num_pairs = int(taken.sums.pop(_PAIRS, 0))
    if batch.pairs is not None and settings.revision < COUNTS_PAIRS_SINCE:
        num_pairs = num_units
    if taken.norms:
        counts = Counts(int(counted[_COMPLETION]), int(counted[_SEQUENCES]), num_pairs)
        metrics |= algorithm.metrics(dict(taken.sums), counts)
        metrics |= off_policy.metrics(taken.sums, counts.tokens)
        metrics |= off_policy.compared_metrics(taken.sums)
    if num_units or batch.pairs is None:
        metrics |= counted
        if _COMPUTED in taken.sums:
            metrics[_COMPUTED] = taken.sums[_COMPUTED]
            metrics["tokens/packing_ratio"] = taken.sums[_COMPUTED] / counted[_TOTAL]
    if taken.norms:
        metrics["optimizer/grad_norm"] = sum(taken.norms) / len(taken.norms)
        metrics["optimizer/learning_rate"] = taken.rates[-1]
    if taken.num_skipped:
        metrics["optimizer/skipped_steps"] = float(taken.num_skipped)
    if not (chosen.calculate_entropy or chosen.needs.entropy):
        metrics.pop(ENTROPY, None)
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise RunFailedError(f"{name} is {value}: training has diverged; lower optimizer.learning_rate")
    return StepResult(len(taken.norms), int(counted[_TOTAL]), metrics, taken.seconds, torch.get_num_threads())


def _take(
    model: PolicyModel,
    optimizer: torch.optim.Optimizer,
    rate: float,
    sums: Mapping[str, float],
    settings: JobSettings,
    taken: _Taken,
) -> None:
    """One optimizer step with clipped gradients, or none if a sum or the gradient's norm is not finite."""
    parameters = [parameter for _, parameter in model.trainable()]
    with model.ranks.collective():
        norm = float(whole(torch.nn.utils.clip_grad_norm_(parameters, settings.optimizer.max_grad_norm)))
    odd = {name: value for name, value in {"the gradient's norm": norm, **sums}.items() if not math.isfinite(value)}
    if odd:
        _skip(odd, settings.optimizer.max_skipped_steps, taken)
        return
    set_learning_rate(optimizer, rate)
    with model.ranks.collective() if steps_together(settings.optimizer) else nullcontext():
        take_step(optimizer, settings.optimizer)
    taken.skipped_in_row = 0
    taken.norms.append(norm)
    taken.rates.append(rate)
    for name, value in sums.items():
        taken.sums[name] += value


def _skip(odd: Mapping[str, float], most: int, taken: _Taken) -> None:
    """Count a skipped step. Raises RunFailedError if it is one too many."""
    taken.num_skipped += 1
    taken.skipped_in_row += 1
    name, value = next(iter(odd.items()))
    if taken.skipped_in_row > most:
        after = f" after {most} skipped steps in a row" if most else ""
        remedy = "lower optimizer.learning_rate or max_grad_norm, or scale rewards down that give very large advantages"
        raise RunFailedError(f"{name} is {value}{after}; {remedy}")
    logger.warning("%s is %s: optimizer step skipped, the weights stay as they are", name, value)
