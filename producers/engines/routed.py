"""One engine for the model groups in training, others for those served elsewhere; a lost GPU ends the process."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from rollstream.producers.engines.base import (
    Capabilities,
    DeviceLostError,
    Engine,
    Generation,
    GenerationRequest,
    Tokenizer,
)
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


class WatchedEngine(RoutedEngine):
    """`base.Engine` over another one, whose DeviceLostError ends the process.

    No request is answered from then on, so that no rollout is recorded as failed: each would be, within milliseconds.
    The next process has a new context on the GPU.
    """

    def __init__(self, engine: Engine) -> None:
        """`engine`: the process's own."""
        super().__init__(engine, {})
        self._lost = asyncio.Event()
        self._error: DeviceLostError | None = None

    async def generate(self, request: GenerationRequest) -> Generation:
        """As the engine does; waits without end once its device is lost."""
        try:
            return await super().generate(request)
        except DeviceLostError as error:
            return await self._lose(error)

    async def load(self, published: WeightsPublished, path: Path) -> None:
        """As the engine does; waits without end once its device is lost."""
        try:
            await super().load(published, path)
        except DeviceLostError as error:
            await self._lose(error)

    async def watch(self) -> NoReturn:
        """Wait until the engine's device is lost. Raises the DeviceLostError."""
        await self._lost.wait()
        assert self._error is not None
        raise self._error

    async def _lose(self, error: DeviceLostError) -> NoReturn:
        self._error = self._error or error
        self._lost.set()
        await asyncio.get_running_loop().create_future()
        raise error
