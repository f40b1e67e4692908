"""Keys and values of the sequences that are being generated: one row each, of its own length, in one tensor.

A transformers model sees it as its cache. Rows begin at column 0; a mask hides what lies beyond a row's length.
Shapes: B live rows, A rows that join, S new tokens of a joining row (padded), W columns in use, V vocabulary.
"""

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, Cache, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rollstream.producers.engines.scheduling import padded_length
from rollstream.schemas.errors import is_out_of_memory

logger = logging.getLogger(__name__)

MEMORY_SHARE = 0.4
"""Share of the free memory that rows may take: while a pool grows, the smaller one is there too."""
KEPT_BYTES = 256 * 2**20
"""Most that a pool without rows keeps. Memory that is new has to be zeroed and mapped: 7 % of the time in which a 20M
model generated an epoch of short answers on two cores."""
PROBE_IDS = 12
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.1}
"""Largest difference of log-probabilities between the pool and a plain forward, by the dtype of its keys."""
NOT_ITS_CACHE = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""Errors of a model that is given a cache of another kind than its own."""
SHARED_KEYS = "rollstream_sdpa"
"""Name of `attend` in transformers, in place of `PLAIN`."""
PLAIN = "sdpa"


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Shape of one token's keys and values, equal in all layers."""

    num_layers: int
    num_heads: int
    """Number of heads of keys and values."""
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values in all layers."""
        return 2 * self.num_layers * self.num_heads * self.head_dim * self.dtype.itemsize


class KVPool(Cache):
    """Room for rows. Before each forward say which rows get new tokens: `for_decode` or `for_join`."""

    def __init__(self, shape: PoolShape, device: torch.device) -> None:
        super().__init__(layers=[])
        self.shape = shape
        self._device = device
        self._slots: Tensor | None = None
        """Rows that join (A,); None: all rows decode."""
        self._is_cold = False
        self._index = torch.empty(0, dtype=torch.int64)
        self._num_rows = self._width = 0
        self.max_tokens = math.inf
        """Slots times columns beyond which no more is taken than rows need."""
        self.free()

    def clear(self) -> None:
        """Forget the rows, all of which are finite; the next ones get their memory, if it is not too much."""
        if self.size_bytes > KEPT_BYTES:
            self.free()

    def begin(self, num_slots: int, num_columns: int) -> None:
        """Free the memory that rows of before have left unless the first new ones fit, so that it is neither copied nor
        multiplied: many short rows, then a long one.
        """
        slots, columns = self._data.shape[2:4]
        if num_slots > slots or num_columns > columns:
            self.free()

    def free(self) -> None:
        """Forget the rows and free their memory."""
        self._data = self._empty(0, 0)

    @property
    def size_bytes(self) -> int:
        """Bytes of its memory."""
        return self._data.nbytes

    def fits(self, shape: PoolShape, device: torch.device) -> bool:
        """Whether rows of such a model can have its memory."""
        return self.shape == shape and self._device == device

    def reserve(self, num_slots: int, num_columns: int) -> None:
        """Have room for so many rows and columns; what is in these rows stays, as far as these columns."""
        old_slots, old_columns = self._data.shape[2:4]
        if num_slots <= old_slots and num_columns <= old_columns:
            return
        slots = old_slots if num_slots <= old_slots else max(num_slots, min(2 * old_slots, num_slots + 64))
        columns = old_columns if num_columns <= old_columns else padded_length(num_columns * 5 // 4)
        if slots * columns > self.max_tokens:
            slots = num_slots
            columns = min(columns, max(padded_length(num_columns), int(self.max_tokens) // slots))
        try:
            grown = self._empty(slots, columns)
        except Exception as error:
            least = (num_slots, min(columns, padded_length(num_columns)))
            if not is_out_of_memory(error) or (slots, columns) == least:
                raise
            grown = self._empty(*least)
        kept = self._data[:, :, : grown.shape[2], : grown.shape[3]]
        grown[:, :, : kept.shape[2], : kept.shape[3]] = kept
        self._data = grown

    def take(self, slots: Sequence[int], width: int) -> Tensor:
        """A copy of rows: (layers, 2, rows, width, heads, dim)."""
        return self._data[:, :, :, :width].index_select(2, self._tensor(slots))

    def put(self, slots: Sequence[int], block: Tensor, indices: Sequence[int], width: int) -> None:
        """Set the first `width` columns of rows from those of a block."""
        self._data[:, :, self._tensor(slots), :width] = block[:, :, self._tensor(indices), :width]

    def copy(self, sources: Sequence[int], targets: Sequence[int], width: int) -> None:
        """Set the first `width` columns of rows from other rows."""
        self.put(targets, self._data, sources, width)

    def blank(self, slots: Sequence[int]) -> None:
        """Set rows to zero: a NaN would spoil the rows that come after, masked or not."""
        self._data[:, :, self._tensor(slots)] = 0

    def for_decode(self, lengths_B: Sequence[int]) -> tuple[Tensor, Tensor]:
        """One new token for each of the first B rows; returns mask (B, 1, 1, W) and positions (B, 1)."""
        self._slots, self._num_rows, self._width = None, len(lengths_B), max(lengths_B) + 1
        self.reserve(self._num_rows, self._width)
        lengths = self._tensor(lengths_B)
        rows = torch.arange(self._num_rows, device=self._device)
        self._index = rows * self._data.shape[3] + lengths
        columns_W = torch.arange(self._width, device=self._device)
        return (columns_W <= lengths[:, None])[:, None, None, :], lengths[:, None]

    def for_join(
        self, slots_A: Sequence[int], starts_A: Sequence[int], counts_A: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """`counts` new tokens, left-padded, for rows that have `starts` tokens.

        Returns mask (A, 1, S, W) and positions (A, S).
        """
        slots, starts, counts = self._tensor(slots_A), self._tensor(starts_A), self._tensor(counts_A)
        steps, self._is_cold = max(counts_A), max(starts_A) == 0
        self._slots, self._num_rows = slots, len(slots_A)
        self._width = max(start + count for start, count in zip(starts_A, counts_A, strict=True)) + 1
        if max(slots_A) >= self._data.shape[2] or self._width > self._data.shape[3]:
            self.reserve(max(*slots_A, self._data.shape[2] - 1) + 1, max(self._width, self._data.shape[3]))
        columns_S = torch.arange(steps, device=self._device)
        own_A_S = columns_S - (steps - counts)[:, None]  # below 0: padding
        positions_A_S = starts[:, None] + own_A_S.clamp(min=0)
        # Padding writes into the column after the row, which the next token overwrites.
        written_A_S = torch.where(own_A_S < 0, (starts + counts)[:, None], positions_A_S)
        self._index = (slots[:, None] * self._data.shape[3] + written_A_S).flatten()
        if self._is_cold:
            is_padding = (own_A_S < 0)[:, None, :] & ~torch.eye(steps, dtype=torch.bool, device=self._device)
            return ((columns_S <= columns_S[:, None]) & ~is_padding)[:, None], positions_A_S
        columns_W = torch.arange(self._width, device=self._device)
        return (columns_W <= positions_A_S[:, :, None])[:, None], positions_A_S

    # ---- what the model calls ----

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values (rows, heads, S, dim); returns those to attend to (rows, heads, W, dim)."""
        found: list[Tensor] = []
        for part, new in zip(self._data[layer_idx], (key_states, value_states), strict=True):
            part.flatten(0, 1).index_copy_(0, self._index, new.transpose(1, 2).flatten(0, 1))
            if self._slots is None:
                found.append(part[: self._num_rows, : self._width].transpose(1, 2))
            elif self._is_cold:
                found.append(new)
            else:
                found.append(part[:, : self._width].index_select(0, self._slots).transpose(1, 2))
        return found[0], found[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns before the new tokens; 0 while rows join."""
        return self._width - 1 if self._slots is None else 0

    @property
    def is_compileable(self) -> bool:
        """Rows come and go."""
        return False

    def _empty(self, slots: int, columns: int) -> Tensor:
        shape = self.shape
        # Not torch.empty: uninitialized memory may hold NaN.
        return torch.zeros(
            shape.num_layers,
            *(2, slots, columns, shape.num_heads, shape.head_dim),
            dtype=shape.dtype,
            device=self._device,
        )

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """SDPA whose query heads read their common head of keys and values where it is; returns (rows, S, heads, dim).

    transformers gives each query head a copy of it wherever there is a mask, because GPU kernels with a mask need one.
    On a CPU that takes longer than the attention itself. With one new token, the query heads of a group are computed
    as if they were so many tokens of one head.
    """
    num_heads, num_groups, num_new = query.shape[1], key.shape[1], query.shape[2]
    is_plain = attention_mask is None or num_heads == num_groups or options.get("position_bias") is not None
    if is_plain or query.device.type != "cpu":
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if num_new == 1:
        query = query.reshape(-1, num_groups, num_heads // num_groups, query.shape[3])
    found = scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=options.get("scaling"), enable_gqa=num_new > 1
    )
    return found.reshape(-1, num_heads, num_new, found.shape[3]).transpose(1, 2).contiguous(), None


AttentionInterface.register(SHARED_KEYS, attend)
AttentionMaskInterface.register(SHARED_KEYS, sdpa_mask)


def free_bytes(device: torch.device) -> int:
    """Bytes of a device's memory, or of main memory, that this process can still take."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            available = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # another system than Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    left = left_in_container()
    return available if left is None else min(available, left)


def left_in_container(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this process's container can still take; None if it has no limit of its own.

    Files that were read are not counted as taken: the kernel drops them first. Formats: "Control Group v2" and, below
    `memory`, "Memory Resource Controller" of the kernel's documentation.
    """
    for limit, usage, unused in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most, taken = ((root / name).read_text(encoding="ascii").strip() for name in (limit, usage))
            lines = (root / limit).with_name("memory.stat").read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        if most == "max":
            return None
        files = next((int(line.split()[1]) for line in lines if line.startswith(f"{unused} ")), 0)
        return max(0, int(most) - max(0, int(taken) - files))
    return None


@torch.inference_mode()
def probed_shape(module: Any, device: torch.device) -> PoolShape | None:
    """The shape of a pool for a model, which then attends by `attend`; None if it must be generated with its own cache.

    Rows of unequal lengths are computed with a pool and plainly: only a model that gives the same both ways gets one.
    """
    config = module.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    has_window = bool(getattr(config, "sliding_window", None)) and getattr(config, "use_sliding_window", True)
    if kinds != {"full_attention"} or has_window:
        return None
    attention = module.config._attn_implementation
    shape = None
    try:
        shape = _probe(module, device)
    except NOT_ITS_CACHE as error:
        logger.warning(
            "batches of %s stay static, since its cache is of another kind: %s", type(module).__name__, error
        )
    if shape is None:
        module.set_attn_implementation(attention)
    return shape


def _probe(module: Any, device: torch.device) -> PoolShape | None:
    ids = torch.arange(PROBE_IDS, device=device)[None, :] % len(module.get_input_embeddings().weight)
    cache = DynamicCache(config=module.config.get_text_config())
    plain = module(input_ids=ids, past_key_values=cache, use_cache=True).logits[0].float()
    layers: list[Any] = cache.layers
    keys = [layer.keys for layer in layers]
    if len({(one.shape, one.dtype) for layer in layers for one in (layer.keys, layer.values)}) != 1:
        return None
    shape = PoolShape(len(keys), keys[0].shape[1], keys[0].shape[3], keys[0].dtype)
    pool = KVPool(shape, device)
    pool.reserve(3, PROBE_IDS + 1)
    if module.config._attn_implementation == PLAIN:
        module.set_attn_implementation(SHARED_KEYS)
    counts = (3, 6)
    found = [*_joined(module, pool, ids, (0, 2), (0, 0), counts), *_joined(module, pool, ids, (0, 2), counts, (4, 2))]
    pool.copy([2], [1], 8)
    mask, positions = pool.for_decode([7, 8, 8])
    last = module(
        input_ids=ids[0, positions], attention_mask=mask, position_ids=positions, past_key_values=pool, use_cache=True
    ).logits[:, -1]
    expected = plain[[2, 5, 6, 7, 7, 8, 8]].log_softmax(-1)
    difference = (torch.cat([*found, last]).float().log_softmax(-1) - expected).abs()
    if difference.nan_to_num().max() <= PROBE_TOLERANCE.get(shape.dtype, 0.25):
        return shape
    logger.warning(
        "batches of %s stay static: with a pool of keys and values it gives other logits", type(module).__name__
    )
    return None


def _joined(
    module: Any, pool: KVPool, ids: Tensor, slots: Sequence[int], starts: Sequence[int], counts: Sequence[int]
) -> list[Tensor]:
    mask, positions = pool.for_join(slots, starts, counts)
    output = module(
        input_ids=ids[0, positions], attention_mask=mask, position_ids=positions, past_key_values=pool, use_cache=True
    )
    return [output.logits[:, -1]]
