"""Losses and gradients beside TRL's own functions on the same weights and tokens, in float32; fails beyond 1e-5.

    make parity    # or: .venv-bench/bin/python -m benchmarks.trl_parity --output FILE

Ours are those of the learner's whole step in new runs (`train_batch`, behind the scores that are recorded before it),
TRL's those of its trainers' `compute_loss`: both have the same tiny model, prompts of different lengths, answers,
behaviour log-probabilities and rewards, and make of them what they make of a batch. Gradients are those of all
parameters. Rewards are in the hundreds, where what TRL adds to a deviation (1e-4) and we do (1e-6) do not count. A row
with `differs` means something else by design, as it says: its errors are shown, not judged.
"""

import argparse
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.recorded_scores import scored
from benchmarks.trl_losses import (
    GROUP,
    GROUPS,
    MAX_COMPLETION,
    THRESHOLD,
    Found,
    Inputs,
    flat,
    logprobs_of,
    tokenizer_of,
)
from benchmarks.trl_parity_cases import Case, corrections, imitations, masks, ratios
from rollstream.learner.algorithms import off_policy
from rollstream.learner.algorithms.advantages import overlong_penalty
from rollstream.learner.algorithms.base import Algorithm, BatchView, Counts, Member, Normaliser, Prepared, Row
from rollstream.learner.algorithms.table import algorithm
from rollstream.learner.algorithms.tokens import Losses, TokenBatch
from rollstream.learner.model.aggregation import aggregated, corrected_rows
from rollstream.learner.model.optimizer import make_optimizer
from rollstream.learner.model.policy import PolicyModel, Reference, make_deterministic
from rollstream.learner.model.step import train_batch
from rollstream.learner.scoring.models import TeacherModel
from rollstream.learner.tiny_model import make_tiny_model
from rollstream.schemas.events.rollouts import Completion
from rollstream.schemas.permissions import NOTHING
from rollstream.schemas.policy_gradient import OverlongSettings
from rollstream.schemas.revisions import NEWEST_REVISION
from rollstream.schemas.settings import JobSettings, ModelSettings, OptimizerSettings

ALL_TOKENS = 100_000
"""Tokens of a micro-batch that holds the whole batch."""
LIMIT = 1e-5
PRECISE = 1e-12


def row_of(inputs: Inputs, index: int, values: list[list[float]]) -> Row:
    """An answer with these log-probabilities."""
    prompt, answer = inputs.prompts[index], inputs.answers[index]
    mask = np.arange(len(prompt) + len(answer)) >= len(prompt)
    logprobs = np.asarray([0.0] * len(prompt) + values[index], np.float32)
    reason = "stop" if answer[-1] == inputs.end else "length"
    part = Completion(start=len(prompt), length=len(answer), step_index=0, finish_reason=reason)
    ids = np.asarray([*prompt, *answer], np.int32)
    return Row(ids, mask, logprobs, index, (part,))


class Watched(Algorithm):
    """An algorithm whose losses are kept as they are computed."""

    def __init__(self, watched: Algorithm) -> None:
        self._watched = watched
        self.Settings = watched.Settings  # pyright: ignore[reportAttributeAccessIssue]
        self.normaliser = Normaliser()
        self.seen: list[tuple[Losses, TokenBatch]] = []

    def prepare(self, batch: BatchView, settings: Any) -> Prepared:
        """Prepare like the watched algorithm, and keep the normaliser."""
        found = self._watched.prepare(batch, settings)
        self.normaliser = found.normaliser
        return found

    def loss(self, tokens: TokenBatch, settings: Any) -> Losses:
        """Losses of the watched algorithm, which are kept."""
        found = self._watched.loss(tokens, settings)
        self.seen.append((found, tokens))
        return found

    def metrics(self, sums: Mapping[str, float], counts: Counts) -> dict[str, float]:
        """Metrics of the watched algorithm."""
        return self._watched.metrics(sums, counts)

    def value(self) -> float:
        """The loss of the one micro-batch."""
        ((found, tokens),) = self.seen
        num_rows, value = len(tokens.chosen_K) or len(tokens.lengths_B), self.normaliser.value
        counts = {"tokens": len(tokens.logprobs_N), "sequences": num_rows, "row_length": num_rows * value}
        count = counts.get(self.normaliser.by, value)
        return aggregated(corrected_rows(found, tokens), tokens, self.normaliser, count).item()


def ours(case: Case, inputs: Inputs) -> Found:
    """The learner's step, whose gradient is left as it is."""
    chosen = case.settings.model_copy(update={"max_tokens_per_micro_batch": ALL_TOKENS})
    model_settings = ModelSettings(path=inputs.policy, device="cpu")
    optimizer = OptimizerSettings(max_grad_norm=1e9)
    how: dict[str, Any] = {"kind": chosen.kind, "algorithm": chosen, "revision": NEWEST_REVISION}
    job = JobSettings(model=model_settings, optimizer=optimizer, **how)
    model = PolicyModel(model_settings, seed=0)
    model.use_dropout(False)
    model.compute_as(job.revision)
    values = inputs.current if case.on_policy else inputs.behaviour
    rows = [row_of(inputs, index, values) for index in range(len(inputs.answers))]
    other = TeacherModel(ModelSettings(path=inputs.reference, device="cpu"), inputs.reference)
    if chosen.needs.teacher:
        rows = scored(rows, "teacher", other, ALL_TOKENS)
    if chosen.needs.reference:
        rows = scored(rows, "reference", Reference(model, other.model.weights_bytes(), "base"), ALL_TOKENS)
    members = [
        Member(
            f"g{index // GROUP}",
            agent="agent",
            reward=reward,
            rewards={"a": reward, "b": other},
            is_truncated=bool(rows[index].truncated.any()),
        )
        for index, (reward, other) in enumerate(zip(inputs.rewards, inputs.other_rewards, strict=True))
    ]
    pairs = [(index, index + 1) for index in range(0, len(rows), 2)] if case.pairs else None
    batch = BatchView(rows, members, pairs, [1.0] * len(pairs or ()))
    watched = Watched(algorithm(chosen.name, NOTHING))
    train_batch(
        model,
        make_optimizer(model.trainable(), optimizer),
        batch,
        watched,
        job,
        index=0,
        seed=0,
    )
    return Found(watched.value(), flat(model.module))


def made_inputs(folder: Path) -> Inputs:
    """Two untrained models of one shape, and rollouts of neither.

    Good answers are longer and most have become less likely, else losses are differences of nearly equal numbers. The
    policy holds the answers for likelier than the reference does, so that KTO's reference point is above 0.
    """
    policy, reference = (
        str(make_tiny_model(folder / name, seed=seed)) for seed, name in ((1, "policy"), (0, "reference"))
    )
    rng, tokenizer = np.random.default_rng(7), tokenizer_of(policy)
    size, num = len(tokenizer) - 8, GROUP * GROUPS
    different = [rng.integers(8, size, length).tolist() for length in range(4, 4 + GROUPS)]
    rewards, others = (rng.integers(0, 1000, num).astype(float).tolist() for _ in range(2))
    lengths = [rng.integers(10, MAX_COMPLETION) if one >= THRESHOLD else rng.integers(3, 8) for one in rewards]
    answers = [rng.integers(8, size, length).tolist() for length in lengths]
    answers = [[*answer, tokenizer.eos_token_id] if index % 4 else answer for index, answer in enumerate(answers)]
    prompts = [prompt for prompt in different for _ in range(GROUP)]
    own = logprobs_of(policy, prompts, answers)
    behaviour: list[list[float]] = []
    for index, values in enumerate(own):
        shift = 0.2 if (rewards[index] >= THRESHOLD) == (index % 4 < 3) else -0.2
        behaviour.append((np.asarray(values) + rng.normal(shift, 0.4, len(values))).tolist())
    return Inputs(policy, reference, prompts, answers, behaviour, own, rewards, others, tokenizer.eos_token_id)


def compared(case: Case, inputs: Inputs) -> dict[str, Any]:
    """A row of the table."""
    own, theirs = ours(case, inputs), case.theirs(inputs)
    gradient = float((own.gradient - theirs.gradient).norm() / theirs.gradient.norm())
    loss = abs(own.loss - theirs.loss) / max(abs(theirs.loss), PRECISE) if case.loss_counts else None
    row: dict[str, Any] = {"algorithm": case.settings.name, "options": case.options, "trl": case.function}
    row |= {"loss": loss, "gradient": gradient, "trl_loss": theirs.loss, "trl_norm": float(theirs.gradient.norm())}
    if case.differs:
        row["differs"] = case.differs
    row["equal"] = max(loss or 0.0, gradient) <= LIMIT
    return row


def overlong() -> dict[str, Any]:
    """DAPO's punishment of long answers, of every length."""
    from trl.rewards import get_soft_overlong_punishment  # pyright: ignore[reportMissingImports]

    theirs = get_soft_overlong_punishment(100, 20)(completion_ids=[[1] * length for length in range(1, 130)])
    settings = OverlongSettings(max_length=100, buffer=20)
    own = [-overlong_penalty(length, settings) for length in range(1, 130)]
    error = max(abs(one - other) for one, other in zip(own, theirs, strict=True))
    row = {"algorithm": "grpo", "options": "overlong", "trl": "get_soft_overlong_punishment"}
    return {**row, "loss": error, "gradient": None, "equal": error <= LIMIT}


def sequence_masks(num: int = 4096) -> dict[str, Any]:
    """Off-policy sequence masking itself, on random sequences and thresholds; the loss is the share that differs."""
    import trl  # pyright: ignore[reportMissingImports] -- of .venv-bench

    torch.manual_seed(0)
    lengths = torch.randint(1, 17, (num,))
    mask = torch.arange(16)[None] < lengths[:, None]
    current, sampling = torch.randn(num, 16, dtype=torch.float64) * 0.3 - 2, torch.randn(num, 16, dtype=torch.float64)
    sampling, advantages = sampling * 0.3 - 1.9, torch.randn(num, dtype=torch.float64).round(decimals=1)
    rows = torch.arange(num)[:, None].expand(num, 16)[mask]
    columns = [current[mask], torch.zeros(len(rows)), sampling[mask], advantages[rows]]
    tokens = TokenBatch(*columns, rows_N=rows, lengths_B=tuple(lengths.tolist()))
    wrong = kept = 0
    for threshold in (0.01, 0.1, 0.5):
        keeps = trl.GRPOTrainer.get_off_policy_mask(advantages[:, None], current, sampling, mask, threshold)
        own = off_policy.masked(tokens, threshold)[0].advantages_N
        wrong += int((own != columns[3] * keeps[:, 0][rows]).sum())
        kept += int(keeps.sum())
    assert 0 < kept < 3 * num, "some are masked, and some are not"
    row = {"algorithm": "grpo", "options": "off_policy_mask_threshold", "trl": "GRPOTrainer.get_off_policy_mask"}
    return {**row, "loss": wrong / (3 * len(rows)), "gradient": None, "equal": wrong == 0}


def main() -> None:
    """Print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--only", default="", help="a part of TRL's function")
    args = parser.parse_args()
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    warnings.simplefilter("ignore")
    make_deterministic(1)
    import datasets  # pyright: ignore[reportMissingImports] -- of .venv-bench

    datasets.disable_progress_bars()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as kept:
        inputs = made_inputs(Path(kept))
        for case in [*ratios(), *corrections(), *masks(), *imitations()]:
            if args.only in case.function:
                rows.append(compared(case, inputs))
                print(
                    {name: rows[-1][name] for name in ("algorithm", "options", "trl", "loss", "gradient")}, flush=True
                )
    rows += [overlong(), sequence_masks()]
    import importlib.metadata

    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "trl")}
    wrong = [row for row in rows if not row["equal"] and "differs" not in row]
    if args.output:
        args.output.write_text(json.dumps({"limit": LIMIT, "versions": versions, "rows": rows}, indent=2) + "\n")
    for row in wrong:
        print(f"beyond {LIMIT:g}: {row}", file=sys.stderr)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
