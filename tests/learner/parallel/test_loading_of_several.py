"""Base weights of several real processes: rank 0 reads them, the others get them bit by bit, and all fail together."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rollstream.learner.model import policy
from rollstream.learner.model.policy import PolicyModel
from rollstream.learner.model.ranks import whole
from rollstream.learner.parallel.process_ranks import ProcessRanks, joined
from rollstream.learner.parallel.sharded_policy import ShardedPolicy
from rollstream.schemas.errors import ModelError, RollstreamError
from rollstream.schemas.settings import LoraSettings, ModelSettings
from tests.rigs.services.process_group import together

pytestmark = pytest.mark.slow
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": LoraSettings(rank=2)},
    "dora": {"lora": LoraSettings(rank=2, use_dora=True)},
    "low": {"lora": LoraSettings(rank=2), "dtype": "bfloat16", "gradient_checkpointing": True},
    "eager": {"attn_implementation": "eager"},
}


def without_weights(model: Path, folder: Path) -> Path:
    """The part of a model folder that a process needs if it gets the weights of another one."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def all_of(model: PolicyModel) -> dict[str, Tensor]:
    return dict([*model.module.named_parameters(), *model.module.named_buffers()])


def loaded_together(model: Path, folder: Path) -> None:
    """One of the processes. The folder of all but the first has no weights."""
    with joined() as ranks:
        path = str(model if ranks.index == 0 else folder)
        for changes in KINDS.values():
            chosen = ModelSettings(path="base", device="cpu", **changes)
            with ranks.together("load") if ranks.index == 0 else followed(ranks):
                found = ShardedPolicy(chosen, ranks, seed=7, path=path)
            alone = PolicyModel(chosen, seed=7, path=str(model))
            own, expected = all_of(found), all_of(alone)
            assert list(own) == list(expected)
            for name, value in own.items():
                assert torch.equal(whole(value), expected[name]), name
                assert value.requires_grad == expected[name].requires_grad
            assert all(isinstance(value, DTensor) for value in found.module.parameters())
            tied = found.module.get_output_embeddings().weight is found.module.get_input_embeddings().weight
            assert tied == (alone.module.get_output_embeddings().weight is alone.module.get_input_embeddings().weight)
            assert found.shares_prefixes(8) == alone.shares_prefixes(8)
            assert found.selects_logprobs == alone.selects_logprobs


def followed(ranks: ProcessRanks) -> Any:
    """Follow a command as `follow` does."""
    return ranks.together(ranks.receive().name)


@pytest.mark.parametrize("num", [2, 4])
def test_processes_that_have_no_weights_get_those_of_a_single_load(tiny_model: Path, tmp_path: Path, num: int) -> None:
    together(num, loaded_together, tiny_model, without_weights(tiny_model, tmp_path / "empty"))


def with_a_buffer(model: Path, folder: Path) -> None:
    """One of the processes: a version with a tensor that no process has a shard of, which rank 0 alone is given."""
    with joined() as ranks:
        path = str(model if ranks.index == 0 else folder)
        chosen = ModelSettings(path="base", device="cpu")
        with ranks.together("load") if ranks.index == 0 else followed(ranks):
            found = ShardedPolicy(chosen, ranks, seed=7, path=path)
        found.module.register_buffer("biases", torch.zeros(3))
        if ranks.index == 0:
            found.load_weights(PolicyModel(chosen, seed=7, path=str(model)).weights() | {"biases": torch.arange(3.0)})
        else:
            ranks.receive()
            found.take_weights()
        assert found.module.biases.tolist() == [0.0, 1.0, 2.0]


def test_a_version_has_the_buffers_of_rank_0_in_all_processes(tiny_model: Path, tmp_path: Path) -> None:
    together(2, with_a_buffer, tiny_model, without_weights(tiny_model, tmp_path / "empty"))


def failing_together(model: Path, folder: Path, failing: int, is_early: bool, results: Path) -> None:
    """One of the processes, of which one fails: before it loads (`is_early`), or because its folder is not there."""
    with joined() as ranks:
        path = str(folder / "nothing") if ranks.index == failing else str(model)
        raised: list[str] = []
        for one in (path, str(model)):
            try:
                with ranks.together("load") if ranks.index == 0 else followed(ranks):
                    if is_early and ranks.index == failing and one == path:
                        raise ModelError("refused")
                    ShardedPolicy(ModelSettings(path="base", device="cpu"), ranks, seed=7, path=one)
            except RollstreamError as error:
                raised.append(f"{type(error).__name__}: {error}")
        (results / f"{ranks.index}.json").write_text(json.dumps(raised))


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("failing", [0, 2])
def test_where_one_fails_all_fail_and_load_the_next_model(
    tiny_model: Path, tmp_path: Path, failing: int, is_early: bool
) -> None:
    together(3, failing_together, tiny_model, tmp_path, failing, is_early, tmp_path)
    raised = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert [len(one) for one in raised] == [1, 1, 1], "and the second time all load"
    for rank, (message,) in enumerate(raised):
        assert message.startswith("ModelError" if rank == failing else f"RunFailedError: load: process {failing}: ")


def lacking_memory_together(model: Path, lacking: int, results: Path) -> None:
    """One of the processes, of which one has no memory for the first model."""
    with joined() as ranks:
        raised: list[str] = []
        for lora in (None, LoraSettings(rank=2)):
            try:
                with (
                    ranks.together("load") if ranks.index == 0 else followed(ranks),
                    pytest.MonkeyPatch.context() as one,
                ):
                    if ranks.index == lacking and lora is None:
                        one.setattr(policy, "load_module" if lacking == 0 else "empty_module", full)
                    ShardedPolicy(ModelSettings(path="base", device="cpu", lora=lora), ranks, seed=7, path=str(model))
            except RollstreamError as error:
                raised.append(f"{type(error).__name__}: {error}")
        (results / f"{ranks.index}.json").write_text(json.dumps(raised))


def full(*_: Any, **options: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


@pytest.mark.parametrize("lacking", [0, 1])
def test_where_one_has_no_memory_for_a_model_all_fail_and_load_the_next(
    tiny_model: Path, tmp_path: Path, lacking: int
) -> None:
    together(2, lacking_memory_together, tiny_model, lacking, tmp_path)
    for rank in range(2):
        (message,) = json.loads((tmp_path / f"{rank}.json").read_text())
        assert message.startswith("ModelError" if rank == lacking else f"RunFailedError: load: process {lacking}: ")
        assert "model base on cpu does not fit into memory (CUDA out of memory. Tried to allocate 20.00 GiB)" in message
