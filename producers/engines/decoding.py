"""Continuous generation: rows of one weight version in a pool of keys and values, joined and left between two forwards.

A lane is a weight version that rows are generated with. Knows nothing of threads or of other lanes. Shapes: A rows
that join, B live rows, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollstream.producers.engines.base import Generation, GenerationRequest, keeps_ids, kept_error
from rollstream.producers.engines.batching import Answer, NewTokens, Outcome, Ticket
from rollstream.producers.engines.generation import ASK_EVERY, NOISE_TOKENS, Sampled, generate
from rollstream.producers.engines.kv_pool import KVPool, PoolShape
from rollstream.producers.engines.model_cache import LoadedModel
from rollstream.producers.engines.sampling import Ids, SamplingBatch, kept_of, sample, uniforms
from rollstream.producers.engines.scheduling import (
    Block,
    KeptSequence,
    PoolCapacity,
    PrefixCache,
    PrefixMatch,
    holes_filled,
)
from rollstream.schemas.errors import ModelError, is_out_of_memory
from rollstream.schemas.events.rollouts import VersionSpan

OTHER_TOKENS = "the answer was begun again for lack of memory, and its tokens differ from those handed on; call again"


@dataclasses.dataclass(eq=False, slots=True)
class DecodingRow:
    """A sequence that is being generated."""

    ticket: Ticket
    prompt: Any
    """(P,) int32."""
    limit: int
    noise: list[float]
    slot: int = -1
    length: int = 0
    """Tokens whose keys and values are in the pool."""
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    kept_ids: list[Ids] = dataclasses.field(default_factory=list)
    num_kept: int = 0
    source: PrefixMatch | None = None
    kept: KeptSequence | None = None
    """While live: what others may copy from this row."""

    def let_go(self) -> None:
        """Let go of kept sequences: one names this row, so both, and the keys and values of `source`, would stay until
        a garbage collection.
        """
        self.source = self.kept = None

    @property
    def request(self) -> GenerationRequest:
        """The request that this row answers."""
        return self.ticket.request

    @property
    def max_length(self) -> int:
        """Tokens at its end, if no end token is sampled."""
        return len(self.prompt) + self.limit

    @property
    def differs(self) -> bool:
        """Whether it was begun again and does not sample the tokens that its caller has."""
        reported = self.ticket.reported[: len(self.tokens)]
        return self.ticket.is_requeued and reported != self.tokens[: len(reported)]


class PoolFullError(Exception):
    """The pool cannot grow, for a reason; all rows are as they were before the step."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


class Lane:
    """Rows of one weight version."""

    def __init__(self, held: LoadedModel, shape: PoolShape, max_prefix_bytes: int, pool: KVPool | None = None) -> None:
        """`pool`: one of an earlier version, without rows."""
        self.held = held
        self.shape = shape
        self.prefixes = PrefixCache(max_prefix_bytes)
        self.pool = KVPool(shape, held.model.device) if pool is None else pool
        self._sampled_on = torch.device("cpu") if held.model.sample_on_cpu else held.model.device
        self._rows: list[DecodingRow | None] = []
        """Rows by slot; None for a free one."""
        self._how: SamplingBatch | None = None
        self._num_steps = 0
        self._is_spoiled = False
        """Whether the pool may hold NaNs, which would spoil later rows, masked or not."""

    @property
    def rows(self) -> list[DecodingRow]:
        """Live ones."""
        return [row for row in self._rows if row is not None]

    @torch.inference_mode()
    def join(self, tickets: Sequence[Ticket]) -> list[Outcome]:
        """Prefill what is not known of each prompt, and sample the first tokens.

        An error leaves the live rows as they are: a prompt writes into no other row.
        """
        rows = self._new_rows(tickets)
        try:
            return self._joined(rows)
        except Exception:
            self._discard(rows)
            raise

    def _joined(self, rows: Sequence[DecodingRow]) -> list[Outcome]:
        leaders: dict[bytes, DecodingRow] = {}
        followers: list[tuple[DecodingRow, DecodingRow]] = []
        for row in rows:
            row.source = self.prefixes.find(row.prompt)
            leader = leaders.setdefault(row.prompt.tobytes(), row)
            if leader is not row:
                followers.append((row, leader))
        self._compact()
        self._seat(rows)
        self._take_over([row for row in leaders.values() if row.source is not None])
        logits = self._prefill(list(leaders.values()))
        for length in {leader.length for _, leader in followers}:
            pairs = [(leader.slot, row.slot) for row, leader in followers if leader.length == length]
            self.pool.copy([one for one, _ in pairs], [one for _, one in pairs], length)
        for row, leader in followers:
            row.length, logits[row] = leader.length, logits[leader]
        self._how = None
        found = self._sample(rows, torch.stack([logits[row] for row in rows]))
        self._how = None
        return found

    @torch.inference_mode()
    def step(self) -> list[Outcome]:
        """The next token of each live row. Raises PoolFullError before anything is changed."""
        self.held.activate()
        self._num_steps += 1
        if self._num_steps % ASK_EVERY == 0:
            self._leave([row for row in self.rows if not row.ticket.is_wanted()])
        rows = self.rows
        if not rows:
            return []
        try:
            self._compact()
            rows = self.rows
            mask, positions = self.pool.for_decode([row.length for row in rows])
        except Exception as error:
            if is_out_of_memory(error):
                raise PoolFullError(error) from error
            raise
        logits = self._forward(torch.tensor([[row.tokens[-1]] for row in rows]), mask, positions)
        for row in rows:
            row.length += 1
        return self._sample(rows, logits)

    def new_tokens(self) -> list[NewTokens]:
        """Tokens sampled since the last call, for rows that report them."""
        found: list[NewTokens] = []
        for row in self._rows:
            if row is not None and row.ticket.request.on_tokens is not None:
                new = row.tokens[len(row.ticket.reported) :]
                row.ticket.reported += new
                found.append((row.ticket, new))
        return [one for one in found if one[1]]

    def requeue(self) -> Ticket:
        """Let a row leave that is to be begun again later: the longest, but not one that was begun again before, if
        there are others.
        """
        chosen = max(self.rows, key=lambda row: (not row.ticket.is_requeued, not row.ticket.reported, row.length))
        self._discard([chosen])
        chosen.ticket.is_requeued = True
        return chosen.ticket

    @property
    def capacity(self) -> PoolCapacity:
        """Room that its rows take, in a pool of `max_tokens`."""
        rows = self.rows
        return PoolCapacity(len(rows), max((row.max_length for row in rows), default=0), self.pool.max_tokens)

    def limit(self, max_tokens: float) -> None:
        """Bound the pool, in tokens over all rows."""
        self.pool.max_tokens = max_tokens

    # ---- joining ----

    def _new_rows(self, tickets: Sequence[Ticket]) -> list[DecodingRow]:
        limits = [ticket.request.sampling.max_new_tokens for ticket in tickets]
        noise = uniforms([ticket.request.seed for ticket in tickets], 0, min(NOISE_TOKENS, max(limits))).tolist()
        prompts = [np.asarray(ticket.request.prompt_ids, np.int32) for ticket in tickets]
        return [DecodingRow(*fields) for fields in zip(tickets, prompts, limits, noise, strict=True)]

    def _seat(self, rows: Sequence[DecodingRow]) -> None:
        if not self.rows:
            self.pool.begin(len(rows), max(len(row.prompt) for row in rows) + 1)
        free = [slot for slot, row in enumerate(self._rows) if row is None]
        for row in rows:
            if free:
                row.slot = free.pop(0)
                self._rows[row.slot] = row
            else:
                row.slot = len(self._rows)
                self._rows.append(row)
        longest = max(max(len(row.prompt), row.length) for row in self.rows)
        self.pool.reserve(len(self._rows), longest + 1)

    def _take_over(self, rows: Sequence[DecodingRow]) -> None:
        """Copy what is kept of prompts: one copy for all rows that find it in the same place."""
        found: dict[int, list[tuple[DecodingRow, PrefixMatch]]] = {}
        for row in rows:
            assert row.source is not None
            found.setdefault(id(row.source.kept.block), []).append((row, row.source))
        for pairs in found.values():
            block = pairs[0][1].kept.block
            slots = [row.slot for row, _ in pairs]
            width = max(match.length for _, match in pairs)
            where = [match.kept.where for _, match in pairs]
            if block is None:
                self.pool.copy([row.slot for row in where], slots, width)
            else:
                self.pool.put(slots, block.data, where, min(width, block.data.shape[3]))
            for row, match in pairs:
                row.length = match.length

    def _prefill(self, rows: Sequence[DecodingRow]) -> dict[DecodingRow, Tensor]:
        """Logits (V,) after each prompt."""
        logits = {row: row.source.kept.after_prompt for row in rows if row.source is not None and row.source.is_whole}
        rest = [row for row in rows if row not in logits]
        if not rest:
            return logits
        new_tokens = [row.prompt[row.length :].tolist() for row in rest]
        width = max(map(len, new_tokens))
        padded = [[self.held.model.pad_id] * (width - len(new)) + new for new in new_tokens]
        mask, positions = self.pool.for_join(
            [row.slot for row in rest], [row.length for row in rest], list(map(len, new_tokens))
        )
        for row, after in zip(rest, self._forward(torch.tensor(padded), mask, positions), strict=True):
            row.length = len(row.prompt)
            logits[row] = after
            row.kept = KeptSequence(row.prompt, row, None, row.length, after.clone())
            self.prefixes.add(row.kept)
        return logits

    # ---- decoding ----

    def _compact(self) -> None:
        """Let the live rows be the first ones."""
        is_live = [row is not None for row in self._rows]
        if moves := holes_filled(is_live):
            movers = [row for row in self._rows[sum(is_live) :] if row is not None]
            self.pool.copy([one for one, _ in moves], [one for _, one in moves], max(row.length for row in movers))
            for row, (_, slot) in zip(movers, moves, strict=True):
                row.slot, self._rows[slot] = slot, row
        del self._rows[sum(is_live) :]

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """Logits (rows, V) of the next token."""
        model = self.held.model
        output = model.module(
            input_ids=ids.to(model.device),
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self.pool,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits
        return logits[:, -1]

    def _sample(self, rows: Sequence[DecodingRow], logits: Tensor) -> list[Outcome]:
        if self._how is None:
            settings = [row.request.sampling for row in rows]
            self._how = SamplingBatch.of(settings, logits.shape[-1], self._sampled_on)
        noise = torch.tensor([self._noise(row) for row in rows], dtype=torch.float64, device=self._sampled_on)
        tokens, logprobs, kept = sample(logits.to(self._sampled_on), noise, self._how)
        for row, ids in zip(rows if kept else (), kept, strict=True):
            row.kept_ids.append(ids)
            row.num_kept += len(ids)
        ended: list[tuple[DecodingRow, Generation | Exception]] = []
        end_ids = self.held.model.end_ids
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            if row.differs:
                ended.append((row, ModelError(OTHER_TOKENS)))
            elif (error := kept_error(len(row.tokens), row.num_kept)) is not None:
                ended.append((row, error))
            elif token in end_ids or len(row.tokens) >= row.limit:
                reason = "stop" if token in end_ids else "length"
                ids = kept_of(row.kept_ids) if keeps_ids(row.request.sampling) else None
                sampled = Sampled(row.slot, row.tokens, row.logprobs, reason, ids)
                ended.append((row, generation_of(sampled, self.held)))
        if ended:
            self._leave([row for row, _ in ended])
        return [(row.ticket, outcome) for row, outcome in ended]

    def _noise(self, row: DecodingRow) -> float:
        drawn = len(row.tokens)
        if drawn and drawn % NOISE_TOKENS == 0:
            row.noise = uniforms([row.request.seed], drawn, min(NOISE_TOKENS, row.limit - drawn))[0].tolist()
        return row.noise[drawn % NOISE_TOKENS]

    def _leave(self, rows: Sequence[DecodingRow]) -> None:
        """Free the rows' slots; their keys and values are kept for the next turns."""
        for row in rows:
            self._rows[row.slot] = None
            if row.kept is not None:
                self.prefixes.remove(row.kept)
        sound = [row for row in rows if all(map(math.isfinite, row.logprobs))]
        if len(sound) < len(rows):
            self._is_spoiled = True
            self.pool.blank([row.slot for row in rows if row not in sound])
        if sound and self.prefixes.max_bytes:
            try:
                self._keep(sound)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self.prefixes.clear()  # the answers are there all the same
        if not self.rows:
            self._rows.clear()
            self.pool.free() if self._is_spoiled else self.pool.clear()  # rows that were moved left copies
            self._is_spoiled = False
        for row in rows:
            row.let_go()
        self._how = None

    def _discard(self, rows: Sequence[DecodingRow]) -> None:
        """Free the slots of rows that could not join."""
        for row in rows:
            if 0 <= row.slot < len(self._rows) and self._rows[row.slot] is row:
                self._rows[row.slot] = None
            if row.kept is not None:
                self.prefixes.remove(row.kept)
        if not self.rows:
            self._rows.clear()
            self.pool.free()  # what is in it is not known
            self._is_spoiled = False
        else:
            self._is_spoiled |= not all(math.isfinite(value) for row in rows for value in row.logprobs)
        for row in rows:
            row.let_go()
        self._how = None

    def _keep(self, rows: Sequence[DecodingRow]) -> None:
        width = max(row.length for row in rows)
        data = self.pool.take([row.slot for row in rows], width)
        after = [row.kept.after_prompt for row in rows if row.kept is not None]
        block = Block(data, sum(one.numel() * one.element_size() for one in (data, *after)))
        for index, row in enumerate(rows):
            if row.source is not None and row.source.is_continued:
                self.prefixes.remove(row.source.kept)  # this sequence has all of it
            ids = np.concatenate([row.prompt, np.asarray(row.tokens, np.int32)])[: row.length]
            after = None if row.kept is None else row.kept.after_prompt
            self.prefixes.add(KeptSequence(ids, index, block, len(row.prompt), after))


def run_static(tickets: Sequence[Ticket], held: LoadedModel, answer: Answer) -> None:
    """Generate one batch to its end; `answer` gets the answers as they come."""
    held.activate()
    generate(
        held.model,
        [ticket.request for ticket in tickets],
        lambda finished: answer([(tickets[one.row], generation_of(one, held)) for one in finished]),
        lambda row: tickets[row].is_wanted(),
    )


def generation_of(sampled: Sampled, held: LoadedModel) -> Generation:
    """Build a generation with one span: a row ends on the version that it began with."""
    published = held.published
    span = VersionSpan(model_group=published.model_group, version=published.version, length=len(sampled.token_ids))
    ids, logprobs = tuple(sampled.token_ids), tuple(sampled.logprobs)
    return Generation(ids, logprobs, (span,), sampled.finish_reason, sampled.kept)


def check_finite(generation: Generation) -> None:
    """Raises ModelError if the weights gave logits that are not finite numbers."""
    if all(map(math.isfinite, generation.logprobs)):
        return
    (span,) = generation.spans
    raise ModelError(
        f"version {span.version} of model group {span.model_group} gives logits that are not finite numbers; "
        "its training has diverged: begin again from an earlier version (--fork)"
    )
