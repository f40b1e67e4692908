"""A rollout engine on transformers: waiting calls join the sequences that are being generated, on one device.

A call ends on the weight version that it began with.
"""

import asyncio
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rollstream.eventlog.blocking_calls import in_own_thread
from rollstream.producers.engines.base import (
    Capabilities,
    Generation,
    GenerationRequest,
    Tokenizer,
    check_prompt,
    max_new_tokens_of,
)
from rollstream.producers.engines.batching import Answer, Batcher, ContinuousBatcher, NewTokens, Outcome, Ticket
from rollstream.producers.engines.decoding import Lane, PoolFullError, check_finite, run_static
from rollstream.producers.engines.kv_pool import MEMORY_SHARE, KVPool, free_bytes
from rollstream.producers.engines.model_cache import LoadedModel, ModelCache, read_weights
from rollstream.producers.engines.scheduling import JoinLimits, PoolCapacity, padded_length
from rollstream.schemas.devices import own_threads
from rollstream.schemas.engine_settings import TransformersSettings
from rollstream.schemas.errors import ModelError, is_out_of_memory
from rollstream.schemas.events import WeightsPublished

LORA_VERSIONS = 2
"""Versions of an adapter that are generated with at once."""


class TransformersEngine:
    """`base.Engine` that samples from transformers models, with full weights or adapters."""

    def __init__(self, settings: TransformersSettings) -> None:
        """Raises ModelError if the settings ask for a GPU and there is none."""
        self._settings = settings
        self._model_cache = ModelCache(settings)
        own = own_threads(torch.get_num_threads)  # by now: below, a thread is given a number
        threads = settings.threads or (1 if settings.deterministic else own)
        initialize = functools.partial(torch.set_num_threads, threads)  # OpenMP counts threads per calling thread
        self._lanes = Lanes(self._held, settings)
        self._loading: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Held while a version is loaded, so that the tensors of one at a time are in memory: of full weights one lock
        for all, of adapters one by model group.
        """
        self._batcher: Batcher | ContinuousBatcher
        if settings.is_continuous:
            self._batcher = ContinuousBatcher(self._lanes, JoinLimits(settings.max_batch), initialize=initialize)
        else:
            max_batch = 1 if settings.deterministic else settings.max_batch
            self._batcher = Batcher(self._run, max_batch=max_batch, initialize=initialize)

    @property
    def capabilities(self) -> Capabilities:
        """Samples from the models whose weights are published."""
        return Capabilities(loads_models=True)

    async def start(self) -> None:
        """Start the worker thread."""
        await self._batcher.between_forwards(lambda: None)

    async def close(self) -> None:
        """Stop; calls that wait are cancelled."""
        await self._batcher.close()

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample until an end token, `max_new_tokens` or the model's longest sequence.

        Raises ModelError as the protocol says, and if the weights give logits that are not finite numbers.
        """
        generation = await self._batcher.submit(self._fitted(request))
        check_finite(generation)
        return generation

    def tokenizer(self, model_group: str) -> Tokenizer:
        """Tokenizer of the group's base model. Raises ModelError if the group has no weights."""
        tokenizer: Tokenizer = self._held(model_group).tokenizer
        return tokenizer

    def module(self, model_group: str) -> Any:
        """The module that the group's next requests are generated with. Raises ModelError if it has no weights."""
        return self._held(model_group).model.module

    def version(self, model_group: str) -> int:
        """Weight version held; -1 before the first."""
        held = self._model_cache.held(model_group)
        return -1 if held is None else held.published.version

    async def load(self, published: WeightsPublished, path: Path) -> None:
        """Generate new requests with this version. Raises ModelError; then the version before it stays.

        What is being generated ends on its version: beside the new one if there is memory for both, else before it.
        """
        where = f"weights {path} of {published.model_group} version {published.version}"
        group = published.model_group
        most = LORA_VERSIONS if published.weights_format == "lora" else self._settings.full_copies
        async with self._loading[group if published.weights_format == "lora" else ""]:
            tensors = await in_own_thread(read_weights, path, where)
            await self._batcher.between_forwards(
                lambda: self._take(published, tensors, where),
                is_ready=lambda: self._is_loadable(group, most),
                holds=group if most == 1 else None,
            )

    async def unload(self, model_group: str) -> None:
        """Forget a model group whose run is over."""
        self._loading.pop(model_group, None)
        await self._batcher.between_forwards(
            lambda: self._forget(model_group),
            is_ready=lambda: not self._lanes.versions_of(model_group),
            holds=model_group,
        )

    # ---- in the worker thread ----

    def _is_loadable(self, model_group: str, most: int) -> bool:
        """Whether a version can be loaded without touching one that rows are generated with."""
        self._release()
        live = self._lanes.versions_of(model_group)
        return self._model_cache.held(model_group) not in live or len(live) < most

    def _take(self, published: WeightsPublished, tensors: dict[str, torch.Tensor], where: str) -> None:
        live = self._lanes.versions_of(published.model_group)
        self._model_cache.load(
            published, tensors, where, in_place=self._model_cache.held(published.model_group) not in live
        )
        self._release()

    def _forget(self, model_group: str) -> None:
        self._release()  # also an older version that was used beside the newest one
        self._lanes.forget(lambda held: held.published.model_group != model_group)
        self._lanes.free_idle()
        self._model_cache.unload(model_group)

    def _release(self) -> None:
        for held in self._lanes.forget(lambda one: one is self._model_cache.held(one.published.model_group)):
            self._model_cache.release(held)

    def _held(self, model_group: str) -> LoadedModel:
        held = self._model_cache.held(model_group)
        if held is None:
            raise ModelError(f"model group {model_group} has no weights yet; wait for a version to be published")
        return held

    def _fitted(self, request: GenerationRequest) -> GenerationRequest:
        """The request, limited to the room that its prompt leaves. One that cannot be served must not join a batch."""
        held = self._held(request.model_group)
        check_prompt(request, num_token_ids=held.num_token_ids)
        max_new_tokens = max_new_tokens_of(request, held.max_length, f"model {held.published.base_model}")
        if max_new_tokens >= request.sampling.max_new_tokens:
            return request
        sampling = request.sampling.model_copy(update={"max_new_tokens": max_new_tokens})
        return replace(request, sampling=sampling)

    def _run(self, tickets: list[Ticket], answer: Answer) -> None:
        """Run a static batch in the worker thread: the version is read once and stays the same until the batch ends."""
        run_static(tickets, self._held(tickets[0].request.model_group), answer)


class Lanes:
    """All lanes of an engine, in one thread, and the memory that their rows share."""

    def __init__(self, held: Callable[[str], LoadedModel], settings: TransformersSettings) -> None:
        """`held`: the weight version of a model group that new rows are generated with; raises ModelError if none."""
        self._held = held
        self._max_prefix_bytes = settings.prefix_cache_mb * 2**20
        self._set_bytes = None if settings.kv_cache_mb is None else settings.kv_cache_mb * 2**20
        self._max_bytes = math.inf
        """Bytes of all rows; lowered when memory ends below it, until no row is live."""
        self._lanes: dict[LoadedModel, Lane] = {}
        self._requeued: list[Ticket] = []
        self._stopped: list[LoadedModel] = []
        """Versions whose rows were all stopped."""
        self._spare: KVPool | None = None
        """Pool of a version that was dropped, for the next one."""

    @property
    def num_live(self) -> int:
        """Rows in the next forwards."""
        return sum(len(lane.rows) for lane in self._lanes.values())

    def versions_of(self, model_group: str) -> list[LoadedModel]:
        """Versions of a model group that rows are generated with."""
        return [held for held, lane in self._lanes.items() if held.published.model_group == model_group and lane.rows]

    def capacity(self, model_group: str) -> PoolCapacity:
        """Memory for further rows of a model group, beside those of all lanes."""
        try:
            held = self._held(model_group)
        except ModelError:  # raised again for those that join
            return PoolCapacity()
        if held.pool_shape is None:
            return PoolCapacity()
        if not self.num_live:
            self._max_bytes = self._set_bytes or MEMORY_SHARE * free_bytes(held.model.device)
        others = sum(_bytes_of(lane) for one, lane in self._lanes.items() if one is not held)
        lane = self._lanes.get(held)
        capacity = PoolCapacity() if lane is None else lane.capacity
        return capacity._replace(max_tokens=max(0, self._max_bytes - others) // held.pool_shape.token_bytes)

    def requeued(self) -> list[Ticket]:
        """Tickets since the last call whose rows had to leave for lack of memory."""
        found, self._requeued = self._requeued, []
        return found

    def join(self, tickets: Sequence[Ticket], answer: Answer) -> list[Outcome]:
        """Generate for tickets of one model group from now on; returns what ended at once.

        A model without a pool generates them to their end; `answer` then gets the first ones before the last. Where
        memory ends, the last tickets are requeued; one that is alone fails.
        """
        try:
            held = self._held(tickets[0].request.model_group)
            held.activate()
            if held.pool_shape is None:
                run_static(tickets, held, answer)
                return []
            lane = self._lanes.get(held)
            if lane is None:
                pool, self._spare = self._spare, None
                if pool is not None and not pool.fits(held.pool_shape, held.model.device):
                    pool = None
                lane = self._lanes[held] = Lane(held, held.pool_shape, self._max_prefix_bytes, pool)
            lane.limit(self.capacity(tickets[0].request.model_group).max_tokens)
            return lane.join(tickets)
        except Exception as error:  # noqa: BLE001 - each call gets an error of its own
            if not is_out_of_memory(error):
                return [(ticket, error) for ticket in tickets]
            failure = error.with_traceback(None)  # which holds the tensors of the forward that failed
        if self._drop_prefixes():
            return self.join(tickets, answer)
        self._lower_bound()
        if len(tickets) == 1 and not self.num_live:
            return [(tickets[0], failure)]
        num_kept = len(tickets) // 2
        self._requeued = [*tickets[num_kept:], *self._requeued]
        return self.join(tickets[:num_kept], answer) if num_kept else []

    def step(self) -> list[Outcome]:
        """One token for every row; returns what ended."""
        found: list[Outcome] = []
        for lane in list(self._lanes.values()):
            if lane.rows:
                found += self._stepped(lane)
        return found

    def new_tokens(self) -> list[NewTokens]:
        """Tokens sampled since the last call, for rows that report them."""
        return [one for lane in self._lanes.values() for one in lane.new_tokens()]

    def forget(self, keeps: Callable[[LoadedModel], bool]) -> list[LoadedModel]:
        """Drop lanes without rows of versions that are not kept, and the cached prompts; returns these, and those that
        were stopped.
        """
        dropped = [one for one, lane in self._lanes.items() if not lane.rows and not keeps(one)]
        for held in dropped:
            self._spare = self._lanes.pop(held).pool
        stopped, self._stopped = self._stopped, []
        return [*dropped, *(one for one in stopped if not keeps(one) and one not in self._lanes)]

    def free_idle(self) -> bool:
        """Free the memory of pools without rows; whether there was any."""
        idle = [lane.pool for lane in self._lanes.values() if not lane.rows]
        idle += [] if self._spare is None else [self._spare]
        self._spare = None
        found = any(pool.size_bytes for pool in idle)
        for pool in idle:
            pool.free()
        return found

    def drop(self) -> list[Ticket]:
        """Stop all; returns whose."""
        tickets = [row.ticket for lane in self._lanes.values() for row in lane.rows]
        self._stopped += self._lanes
        self._lanes.clear()
        self._requeued.clear()
        return tickets

    def _stepped(self, lane: Lane) -> list[Outcome]:
        rows = lane.rows
        try:
            return lane.step()
        except PoolFullError as error:
            failure = error.reason.with_traceback(None)
        except Exception as error:  # noqa: BLE001 - what is in the pool is not known any more
            self._lanes[lane.held] = Lane(lane.held, lane.shape, self._max_prefix_bytes)
            return [(row.ticket, error) for row in rows]
        if not self._drop_prefixes():
            is_alone = self.num_live == 1
            ticket = lane.requeue()
            self._lower_bound()
            if is_alone:
                return [(ticket, failure)]
            self._requeued.append(ticket)
        return self._stepped(lane) if lane.rows else []

    def _drop_prefixes(self) -> bool:
        """Free what is kept of earlier sequences, of all versions, and idle pools; whether there was anything."""
        found = self.free_idle() or any(lane.prefixes.size_bytes for lane in self._lanes.values())
        for lane in self._lanes.values():
            lane.prefixes.clear()
        return found

    def _lower_bound(self) -> None:
        """There is less memory than was assumed: let no row join beside those that are live."""
        self._max_bytes = min(self._max_bytes, sum(map(_bytes_of, self._lanes.values())))


def _bytes_of(lane: Lane) -> int:
    capacity = lane.capacity
    return capacity.num_rows * padded_length(capacity.max_length) * lane.shape.token_bytes


build = TransformersEngine
"""Function of `EngineKind` that `table` calls."""
