"""Generates one batch of sequences with a transformers model: prefill, then token by token on the KV cache.

Rows are left-padded; finished ones are handed over at once and leave the batch. Knows nothing of threads or versions.
Shapes: N requests, B rows still in the forward, P padded prompt, T tokens sampled, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from rollstream.producers.engines.base import FinishReason, GenerationRequest, keeps_ids
from rollstream.producers.engines.kv_pool import NOT_ITS_CACHE, PROBE_IDS
from rollstream.producers.engines.sampling import Ids, SamplingBatch, kept_of, sample, uniforms
from rollstream.schemas.errors import ModelError, is_of_device, is_out_of_memory
from rollstream.schemas.tokens import KeptIds
from rollstream.schemas.variables import one_line

NOISE_TOKENS = 64
"""Uniform numbers are made for so many tokens at a time."""
COMPACT_SHARE = 0.75
"""Finished rows leave the forward once no more than this share of its rows goes on."""
ASK_EVERY = 16
"""Tokens between two looks at which requests are still wanted."""
ROUNDING = 10
"""Changes of logits of up to so many times their precision may be rounding alone."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Sampled tokens of one request; both lists (T,)."""

    row: int
    """Row of the request, 0 to N - 1."""
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    kept: KeptIds | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is ready to generate with."""

    module: Any
    """`AutoModelForCausalLM` in eval mode, or a PEFT model around one."""
    device: torch.device
    end_ids: tuple[int, ...]
    pad_id: int
    sample_on_cpu: bool = False
    """Sample in main memory, as a deterministic engine does: equal logits give equal tokens on every device."""


OnFinished = Callable[[list[Sampled]], object]
IsWanted = Callable[[int], bool]
"""Whether the request of a row is still waited for."""


@torch.inference_mode()
def generate(
    model: Model, requests_N: Sequence[GenerationRequest], on_finished: OnFinished, is_wanted: IsWanted
) -> None:
    """Sample all requests; `on_finished` gets each as soon as it is done, unwanted ones never."""
    forward = _Forward(model, [request.prompt_ids for request in requests_N])
    samples = _Samples(model, requests_N)
    logits_B_V = forward.prefill()
    while True:
        tokens_B, finished = samples.draw(logits_B_V)
        if finished:
            on_finished(finished)
        if samples.num_drawn % ASK_EVERY == 0:
            samples.drop(is_wanted)
        if not samples.num_open:
            return
        if samples.num_open <= COMPACT_SHARE * len(tokens_B):
            rows = samples.compact()
            forward.select(rows)
            tokens_B = tokens_B[rows]
        logits_B_V = forward.step(tokens_B)


@torch.inference_mode()
def check_cache(model: Model, *, is_batched: bool) -> None:
    """Raises ModelError for a model that fails token by token, or then gives logits nearer to those without the tokens
    before than to those of one forward: its state is not in the cache that it is given. Rounding, and other experts
    chosen because of it, are never refused.

    `is_batched`: rows of unequal lengths are checked, too.
    """
    module = model.module
    ids = torch.arange(PROBE_IDS, device=model.device)[None, :] % len(module.get_input_embeddings().weight)
    try:
        plain_T_V = module(input_ids=ids, use_cache=False).logits[0]
        batches = [(5,), (7, 4)] if is_batched else [(5,)]
        reason = "its logits change" if any(_loses(model, ids, lengths, plain_T_V) for lengths in batches) else ""
    except NOT_ITS_CACHE as error:
        if is_out_of_memory(error) or is_of_device(error):
            raise
        reason = one_line(error)
    if reason:
        raise ModelError(
            f"the transformers engine cannot keep the state of {module.config.model_type} between tokens ({reason}); "
            "use engine.kind vllm, or another model"
        )


def _loses(model: Model, ids_1_T: Tensor, lengths_B: Sequence[int], plain_T_V: Tensor) -> bool:
    """Whether tokens after prompts of such lengths get logits nearer to those without the tokens before than to those
    of a plain forward.
    """
    forward = _Forward(model, [ids_1_T[0, :length].tolist() for length in lengths_B])
    forward.prefill()
    at = torch.tensor(lengths_B, device=model.device)
    found: list[Tensor] = []
    alone: list[Tensor] = []
    expected: list[Tensor] = []
    for rows in (torch.arange(len(at)), torch.arange(len(at)), torch.tensor([len(at) - 1])):
        forward.select(rows)
        at = at[rows.to(at.device)]
        found.append(forward.step(ids_1_T[0, at]))
        output = model.module(input_ids=ids_1_T[0, at, None], position_ids=at[:, None], use_cache=False)
        alone.append(output.logits[:, -1])
        expected.append(plain_T_V[at])
        at = at + 1
    cached, without, plain = (torch.cat(logits).float() for logits in (found, alone, expected))
    rounding = ROUNDING * torch.finfo(model.module.dtype).eps * float(plain.std())
    if _distance(without, plain) <= rounding:
        return False
    return _distance(cached, without) < _distance(cached, plain)


def _distance(logits: Tensor, others: Tensor) -> float:
    """Mean absolute difference of the log-probabilities."""
    return float((logits.log_softmax(-1) - others.log_softmax(-1)).abs().mean())


class _Samples:
    """Sampled tokens so far, and which rows continue."""

    def __init__(self, model: Model, requests_N: Sequence[GenerationRequest]) -> None:
        device = torch.device("cpu") if model.sample_on_cpu else model.device
        limits = [request.sampling.max_new_tokens for request in requests_N]
        self.num_drawn = 0
        self.num_open = len(requests_N)
        self._device = device
        self._requests = requests_N
        self._how_B: SamplingBatch | None = None
        self._end_ids = torch.tensor(model.end_ids, device=device)
        self._noise_N = torch.empty(0, dtype=torch.float64)
        self._rows_B = torch.arange(len(requests_N), device=device)
        self._open_B = torch.ones(len(requests_N), dtype=torch.bool, device=device)
        self._limits_B = torch.tensor(limits, device=device)
        self._tokens_N_T = torch.zeros(len(requests_N), max(limits), dtype=torch.int64, device=device)
        self._logprobs_N_T = torch.zeros(len(requests_N), max(limits), dtype=torch.float32, device=device)
        self._kept_N: list[list[Ids]] = [[] for _ in requests_N]

    def draw(self, logits_B_V: Tensor) -> tuple[Tensor, list[Sampled]]:
        """The next token of each row in the forward (B,), and the sequences that it finishes."""
        if self._how_B is None:
            settings = [request.sampling for request in self._requests]
            self._how_B = SamplingBatch.of(settings, logits_B_V.shape[-1], self._device)
        tokens_B, logprobs_B, kept_B = sample(logits_B_V.to(self._device), self._next_noise(), self._how_B)
        for row, ids in zip(self._rows_B.tolist() if kept_B else (), kept_B, strict=True):
            self._kept_N[row].append(ids)
        self._tokens_N_T[self._rows_B, self.num_drawn] = tokens_B
        self._logprobs_N_T[self._rows_B, self.num_drawn] = logprobs_B
        self.num_drawn += 1
        has_end_B = torch.isin(tokens_B, self._end_ids)
        done_B = self._open_B & (has_end_B | (self._limits_B <= self.num_drawn))
        return tokens_B, self._finish(done_B, has_end_B)

    def drop(self, is_wanted: IsWanted) -> None:
        """Let rows that nobody waits for leave."""
        wanted = [is_wanted(row) for row in self._rows_B.tolist()]
        self._open_B &= torch.tensor(wanted, device=self._device)
        self.num_open = int(self._open_B.sum())

    def compact(self) -> Tensor:
        """Keep unfinished rows only; returns their indices_B (B,) among the rows before."""
        assert self._how_B is not None
        rows = self._open_B.nonzero()[:, 0]
        self._how_B = self._how_B.select(rows)
        self._rows_B, self._limits_B, self._open_B = self._rows_B[rows], self._limits_B[rows], self._open_B[rows]
        return rows

    def _next_noise(self) -> Tensor:
        column = self.num_drawn % NOISE_TOKENS
        if column == 0:
            count = min(NOISE_TOKENS, self._tokens_N_T.shape[1] - self.num_drawn)
            seeds = [request.seed for request in self._requests]
            self._noise_N = uniforms(seeds, self.num_drawn, count).to(self._device)
        return self._noise_N[self._rows_B, column]

    def _finish(self, done_B: Tensor, has_end_B: Tensor) -> list[Sampled]:
        indices_B = done_B.nonzero()[:, 0]
        if not len(indices_B):
            return []
        self._open_B &= ~done_B
        self.num_open -= len(indices_B)
        rows = self._rows_B[indices_B]
        columns = zip(
            rows.tolist(),
            self._tokens_N_T[rows, : self.num_drawn].tolist(),
            self._logprobs_N_T[rows, : self.num_drawn].tolist(),
            has_end_B[indices_B].tolist(),
            strict=True,
        )
        return [
            Sampled(row, ids, logprobs, "stop" if ended else "length", self._kept(row))
            for row, ids, logprobs, ended in columns
        ]

    def _kept(self, row: int) -> KeptIds | None:
        return kept_of(self._kept_N[row]) if keeps_ids(self._requests[row].sampling) else None


class _Forward:
    """The model's forwards over one batch, with their cache, mask and positions."""

    def __init__(self, model: Model, prompts_N: Sequence[Sequence[int]]) -> None:
        self._model = model
        lengths = [len(prompt) for prompt in prompts_N]
        width = max(lengths)
        padded = [[model.pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts_N]
        self._tokens_B_P = torch.tensor(padded, device=model.device)
        self._lengths_B = torch.tensor(lengths, device=model.device)[:, None]
        columns_P = torch.arange(width, device=model.device)[None, :]
        self._mask = None if min(lengths) == width else (columns_P >= width - self._lengths_B).long()
        """(B, so far); None while no row is padded."""
        self._cache = DynamicCache(config=model.module.config.get_text_config())

    def prefill(self) -> Tensor:
        """Logits (B, V) of the first token."""
        width = self._tokens_B_P.shape[1]
        columns_P = torch.arange(width, device=self._model.device)[None, :]
        positions_B_P = (columns_P - (width - self._lengths_B)).clamp_(min=0)
        return self._logits(self._tokens_B_P, positions_B_P)

    def step(self, tokens_B: Tensor) -> Tensor:
        """Logits (B, V) of the next token after `tokens_B`."""
        positions_B_1 = self._lengths_B
        self._lengths_B = self._lengths_B + 1
        if self._mask is not None:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens_B), 1)], dim=1)
        return self._logits(tokens_B[:, None].to(self._model.device), positions_B_1)

    def select(self, rows: Tensor) -> None:
        """Keep some of the rows."""
        rows = rows.to(self._model.device)
        self._cache.reorder_cache(rows)  # pyright: ignore[reportArgumentType]
        self._lengths_B = self._lengths_B[rows]
        self._mask = None if self._mask is None else self._mask[rows]

    def _logits(self, tokens_B_P: Tensor, positions_B_P: Tensor) -> Tensor:
        output = self._model.module(
            input_ids=tokens_B_P,
            attention_mask=self._mask,
            position_ids=positions_B_P,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits
        return logits[:, -1]
