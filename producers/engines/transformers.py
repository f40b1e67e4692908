"""A rollout engine on transformers: waiting calls join the sequences that are being generated, on one device.

A call ends on the weight version that it began with.
"""

import asyncio
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rollstream.producers.engines.base import (
    Capabilities,
    Generation,
    GenerationRequest,
    Tokenizer,
    check_prompt,
    max_new_tokens_of,
)
from rollstream.producers.engines.batching import Answer, Batcher, ContinuousBatcher, Ticket
from rollstream.producers.engines.decoding import Lanes, check_finite, run_static
from rollstream.producers.engines.model_cache import LoadedModel, ModelCache, read_weights
from rollstream.producers.engines.scheduling import JoinLimits
from rollstream.schemas.errors import ModelError
from rollstream.schemas.events import WeightsPublished
from rollstream.schemas.services import TransformersSettings

LORA_VERSIONS = 2
"""Versions of an adapter that are generated with at once."""


class TransformersEngine:
    """`base.Engine` that samples from transformers models, with full weights or adapters."""

    def __init__(self, settings: TransformersSettings) -> None:
        """Raises ModelError if the settings ask for a GPU and there is none."""
        self._settings = settings
        self._model_cache = ModelCache(settings)
        threads = settings.threads or (1 if settings.deterministic else None)
        initialize = functools.partial(_fix_threads, threads)
        self._lanes = Lanes(self._held, settings.prefix_cache_mb * 2**20)
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
        tensors = await asyncio.to_thread(read_weights, path, where)
        group = published.model_group
        most = LORA_VERSIONS if published.weights_format == "lora" else self._settings.full_copies
        await self._batcher.between_forwards(
            lambda: self._take(published, tensors, where),
            is_ready=lambda: self._is_loadable(group, most),
            holds=group if most == 1 else None,
        )

    async def unload(self, model_group: str) -> None:
        """Forget a model group whose run is over."""
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


build = TransformersEngine
"""Function of `EngineKind` that `table` calls."""


def _fix_threads(threads: int | None) -> None:
    # Of this thread only: OpenMP counts threads per calling thread.
    if threads is not None:
        torch.set_num_threads(threads)
