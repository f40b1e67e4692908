"""A rollout engine on transformers: many waiting calls become one batch on one device.

Weight versions change between batches, never within one: a call ends on the version that it began with.
"""

import functools
import math
from pathlib import Path

import torch

from rollstream.producers.engines.base import (
    Capabilities,
    Generation,
    GenerationRequest,
    Tokenizer,
    check_prompt,
    room_for,
)
from rollstream.producers.engines.batching import Answer, Batcher, Ticket
from rollstream.producers.engines.generation import Sampled, generate
from rollstream.producers.engines.model_cache import LoadedModel, ModelCache
from rollstream.schemas.errors import ModelError
from rollstream.schemas.events import WeightsPublished
from rollstream.schemas.events.rollouts import VersionSpan
from rollstream.schemas.services import TransformersSettings


class TransformersEngine:
    """`base.Engine` that samples from transformers models, with full weights or adapters."""

    def __init__(self, settings: TransformersSettings) -> None:
        """Raises ModelError if the settings ask for a GPU and there is none."""
        self._shelf = ModelCache(settings)
        threads = settings.threads or (1 if settings.deterministic else None)
        self._batcher = Batcher(
            self._run,
            max_batch=1 if settings.deterministic else settings.max_batch,
            initialize=functools.partial(_fix_threads, threads),
        )

    @property
    def capabilities(self) -> Capabilities:
        """Samples from the models whose weights are published."""
        return Capabilities(loads_models=True)

    async def start(self) -> None:
        """Start the worker thread."""
        await self._batcher.between_batches(lambda: None)

    async def close(self) -> None:
        """Stop; calls that wait are cancelled."""
        await self._batcher.close()

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample until an end token, `max_new_tokens` or the model's longest sequence.

        Raises ModelError as the protocol says, and if the weights give logits that are no numbers.
        """
        generation = await self._batcher.submit(self._fitted(request))
        if not all(map(math.isfinite, generation.logprobs)):
            (span,) = generation.spans
            raise ModelError(
                f"version {span.version} of model group {span.model_group} gives logits that are no numbers; "
                "its training has diverged: begin again from an earlier version (--fork)"
            )
        return generation

    def tokenizer(self, model_group: str) -> Tokenizer:
        """Tokenizer of the group's base model. Raises ModelError if the group has no weights."""
        tokenizer: Tokenizer = self._held(model_group).tokenizer
        return tokenizer

    def version(self, model_group: str) -> int:
        """Weight version held; -1 before the first."""
        held = self._shelf.held(model_group)
        return -1 if held is None else held.published.version

    async def load(self, published: WeightsPublished, path: Path) -> None:
        """Generate with this version from the next batch on. Raises ModelError; then the version before it stays."""
        await self._batcher.between_batches(functools.partial(self._shelf.load, published, path))

    async def unload(self, model_group: str) -> None:
        """Forget a model group whose run is over."""
        await self._batcher.between_batches(functools.partial(self._shelf.unload, model_group))

    def _held(self, model_group: str) -> LoadedModel:
        held = self._shelf.held(model_group)
        if held is None:
            raise ModelError(f"model group {model_group} has no weights yet; wait for a version to be published")
        return held

    def _fitted(self, request: GenerationRequest) -> GenerationRequest:
        """The request, limited to the room that its prompt leaves. One that cannot be served must not join a batch."""
        held = self._held(request.model_group)
        check_prompt(request, num_token_ids=held.num_token_ids)
        room = room_for(request, held.max_length, f"model {held.published.base_model}")
        if room >= request.sampling.max_new_tokens:
            return request
        sampling = request.sampling.model_copy(update={"max_new_tokens": room})
        return GenerationRequest(request.model_group, request.prompt_ids, sampling, request.seed)

    def _run(self, tickets: list[Ticket], answer: Answer) -> None:
        """In the worker thread: the version is read once and holds to the batch's end."""
        held = self._held(tickets[0].request.model_group)
        held.activate()
        generate(
            held.model,
            [ticket.request for ticket in tickets],
            lambda finished: answer([(tickets[sampled.row], _generation(sampled, held)) for sampled in finished]),
            lambda row: tickets[row].is_wanted(),
        )


build = TransformersEngine
"""Of `EngineKind`, as `table` wants it."""


def _generation(sampled: Sampled, held: LoadedModel) -> Generation:
    span = VersionSpan(
        model_group=held.published.model_group, version=held.published.version, length=len(sampled.token_ids)
    )
    return Generation(tuple(sampled.token_ids), tuple(sampled.logprobs), (span,), sampled.finish_reason)


def _fix_threads(threads: int | None) -> None:
    # Of this thread only: OpenMP counts threads per calling thread.
    if threads is not None:
        torch.set_num_threads(threads)
