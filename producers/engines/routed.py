"""One engine for the model groups in training, and others beside it for those that are served elsewhere."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from rollstream.producers.engines.base import Capabilities, Engine, Generation, GenerationRequest, Tokenizer
from rollstream.schemas import ids
from rollstream.schemas.events import WeightsPublished


class RoutedEngine:
    """`base.Engine` that hands each call to the engine of its model group."""

    def __init__(self, engine: Engine, others: Mapping[str, Engine]) -> None:
        """`others`: by model group, or by its name in any run; all further ones are of `engine`."""
        self._engine = engine
        self._others = others

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the engine that loads weights."""
        return self._engine.capabilities

    async def start(self) -> None:
        """Start all."""
        for engine in (self._engine, *self._others.values()):
            await engine.start()

    async def close(self) -> None:
        """Stop all."""
        await asyncio.gather(*(engine.close() for engine in (self._engine, *self._others.values())))

    async def generate(self, request: GenerationRequest) -> Generation:
        """Generate with the model group's engine."""
        return await self._of(request.model_group).generate(request)

    def tokenizer(self, model_group: str) -> Tokenizer:
        """Tokenizer of the model group's engine."""
        return self._of(model_group).tokenizer(model_group)

    def version(self, model_group: str) -> int:
        """Version in the model group's engine."""
        return self._of(model_group).version(model_group)

    async def load(self, published: WeightsPublished, path: Path) -> None:
        """Load a version into the model group's engine."""
        await self._of(published.model_group).load(published, path)

    async def unload(self, model_group: str) -> None:
        """Unload the model group from its engine."""
        await self._of(model_group).unload(model_group)

    def _of(self, model_group: str) -> Engine:
        return self._others.get(model_group) or self._others.get(ids.name_of(model_group)) or self._engine
