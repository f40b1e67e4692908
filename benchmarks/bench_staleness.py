"""Cost of staleness, and gain of a correction: one small task, learner steps as in a run.

    python benchmarks/bench_staleness.py --output benchmarks/results/bench_staleness.json

Each step trains on rollouts that the weights of `staleness` steps before sampled, in a loop without an engine: a tiny
model answers a digit with four characters, and earns the share of them whose token id is of the class that the digit
asks for. The result is the reward of fresh rollouts of the trained weights. Ways to train on old ones:

* `ignored`: GRPO as if the trained weights had sampled them (log-probabilities computed again by these)
* `ratio`: GRPO with the recorded log-probabilities, so that its clipped ratio is the only correction
* `token`, `sequence`, `icepop`: the same with `off_policy`: token and truncate, sequence and mask (the default), token
  and mask from 0.5 to 5
"""

import argparse
import json
import statistics
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollstream.learner.algorithms.base import BatchView, Member, Row
from rollstream.learner.algorithms.builtin.grpo import Grpo
from rollstream.learner.model.optimizer import make_optimizer
from rollstream.learner.model.policy import PolicyModel, make_deterministic
from rollstream.learner.model.step import train_batch
from rollstream.learner.tiny_model import make_tiny_model
from rollstream.schemas.algorithms import GrpoSettings
from rollstream.schemas.policy_gradient import OffPolicySettings
from rollstream.schemas.settings import JobSettings, ModelSettings, OptimizerSettings

NUM_TASKS, NUM_GENERATIONS, LENGTH, NUM_CLASSES = 8, 8, 4, 4
WAYS: dict[str, OffPolicySettings | None] = {
    "ignored": None,
    "ratio": None,
    "token": OffPolicySettings(level="token", mode="truncate"),
    "sequence": OffPolicySettings(),
    "icepop": OffPolicySettings(level="token", mode="mask", clip_min=0.5, clip_max=5.0),
}
LAST = 10
"""Steps whose mean reward counts as the end of a run."""


@torch.no_grad()
def sampled(model: PolicyModel, prompts_B: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Token ids (B, 1 + LENGTH) and log-probabilities (B, LENGTH), sampled at temperature 1."""
    ids_B_T, cache = prompts_B[:, None], None
    logprobs: list[Tensor] = []
    for _ in range(LENGTH):
        found = model.module(input_ids=ids_B_T if cache is None else ids_B_T[:, -1:], past_key_values=cache)
        cache = found.past_key_values
        table_B_V = found.logits[:, -1].float().log_softmax(dim=-1)
        next_B_1 = torch.multinomial(table_B_V.exp(), 1, generator=random)
        logprobs.append(table_B_V.gather(1, next_B_1)[:, 0])
        ids_B_T = torch.cat([ids_B_T, next_B_1], dim=1)
    return ids_B_T, torch.stack(logprobs, dim=1)


@torch.no_grad()
def scored(model: PolicyModel, ids_B_T: Tensor) -> Tensor:
    """Log-probabilities (B, LENGTH) of the answers under the model's weights."""
    table = model.module(input_ids=ids_B_T).logits[:, :-1].float().log_softmax(dim=-1)
    return table.gather(2, ids_B_T[:, 1:, None])[:, :, 0]


def rewards_of(ids_B_T: Tensor) -> Tensor:
    """(B,): share of an answer's tokens that are of the class asked for."""
    wanted_B_1 = ids_B_T[:, :1] % NUM_CLASSES
    return (ids_B_T[:, 1:] % NUM_CLASSES == wanted_B_1).float().mean(dim=1)


def prompts(step: int) -> Tensor:
    """(B,): the tasks of a step, each so often as it has rollouts; consecutive token ids, so all classes come up."""
    return (torch.arange(NUM_TASKS) + 20 + step % NUM_CLASSES).repeat_interleave(NUM_GENERATIONS)


def batch_of(ids_B_T: Tensor, logprobs_B_T: Tensor) -> BatchView:
    """The learner's input for these rollouts."""
    mask = np.arange(1 + LENGTH) > 0
    rows = [
        Row(ids.numpy().astype(np.int32), mask, np.concatenate([[0.0], logprobs.numpy()]).astype(np.float32), member)
        for member, (ids, logprobs) in enumerate(zip(ids_B_T, logprobs_B_T, strict=True))
    ]
    members = [
        Member(group_id=str(member // NUM_GENERATIONS), rollout_id=str(member), agent="agent", reward=reward)
        for member, reward in enumerate(rewards_of(ids_B_T).tolist())
    ]
    return BatchView(rows, members)


def trained(
    folder: Path, way: str, staleness: int, rate: float, seed: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """The rewards of the weights after each step, and means over the steps of the learner's metrics."""
    settings = JobSettings(
        kind="rl",
        model=ModelSettings(path=str(make_tiny_model(folder / f"seed-{seed}", seed=seed)), device="cpu"),
        algorithm=GrpoSettings(mini_batches=arguments.mini_batches, dual_clip=3.0, off_policy=WAYS[way]),
        optimizer=OptimizerSettings(learning_rate=rate),
    )
    model, sampler = (PolicyModel(settings.model, seed=seed) for _ in range(2))
    model.use_dropout(False)
    optimizer = make_optimizer(model.trainable(), settings.optimizer)
    random, fresh = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(1000 + seed)
    past: deque[dict[str, Tensor]] = deque(maxlen=staleness + 1)
    rewards: list[float] = []
    seen: dict[str, list[float]] = {"policy/kl": [], "policy/ess": [], "off_policy/ess": [], "off_policy/clipped": []}
    for step in range(arguments.steps):
        past.append({name: value.detach().clone() for name, value in model.weights().items()})
        sampler.load_weights(past[0])
        ids_B_T, logprobs_B_T = sampled(sampler, prompts(step), random)
        if way == "ignored":
            logprobs_B_T = scored(model, ids_B_T)
        batch = batch_of(ids_B_T, logprobs_B_T)
        found = train_batch(model, optimizer, batch, Grpo(), settings, index=step, seed=seed * 10_000 + step)
        for name, values in seen.items():
            values += [found.metrics[name]] if name in found.metrics else []
        rewards.append(float(rewards_of(sampled(model, prompts(step), fresh)[0]).mean()))
    metrics = {name: round(statistics.fmean(values), 4) for name, values in seen.items() if values}
    named = {"learning_rate": rate, "staleness": staleness, "way": way, "seed": seed}
    return {**named, "rewards": [round(one, 3) for one in rewards], "metrics": metrics}


def show(runs: list[dict[str, Any]]) -> None:
    """Print what the seeds of one way at one staleness have in common."""
    one, means = runs[0], [statistics.fmean(run["rewards"]) for run in runs]
    ends = [statistics.fmean(run["rewards"][-LAST:]) for run in runs]
    print(
        f"{one['learning_rate']:g} staleness {one['staleness']} {one['way']:9} mean {statistics.fmean(means):.3f} "
        f"end {statistics.fmean(ends):.3f} ({min(ends):.3f} to {max(ends):.3f})",
        flush=True,
    )


def main() -> None:
    """Train every way at every staleness; print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--mini-batches", type=int, default=2)
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[3e-3, 1e-2])
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    arguments = parser.parse_args()
    make_deterministic(1)
    runs: list[dict[str, Any]] = []
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        for rate in arguments.learning_rates:
            for staleness in arguments.staleness:
                for way in arguments.ways:
                    runs += [trained(Path(folder), way, staleness, rate, seed, arguments) for seed in arguments.seeds]
                    show(runs[-len(arguments.seeds) :])
    options = {key: value for key, value in vars(arguments).items() if key != "output"}
    found = {"options": options, "cpu_s": round(time.process_time() - began, 1), "runs": runs}
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
