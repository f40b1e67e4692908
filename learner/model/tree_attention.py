"""Attention over a prefix tree, as an attention implementation of transformers: each token sees its own path alone.

Differentiable in keys and values that rows share: their gradients are summed over the rows.
"""

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
    varlen,
)
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rollstream.learner.model.micro_batch import moved
from rollstream.learner.model.prefixes import AttentionBlock, PrefixTree, tree_of
from rollstream.schemas.errors import ModelError, is_out_of_memory
from rollstream.schemas.settings import FlashAttention
from rollstream.schemas.variables import one_line

NAME = "rollstream_prefix_tree"
PLAIN = "sdpa"
"""The implementation that gives the same numbers on rows."""
_TOLERANCE = 1e-3
_KNOWN = frozenset({"sliding_window", "position_ids", "use_cache", "output_attentions", "is_causal", "layer_idx"})
"""Options of an attention call that change nothing here: windows are compared with the rows' lengths before."""

_ALIGNED = 8
"""Rows of a mask begin at a multiple of so many numbers: kernels of a GPU would copy it otherwise."""
_VARLEN_TYPES = frozenset({torch.bfloat16, torch.float16})
_VARLEN_WIDTH = 256
"""Maximum width of a head."""
_PACKAGES: Mapping[FlashAttention, str] = {"FA3": "flash_attn_3 (built for this torch)", "FA4": "flash-attn-4"}

logger = logging.getLogger(__name__)


class SharedTree:
    """A tree in one forward, and the masks of its blocks, which all layers use."""

    def __init__(self, tree: PrefixTree, *, copies_keys: bool = False) -> None:
        """`copies_keys`: each query head gets a copy of keys and values that it shares, as before SHARES_KEYS_SINCE."""
        self.tree = tree
        self.copies_keys = copies_keys
        self._dtype: torch.dtype | None = None
        self._masks: list[Tensor | None] = []

    def masks(self, dtype: torch.dtype) -> list[Tensor | None]:
        """Masks of all blocks, in the type that attention computes in."""
        if dtype != self._dtype:
            self._dtype, self._masks = dtype, [additive_mask(block, dtype) for block in self.tree.blocks]
        return self._masks


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    prefix_tree: SharedTree | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention over a tree's tokens: query (1, H, N, D), key and value (1, G, N, D); output (1, N, H, D).

    Raises ModelError for any further argument that a model passes to attention.
    """
    unknown = sorted(name for name, given in options.items() if given is not None and name not in _KNOWN)
    if prefix_tree is None or attention_mask is not None or dropout or unknown or options.get("is_causal") is False:
        raise ModelError(f"attention with {', '.join(unknown) or 'a mask of its own'} has no prefix tree")
    num_heads, width = query.shape[1], query.shape[3]
    num_groups, of_key = key.shape[1], key.shape[3]
    queries_N_F = query[0].transpose(0, 1).flatten(1)
    # One gather for both, and one sum over rows in the backward pass.
    both_N_F = torch.cat([key[0].transpose(0, 1).flatten(1), value[0].transpose(0, 1).flatten(1)], dim=1)
    tree, dtype = prefix_tree.tree, _computed_in(query)
    if is_packed(query, key, value, dtype):
        q_N_H_D = queries_N_F.to(dtype).unflatten(1, (num_heads, width))
        return _packed(q_N_H_D, both_N_F.to(dtype), num_groups, tree, scaling)[None], None
    # Kernels of a GPU need the copies where there is a mask; on a CPU they take longer than the attention.
    attends = _shared if query.is_cpu and not prefix_tree.copies_keys else sdpa_attention_forward
    outputs: list[Tensor] = []
    for block, mask in zip(tree.blocks, prefix_tree.masks(dtype), strict=True):
        q_S_H_Q_D = (
            functional.embedding(block.queries_S_Q, queries_N_F).unflatten(2, (num_heads, width)).transpose(1, 2)
        )
        both_S_K_F = functional.embedding(block.keys_S_K, both_N_F)
        k_S_K_F, v_S_K_F = both_S_K_F.split([num_groups * of_key, both_S_K_F.shape[2] - num_groups * of_key], dim=2)
        found, _ = attends(
            module,
            q_S_H_Q_D,
            k_S_K_F.unflatten(2, (num_groups, of_key)).transpose(1, 2),
            v_S_K_F.unflatten(2, (num_groups, -1)).transpose(1, 2),
            mask,
            scaling=scaling,
        )
        outputs.append(found.flatten(0, 1).flatten(1))
    output_N_F = functional.embedding(tree.slots_N, torch.cat(outputs) if len(outputs) > 1 else outputs[0])
    return output_N_F.unflatten(1, (num_heads, -1))[None], None


AttentionInterface.register(NAME, attend)


def _shared(
    _: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float | None
) -> tuple[Tensor, None]:
    """transformers' SDPA without a copy of keys and values for each query head: equal bits, but in their gradients."""
    found = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    )
    return found.transpose(1, 2).contiguous(), None


def _computed_in(query: Tensor) -> torch.dtype:
    """The type that attention over these queries computes in."""
    kind = query.device.type
    if torch.is_autocast_enabled(kind) and query.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return query.dtype


def additive_mask(block: AttentionBlock, dtype: torch.dtype) -> Tensor | None:
    """(S, 1, Q, K): 0 where a query sees a key, else minus infinity; what SDPA makes of bools in each call."""
    if block.starts_S is None:
        return None
    device, num_keys = block.starts_S.device, block.keys_S_K.shape[1]
    shape = (*block.queries_S_Q.shape, -(-num_keys // _ALIGNED) * _ALIGNED)
    reached_S_Q = block.starts_S[:, None] + torch.arange(shape[1], device=device)
    is_seen_S_Q_K = torch.arange(shape[2], device=device) <= reached_S_Q[:, :, None]
    mask_S_Q_K = torch.full(shape, -math.inf, dtype=dtype, device=device).masked_fill_(is_seen_S_Q_K, 0.0)
    return mask_S_Q_K[:, None, :, :num_keys]


def is_packed(query: Tensor, key: Tensor, value: Tensor, dtype: torch.dtype) -> bool:
    """Whether segments are computed without masks and padding, by the variable-length attention of a GPU."""
    widths = {query.shape[3], key.shape[3], value.shape[3]}
    fits = dtype in _VARLEN_TYPES and len(widths) == 1 and query.shape[3] % 8 == 0 and query.shape[3] <= _VARLEN_WIDTH
    return fits and query.is_cuda and torch.cuda.get_device_capability(query.device) >= (8, 0)


def _packed(q_N_H_D: Tensor, both_N_F: Tensor, num_groups: int, tree: PrefixTree, scaling: float | None) -> Tensor:
    """(N, H, D): a segment's queries see the keys of its path, whose last one is that of its last query."""
    segments = tree.segments
    both_P_2G_D = functional.embedding(segments.keys_P, both_N_F).unflatten(1, (2 * num_groups, -1))
    return varlen.varlen_attn(
        q_N_H_D,
        both_P_2G_D[:, :num_groups],
        both_P_2G_D[:, num_groups:],
        segments.query_bounds_S1,
        segments.key_bounds_S1,
        segments.longest_segment,
        segments.longest_path,
        scale=scaling,
        window_size=(-1, 0),
        enable_gqa=True,
    )  # pyright: ignore[reportReturnType]


def use_flash_attention(version: FlashAttention) -> None:
    """Let a GPU compute packed segments, and SDPA without a mask, by this version in the whole process.

    Raises ModelError if its package is not installed or is another one.
    """
    if not torch.cuda.is_available() or version == (current_flash_attention_impl() or "FA2"):
        return
    if version == "FA2":
        restore_flash_attention_impl()
        return
    try:
        activate_flash_attention_impl(version)
    except (ImportError, RuntimeError, AttributeError) as error:
        raise ModelError(
            f"model.flash_attention is {version}, and it cannot be loaded: {one_line(error)}; install "
            f"{_PACKAGES[version]}, or leave model.flash_attention out"
        ) from error


@contextlib.contextmanager
def attention_as(config: Any, name: str) -> Iterator[None]:
    """Attention of a model by this implementation while inside."""
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


def hidden_states(decoder: Any, tree: PrefixTree, *, copies_keys: bool = False) -> Tensor:
    """(N, D), the last hidden states of a tree's tokens. `copies_keys`: see `SharedTree`."""
    with attention_as(decoder.config, NAME):
        output = decoder(
            input_ids=tree.token_ids_N[None],
            position_ids=tree.positions_N[None],
            use_cache=False,
            prefix_tree=SharedTree(tree, copies_keys=copies_keys),
        )
    return output.last_hidden_state[0]


@torch.no_grad()
def longest_row(decoder: Any, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[float, str]:
    """Tokens of the longest row that a model can have in a prefix tree, and why it is not any: 0, if it can have none.

    Found by trying: a small tree must give what its rows give, on a GPU in the type `dtype` that it is to compute in.
    """
    config = decoder.config
    if getattr(config, "_attn_implementation", None) != PLAIN:
        return 0.0, f"its attention is {getattr(config, '_attn_implementation', None)}, not {PLAIN}"
    size = decoder.get_input_embeddings().weight.shape[0]
    rows = [np.asarray([n % size for n in ids], np.int32) for ids in ((1, 2, 3, 4, 5), (1, 2, 3, 6), (7, 1), (1, 2, 8))]
    masks = [np.arange(len(row)) > 0 for row in rows]
    tree = moved(tree_of(rows, masks), device)
    is_low = device.type != "cpu" and dtype != torch.float32
    try:
        with torch.autocast(device.type, dtype, enabled=is_low):
            found = hidden_states(decoder, tree)[tree.sources_M].float()
            ids = [torch.from_numpy(row[None, :-1]).long().to(device) for row in rows]
            plain = [decoder(input_ids=one, use_cache=False).last_hidden_state[0] for one in ids]
    except (ModelError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        return 0.0, one_line(error)
    expected = torch.cat(plain).float()
    is_low |= decoder.get_input_embeddings().weight.dtype != torch.float32
    tolerance = 30 * _TOLERANCE if is_low else _TOLERANCE
    if (found - expected).abs().nan_to_num(math.inf).max() > tolerance * (1 + expected.abs().max()):
        return 0.0, "a tree of rows gives other hidden states than the rows"
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    window = min((float(one) for one in windows if one), default=math.inf)
    return window, f"its attention reaches back {window:g} tokens"
