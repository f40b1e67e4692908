"""Attention over a prefix tree, as an attention implementation of transformers: each token sees its own path alone.

Differentiable in keys and values that rows share: their gradients are summed over the rows.
"""

import contextlib
import logging
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rollstream.learner.model.memory import is_out_of_memory
from rollstream.learner.model.prefixes import PrefixTree, tree_of
from rollstream.schemas.errors import ModelError

NAME = "rollstream_prefix_tree"
PLAIN = "sdpa"
"""The implementation that gives the same numbers on rows."""
_TOLERANCE = 1e-3
_KNOWN = frozenset({"sliding_window", "position_ids", "use_cache", "output_attentions", "is_causal", "layer_idx"})
"""Options of an attention call that change nothing here: windows are compared with the rows' lengths before."""

logger = logging.getLogger(__name__)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    prefix_tree: PrefixTree | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Of a tree's tokens: query (1, H, N, D), key and value (1, G, N, D); output (1, N, H, D).

    Raises ModelError for what a model adds to attention beyond that.
    """
    unknown = sorted(name for name, given in options.items() if given is not None and name not in _KNOWN)
    if prefix_tree is None or attention_mask is not None or dropout or unknown or options.get("is_causal") is False:
        raise ModelError(f"attention with {', '.join(unknown) or 'a mask of its own'} has no prefix tree")
    num_heads, width = query.shape[1], query.shape[3]
    num_groups, of_key = key.shape[1], key.shape[3]
    queries_N_F = query[0].transpose(0, 1).flatten(1)
    # One gather for both, and one sum over rows in the backward pass.
    both_N_F = torch.cat([key[0].transpose(0, 1).flatten(1), value[0].transpose(0, 1).flatten(1)], dim=1)
    outputs: list[Tensor] = []
    for block in prefix_tree.blocks:
        q_S_H_Q_D = (
            functional.embedding(block.queries_S_Q, queries_N_F).unflatten(2, (num_heads, width)).transpose(1, 2)
        )
        both_S_K_F = functional.embedding(block.keys_S_K, both_N_F)
        k_S_K_F, v_S_K_F = both_S_K_F.split([num_groups * of_key, both_S_K_F.shape[2] - num_groups * of_key], dim=2)
        found, _ = sdpa_attention_forward(
            module,
            q_S_H_Q_D,
            k_S_K_F.unflatten(2, (num_groups, of_key)).transpose(1, 2),
            v_S_K_F.unflatten(2, (num_groups, -1)).transpose(1, 2),
            block.mask_S_1_Q_K,
            scaling=scaling,
        )
        outputs.append(found.flatten(0, 1).flatten(1))
    places = prefix_tree.places_N
    output_N_F = functional.embedding(places, torch.cat(outputs) if len(outputs) > 1 else outputs[0])
    return output_N_F.unflatten(1, (num_heads, -1))[None], None


AttentionInterface.register(NAME, attend)


@contextlib.contextmanager
def attention_as(config: Any, name: str) -> Iterator[None]:
    """Attention of a model by this implementation while inside."""
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


def hidden_states(decoder: Any, tree: PrefixTree) -> Tensor:
    """(N, D), the last hidden states of a tree's tokens."""
    with attention_as(decoder.config, NAME):
        output = decoder(
            input_ids=tree.token_ids_N[None], position_ids=tree.positions_N[None], use_cache=False, prefix_tree=tree
        )
    return output.last_hidden_state[0]


@torch.no_grad()
def longest_row(decoder: Any, device: torch.device) -> tuple[float, str]:
    """Tokens of the longest row that a model can have in a prefix tree, and why it is not any: 0, if it can have none.

    Found by trying: a small tree must give what its rows give.
    """
    config = decoder.config
    if getattr(config, "_attn_implementation", None) != PLAIN:
        return 0.0, f"its attention is {getattr(config, '_attn_implementation', None)}, not {PLAIN}"
    size = decoder.get_input_embeddings().weight.shape[0]
    rows = [np.asarray([n % size for n in ids], np.int32) for ids in ((1, 2, 3, 4, 5), (1, 2, 3, 6), (7, 1), (1, 2, 8))]
    masks = [np.arange(len(row)) > 0 for row in rows]
    tree = tree_of(rows, masks).to(device)
    try:
        found = hidden_states(decoder, tree)[tree.sources_M].float()
        plain = [
            decoder(input_ids=torch.from_numpy(row[None, :-1]).long().to(device), use_cache=False).last_hidden_state[0]
            for row in rows
        ]
    except (ModelError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        return 0.0, " ".join(str(error).split())[:200]
    expected = torch.cat(plain).float()
    tolerance = _TOLERANCE if decoder.get_input_embeddings().weight.dtype == torch.float32 else 30 * _TOLERANCE
    if (found - expected).abs().nan_to_num(math.inf).max() > tolerance * (1 + expected.abs().max()):
        return 0.0, "a tree of rows gives other hidden states than the rows"
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    window = min((float(one) for one in windows if one), default=math.inf)
    return window, f"its attention reaches back {window:g} tokens"
