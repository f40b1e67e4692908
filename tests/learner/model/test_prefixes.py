"""Rows that begin alike, computed as a prefix tree: the same numbers and gradients as of each row by itself."""

import logging
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GemmaConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from rollstream.learner.algorithms.base import BatchView, KeptRow, Member, Row
from rollstream.learner.algorithms.builtin.grpo import Grpo
from rollstream.learner.model import collate, tree_attention
from rollstream.learner.model.collate import MicroBatch, TrainRow
from rollstream.learner.model.optimizer import make_optimizer
from rollstream.learner.model.policy import PolicyModel, make_deterministic
from rollstream.learner.model.prefixes import Order, inputs_of, tree_of
from rollstream.learner.model.step import StepResult, micro_batch_tokens, train_batch
from rollstream.learner.model.tree_attention import additive_mask, hidden_states, longest_row
from rollstream.schemas.algorithms import GrpoSettings
from rollstream.schemas.revisions import NEWEST_REVISION
from rollstream.schemas.settings import JobSettings, LoraSettings, ModelSettings

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
CONFIGS = {
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "llama": LlamaConfig,
    "gemma": GemmaConfig,
    "mistral": MistralConfig,
}
PRECISIONS = [(torch.float64, 1e-6), (torch.float32, 2e-5)]
"""Types and tolerances; transformers' norms compute in float32 even in a model in float64."""
token_rows = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=8), min_size=1, max_size=8)


def made(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.3)
    return model


def rows_of_groups(groups: int = 2, size: int = 4) -> list[Row]:
    """Groups over one prompt, with two turns; two members have their first answer in common, and two are equal."""
    rng = random.Random(7)
    rows: list[Row] = []
    for _ in range(groups):
        prompt = [rng.randrange(40) for _ in range(rng.randint(2, 6))]
        first = [rng.randrange(40) for _ in range(3)]
        for index in range(size):
            answer = first if index < 2 else [rng.randrange(40) for _ in range(rng.randint(1, 5))]
            last = [rng.randrange(40) for _ in range(rng.randint(1, 7))]
            ids = [*prompt, *answer, 5, 6, *last, 9]
            mask = np.zeros(len(ids), np.bool_)
            mask[len(prompt) : len(prompt) + len(answer)] = True
            mask[len(prompt) + len(answer) + 2 : -1] = True
            logprobs = np.where(mask, -3.0, 0).astype(np.float32)
            rows.append(Row(np.asarray(ids, np.int32), mask, logprobs, len(rows)))
        rows.append(rows[-1])
    return rows


@given(token_rows)
def test_a_tree_has_each_beginning_once_and_every_row(rows: list[list[int]]) -> None:
    arrays = [np.asarray(row, np.int32) for row in rows]
    masks = [np.arange(len(row)) == len(row) - 1 for row in rows]
    tree = tree_of(arrays, masks)
    beginnings = {tuple(row[:end]) for row in rows for end in range(1, len(row))}
    assert len(tree.token_ids_N) == len(beginnings)
    seen: list[list[int]] = []
    for block in tree.blocks:
        mask = additive_mask(block, torch.float32)
        for segment, keys in enumerate(block.keys_S_K.tolist()):
            for query in range(block.queries_S_Q.shape[1]):
                seen.append(keys[: query + 1 if mask is None else int((mask[segment, 0, query] == 0).sum())])
    paths = [seen[slot] for slot in tree.slots_N.tolist()]
    for row, source in zip(rows, tree.sources_M.tolist(), strict=True):
        assert tree.token_ids_N[paths[source]].tolist() == row[:-1]
        assert tree.positions_N[paths[source]].tolist() == list(range(len(row) - 1))


@given(token_rows, st.randoms(use_true_random=False))
def test_an_order_counts_what_a_row_adds_wherever_it_comes(rows: list[list[int]], rng: random.Random) -> None:
    arrays = [np.asarray(row, np.int32) for row in rows]
    order = Order(arrays)
    ranks = list(order.ranks)
    rng.shuffle(ranks)
    held: list[int] = []
    total = 0
    for rank in ranks:
        before = max((one for one in held if one < rank), default=None)
        after = min((one for one in held if one > rank), default=None)
        total += order.added(before, rank, after)
        held.append(rank)
    assert total == len({tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)})


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_those_of_plain_forwards(name: str, dtype: torch.dtype, tolerance: float) -> None:
    model = made(CONFIGS[name](**SHAPE), dtype)
    rows = rows_of_groups()
    tree = tree_of([row.token_ids for row in rows], [row.mask for row in rows])
    assert len(tree.token_ids_N) < 0.8 * sum(len(row.token_ids) for row in rows)
    shared = hidden_states(model.get_decoder(), tree)[tree.sources_M]
    factor = torch.linspace(-1, 1, shared.numel(), dtype=dtype).reshape(shared.shape)
    (shared * factor).sum().backward()
    grads = {key: parameter.grad.clone() for key, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    parts = []
    for row in rows:
        output = model.get_decoder()(input_ids=torch.from_numpy(row.token_ids[None]).long(), use_cache=False)
        parts.append(output.last_hidden_state[0][np.flatnonzero(row.mask) - 1])
    plain = torch.cat(parts)
    (plain * factor).sum().backward()
    assert torch.allclose(shared, plain, rtol=tolerance, atol=tolerance * 10)
    assert grads
    for key, parameter in model.named_parameters():
        if parameter.grad is not None:
            scale = parameter.grad.abs().max()
            assert (grads[key] - parameter.grad).abs().max() <= tolerance * scale + 1e-12, key


def backward(model: Any, *, copies_keys: bool = False, **options: Any) -> list[torch.Tensor]:
    """Hidden states of a tree, and the gradients of all parameters."""
    rows = rows_of_groups()
    tree = tree_of([row.token_ids for row in rows], [row.mask for row in rows])
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, **{"enabled": False, **options}):
        found = hidden_states(model.get_decoder(), tree, copies_keys=copies_keys)
    (found * torch.linspace(-1, 1, found.numel(), dtype=found.dtype).reshape(found.shape)).sum().backward()
    return [found.detach(), *(one.grad for one in model.parameters() if one.grad is not None)]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_copy_of_keys_for_each_query_head_changes_only_the_rounding_of_gradients(name: str) -> None:
    model = made(CONFIGS[name](**SHAPE))
    (shared, *gradients), (copied, *others) = backward(model), backward(model, copies_keys=True)
    assert torch.equal(shared, copied)
    for one, other in zip(gradients, others, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


@pytest.mark.parametrize(("revision", "copies_keys"), [(11, True), (12, False)])
def test_jobs_copy_keys_if_they_were_recorded_so(tiny_model: Path, revision: int, copies_keys: bool) -> None:
    model = PolicyModel(ModelSettings(path=str(tiny_model), device="cpu"), seed=0)
    model.compute_as(revision)
    assert (model.copies_keys, model.frozen_copy().copies_keys) == (copies_keys, copies_keys)


@pytest.mark.parametrize("is_low", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_masks_that_layers_share_give_the_bits_of_masks_of_bools(
    name: str, is_low: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(CONFIGS[name](**SHAPE))
    shared = backward(model, enabled=is_low)

    def as_bools(block: Any, dtype: torch.dtype) -> torch.Tensor | None:
        mask = additive_mask(block, dtype)
        return None if mask is None else (mask == 0).contiguous()

    monkeypatch.setattr(tree_attention, "additive_mask", as_bools)
    assert all(one.equal(other) for one, other in zip(shared, backward(model, enabled=is_low), strict=True))


def test_a_mask_is_made_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    made_of: list[Any] = []

    def counted(block: Any, dtype: torch.dtype) -> torch.Tensor | None:
        made_of.append(block)
        return additive_mask(block, dtype)

    monkeypatch.setattr(tree_attention, "additive_mask", counted)
    backward(made(Qwen2Config(**SHAPE)))
    assert len(made_of) == len({id(block) for block in made_of}) > 1


def varlen_in_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """Compute what torch documents for varlen_attn, a sequence at a time."""
    assert window_size == (-1, 0)
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert (cu_seq_q.diff().max(), cu_seq_k.diff().max()) == (max_q, max_k)
    factor = query.shape[2] ** -0.5 if scale is None else scale
    groups = query.shape[1] // key.shape[1] if enable_gqa else 1
    outputs = []
    for at, end, first, last in zip(cu_seq_q[:-1], cu_seq_q[1:], cu_seq_k[:-1], cu_seq_k[1:], strict=True):
        k, v = (one[first:last].repeat_interleave(groups, dim=1) for one in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[at:end], k) * factor
        num_queries, num_keys = int(end - at), int(last - first)
        is_seen = torch.ones(num_queries, num_keys).tril(num_keys - num_queries) > 0  # aligned at the last of both
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~is_seen, -math.inf).softmax(-1), v))
    return torch.cat(outputs)


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("name", CONFIGS)
def test_segments_without_masks_have_the_numbers_and_gradients_of_blocks(
    name: str, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(CONFIGS[name](**SHAPE), dtype)
    blocks = backward(model)
    calls: list[int] = []

    def kernel(*args: Any, **options: Any) -> torch.Tensor:
        calls.append(1)
        return varlen_in_torch(*args, **options)

    monkeypatch.setattr(tree_attention, "is_packed", lambda *_: True)
    monkeypatch.setattr(tree_attention.varlen, "varlen_attn", kernel)
    packed = backward(model)
    assert len(calls) == SHAPE["num_hidden_layers"]
    for one, other in zip(packed, blocks, strict=True):
        assert (one - other).abs().max() <= tolerance * 10 * other.abs().max()


def test_the_variable_length_kernel_is_for_a_gpu_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    query = torch.zeros(1, 4, 3, 16)
    assert not tree_attention.is_packed(query, query, query, torch.bfloat16)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for capability, is_new in (((7, 5), False), ((8, 0), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert tree_attention.is_packed(query, query, query, torch.bfloat16) == is_new
    assert not tree_attention.is_packed(query, query, query, torch.float32)
    assert not tree_attention.is_packed(query, query, torch.zeros(1, 4, 3, 8), torch.bfloat16)
    odd = torch.zeros(1, 4, 3, 12)
    assert not tree_attention.is_packed(odd, odd, odd, torch.bfloat16)


def policy_of(folder: Path, config: Any, **settings: Any) -> PolicyModel:
    made(config).save_pretrained(folder)
    return PolicyModel(ModelSettings(path=str(folder), device="cpu", **settings), seed=0)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Gemma2Config(**SHAPE), "more than a linear map"),
        (MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, state_size=4), ""),
        (MistralConfig(**SHAPE, sliding_window=4), "reaches back 4 tokens"),
        (Qwen2Config(**SHAPE, attention_dropout=0.1), "dropout"),
    ],
    ids=["capped", "state", "window", "dropout"],
)
def test_a_model_that_cannot_share_computes_each_row_and_logs_the_reason(
    config: Any, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = policy_of(tmp_path, config)
    with caplog.at_level(logging.WARNING):
        assert not model.shares_prefixes(5)
        assert not model.shares_prefixes(5)
    messages = [record.message for record in caplog.records if "common prefixes" in record.message]
    assert len(messages) == 1
    assert reason in messages[0]
    result = train(model, revision=NEWEST_REVISION)
    assert result.metrics["tokens/packing_ratio"] >= 1
    assert result.num_optimizer_steps == 1


def test_rows_within_a_window_are_shared() -> None:
    decoder = made(MistralConfig(**SHAPE, sliding_window=16)).get_decoder()
    assert longest_row(decoder, CPU)[0] == 16
    assert longest_row(made(Qwen2Config(**SHAPE)).get_decoder(), CPU)[0] == math.inf
    eager = made(Qwen2Config(**SHAPE))
    eager.set_attn_implementation("eager")
    assert longest_row(eager.get_decoder(), CPU)[0] == 0


def train(model: PolicyModel, *, revision: Any, **algorithm: Any) -> StepResult:
    make_deterministic(1)
    rows = rows_of_groups()
    members = [Member(f"g{index // 5}", "agent", reward=index % 3) for index, _ in enumerate(rows)]
    job = JobSettings(kind="rl", model=model.settings, algorithm=GrpoSettings(**algorithm), revision=revision)
    batch = BatchView([Row(r.token_ids, r.mask, r.logprobs, index) for index, r in enumerate(rows)], members)
    optimizer = make_optimizer(model.trainable(), job.optimizer)
    return train_batch(model, optimizer, batch, Grpo(), job, index=0, seed=1)


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2, dropout=0.0)])
def test_a_step_with_shared_prompts_is_that_of_padded_rows(tmp_path: Path, lora: LoraSettings | None) -> None:
    model = policy_of(tmp_path, Qwen2Config(**SHAPE), lora=lora)
    padded = train(model, revision=3)
    grads = {name: parameter.grad.clone() for name, parameter in model.trainable() if parameter.grad is not None}
    again = PolicyModel(model.settings, seed=0)
    shared = train(again, revision=4, max_tokens_per_micro_batch=40)
    for name, parameter in again.trainable():
        assert parameter.grad is not None
        assert torch.allclose(grads[name], parameter.grad, rtol=1e-3, atol=1e-5), name
    names = padded.metrics.keys() - {"tokens/padding"}
    assert {name: shared.metrics[name] for name in names} == pytest.approx(
        {name: padded.metrics[name] for name in names}, rel=1e-3, abs=1e-5
    )
    assert shared.metrics["tokens/padding"] == 0
    computed = shared.metrics["tokens/computed"]
    assert shared.metrics["tokens/packing_ratio"] == computed / shared.metrics["tokens/total"] < 0.9
    assert not {"tokens/computed", "tokens/packing_ratio"} & padded.metrics.keys()


def test_recorded_jobs_keep_padded_rows_and_their_micro_batches(tmp_path: Path) -> None:
    model = policy_of(tmp_path, Qwen2Config(**SHAPE))
    job = JobSettings(kind="rl", model=model.settings, revision=3)
    assert micro_batch_tokens(job, CPU) == 16384
    assert micro_batch_tokens(job.model_copy(update={"revision": 4}), CPU) == 2048
    assert micro_batch_tokens(job.model_copy(update={"revision": 4}), torch.device("cuda:0")) == 16384


@pytest.mark.parametrize("max_tokens", [1, 25, 60, 1000])
@pytest.mark.parametrize("pairs", [False, True])
def test_trees_hold_every_unit_once_and_no_more_tokens_than_they_may(max_tokens: int, pairs: bool) -> None:
    rows = [TrainRow(row, row.mask, group=index) for index, row in enumerate(rows_of_groups(4))]
    singles = [(index,) for index in range(len(rows))]
    units: Any = [(index, index + 1) for index in range(0, len(rows) - 1, 2)] if pairs else singles
    batches = collate.tree_micro_batches(rows, units, max_tokens)
    assert sum(len(batch.chosen) or len(batch.lengths) for batch in batches) == len(units)
    for batch in batches:
        assert batch.tree is not None
        assert batch.num_computed <= max_tokens or len(batch.chosen) == 1 or len(batch.lengths) == 1
    assert shown(batches) == shown(collate.tree_micro_batches(rows, units[::-1], max_tokens))


def shown(batches: list[MicroBatch]) -> list[list[int]]:
    return [[] if batch.tree is None else batch.tree.token_ids_N.tolist() for batch in batches]


def test_kept_sets_go_with_their_tokens(tmp_path: Path) -> None:
    model = policy_of(tmp_path, Qwen2Config(**SHAPE))
    rows: list[TrainRow] = []
    for row in rows_of_groups():
        lengths = np.where(row.mask, 3, 0).astype(np.int64)
        ids = [np.asarray([one, (one + 1) % 40, (one + 7) % 40]) for one in row.token_ids[row.mask]]
        kept = KeptRow(lengths, np.concatenate(ids).astype(np.int32))
        rows.append(TrainRow(Row(row.token_ids, row.mask, row.logprobs, row.member, kept=kept), row.mask))
    units = [(index,) for index in range(len(rows))]
    plain, _ = model.completion_terms(collate.pad(rows, units), temperature=0.7, entropy_needs_grad=False)
    tree = collate.pad(rows, units, shares=True)
    found, _ = model.completion_terms(tree, temperature=0.7, entropy_needs_grad=False)
    assert tree.kept is not None
    assert torch.allclose(plain, found, atol=1e-5)


def test_tokens_after_the_last_trained_one_are_not_computed() -> None:
    ids, mask = np.arange(6, dtype=np.int32), np.asarray([False, False, True, True, False, False])
    assert inputs_of(ids, mask).tolist() == [0, 1, 2]
