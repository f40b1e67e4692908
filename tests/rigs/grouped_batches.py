"""Groups over one prompt each on a Qwen2 with heads as large models have them, and steps on them on any device."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from rollstream.learner.algorithms.base import Algorithm, BatchView, Member, Row
from rollstream.learner.algorithms.builtin.grpo import Grpo
from rollstream.learner.model import collate
from rollstream.learner.model.micro_batch import MicroBatch
from rollstream.learner.model.optimizer import make_optimizer
from rollstream.learner.model.policy import PolicyModel, make_deterministic
from rollstream.learner.model.step import StepResult, train_batch
from rollstream.schemas.algorithms import GrpoSettings
from rollstream.schemas.revisions import NEWEST_REVISION
from rollstream.schemas.settings import JobSettings, ModelSettings, OptimizerSettings

HEAD_DIM = 64
OPTIMIZER = OptimizerSettings(learning_rate=1e-3, eps=1e-4)
"""With an `eps` far above rounding errors, steps differ as little as gradients do."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of models and batches: as large as tells something on a GPU, as small as a CPU rehearses in seconds."""

    num_heads: int
    num_kv_heads: int
    vocabulary: int
    num_groups: int
    group_size: int
    prompt: int
    answer: int


GPU_SCALE = Scale(num_heads=14, num_kv_heads=2, vocabulary=4096, num_groups=4, group_size=8, prompt=200, answer=80)
CPU_SCALE = Scale(num_heads=2, num_kv_heads=1, vocabulary=256, num_groups=2, group_size=4, prompt=12, answer=8)


def make_model(folder: Path, scale: Scale, *, num_layers: int = 2, **changes: Any) -> Path:
    """A transformers folder without a tokenizer."""
    torch.manual_seed(0)
    width = scale.num_heads * HEAD_DIM
    shape: dict[str, Any] = {
        "vocab_size": scale.vocabulary,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": scale.num_heads,
        "num_key_value_heads": scale.num_kv_heads,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "initializer_range": 0.04,
    }
    AutoModelForCausalLM.from_config(Qwen2Config(**(shape | changes))).save_pretrained(folder)
    return folder


def grouped(scale: Scale, seed: int = 0) -> BatchView:
    """Rows of a prompt and an answer of half to all of `answer` tokens, with rewards."""
    rng = random.Random(seed)
    rows: list[Row] = []
    members: list[Member] = []
    for group in range(scale.num_groups):
        prompt = [rng.randrange(scale.vocabulary) for _ in range(scale.prompt + group)]
        for _ in range(scale.group_size):
            length = rng.randint(scale.answer // 2, scale.answer)
            ids = prompt + [rng.randrange(scale.vocabulary) for _ in range(length)]
            mask = np.arange(len(ids)) >= len(prompt)
            logprobs = np.where(mask, -np.log(scale.vocabulary), 0).astype(np.float32)
            rows.append(Row(np.asarray(ids, np.int32), mask, logprobs, len(members)))
            members.append(Member(f"g{group}", "", "agent", reward=rng.random()))
    return BatchView(rows, members)


def micro_batch(batch: BatchView, *, shares: bool) -> MicroBatch:
    """All rows in one forward, as a prefix tree or padded."""
    return collate.pad(*collate.prepared_rows(batch, Grpo().prepare(batch, GrpoSettings())), shares=shares)


def backward(model: PolicyModel, batch: BatchView, *, shares: bool) -> list[torch.Tensor]:
    """Log-probabilities and the gradients of a weighted sum of them, in the order of `trainable`."""
    model.module.zero_grad()
    model.use_dropout(False)
    given = micro_batch(batch, shares=shares).to(model.device)
    logprobs, _ = model.completion_terms(given, temperature=1.0, entropy_needs_grad=False)
    (logprobs * torch.linspace(-1, 1, len(logprobs), device=model.device)).mean().backward()
    return [logprobs.detach(), *(one.grad for _, one in model.trainable() if one.grad is not None)]


def distance(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """Norm of all differences, as a part of the norm of what is wanted."""
    pairs = [(one.double().cpu(), other.double().cpu()) for one, other in zip(found, wanted, strict=True)]
    far = sum(float((one - other).square().sum()) for one, other in pairs)
    return (far / sum(float(other.square().sum()) for _, other in pairs)) ** 0.5


@dataclass(frozen=True, slots=True)
class Stepped:
    """A model after steps on a batch."""

    model: PolicyModel
    optimizer: torch.optim.Optimizer
    results: list[StepResult]

    @property
    def result(self) -> StepResult:
        """That of the last step."""
        return self.results[-1]

    @property
    def weights(self) -> list[torch.Tensor]:
        """Trained parameters, copied to main memory."""
        return [one.detach().to("cpu", copy=True) for _, one in self.model.trainable()]

    @property
    def gradients(self) -> list[torch.Tensor]:
        """Gradients of the last mini-batch, clipped."""
        return [one.grad for _, one in self.model.trainable() if one.grad is not None]


def step(
    settings: ModelSettings,
    batch: BatchView,
    *,
    times: int = 1,
    optimizer: OptimizerSettings = OPTIMIZER,
    loss: Algorithm | None = None,
    **algorithm: Any,
) -> Stepped:
    """Train a new model by grpo, or `loss` in its place."""
    make_deterministic(1, deterministic=settings.deterministic)
    chosen = GrpoSettings(**algorithm)
    job = JobSettings(kind="rl", model=settings, algorithm=chosen, optimizer=optimizer, revision=NEWEST_REVISION)
    model = PolicyModel(settings, seed=0)
    model.use_dropout(False)
    taken = make_optimizer(model.trainable(), job.optimizer)
    results = [train_batch(model, taken, batch, loss or Grpo(), job, index=0, seed=1, version=1) for _ in range(times)]
    return Stepped(model, taken, results)


@contextmanager
def at_most(reserved_bytes: float, device: str) -> Iterator[None]:
    """Let torch take no more memory of a GPU than this while inside."""
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, reserved_bytes / whole), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        torch.cuda.empty_cache()
