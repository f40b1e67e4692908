"""A model and its optimizer over seeded batches, alone or in several processes."""

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import safetensors.torch
import torch

from rollstream.learner.algorithms.base import Algorithm, BatchView, Member, Row
from rollstream.learner.algorithms.builtin.grpo import Grpo
from rollstream.learner.algorithms.builtin.malt import Malt
from rollstream.learner.checkpoints.checkpoint import part
from rollstream.learner.model.optimizer import load_state_tensors, make_optimizer, sharding_of_state, state_tensors
from rollstream.learner.model.policy import PolicyModel
from rollstream.learner.model.step import train_batch
from rollstream.learner.parallel.process_ranks import ProcessRanks
from rollstream.schemas.algorithms import GrpoSettings, MaltSettings
from rollstream.schemas.events.rollouts import Completion, VersionSpan
from rollstream.schemas.policy_gradient import OffPolicySettings
from rollstream.schemas.settings import JobSettings, LoraSettings, ModelSettings, OptimizerSettings

NUM_STEPS = 10
LEARNING_RATE = 1e-3
NEWEST = get_args(JobSettings.model_fields["revision"].annotation)[-1]
TARGETS = ("q_proj", "v_proj", "down_proj")


def batch(seed: int, *, in_pairs: bool = False) -> BatchView:
    """Three groups of a common prompt, with rows of very different lengths; in every fifth batch two rows alone.

    `in_pairs`: the first row of each group is better than the second one, and the third is left out.
    """
    rng = random.Random(seed)
    rows: list[Row] = []
    members: list[Member] = []
    for group in range(3):
        prompt = [rng.randrange(32) for _ in range(rng.randint(3, 6))]
        for _ in range(3):
            ids = np.asarray([*prompt, *(rng.randrange(32) for _ in range(rng.randint(1, 24)))], np.int32)
            mask = np.arange(len(ids)) >= len(prompt)
            logprobs = np.where(mask, [-3.4 + 0.2 * rng.random() for _ in ids], 0).astype(np.float32)
            length = len(ids) - len(prompt)
            span = VersionSpan(model_group="run-1/main", version=group, length=length)
            completion = Completion(start=len(prompt), length=length, step_index=0, spans=(span,))
            rows.append(Row(ids, mask, logprobs, len(members), (completion,)))
            members.append(Member(group_id=f"g{group}", reward=rng.choice([0.0, 1.0, 2.0])))
    count = 2 if seed % 5 == 4 else len(rows)
    members[:2] = [replace(one, reward=reward) for one, reward in zip(members, (0.0, 2.0), strict=False)]
    if in_pairs:
        pairs = [(index, index + 1) for index in range(0, count, 3)]
        return BatchView(rows[:count], members[:count], pairs, [1.0] * len(pairs))
    return BatchView(rows[:count], members[:count])


def algorithm_of(kind: str) -> tuple[Algorithm, GrpoSettings | MaltSettings]:
    """Those of `OTHERS` that compare take two passes over each batch, whose rows are divided in other ways."""
    if kind == "malt":
        return Malt(), MaltSettings(max_tokens_per_micro_batch=96, mini_batches=2, num_iterations=2)
    chosen = GrpoSettings(max_tokens_per_micro_batch=48, mini_batches=2)
    if kind == "off-policy":
        return Grpo(), chosen.model_copy(update={"num_iterations": 2, "off_policy": OffPolicySettings()})
    return Grpo(), chosen


def settings(model: Path, kind: str) -> JobSettings:
    return JobSettings(
        kind="dpo" if kind == "malt" else "rl",
        model=ModelSettings(
            path=str(model),
            device="cpu",
            lora=LoraSettings(rank=4, target_modules=TARGETS) if kind == "lora" else None,
            dtype="bfloat16" if kind == "bfloat16" else "float32",
            gradient_checkpointing=kind == "checkpointing",
        ),
        algorithm=algorithm_of(kind)[1],
        optimizer=OptimizerSettings(learning_rate=LEARNING_RATE, max_grad_norm=0.05),
        num_versions=NUM_STEPS,
        revision=NEWEST,
    )


class Training:
    """One model and its optimizer over `NUM_STEPS` batches."""

    def __init__(self, model: PolicyModel, chosen: JobSettings, kind: str) -> None:
        self.model = model
        self.kind = kind
        self.settings = chosen
        self.optimizer = make_optimizer(model.trainable(), chosen.optimizer)
        self.metrics: list[dict[str, float]] = []

    def run(self, first: int, last: int) -> None:
        for index in range(first, last):
            result = train_batch(
                self.model,
                self.optimizer,
                batch(index, in_pairs=self.kind == "malt"),
                algorithm_of(self.kind)[0],
                self.settings,
                index=index,
                seed=index,
                version=2,
            )
            self.metrics.append(dict(result.metrics))

    def state(self) -> dict[str, torch.Tensor]:
        weights = {f"weights/{name}": value.detach() for name, value in self.model.trainable()}
        of_optimizer = state_tensors(self.optimizer, self.model.trainable())
        return weights | {f"optimizer/{name}": value for name, value in of_optimizer.items()}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, value in self.model.trainable():
                value.copy_(tensors[f"weights/{name}"])
        offload = self.settings.optimizer.offload
        load_state_tensors(self.optimizer, self.model.trainable(), part(tensors, "optimizer"), offload)

    def like(self) -> dict[str, torch.Tensor]:
        """The shards to read: of the optimizer's, those of the parameters they belong to."""
        found = {f"weights/{name}": value.detach() for name, value in self.model.trainable()}
        of_optimizer = sharding_of_state(self.model.trainable())
        return found | {f"optimizer/{name}": value for name, value in of_optimizer.items()}

    def keep(self, folder: Path, name: str) -> None:
        if self.model.ranks.index:  # rank 0 tells the others which weights it wants
            assert isinstance(self.model.ranks, ProcessRanks)
            assert self.model.ranks.receive() == ("weights", "", b"")
        weights = self.model.weights_bytes()
        if self.model.ranks.index == 0:
            (folder / f"{name}.safetensors").write_bytes(weights)
            (folder / f"{name}.json").write_text(json.dumps(self.metrics))


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / f"{name}.safetensors")


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)
