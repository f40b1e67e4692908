"""A rollout engine on transformers: many waiting calls become one batch on one device.

Weight versions change between batches, never within one: a call ends on the version that it began with.
"""

import functools
import math
from pathlib import Path

import torch

from rollstream.producers.batching import Answer, Batcher, Ticket
from rollstream.producers.engine import Generation, GenerationRequest, Tokenizer
from rollstream.producers.generation import Sampled, generate
from rollstream.producers.weights import Held, ModelShelf
from rollstream.schemas.errors import ModelError
from rollstream.schemas.events import WeightsPublished
from rollstream.schemas.events_rollouts import VersionSpan
from rollstream.schemas.services import EngineSettings


class TransformersEngine:
    """`engine.Engine` that samples from transformers models, with full weights or adapters."""

    def __init__(self, settings: EngineSettings) -> None:
        """Raises ModelError if the settings ask for a GPU and there is none."""
        self._shelf = ModelShelf(settings)
        threads = settings.threads or (1 if settings.deterministic else None)
        self._batcher = Batcher(
            self._run,
            max_batch=1 if settings.deterministic else settings.max_batch,
            initialize=functools.partial(_fix_threads, threads),
        )

    async def start(self) -> None:
        """Start the worker thread."""
        await self._batcher.between_batches(lambda: None)

    async def close(self) -> None:
        """Stop; calls that wait are cancelled."""
        await self._batcher.close()

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample until an end token, `max_new_tokens` or the model's longest sequence.

        Raises ModelError if the group has no weights, the prompt is empty or leaves no room, or the weights are spoilt.
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

    def _held(self, model_group: str) -> Held:
        held = self._shelf.held(model_group)
        if held is None:
            raise ModelError(f"model group {model_group} has no weights yet; wait for a version to be published")
        return held

    def _fitted(self, request: GenerationRequest) -> GenerationRequest:
        held, length = self._held(request.model_group), len(request.prompt_ids)
        if not length:
            raise ModelError(f"a prompt for model group {request.model_group} has no tokens")
        room = request.sampling.max_new_tokens if held.max_length is None else held.max_length - length
        if room < 1:
            raise ModelError(
                f"a prompt of {length} tokens leaves no room in model {held.published.base_model}, "
                f"which takes {held.max_length}; make the conversation shorter (max_turns)"
            )
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


def _generation(sampled: Sampled, held: Held) -> Generation:
    span = VersionSpan(
        model_group=held.published.model_group, version=held.published.version, length=len(sampled.token_ids)
    )
    return Generation(tuple(sampled.token_ids), tuple(sampled.logprobs), (span,), sampled.finish_reason)


def _fix_threads(threads: int | None) -> None:
    # Of this thread only: OpenMP counts threads per calling thread.
    if threads is not None:
        torch.set_num_threads(threads)
