"""Training by 1, 2 and 4 real processes over gloo: what they agree on, and what decides bits."""

import itertools
import json
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import safetensors.torch
import torch

from rollstream.learner.algorithms.base import Algorithm, BatchView, Member, Row
from rollstream.learner.algorithms.builtin.grpo import Grpo
from rollstream.learner.algorithms.builtin.malt import Malt
from rollstream.learner.checkpoints.checkpoint import part
from rollstream.learner.model.optimizer import load_state_tensors, make_optimizer, sharding_of_state, state_tensors
from rollstream.learner.model.policy import PolicyModel, make_deterministic
from rollstream.learner.model.step import train_batch
from rollstream.learner.parallel.process_ranks import ProcessRanks, joined, shares
from rollstream.learner.parallel.sharded_policy import (
    ShardedPolicy,
    checkpointed,
    gathered_as,
    write_shards,
)
from rollstream.schemas.algorithms import GrpoSettings, MaltSettings
from rollstream.schemas.events.rollouts import Completion, VersionSpan
from rollstream.schemas.policy_gradient import OffPolicySettings
from rollstream.schemas.settings import JobSettings, LoraSettings, ModelSettings, OptimizerSettings
from tests.rigs.services.process_group import together

NUM_STEPS = 20
WORLDS = (1, 2, 4)
KINDS = ("full", "lora")
OTHERS = ("checkpointing", "bfloat16", "off-policy", "malt")
"""Settings that decide how layers compute, and losses that compare with the policy before a batch; tried with two
processes.
"""
NEWEST = get_args(JobSettings.model_fields["revision"].annotation)[-1]
pytestmark = pytest.mark.slow
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
        optimizer=OptimizerSettings(learning_rate=1e-3, max_grad_norm=0.05),
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


def trained_together(model: Path, folder: Path, kinds: tuple[str, ...], runs: int) -> None:
    """One of the processes: trains `runs` times, and at two processes keeps its shards midway."""
    make_deterministic(1)
    with joined() as ranks:
        for kind, number in itertools.product(kinds, range(runs)):
            chosen = settings(model, kind)
            training = Training(ShardedPolicy(chosen.model, ranks, seed=7), chosen, kind)
            if number == 0:
                training.keep(folder, f"{kind}-{ranks.num}-base")
            training.run(0, NUM_STEPS // 2)
            if ranks.num == 2 and number == 0:
                write_shards(training.state(), folder / f"{kind}-shards")
            training.run(NUM_STEPS // 2, NUM_STEPS)
            training.keep(folder, f"{kind}-{ranks.num}-{number}")


def resumed_together(model: Path, folder: Path, kinds: tuple[str, ...]) -> None:
    """One of the processes: goes on from what two of them kept."""
    make_deterministic(1)
    with joined() as ranks:
        for kind in kinds:
            chosen = settings(model, kind)
            training = Training(ShardedPolicy(chosen.model, ranks, seed=7), chosen, kind)
            training.restore(checkpointed(folder / f"{kind}-shards", {}, training.like(), ranks))
            training.run(NUM_STEPS // 2, NUM_STEPS)
            training.keep(folder, f"{kind}-{ranks.num}-resumed")


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models trained by several processes, and by this one alone, as KIND-PROCESSES-RUN."""
    found = tmp_path_factory.mktemp("ranks")
    make_deterministic(1)
    for kind in (*KINDS, *OTHERS):
        chosen = settings(tiny_model, kind)
        training = Training(PolicyModel(chosen.model, seed=7), chosen, kind)
        training.keep(found, f"{kind}-alone-base")
        training.run(0, NUM_STEPS)
        training.keep(found, f"{kind}-alone-0")
    for num in WORLDS:
        together(num, trained_together, tiny_model, found, KINDS, 2)
    together(2, trained_together, tiny_model, found, OTHERS, 1)
    return found


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / f"{name}.safetensors")


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


@pytest.mark.parametrize(("kind", "num"), [*itertools.product(KINDS, WORLDS), *itertools.product(OTHERS, [2])], ids=str)
def test_processes_train_what_one_trains_alone(folder: Path, kind: str, num: int) -> None:
    alone, found = (weights(folder, f"{kind}-{name}-0") for name in ("alone", num))
    begun = weights(folder, f"{kind}-alone-base")
    assert furthest(alone, begun) > 1e-2
    assert furthest(alone, found) < (1e-5 if kind != "bfloat16" else 5e-2)
    expected, metrics = (json.loads((folder / f"{kind}-{name}-0.json").read_text()) for name in ("alone", num))
    for one, other in zip(expected, metrics, strict=True):
        for name in ("tokens/computed", "tokens/packing_ratio"):  # what is shared across two processes is not
            one.pop(name, None)
            other.pop(name, None)
        assert other == pytest.approx(one, rel=1e-3 if kind != "bfloat16" else 0.3, abs=1e-5)


@pytest.mark.parametrize("num", WORLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_equal_at_one_number_of_processes(folder: Path, kind: str, num: int) -> None:
    first, second = ((folder / f"{kind}-{num}-{number}.safetensors").read_bytes() for number in range(2))
    assert first == second
    base = (folder / f"{kind}-{num}-base.safetensors").read_bytes()
    assert base == (folder / f"{kind}-alone-base.safetensors").read_bytes()


@pytest.mark.parametrize("num", [1, 4])
def test_shards_of_two_processes_are_read_by_others(folder: Path, tiny_model: Path, num: int) -> None:
    together(num, resumed_together, tiny_model, folder, KINDS)
    for kind in KINDS:
        assert furthest(weights(folder, f"{kind}-2-0"), weights(folder, f"{kind}-{num}-resumed")) < 1e-5


def test_a_process_alone_reads_shards_whole(folder: Path, tiny_model: Path) -> None:
    make_deterministic(1)
    chosen = settings(tiny_model, "full")
    training = Training(PolicyModel(chosen.model, seed=7), chosen, "full")
    training.restore(checkpointed(folder / "full-shards", {}, None, training.model.ranks))
    training.run(NUM_STEPS // 2, NUM_STEPS)
    training.keep(folder, "full-alone-resumed")
    assert furthest(weights(folder, "full-2-0"), weights(folder, "full-alone-resumed")) < 1e-5


def resumed_in_vain(shards: Path, folder: Path) -> None:
    """One of the processes, of which one sees other folders than the other."""
    with joined() as ranks:
        for name in UNREADABLE:
            if ranks.index:
                ranks.receive()
            says = UNREADABLE[name] if ranks.index else ""
            with pytest.raises(OSError, match=says) as raised, ranks.together("resume"):
                checkpointed(folder / name if ranks.index else shards, {}, {}, ranks)
            (folder / f"{name}-{ranks.index}.txt").write_text(str(raised.value))


UNREADABLE = {"missing": "missing", "broken": "restore the folder", "empty": "see the same folder"}
"""Folders of one process, and what its error says."""


def test_processes_of_which_one_cannot_read_the_shards_or_sees_others_all_fail(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/shard-00000-model-00001-of-00001.safetensors").write_bytes(b"no safetensors file")
    together(2, resumed_in_vain, folder / "full-shards", tmp_path)
    for name, message in UNREADABLE.items():
        assert message in (tmp_path / f"{name}-1.txt").read_text()
        assert (tmp_path / f"{name}-0.txt").read_text()


def test_rows_are_shared_by_tokens_and_in_order() -> None:
    units = [(index,) for index in range(6)]
    assert shares(units, [8, 1, 1, 2, 2, 2], 2) == [[(0,)], [(1,), (2,), (3,), (4,), (5,)]]
    assert shares(units, [1] * 6, 3) == [[(0,), (1,)], [(2,), (3,)], [(4,), (5,)]]
    assert shares([(0, 1)], [3, 4], 4) == [[], [], [(0, 1)], []]
    assert shares([], [], 2) == [[], []]


def test_only_the_head_and_scales_are_gathered_in_float32_for_its_logits() -> None:
    scale, matrix = (torch.nn.Parameter(torch.zeros(size)) for size in ((2,), (2, 2)))
    layer, rest = gathered_as(torch.bfloat16, fp32_head=True)
    assert layer.param_dtype_override_fn is not None
    assert (layer.param_dtype, rest.param_dtype) == (torch.bfloat16, None)
    assert (layer.param_dtype_override_fn(matrix), layer.param_dtype_override_fn(scale)) == (None, torch.float32)
    assert [one.param_dtype for one in gathered_as(torch.bfloat16, fp32_head=False)] == [torch.bfloat16] * 2
    assert [one.param_dtype for one in gathered_as(torch.float32, fp32_head=True)] == [None] * 2
