"""Attention of the pool: query heads that share a head of keys and values read it where it is."""

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rollstream.producers.engines.kv_pool import PLAIN, SHARED_KEYS, attend
from tests.producers.engines.engine_rig import GROUP, published, run

NUM_ROWS, NUM_COLUMNS, WIDTH = 5, 37, 16


class Heads(torch.nn.Module):
    """What transformers' attention asks of the layer that it is called for."""

    is_causal = True

    def __init__(self, num_key_value_groups):
        super().__init__()
        self.num_key_value_groups = num_key_value_groups


def inputs(num_heads, num_groups, num_new, dtype=torch.float32):
    """Query, key, value and mask; keys and values lie as in a pool, with room beside them."""
    torch.manual_seed(0)
    query = torch.randn(NUM_ROWS, num_new, num_heads, WIDTH, dtype=dtype).transpose(1, 2)
    key, value = torch.randn(2, NUM_ROWS + 3, NUM_COLUMNS + 27, num_groups, WIDTH, dtype=dtype)[
        :, :NUM_ROWS, :NUM_COLUMNS
    ].transpose(2, 3)
    positions = torch.tensor([3, 30, 12, 7, 36 - num_new])[:, None] + torch.arange(num_new)
    return query, key, value, (torch.arange(NUM_COLUMNS) <= positions[:, :, None])[:, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_new", [1, 4])
@pytest.mark.parametrize(("num_heads", "num_groups"), [(4, 2), (6, 2), (4, 1), (4, 4)])
def test_attention_equals_that_with_a_copy_for_each_query_head(num_heads, num_groups, num_new, dtype):
    query, key, value, mask = inputs(num_heads, num_groups, num_new, dtype)
    module = Heads(num_heads // num_groups)
    expected, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    found, _ = attend(module, query, key, value, mask, scaling=0.3)
    assert found.shape == expected.shape
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected)


def test_attention_without_a_mask_or_with_a_bias_is_that_of_transformers():
    query, key, value, mask = inputs(4, 2, 4)
    bias = torch.randn(1, 4, 4, NUM_COLUMNS)
    for given, options in ((None, {}), (mask, {"position_bias": bias})):
        expected, _ = sdpa_attention_forward(Heads(2), query, key, value, given, **options)
        assert torch.equal(attend(Heads(2), query, key, value, given, **options)[0], expected)


@pytest.mark.parametrize(
    ("settings", "attention"), [({}, SHARED_KEYS), ({"batching": "static"}, PLAIN), ({"deterministic": True}, PLAIN)]
)
def test_models_attend_so_in_continuous_batches_only(folder, versions, settings, attention):
    async def used(engine):
        return engine.module(GROUP).config._attn_implementation

    assert run(used, (published(folder), versions(0)), **settings) == attention
