"""Builds the three components of a run from what is registered, and lets go of them when the run is over."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rollstream.harness import component_errors, registry
from rollstream.harness.config.finetune_config import block_of
from rollstream.harness.config.rollstream_config import OurAdapterFields, OurBuilderFields
from rollstream.harness.interfaces import Trainer, TrainerAdapter, TrajectoryBuilder
from rollstream.schemas.errors import ComponentError, ConfigError
from rollstream.schemas.finetuning import FinetuneConfig


class Builder(NamedTuple):
    """What a component may ask for while it is built: the second argument of what is registered."""

    config: FinetuneConfig
    workspace: Path


class Components(NamedTuple):
    """The three components of a run, not bound to each other yet."""

    trainer: Trainer
    trajectory_builder: TrajectoryBuilder
    trainer_adapter: TrainerAdapter


_KINDS = {"trainer": Trainer, "trajectory_builder": TrajectoryBuilder, "trainer_adapter": TrainerAdapter}


@asynccontextmanager
async def components_of(finetune: FinetuneConfig, workspace: Path) -> AsyncIterator[Components]:
    """The components that `finetune` names. What stands behind their `yield` runs when the run is over.

    Adapter, builder and trainer are built in this order and let go of in the other one, whatever happens in between.
    Blocks of ours, and those derived from them, are given `workspace`, whatever the file says.
    Raises ConfigError naming the path of a block that nothing is registered for, or whose component is none.
    """
    builder = Builder(finetune, workspace)
    async with AsyncExitStack() as held:
        adapter = await _build(held, finetune, "trainer_adapter", builder)
        trajectory_builder = await _build(held, finetune, "trajectory_builder", builder)
        trainer = await _build(held, finetune, "trainer", builder)
        yield Components(trainer, trajectory_builder, adapter)


async def _build(held: AsyncExitStack, finetune: FinetuneConfig, role: str, builder: Builder) -> Any:
    block = block_of(finetune, role)
    _place(block, builder.workspace)
    place = f"{role}s.{getattr(finetune, role)}"
    build = registry.registered(f"{role}s").get(type(block))
    if build is None:
        raise ConfigError(f"{place}: nothing is registered for {type(block).__name__}")
    try:
        with component_errors.told(place):
            component = await held.enter_async_context(asynccontextmanager(build)(block, builder))
    except ComponentError as error:
        if str(error.__cause__) != "generator didn't yield":
            raise
        raise ConfigError(f"{place}: {build.__module__}.{build.__qualname__} yields no component") from error
    if not isinstance(component, _KINDS[role]):
        found = type(component).__name__
        raise ConfigError(f"{place}: {build.__qualname__} yields a {found}, which is no {_KINDS[role].__name__}")
    return component


def _place(block: Any, workspace: Path) -> None:
    if isinstance(block, OurBuilderFields | OurAdapterFields):
        block.workspace = workspace
