"""Every algorithm under the contract: one batch, and a way to train it by one algorithm on a device."""

import random
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from rollstream.learner.algorithms import table
from rollstream.learner.algorithms.base import Algorithm, BatchView, Member, Row
from rollstream.learner.model.optimizer import make_optimizer
from rollstream.learner.model.policy import PolicyModel, Reference, make_deterministic
from rollstream.learner.model.step import StepResult, train_batch
from rollstream.schemas.algorithm_settings import AlgorithmSettings
from rollstream.schemas.algorithms import BUILT_IN, CustomSettings
from rollstream.schemas.events.rollouts import Completion, VersionSpan
from rollstream.schemas.permissions import Permissions
from rollstream.schemas.revisions import NEWEST_REVISION
from rollstream.schemas.settings import JobSettings, ModelSettings, OptimizerSettings
from tests.rigs.waits import counted_waits

OTHERS = ("python:tests.rigs.toy_cispo.Cispo", "python:tests.rigs.toy_gspo.Gspo")
OPTIONS: dict[str, dict[str, Any]] = {
    "expert_iteration": {"reward_threshold": 0.0},
    "opd": {"teacher": "somebody"},
    "opsd": {"context": "{answer}"},
}
ALLOWED = Permissions(frozenset(OTHERS))
NUM_GROUPS, SIZE, TAIL = 2, 3, 3
Gradient = dict[str, torch.Tensor]


@dataclass
class Case:
    """One algorithm, and a way to train one batch by it."""

    algorithm: Algorithm
    settings: AlgorithmSettings
    folder: Path
    waits: Counter[str] = field(default_factory=Counter[str])
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    eps: float = 1e-8
    """That of the optimizer, whose steps are as smooth as gradients if it is far above rounding errors."""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Entered around the optimizer steps alone."""

    @property
    def batch(self) -> BatchView:
        return batch_of(pairs=self.settings.needs.pairs)

    def train(
        self, batch: BatchView, algorithm: Algorithm | None = None, revision: Any = NEWEST_REVISION, **changes: Any
    ) -> tuple[Gradient, StepResult, bytes]:
        """Gradients of the last mini-batch, the result, and the weights afterwards. What waits is in `waits`."""
        make_deterministic(1)
        job = JobSettings(
            kind=self.settings.kind,
            model=ModelSettings(path=str(self.folder), device=self.device, dtype=self.dtype),
            optimizer=OptimizerSettings(learning_rate=1e-3, max_grad_norm=1e9, eps=self.eps),
            revision=revision,
        ).model_copy(update={"algorithm": self.settings.model_copy(update=changes)})
        model = PolicyModel(job.model, seed=0)
        model.use_dropout(False)
        reference = Reference(model, model.weights_bytes(), "base") if self.settings.needs.reference else None
        with torch.no_grad():
            for _, parameter in model.trainable():
                parameter.mul_(1.1)
        optimizer = make_optimizer(model.trainable(), job.optimizer)
        chosen = algorithm or self.algorithm
        compared = 1 if revision >= 5 else None
        with counted_waits(optimizer) as self.waits, self.around():
            result = train_batch(
                model, optimizer, batch, chosen, job, index=0, seed=1, reference=reference, version=compared
            )
        grads = {name: p.grad.clone() for name, p in model.trainable() if p.grad is not None}
        return grads, result, model.weights_bytes()


def case_of(name: str, folder: Path) -> Case:
    written = BUILT_IN[name](**OPTIONS.get(name, {})) if name in BUILT_IN else CustomSettings(name=name)
    return Case(table.algorithm(name, ALLOWED), table.settings_of(written, ALLOWED), folder)


def batch_of(*, pairs: bool) -> BatchView:
    """Two groups of three members; a row is a prompt, two completions with a prompt between, and a tail of prompt."""
    rng = random.Random(5)
    rows, members = [], []
    for group in range(NUM_GROUPS):
        prompt = [rng.randrange(6, 60) for _ in range(2 + group)]
        for _ in range(SIZE):
            parts = [len(prompt), *(rng.randint(1, 4) for _ in range(3))]
            start, end = parts[0] + (0 if pairs else parts[1] + parts[2]), sum(parts)
            ids = prompt + [rng.randrange(6, 60) for _ in range(end - len(prompt) + TAIL)]
            spans = [(parts[0], end - parts[0])] if pairs else [(parts[0], parts[1]), (start, end - start)]
            completions = tuple(
                Completion(
                    start=at,
                    length=length,
                    step_index=step,
                    spans=(VersionSpan(model_group="g", version=step, length=length),),
                )
                for step, (at, length) in enumerate(spans)
            )
            mask = np.zeros(len(ids), np.bool_)
            for part in completions:
                mask[part.start : part.start + part.length] = True
            logprobs = np.where(mask, [-4.6 + 0.4 * rng.random() for _ in ids], 0).astype(np.float32)
            teacher = (logprobs - 0.5 * mask * rng.random()).astype(np.float32)
            scores = {"teacher": teacher}
            rows.append(Row(np.asarray(ids, np.int32), mask, logprobs, len(members), completions, scores=scores))
            members.append(
                Member(
                    f"g{group}",
                    "",
                    "agent",
                    reward=(reward := rng.random()),
                    rewards={"a": reward, "b": 0.5},
                    steps=frozenset(part.step_index for part in completions),
                )
            )
    if not pairs:
        return BatchView(rows, members)
    sides = [(SIZE * group + better, SIZE * group + worse) for group in range(2) for better, worse in ((0, 1), (0, 2))]
    return BatchView(rows, members, sides, [1.0, 0.5, 1.0, 0.5])


def close(one: Gradient, other: Gradient) -> bool:
    return all(torch.allclose(one[name], other[name], rtol=1e-4, atol=1e-6) for name in one)
