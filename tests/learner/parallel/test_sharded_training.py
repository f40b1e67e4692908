"""Training by 1, 2 and 4 real processes over gloo: what they agree on, and what decides bits."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from rollstream.learner.model.policy import PolicyModel, make_deterministic
from rollstream.learner.parallel.process_ranks import joined, shares
from rollstream.learner.parallel.sharded_policy import (
    ShardedPolicy,
    checkpointed,
    gathered_as,
    write_shards,
)
from tests.learner.parallel.training_rig import LEARNING_RATE, NUM_STEPS, Training, furthest, settings, weights
from tests.rigs.services.process_group import together

WORLDS = (1, 2, 4)
KINDS = ("full", "lora")
OTHERS = ("checkpointing", "bfloat16", "off-policy", "malt")
"""Settings that decide how layers compute, and losses that compare with the policy before a batch; tried with two
processes.
"""
pytestmark = pytest.mark.slow


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


@pytest.mark.parametrize(("kind", "num"), [*itertools.product(KINDS, WORLDS), *itertools.product(OTHERS, [2])], ids=str)
def test_processes_train_what_one_trains_alone(folder: Path, kind: str, num: int) -> None:
    alone, found = (weights(folder, f"{kind}-{name}-0") for name in ("alone", num))
    begun = weights(folder, f"{kind}-alone-base")
    assert furthest(alone, begun) > NUM_STEPS * LEARNING_RATE / 2
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
