"""Rows of a batch, their padded tensors, and a training step over them."""

import random
from pathlib import Path
from typing import Any

import numpy as np

from rollstream.learner.algorithms.base import BatchView, Member, Prepared
from rollstream.learner.algorithms.builtin.grpo import Grpo
from rollstream.learner.model import collate
from rollstream.learner.model.collate import Row
from rollstream.learner.model.optimizer import make_optimizer
from rollstream.learner.model.policy import PolicyModel, make_deterministic
from rollstream.learner.model.step import train_batch
from rollstream.schemas.algorithms import GrpoSettings
from rollstream.schemas.settings import JobSettings, ModelSettings, OptimizerSettings


class Given(Grpo):
    """grpo with the rewards of members as advantages."""

    def prepare(self, batch: BatchView, settings: Any) -> Prepared:
        return Prepared(advantages=[batch.members[row.member].reward for row in batch.rows])


def rows(count: int = 8) -> BatchView:
    rng = random.Random(3)
    made: list[Row] = []
    members: list[Member] = []
    for _ in range(count):
        length = rng.randint(4, 12)
        mask = np.asarray([index > 1 and rng.random() < 0.6 for index in range(length)])
        mask[-1] = True
        logprobs = np.where(mask, -3.4 + 0.2 * np.asarray([rng.random() for _ in range(length)]), 0)
        ids = np.asarray([rng.randrange(32) for _ in range(length)], np.int32)
        made.append(Row(ids, mask, logprobs.astype(np.float32), len(members)))
        members.append(Member(reward=rng.choice([-1.0, 1.0])))
    return BatchView(made, members)


def padded() -> collate.MicroBatch:
    """All rows in one forward."""
    trained, units = collate.prepared_rows(rows(), Given().prepare(rows(), GrpoSettings()))
    return collate.pad(trained, units)


def trained(path: Path, *, times: int = 1, **algorithm: Any) -> tuple[PolicyModel, dict[str, float]]:
    """A model trained on the same rows so many times, and the metrics of the last time."""
    make_deterministic(1)
    settings = JobSettings(
        kind="rl",
        model=ModelSettings(path=str(path), device="cpu"),
        algorithm=GrpoSettings(**algorithm),
        optimizer=OptimizerSettings(learning_rate=1e-3, max_grad_norm=1e9),
    )
    model = PolicyModel(settings.model, seed=0)
    optimizer = make_optimizer(model.trainable(), settings.optimizer)
    metrics = dict[str, float]()
    for _ in range(times):
        metrics = train_batch(model, optimizer, rows(), Given(), settings, index=0, seed=1).metrics
    return model, metrics
